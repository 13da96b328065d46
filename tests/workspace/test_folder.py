"""A workspace from Python: it answers as its parts do, and changes take effect at once."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

import realm
from realm.errors import InputError
from realm.qa.answers import Answer, RankedPassage
from realm.qa.filling import Filler
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.store.knowledge_base import KnowledgeBase
from realm.workspace.living import LivingKnowledge, Snapshot
from realm.workspace.settings import FitConfig
from tests.conftest import TOWNS

QUESTION = "on which river lies Arden?"
OAKHAM = {"title": "Oakham", "text": "Oakham lies on the river Wear. Berthe built a tower in Oakham."}


def test_a_workspace_answers_retrieves_and_fills_as_its_parts_do(towns: Path) -> None:
    workspace = realm.load(towns)
    parts = str(towns / "kb"), str(towns / "model"), AnswerConfig()
    answer, expected = workspace.answer(QUESTION), Answerer.load(*parts).answer(QUESTION)
    assert isinstance(answer, Answer) and answer == expected.answers[0]
    assert answer.passage.text[answer.start : answer.end] == answer.text
    assert workspace.answers(QUESTION).passages == expected.passages
    found = workspace.retrieve(QUESTION, 5)
    assert all(type(passage) is RankedPassage for passage in found)
    read = [(p.id, p.rank, pytest.approx(p.probability)) for p in expected.passages]
    assert [(p.id, p.rank, p.probability) for p in found] == read
    assert len(workspace.retrieve(QUESTION, top_k=1000)) == 28
    words = workspace.retrieve(QUESTION, 3, method="bm25")
    assert [p.title for p in words][:1] == ["Arden"] and sum(p.probability for p in words) == pytest.approx(1)
    sentence = "Arden lies on the river [MASK]."
    assert workspace.fill(sentence, "ouse").to_json() == Filler.load(*parts).fill(sentence, "ouse").to_json()


def test_a_number_of_passages_below_one_is_refused_with_every_method(towns: Path) -> None:
    workspace = realm.load(towns)
    for method in ("dense", "bm25", "hybrid"):
        for find in (workspace.search, workspace.retrieve):
            for k in (0, -1):
                with pytest.raises(InputError, match=f"top_k is {k}: it must be 1 or more"):
                    find(QUESTION, k, method=method)


def test_what_is_added_is_found_and_what_is_deleted_is_gone_when_the_call_returns(towns: Path) -> None:
    workspace = realm.load(towns)
    assert workspace.add([OAKHAM, {"title": "Nowhere", "text": "Nowhere has no river.", "id": 7}]).added == 2
    assert [(d.id, d.title) for d in workspace.documents("O")] == [("Oakham", "Oakham")]
    assert {"Oakham", "Nowhere"} <= {p.title for p in workspace.retrieve("Oakham", 100)}
    assert workspace.add([OAKHAM | {"text": "Oakham is gone."}]).replaced == 1
    assert "Oakham is gone." in {p.text for p in workspace.retrieve("Oakham", 100)}
    with pytest.raises(InputError, match="no document has the id 'absent'"):
        workspace.delete(["Oakham", "absent"])
    assert workspace.delete(["Oakham", "7"]) == 2
    assert workspace.delete("d0") == 2
    left = {p.title for p in workspace.retrieve("Oakham", 100)}
    assert left == set(TOWNS) - {TOWNS[0]} == {d.title for d in realm.load(towns).documents()}


def test_documents_of_one_call_with_the_same_title_have_different_ids(towns: Path) -> None:
    workspace = realm.load(towns)
    assert workspace.add([OAKHAM, OAKHAM | {"text": "Oakham has a mill."}]).added == 2
    assert [d.id for d in workspace.documents("O")] == ["Oakham", "Oakham (2)"]


def test_a_workspace_answers_from_the_documents_that_match_a_filter(towns: Path) -> None:
    workspace = realm.load(towns)
    workspace.add(
        [{**OAKHAM, "year": 2020}, {"title": "Nowhere", "text": "Nowhere has no river.", "year": 1999}]
    )
    assert [p.title for p in workspace.retrieve("river", 9, where="year > 2000")] == ["Oakham"]
    found = workspace.search("river", 9, where="year < 2000", method="bm25")
    assert [(hit.document, hit.fields) for hit in found] == [("Nowhere", {"year": 1999})]
    answer = workspace.answer("on which river lies Oakham?", where="year = 2020", method="bm25")
    assert answer.passage.fields == {"year": 2020}
    assert [d.id for d in workspace.documents(where="year < 2000")] == ["Nowhere"]
    with pytest.raises(InputError, match="no passage to read that matches the filter year = 1"):
        workspace.answer("river?", where="year = 1")
    with pytest.raises(InputError, match="is not a field"):
        workspace.answers("river?", where="month = 1")


def test_a_change_by_another_process_is_taken_up(towns: Path) -> None:
    workspace = realm.load(towns)
    KnowledgeBase.open(towns / "kb").delete(["d0"])
    assert "Arden" not in {p.title for p in workspace.retrieve("Arden", 100)}


@pytest.mark.parametrize("call", ["answer", "answers", "search", "retrieve"])
def test_an_unknown_search_method_is_refused_with_the_known_ones(towns: Path, call: str) -> None:
    workspace = realm.load(towns)
    with pytest.raises(InputError, match=r"^method is 'BM25': it must be dense, bm25 or hybrid$"):
        getattr(workspace, call)(QUESTION, method="BM25")


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([OAKHAM, {"title": "x"}], 'record 2: no "text"'),
        ([["x", "y"]], r"record 1 is \['x', 'y'\], not a mapping"),
        ([OAKHAM | {"id": "1"}, OAKHAM | {"id": 1}], "record 2: a second document with the id '1'"),
    ],
)
def test_a_record_that_is_no_document_is_named_and_none_is_added(towns: Path, records, says: str) -> None:
    workspace = realm.load(towns)
    with pytest.raises(InputError, match=says):
        workspace.add(records)
    assert len(workspace.documents()) == len(TOWNS)


def test_a_folder_that_is_no_workspace_is_refused_with_the_way_out(towns: Path, tmp_path: Path) -> None:
    (towns / "model").rename(towns / "elsewhere")
    for folder, part in ((towns, "model"), (tmp_path / "absent", "kb")):
        with pytest.raises(
            InputError,
            match=f"not a workspace, because it has no folder {part}: make a workspace with `realm fit SOURCE",
        ):
            realm.load(folder)


@pytest.mark.parametrize("given", ["", " ", None, 5])
def test_what_is_no_text_is_refused_by_every_call(towns: Path, given) -> None:
    workspace = realm.load(towns)
    for call in (
        workspace.answer,
        workspace.answers,
        workspace.retrieve,
        workspace.search,
        workspace.fill,
        lambda text: workspace.answer_many([QUESTION, text]),
        lambda text: workspace.read(text, [{"text": "Arden lies on the river Tay."}]),
        lambda text: workspace.read(QUESTION, [{"text": text}]),
        lambda text: workspace.delete([text]),
    ):
        with pytest.raises(InputError, match=r"is empty|must be a text"):
            call(given)


def test_many_questions_are_answered_as_one_by_one_and_a_passage_needs_no_title(towns: Path) -> None:
    workspace = realm.load(towns)
    questions = [QUESTION, "who built a tower in Arden?"]
    together = workspace.answer_many(iter(questions))
    assert [[one.text for one in each.answers] for each in together] == [
        [one.text for one in workspace.answers(question).answers] for question in questions
    ]
    assert workspace.answer_many([]) == []
    with pytest.raises(InputError, match="give a list of questions"):
        workspace.answer_many(QUESTION)
    read = [
        workspace.read(QUESTION, [{"text": "Arden lies on the Tay.", **more}])
        for more in ({}, {"title": None})
    ]
    assert read[0].answers == read[1].answers
    with pytest.raises(InputError, match="it must be a mapping with a text"):
        workspace.read(QUESTION, ["Arden lies on the Tay."])


def test_fields_may_be_numbers_of_other_libraries_or_a_mapping_and_what_cannot_be_stored_is_refused(
    towns: Path,
) -> None:
    workspace = realm.load(towns)
    given = {
        "year": np.int64(2024),
        "price": Decimal("19.5"),
        "of": UUID(int=1),
        "day": np.datetime64("2020-05-01"),
    }
    workspace.add([{**OAKHAM, **given, "fields": {"since": 1906}}])
    (document,) = workspace.documents("Oakham", where="since = 1906 and year > 2000 and day = '2020-05-01'")
    assert document.fields == {
        "year": 2024, "price": 19.5, "of": str(UUID(int=1)), "day": "2020-05-01", "since": 1906,
    }  # fmt: skip
    for value in ({1, 2}, np.zeros(2), "x" * 2001):
        with pytest.raises(InputError, match="the field 'tags' of the document 'Oakham' cannot be stored"):
            workspace.add([{**OAKHAM, "tags": value}])


def test_a_workspace_is_not_lost_when_the_current_folder_changes(towns: Path, monkeypatch) -> None:
    monkeypatch.chdir(towns.parent)
    workspace = realm.load(towns.name)
    monkeypatch.chdir("/")
    realm.load(towns).add([OAKHAM])
    assert [one.id for one in workspace.documents("Oakham")] == ["Oakham"]


def test_threads_load_a_new_version_once_and_none_answers_from_the_old_one(towns: Path, monkeypatch) -> None:
    workspace = realm.load(towns)
    realm.load(towns).add([OAKHAM])
    loads, load = [], LivingKnowledge._load

    def counted(self: LivingKnowledge, before: Snapshot | None) -> Snapshot:
        loads.append(before)
        return load(self, before)

    monkeypatch.setattr(LivingKnowledge, "_load", counted)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: [one.id for one in workspace.documents("Oakham")], range(8)))
    assert found == [["Oakham"]] * 8 and len(loads) == 1


def test_threads_try_a_version_that_cannot_be_loaded_once_and_later_calls_again(
    towns: Path, monkeypatch
) -> None:
    workspace = realm.load(towns)
    realm.load(towns).add([OAKHAM])
    load = LivingKnowledge._load
    tries: list[int] = []

    def fails(self: LivingKnowledge, before: Snapshot | None) -> Snapshot:
        tries.append(1)
        time.sleep(0.3)  # all threads have called meanwhile
        raise InputError("it is damaged")

    monkeypatch.setattr(LivingKnowledge, "_load", fails)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: workspace.documents("Oakham"), range(8)))
    assert found == [[]] * 8 and len(tries) == 1
    monkeypatch.setattr(LivingKnowledge, "_load", load)
    assert [one.id for one in workspace.documents("Oakham")] == ["Oakham"]


def test_questions_do_not_wait_for_a_change_of_the_same_process(towns: Path) -> None:
    workspace = realm.load(towns)
    realm.load(towns).add([OAKHAM])
    with workspace._living._changing:  # a change that takes long
        assert workspace.documents("Oakham") == [] and workspace.answer(QUESTION).text
    assert [one.id for one in workspace.documents("Oakham")] == ["Oakham"]


@pytest.mark.filterwarnings("ignore:lance is not fork-safe", "ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_cannot_change_a_workspace_that_was_opened_before(towns: Path) -> None:
    workspace, forking = realm.load(towns), multiprocessing.get_context("fork")
    refusals = forking.SimpleQueue()

    def change() -> None:
        for refused in (lambda: workspace.add([OAKHAM]), lambda: workspace.delete("Arden")):
            try:
                refused()
            except InputError as error:
                refusals.put(str(error))

    process = forking.Process(target=change)
    process.start()
    process.join(60)
    said = "open it in this process, and start processes with the method spawn"
    assert process.exitcode == 0 and all(said in refusals.get() for _ in range(2))


def test_settings_made_in_python_are_checked_before_anything_is_written(towns: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text("Arden lies on the river Tay.")
    wrong: list[Any] = [
        {"cut": "row"},
        {"minutes": "3"},
        {"minutes": -1},
        {"held_out": 2},
        {"device": None},
        {"questions": 2.5},
    ]
    for settings in wrong:
        (name,) = settings
        with pytest.raises(InputError, match=name):
            realm.fit(docs, tmp_path / "made", config=FitConfig(**settings))
    for given in ({"minutes": -1}, {"minutes": "3"}, {"config": {}}):
        with pytest.raises(InputError):
            realm.fit(docs, tmp_path / "made", **given)
    assert not (tmp_path / "made").exists()
    wrong = [
        {"threshold": 2},
        {"threshold": "0.5"},
        {"read": 0},
        {"precision": "fp16"},
        {"mapped_index": "no"},
        {"device": None},
    ]
    for settings in wrong:
        (name,) = settings
        with pytest.raises(InputError, match=name):
            realm.load(towns, AnswerConfig(**settings))
    with pytest.raises(InputError, match=r"the settings are .*: they must be of the class AnswerConfig"):
        realm.load(towns, {"read": 3})  # type: ignore[arg-type]
    numbers = AnswerConfig(read=np.int64(3), threshold=np.float32(0.5))  # type: ignore[arg-type]
    assert len(realm.load(towns, numbers).answers(QUESTION).passages) == 3


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("The password is swordfish.")
    with pytest.raises(InputError, match="a source is empty"):
        realm.fit("", tmp_path / "made", minutes=0)
    with pytest.raises(InputError, match="the folder of the workspace is empty"):
        realm.load("")


def test_a_knowledge_base_keeps_its_limit_of_characters_for_later_documents(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text("Arden lies on the river Tay.")
    made = realm.fit(docs, tmp_path / "made", config=FitConfig(minutes=0, max_document_chars=100))
    with pytest.raises(InputError, match="over the limit of 100"):
        made.add([{"title": "Long", "text": "x" * 101}])
