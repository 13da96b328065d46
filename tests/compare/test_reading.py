"""Tables whose readers are first trained on questions with passages (`data.reading`)."""

import json
import lzma
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realm import cli
from realm.compare import table as table_module
from realm.compare.plan import TablePlan
from realm.compare.questions import is_dev
from realm.compare.rows import STARTS, TABLE_1, TABLE_2, encoder_of
from realm.compare.settings import DataConfig, PublishedConfig, ReadingConfig, TableConfig
from realm.errors import InputError
from realm.model.folder import load_model
from realm.qa.question_files import digest_of, read_questions
from realm.store.knowledge_base import KnowledgeBase
from realm.systems import system
from realm.systems.drqa import examples_of_documents
from realm.systems.system import ReadingSet
from tests.compare.conftest import printed, read_lines, undrawn_tables
from tests.compare.scorer import plain
from tests.towns import TOWNS

CORPUS = 'data.reading.corpus=["{towns}"]'
ROWS = ("bm25-reader", "t5", "drqa", "graph", "orqa", "realm", "hybrid")


@pytest.fixture(scope="module", autouse=True)
def _undrawn() -> Iterator[None]:
    with undrawn_tables():
        yield


def reading_words(home, folder: Path, *more: str) -> list[str]:
    """Settings with questions about towns, which name the towns as documents. The file is compressed."""
    asked = [
        {
            "question": f"who keeps {thing} in {town}?",
            "answers": [f"The people of {town}"],
            "passage_id": town,
        }
        for town in TOWNS
        for thing in ("bees", "the bees", "all bees")
    ]
    test = json.loads((home.folder / "spans.jsonl").read_text().splitlines()[0])
    asked.append(test | {"passage_id": TOWNS[0]})
    file = folder / "reading.jsonl.xz"
    file.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in asked).encode()))
    data = {
        "corpus": json.dumps([str(home.folder / "towns.jsonl")]),
        "questions": json.dumps([str(file)]),
        "settings": '["steps=3", "learning_rate=1e-2"]',
    }
    return [
        *(word for key, value in data.items() for word in ("--set", f"data.reading.{key}={value}")),
        *more,
    ]


