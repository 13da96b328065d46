"""A workspace from Python: it answers as its parts do, and changes take effect at once."""

from pathlib import Path

import pytest

import realm
from realm.errors import InputError
from realm.qa.answers import Answer, RankedPassage
from realm.qa.filling import Filler
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.store.knowledge_base import KnowledgeBase
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
