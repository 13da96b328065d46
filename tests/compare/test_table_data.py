"""The documents, made questions and published weights that `realm compare` makes a table from."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from farmhash import fingerprint64

from realm import cli
from realm.compare import results
from realm.compare import table as table_module
from realm.compare.plan import TablePlan
from realm.compare.rows import TABLE_1
from realm.compare.settings import DataConfig, TableConfig
from realm.errors import InputError
from realm.interop.blocks import convert_checkpoint
from realm.model.folder import load_model
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.predictions import read_predictions
from realm.qa.question_files import read_questions
from realm.settings import read_config
from realm.store.knowledge_base import KnowledgeBase
from tests.compare.conftest import printed, read_lines, undrawn_tables
from tests.schemas import assert_holds
from tests.towns import TOWNS

FIXTURES = Path(__file__).parent.parent / "interop" / "fixtures"
OPEN_QA = {"checkpoint": FIXTURES / "openqa" / "new", "embedder": FIXTURES / "embedder" / "new"}
GOOGLES = {
    "checkpoint": FIXTURES / "tensorflow" / "openqa" / "model.ckpt-300000",
    "embedder": FIXTURES / "tensorflow" / "embedder",
    "tokenizer": FIXTURES / "tensorflow" / "openqa",
}
PRETRAINED = {"checkpoint": FIXTURES / "embedder" / "new", "encoder": FIXTURES / "encoder" / "new"}


@pytest.fixture(scope="module", autouse=True)
def _undrawn() -> Iterator[None]:
    with undrawn_tables():
        yield


def test_made_questions_that_are_also_in_a_test_file_are_not_trained_on(home, tmp_path) -> None:
    words = home.words("compare", tmp_path, "--rows", "bm25-reader", asked=False)
    printed(*words)
    made = read_lines(tmp_path / "questions" / "train.jsonl")
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps(line) + "\n" for line in made[:3]))
    words = home.words("compare", tmp_path / "named", "--rows", "bm25-reader", asked=False)
    printed(*words, "--set", f"data.tests.named={test}")
    kept = read_lines(tmp_path / "named" / "questions" / "train.jsonl")
    assert [line["question"] for line in kept] == [line["question"] for line in made[3:]]
    report = json.loads((tmp_path / "named" / "table1.json").read_text())
    assert report["made_by"]["dropped"] == 3


def test_a_test_that_asks_a_training_question_is_not_added_to_a_folder(
    home, tmp_path, monkeypatch, capsys
) -> None:
    stop = MagicMock(side_effect=InputError("stopped before pre-training"))
    monkeypatch.setattr("realm.compare.commands.starting", stop)
    folder = tmp_path / "t"
    words = home.words("compare", folder, "--rows", "bm25-reader", asked=False)
    words += ["--set", f"data.tests.spans={home.folder / 'spans.jsonl'}"]
    assert cli.main(words) == 2
    trained = (folder / "questions" / "train.jsonl").read_bytes()
    test = tmp_path / "test.jsonl"
    test.write_bytes(b"".join(trained.splitlines(keepends=True)[:1]))
    capsys.readouterr()
    assert cli.main([*words, "--set", f"data.tests.more={test}"]) == 2
    error = capsys.readouterr().err
    assert "was made with other questions (train)" in error and error.count("\n") == 1
    # The folder does not list the refused test, so a test of that name with other questions can be added.
    test.write_text('{"question": "who keeps bees?", "answer": "nobody"}\n')
    assert cli.main([*words, "--set", f"data.tests.more={test}"]) == 2
    assert "stopped before pre-training" in capsys.readouterr().err
    assert {"spans", "more"} <= json.loads((folder / "data.json").read_text())["questions"].keys()


@pytest.mark.parametrize(
    ("preset", "tests"),
    [
        ("wikipedia", ["NQ", "WQ-dev", "CT-dev"]),
        ("wikipedia-nq", ["NQ"]),
        ("wikipedia-webq", ["WQ"]),
        ("wikipedia-trec", ["CT"]),
        ("wikipedia-20k", ["NQ"]),
        ("wikipedia-minilm", ["NQ"]),
    ],
)
def test_each_preset_with_question_files_has_questions_of_each_part(
    preset: str, tests: list[str], tmp_path: Path, monkeypatch
) -> None:
    data = read_config(DataConfig, preset, "data")
    monkeypatch.chdir(tmp_path)
    for file in map(Path, {*data.train, *data.tests.values()}):
        asked = [(f"what stands in {number} of {file}?", "a mill") for number in range(100)]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "".join(f"{question}\t{answer}\n" for question, answer in asked)
            if file.suffix == ".tsv"
            else "".join(json.dumps({"question": q, "answers": [a]}) + "\n" for q, a in asked)
        )
    plan = TablePlan(TableConfig(), data, preset, tmp_path / "t", TABLE_1)
    split = table_module._split(plan)
    assert split is not None and split.dropped == 0
    parts = {"train": split.train, "dev": split.dev, **table_module._tests(plan)}
    assert list(parts) == ["train", "dev", *tests]
    asked = [question.question for questions in parts.values() for question in questions]
    assert all(parts.values()) and len(asked) == len(set(asked))


def test_held_out_training_questions_become_a_test_and_are_in_no_other_part(home, tmp_path) -> None:
    asked = read_lines(home.folder / "train.jsonl")
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, lines in zip(files, (asked[::2], asked[1::2]), strict=True):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = home.words("compare", tmp_path / "t", "--rows", "t5", "--set", f'data.held_out.b=["{files[1]}"]')
    printed(*words, "--set", f'data.train=["{files[0]}", "{files[1]}"]')
    parts = {
        name: [line["question"] for line in read_lines(tmp_path / "t" / "questions" / f"{name}.jsonl")]
        for name in ("train", "dev", "b")
    }
    second = [line["question"] for line in asked[1::2]]
    assert parts["b"] == [one for one in second if fingerprint64(one) % 100_000 % 10 == 0]
    elsewhere = {*parts["b"], *(line["question"] for line in read_lines(home.folder / "spans.jsonl"))}
    kept = [line["question"] for line in asked if line["question"] not in elsewhere]
    assert sorted(parts["train"] + parts["dev"]) == sorted(kept)
    report = json.loads((tmp_path / "t" / "table1.json").read_text())
    # Held-out questions are not counted, only training questions that a given test has too.
    assert report["made_by"]["dropped"] == len(asked) - len(parts["b"]) - len(kept)
    tests = report["rows"]["t5"]["tests"]
    assert list(tests) == ["spans", "patterns", "b"]
    assert tests["b"]["all"]["n"] == len(parts["b"]) > 0


def test_an_encoder_that_can_retrieve_is_trained_by_realm_without_the_inverse_cloze_task(
    home, tmp_path, capsys
) -> None:
    kb, given = str(tmp_path / "kb"), str(tmp_path / "given")
    build = ["kb", "build", str(home.folder / "towns.jsonl"), "--tokenizer", str(home.folder / "encoder")]
    config = ["--config", str(home.folder / "tables.toml")]
    printed(*build, "--out", kb, *config)
    printed("mlm", "--kb", kb, "--init", str(home.folder / "encoder"), "--out", given, *config)
    words = home.words("compare", tmp_path / "t", "--set", "data.warm_start=false")
    words += ["--set", f"data.encoder={given}", "--rows", "given", "realm", "hybrid"]
    assert cli.main(words) == 2
    assert "mlm.embedder_start is not given" in capsys.readouterr().err
    keeping = tmp_path / "keeping.toml"
    keeping.write_text(f'base = "{home.folder}/tables.toml"\n[mlm]\nembedder_start = "given"\n')
    words[1] = str(keeping)
    printed(*words)
    report = json.loads((tmp_path / "t" / "table1.json").read_text())
    assert_holds(results.TableJson, report)
    assert list(report["rows"]) == ["given", "realm", "hybrid"]
    assert list(report["starts"]) == ["bm25", "encoder", "realm"]
    stages = load_model(tmp_path / "t" / "models" / "realm").stages
    assert [one["stage"] for one in stages] == ["mlm", "mlm", "pretrain"]
    start, row = (
        load_model(folder).embedder.passage.state_dict() for folder in (given, tmp_path / "t/rows/given")
    )
    assert start.keys() == row.keys() and all(start[name].equal(row[name]) for name in start)
    words[words.index("data.warm_start=false")] = "data.warm_start=true"
    words[words.index("given", words.index("--rows"))] = "orqa"
    assert cli.main(words) == 2
    assert "was made with other data (warm_start)" in capsys.readouterr().err


def test_only_the_first_documents_of_both_corpora_are_used_if_so_many_are_asked_for(
    home, tmp_path, monkeypatch
) -> None:
    def stop(*_: object) -> None:
        raise InputError("stopped before the questions")

    monkeypatch.setattr("realm.compare.table._write_questions", stop)
    words = home.words("compare", tmp_path / "t", "--set", "data.documents=5", asked=False)
    assert cli.main(words) == 2
    for name in ("kb", "text-kb"):
        kb = KnowledgeBase.open(tmp_path / "t" / name)
        assert sorted({passage.title for passage in kb}) == sorted(TOWNS[:5])
        documents = read_lines(tmp_path / "t" / "documents" / f"{name}.jsonl")
        assert [(one["id"], one["title"]) for one in documents] == [(town, town) for town in TOWNS[:5]]


def test_the_first_documents_are_found_and_built_under_the_names_of_the_corpora(
    home, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("realm.compare.table._write_questions", MagicMock(side_effect=InputError("stopped")))
    rows = [
        {"headline": town, "content": f"{town} is a town.", "title": "No", "text": "No."} for town in TOWNS
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["data.documents=5", "kb.text_field=content", "kb.title_field=headline"]
    corpora = [f"data.{corpus}=['{tmp_path / 'c.jsonl'}']" for corpus in ("corpus", "text")]
    changed = [word for setting in (*named, *corpora) for word in ("--set", setting)]
    assert cli.main(home.words("compare", tmp_path / "t", *changed, asked=False)) == 2
    for name in ("kb", "text-kb"):
        found = {one.title: one.text for one in KnowledgeBase.open(tmp_path / "t" / name)}
        assert found == {town: f"{town} is a town." for town in TOWNS[:5]}


@pytest.mark.parametrize("given", [OPEN_QA, GOOGLES, PRETRAINED], ids=["open-qa", "googles", "pretrained"])
def test_a_published_model_answers_from_the_corpus_of_the_table(home, tmp_path, given) -> None:
    named = [word for key, path in given.items() for word in ("--set", f"data.published.{key}={path}")]
    printed(*home.words("compare", tmp_path, "--rows", "published", *named, asked=False))
    report = json.loads((tmp_path / "table1.json").read_text())
    assert_holds(results.TableJson, report)
    row = report["rows"]["published"]
    assert row["seconds"] is None  # its training time is not known
    assert row["tests"]["made"]["all"]["n"] > 0
    model, kb = load_model(tmp_path / "models" / "published"), KnowledgeBase.open(tmp_path / "published-kb")
    converted = convert_checkpoint(
        str(given["checkpoint"]), tmp_path / "again", model_only=True,
        **{key: str(path) for key, path in given.items() if key != "checkpoint"},
    )  # fmt: skip
    again = load_model(converted["model"])
    assert model.compute_passage_fingerprint() == again.compute_passage_fingerprint()
    assert {passage.title for passage in kb} == set(TOWNS)
    asked = read_questions(tmp_path / "questions" / "test.jsonl")
    predictions = read_predictions(tmp_path / "predictions" / "published.made.jsonl")
    if given is PRETRAINED:
        assert (tmp_path / "rows" / "published").is_dir()
        assert list(report["starts"]) == ["bm25", "published"]
    else:
        assert list(report["starts"]) == ["bm25"]  # it has seen questions before
        answerer = Answerer.load(str(kb.folder), converted["model"], AnswerConfig())
        found = answerer.answer_batch([question.question for question in asked], "dense")
        answers = [one.answers[0].text if one.answers else "" for one in found]
        assert [one.answer for one in predictions] == answers