@pytest.fixture(scope="module")
def table(home, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The folder and the report of a table with such readers."""
    folder = tmp_path_factory.mktemp("reading")
    words = reading_words(home, folder, "--rows", *ROWS)
    text = printed(*home.words("compare", folder / "t", *words))
    assert "left out because they are also in a test: 1." in text  # of `train`
    return folder / "t", json.loads((folder / "t" / "table1.json").read_text())


def test_every_encoder_is_trained_on_these_questions_once(table) -> None:
    folder, report = table
    assert sorted(one.name for one in (folder / "readers").iterdir() if one.suffix == "") == [
        "encoder",
        "realm",
    ]
    given = read_questions(folder.parent / "reading.jsonl.xz")[:-1]  # the last question is in a test
    for part, kept in (
        ("train", [one for one in given if not is_dev(one.question)]),
        ("dev", [one for one in given if is_dev(one.question)]),
    ):
        lines = read_lines(folder / "questions" / f"reading-{part}.jsonl")
        assert [(line["question"], line["document_id"]) for line in lines] == [
            (one.question, one.document_id) for one in kept
        ]
    assert report["made_by"]["questions"]["reading"]["n"] == len(
        read_lines(folder / "questions" / "reading-train.jsonl")
    )
    assert report["made_by"]["dropped"] == 2
    kb = KnowledgeBase.open(folder / "reading-kb")
    assert report["made_by"]["other_corpora"] == {"reading-kb": kb.fingerprint}


def test_rows_start_from_the_reader_of_their_encoder(table) -> None:
    folder, report = table
    last = {}
    for row in ROWS[:-1]:
        manifest = "system.json" if row in ("t5", "drqa", "graph") else "realm.json"
        last[row] = json.loads((folder / "rows" / row / manifest).read_text())["stages"][-1]
    readers = {row: Path(last[row].get("reader") or "").name for row in ("bm25-reader", "orqa", "realm")}
    assert readers == {"bm25-reader": "encoder", "orqa": "encoder", "realm": "realm"}
    assert last["orqa"]["init"].endswith("models/ict")
    assert last["graph"]["init"].endswith("readers/encoder")

    def seconds(place: str) -> list[float]:
        return [one.get("seconds", 0.0) for one in json.loads((folder / place).read_text())["stages"]]

    own = seconds("rows/orqa/realm.json")
    read = seconds("readers/encoder/realm.json")[-1]
    assert report["rows"]["orqa"]["seconds"] == pytest.approx(sum(own) + read, abs=0.06)
    whole = sum(seconds("readers/encoder/realm.json")) + seconds("rows/graph/system.json")[-1]
    assert report["rows"]["graph"]["seconds"] == pytest.approx(whole, abs=0.06)
    assert report["rows"]["hybrid"]["seconds"] == report["rows"]["realm"]["seconds"]


def test_systems_start_from_the_encoder_of_the_span_reader_if_there_is_one(table) -> None:
    folder, _ = table
    plain, trained = load_model(folder / "models" / "encoder"), load_model(folder / "readers" / "encoder")
    assert system.start_encoder(plain) is plain.reader.bert.bert
    assert trained.span_reader is not None
    assert system.start_encoder(trained) is trained.span_reader.encoder
    moved = [
        not torch.equal(one, other)
        for one, other in zip(
            plain.reader.bert.bert.parameters(), trained.span_reader.encoder.parameters(), strict=True
        )
    ]
    assert any(moved)


def test_drqa_reads_the_passage_that_a_question_names(table) -> None:
    folder, _ = table
    kb = KnowledgeBase.open(folder / "reading-kb")
    questions = read_questions(folder / "questions" / "reading-train.jsonl")
    examples = examples_of_documents(ReadingSet(kb, questions))
    assert len(examples) == len(questions)
    for question, example in zip(questions, examples, strict=True):
        answer = " ".join(token.text for token in example.passage[example.first : example.last + 1])
        assert answer == question.answers[0] == f"The people of {question.document_id}"
    unknown = questions[0]._replace(document_id="Atlantis")
    assert len(examples_of_documents(ReadingSet(kb, [unknown, questions[0]]))) == 1
    with pytest.raises(InputError, match="no question names a document with a passage"):
        examples_of_documents(ReadingSet(kb, [unknown]))
    stage = json.loads((folder / "rows" / "drqa" / "system.json").read_text())["stages"][-1]
    train, dev = (read_questions(folder / "questions" / f"{part}.jsonl") for part in ("train", "dev"))
    assert stage["questions"] == digest_of(train, dev, questions)


def test_a_repeated_command_makes_nothing_again(home, table) -> None:
    folder, report = table
    text = printed(*home.words("compare", folder, *reading_words(home, folder.parent, "--rows", *ROWS)))
    assert "\n$ realm" not in text
    assert json.loads((folder / "table1.json").read_text())["rows"] == report["rows"]


def test_dev_questions_and_questions_of_unknown_documents_are_left_out(home, table, tmp_path) -> None:
    folder, _ = table
    asked = [
        line
        for part in ("train", "dev")
        for line in read_lines(folder / "questions" / f"reading-{part}.jsonl")
    ]
    dev, unknown = asked[0], asked[1] | {"id": "x", "document_id": "Atlantis"}
    for name, lines in (("dev", [dev]), ("reading", [*asked[1:], dev, unknown])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataConfig(
        dev=(str(tmp_path / "dev.jsonl"),),
        reading=ReadingConfig(("c",), (str(tmp_path / "reading.jsonl"),)),
        train=(str(home.folder / "train.jsonl"),),
        tests={"spans": str(home.folder / "spans.jsonl")},
    )
    plan = TablePlan(TableConfig(rows=("orqa",)), data, None, folder, TABLE_1)
    split = table_module._split(plan)
    assert split is not None
    reading = table_module._split_reading(plan, table_module._read_reading(plan), split)
    assert reading is not None
    kept = [one.question for one in [*reading.train, *reading.dev]]
    others = [line["question"] for line in asked if plain(line["question"]) != plain(dev["question"])]
    assert sorted(kept) == sorted(others)
    assert reading.dropped == len(asked) - len(others) == 2  # articles do not count


def test_a_folder_without_such_readers_is_not_continued_with_them(home, table, capsys) -> None:
    folder, _ = table
    assert cli.main(home.words("compare", folder, "--rows", *ROWS)) == 2
    assert "was made with other data (reading)" in capsys.readouterr().err


def test_a_test_that_asks_a_question_of_the_readers_is_not_added_to_a_folder(
    home, table, tmp_path, capsys
) -> None:
    folder, _ = table
    test = tmp_path / "test.jsonl"
    test.write_text((folder / "questions" / "reading-train.jsonl").read_text().splitlines()[0] + "\n")
    words = reading_words(home, tmp_path, "--rows", *ROWS, "--set", f"data.tests.more={test}")
    assert cli.main(home.words("compare", folder, *words)) == 2
    assert "was made with other questions (reading-train)" in capsys.readouterr().err


def test_a_folder_is_not_continued_with_other_settings_of_the_readers(home, table, tmp_path, capsys) -> None:
    folder, _ = table
    words = reading_words(home, tmp_path, "--rows", *ROWS)
    words = [word.replace("steps=3", "steps=4") for word in words]
    assert cli.main(home.words("compare", folder, *words)) == 2
    assert "(data.reading.settings.steps was 3 and is now 4)" in capsys.readouterr().err


def test_a_folder_can_be_continued_with_rows_that_do_not_read(home, table) -> None:
    folder, _ = table
    before = json.loads((folder / "data.json").read_text())
    printed(*home.words("compare", folder, "--rows", "t5"))
    assert json.loads((folder / "data.json").read_text()) == before


def test_rows_that_read_can_be_added_to_a_folder_without_such_rows(home, table, tmp_path) -> None:
    data = DataConfig(
        train=(str(home.folder / "train.jsonl"),),
        tests={"spans": str(home.folder / "spans.jsonl")},
        reading=ReadingConfig(("c",), (str(table[0].parent / "reading.jsonl.xz"),)),
    )
    kept = []
    for answer_seeds, reading in ((0, data.reading), (1, data.reading), (0, ReadingConfig())):
        config = TableConfig(rows=("orqa",), answer_seeds=answer_seeds)
        plan = TablePlan(config, replace(data, reading=reading), None, tmp_path, TABLE_1)
        kept.append(table_module._data(plan, table_module._split(plan), table_module._read_reading(plan)))
        (tmp_path / "data.json").write_text(json.dumps(kept[-1]))
    assert [one["reading"] for one in kept] == [[], ["c"], ["c"]]
    assert ["reading" in one["questions"] for one in kept] == [False, True, True]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([CORPUS], "reading needs both corpus and questions"),
        ([CORPUS, 'data.reading.questions=["{train}"]'], "question 1 of train names no document"),
        ([CORPUS, 'data.reading.questions=["{asked}", "{asked}"]'], "asked.jsonl is listed twice"),
        (
            ['data.train=["{train}","{asked}"]', 'data.held_out.A=["{asked}", "{asked}"]'],
            "asked.jsonl is listed twice",
        ),
        (['data.reading.settings=["steps=3"]'], "reading needs both corpus and questions"),
        ([CORPUS, 'data.reading.questions=["{asked}"]', 'data.reading.settings=["batch=3"]'], "batch"),
        (["data.tests={{}}"], "train needs tests"),
        (["data.tests.dev={train}"], "'dev' is the name of other questions"),
        (['data.held_out.train=["{train}"]'], "'train' is the name of other questions"),
        (['data.held_out.spans=["{train}"]'], "'spans' is also in tests"),
        (['data.held_out.A=["{towns}"]'], "'A' needs files that are also in train"),
        (["data.held_out.A=[]"], "'A' needs files that are also in train"),
        (
            ['data.train=["{train}","{asked}"]', 'data.held_out.A=["{asked}"]'],
            "the test A has no question",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_first_stage(
    home, settings, problem, tmp_path, capsys
) -> None:
    files = {name: home.folder / f"{name}.jsonl" for name in ("towns", "train")}
    files["asked"] = tmp_path / "asked.jsonl"
    files["asked"].write_text('{"question": "who?", "answers": ["me"], "document_id": "Aldora"}\n')
    words = [word for one in settings for word in ("--set", one.format(**files))]
    assert cli.main(home.words("compare", tmp_path / "t", *words)) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_encoder_of_a_start_is_that_of_the_start_that_trained_it(table) -> None:
    assert {name: encoder_of(name) for name in STARTS if encoder_of(name) != name} == {
        "ict": "encoder",
        "realm-retriever": "encoder",
        "realm-encoder": "realm",
        "towers-ict": "towers-encoder",
    }
    folder, _ = table
    encoder, ict, realm = (
        load_model(folder / "models" / name).reader.state_dict() for name in ("encoder", "ict", "realm")
    )
    assert all(torch.equal(encoder[name], ict[name]) for name in encoder)
    assert not all(torch.equal(encoder[name], realm[name]) for name in encoder)


def test_a_published_model_and_systems_with_own_networks_have_no_such_reader() -> None:
    data = DataConfig(text=("x",), reading=ReadingConfig(("c",), ("q",)), published=PublishedConfig("p"))
    plan = TablePlan(TableConfig(seeds=(0, 1)), data, None, Path("t"), TABLE_1)
    assert {name for name in TABLE_1 if plan.reader(name, 0) is None} == {"t5", "drqa", "published"}
    assert plan.reader("realm", 1) == Path("t/readers/realm-1")
    assert plan.reader("orqa", 1) == Path("t/readers/encoder-1")  # the training depends on the seed
    assert plan.reader("hybrid", 1) == plan.reader("realm", 1)
    assert replace(plan, config=TableConfig(rows=("t5",))).reads_first is False
    assert replace(plan, config=TableConfig(answer_seeds=0)).reads_first is False
    assert replace(plan, config=TableConfig(rows=("drqa",))).reads_first is True
    assert replace(plan, data=DataConfig()).reader("realm", 0) is None
    assert replace(plan, table=TABLE_2).reader("realm-retriever", 0) == Path("t/readers/encoder")


@pytest.mark.parametrize(
    "flags",
    [["--reading-kb", "kb"], ["--reading-train", "q"], ["--reading-kb", "kb", "--reading-train", "q"]],
)
def test_only_drqa_takes_questions_with_passages(home, table, flags, capsys) -> None:
    folder, _ = table
    name = "t5" if len(flags) == 4 else "drqa"
    asked = str(home.folder / "train.jsonl")
    words = [
        "--kb",
        str(folder / "kb"),
        "--model",
        str(folder / "models" / "encoder"),
        "--train",
        asked,
        "--dev",
        asked,
    ]
    assert cli.main(["baseline", name, *words, "--out", str(folder / "no"), *flags]) == 2
    assert "only for the system drqa, and are given together" in capsys.readouterr().err
