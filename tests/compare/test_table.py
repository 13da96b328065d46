"""`realm compare` and `realm ablate` on a dozen made-up towns with random weights, and the parts of a table."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realm import cli
from realm.compare import plots, results
from realm.compare.plan import DataConfig, Plan, PublishedConfig, TableConfig, is_dev, split_questions
from realm.compare.rows import STARTS, TABLE_1, TABLE_2
from realm.errors import InputError
from realm.interop.blocks import convert_checkpoint
from realm.model.folder import load_model
from realm.model.manifest import read_manifest
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.predictions import read_predictions
from realm.qa.question_files import Question, read_questions
from realm.store.knowledge_base import KnowledgeBase
from tests.schemas import assert_holds
from tests.towns import TOWNS, write_corpus, write_encoder

SETTINGS = """
[data]
corpus = ["{corpus}"]
text = ["{corpus}"]
encoder = "{encoder}"

[compare]
rows = ["bm25-reader", "t5", "drqa", "hard-em", "graph", "path", "orqa", "realm", "realm-x", "realm-mixture", "hybrid"]

[ablate]
rows = ["realm", "realm-retriever", "realm-encoder", "orqa", "bert-masks", "no-null", "own-passage", "two-towers", "no-ict"]
seeds = [0, 1]
answer_seeds = 0

[kb]
passage_tokens = 64
held_out = 0.3
tagger = "rules"

[questions]
dev_share = 0.5

[mlm]
steps = 2
query_tokens = 32
[mlm.embedder]
dim = 16

[ict]
steps = 2

[pretrain]
steps = 4
batch_size = 2
candidates = 3
injected = 1
ict = 0.5
[pretrain.refresh]
every = 2
in_background = false
[pretrain.health]
gate = 0.0
margin = -1.0

[finetune]
steps = 2
batch_size = 2
retrieved = 10
dev_every = 1

[baseline.t5]
steps = 2
span_steps = 1
layers = 1
width = 16
heads = 2

[baseline.graph]
steps = 2
passages = 10

[baseline.path]
steps = 2

[baseline.drqa]
steps = 2
width = 8
hidden = 8
layers = 1
"""


def printed(*words: str) -> str:
    """What a command prints."""
    out = StringIO()
    with redirect_stdout(out):
        assert cli.main(words) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tables")
    texts = write_corpus(home / "towns.jsonl")
    write_encoder(home / "encoder", texts)
    settings = SETTINGS.format(corpus=home / "towns.jsonl", encoder=home / "encoder")
    (home / "tiny.toml").write_text(settings)
    return home


@pytest.fixture(scope="module")
def compared(home: Path) -> dict[str, Any]:
    """The report of `realm compare`, which is also in table1/report.json."""
    text = printed("compare", str(home / "tiny.toml"), "--dir", str(home / "table1"))
    assert "REALM + BM25" in text
    return json.loads((home / "table1" / "report.json").read_text())


def test_every_row_is_trained_and_measured_on_the_same_questions(home, compared) -> None:
    assert_holds(results.TableJson, compared)
    assert list(compared["rows"]) == [name for name in TABLE_1 if name != "published"]
    tests = [row["tests"]["made"] for row in compared["rows"].values()]
    assert len({one["all"]["n"] for one in tests}) == 1
    assert all(one["seen"]["n"] + one["unseen"]["n"] == one["all"]["n"] for one in tests)
    assert compared["rows"]["realm"]["tests"]["made"]["less"] is None
    assert compared["masked_facts"]["n"] > 0


def test_scores_of_the_table_are_those_of_the_saved_predictions(home, compared, capsys) -> None:
    folder = home / "table1"
    words = [
        "evaluate",
        "--kb",
        str(folder / "kb"),
        "--questions",
        str(folder / "questions" / "test.jsonl"),
        "--json",
    ]
    for name, row in compared["rows"].items():
        saved = folder / "predictions" / f"{name}.made.jsonl"
        assert cli.main([*words, "--predictions", str(saved)]) == 0
        again = json.loads(capsys.readouterr().out.splitlines()[-1])
        one = row["tests"]["made"]
        assert (again["em"], again["f1"], again["em_ci95"]) == (
            one["all"]["em"],
            one["all"]["f1"],
            one["all"]["em_ci95"],
        )
        if name == "t5":
            assert one["retrieved"] is None
        else:
            assert one["retrieved"]["all"]["recall"] == again["recall"]
            assert one["retrieved"]["all"]["mrr"] == again["mrr"]


def test_the_picture_shows_every_value_within_its_interval(home, compared) -> None:
    assert (home / "table1" / "table.png").read_bytes().startswith(b"\x89PNG")
    drawn = plots.panels(compared)
    assert [len(panel.labels) for panel in drawn] == [len(compared["rows"]), len(compared["starts"])]
    for panel in drawn:
        for value, (low, high) in zip(panel.values, panel.intervals, strict=True):
            assert low - 0.01 <= value <= high + 0.01


def test_a_finished_table_is_only_read_again(home, compared) -> None:
    text = printed("compare", str(home / "tiny.toml"), "--dir", str(home / "table1"))
    assert "$ realm" not in text
    assert json.loads((home / "table1" / "report.json").read_text()) == compared


def test_ablations_measure_retrieval_of_every_seed_before_any_question(home) -> None:
    printed("ablate", str(home / "tiny.toml"), "--dir", str(home / "table2"))
    report = json.loads((home / "table2" / "report.json").read_text())
    assert_holds(results.TableJson, report)
    assert report["rows"] == {}
    starts = report["starts"]
    named = {
        "bm25",
        "encoder",
        "ict",
        "realm",
        "realm-retriever",
        "realm-encoder",
        "bert-masks",
        "no-null",
        "own-passage",
        "towers-encoder",
        "towers-ict",
        "two-towers",
        "no-ict",
    }
    assert named == set(starts)
    assert starts["realm-retriever"]["tests"] == starts["realm"]["tests"]  # the same retriever
    assert starts["realm-encoder"]["tests"] == starts["ict"]["tests"]
    assert (home / "table2" / "models" / "realm-1").is_dir()
    encoder = {
        name: (home / "table2" / "models" / name / "encoder" / "model.safetensors").read_bytes()
        for name in ("ict", "realm", "realm-retriever", "realm-encoder")
    }
    assert encoder["realm-retriever"] == encoder["ict"] != encoder["realm"] == encoder["realm-encoder"]
    for name in named - {"bm25", "encoder", "towers-encoder"}:
        manifest = read_manifest(home / "table2" / "models" / name)
        assert manifest["embedder"]["shared"] == (name not in ("towers-ict", "two-towers")), name
    assert starts["towers-encoder"]["tests"] == starts["encoder"]["tests"]
    assert read_manifest(home / "table2" / "models" / "no-ict")["stages"][-1]["ict"] == 0
    assert read_manifest(home / "table2" / "models" / "realm")["stages"][-1]["ict"] == 0.5
    table = (home / "table2" / "table.md").read_text()
    assert "| realm-retriever |" in table


FIXTURES = Path(__file__).parent.parent / "interop" / "fixtures"
OPEN_QA = {"checkpoint": FIXTURES / "openqa" / "new", "embedder": FIXTURES / "embedder" / "new"}
GOOGLES = {
    "checkpoint": FIXTURES / "tensorflow" / "openqa" / "model.ckpt-300000",
    "embedder": FIXTURES / "tensorflow" / "embedder",
    "tokenizer": FIXTURES / "tensorflow" / "openqa",
}
PRETRAINED = {"checkpoint": FIXTURES / "embedder" / "new", "encoder": FIXTURES / "encoder" / "new"}


@pytest.mark.parametrize("given", [OPEN_QA, GOOGLES, PRETRAINED], ids=["open-qa", "googles", "pretrained"])
def test_a_published_model_answers_from_the_corpus_of_the_table(home, tmp_path, given) -> None:
    named = [word for key, path in given.items() for word in ("--set", f"data.published.{key}={path}")]
    words = ["compare", str(home / "tiny.toml"), "--dir", str(tmp_path), "--rows", "published", *named]
    printed(*words)
    report = json.loads((tmp_path / "report.json").read_text())
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


def test_rows_without_their_data_are_left_out_with_a_sentence(home, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("realm.compare.table.run_stages", _stop)
    settings = (home / "tiny.toml").read_text().replace("[compare]\nrows", "[compare]\n#")
    (tmp_path / "all.toml").write_text(settings)
    out = StringIO()
    with redirect_stdout(out):
        assert cli.main(["compare", str(tmp_path / "all.toml"), "--dir", str(tmp_path / "t")]) == 2
    assert "The row published is left out: it needs published weights: name a checkpoint" in out.getvalue()
    assert "realm-x is left out" not in out.getvalue()


def _stop(*_: object) -> None:
    raise InputError("no stage is needed")


def test_scores_are_checked_against_an_earlier_report(home, compared, capsys) -> None:
    words = ["compare", str(home / "tiny.toml"), "--dir", str(home / "table1")]
    assert cli.main([*words, "--check", str(home / "table1" / "report.json")]) == 0
    compared["rows"]["realm"]["tests"]["made"]["all"]["em"] += 50
    (home / "other.json").write_text(json.dumps(compared))
    assert cli.main([*words, "--check", str(home / "other.json")]) == 2
    assert "realm, made, exact match" in capsys.readouterr().err


def test_disagreements_name_questions_that_only_one_row_answers(home, compared) -> None:
    text = printed(
        "compare", str(home / "tiny.toml"), "--dir", str(home / "table1"), "--diff", "orqa", "realm"
    )
    counts = compared["rows"]["orqa"]["tests"]["made"]["less"]
    assert f"REALM, X = Z is right, ORQA is wrong: {counts['only_realm']}" in text
    assert f"ORQA is right, REALM, X = Z is wrong: {counts['only_other']}" in text


# -- parts


def plan(table=TABLE_1, data: DataConfig | None = None, **settings: Any) -> Plan:
    return Plan(TableConfig(**settings), data or DataConfig(), None, Path("t"), table)


def test_rows_and_starts_are_made_after_what_they_need() -> None:
    for table in (TABLE_1, TABLE_2):
        every = plan(table, DataConfig(text=("x",), published=PublishedConfig("y")))
        assert list(every.rows()) == list(table)
        made: set[str] = set()
        for name in every.starts():
            start = STARTS[name]
            assert {start.init, start.encoder_of} - {""} <= made
            made.add(name)
    assert list(plan(rows=("hybrid",)).rows()) == ["realm", "hybrid"]
    assert plan(rows=("orqa",)).starts() == ["encoder", "ict"]


def test_rows_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(InputError, match="no row 'atlas'"):
        plan(rows=("atlas",)).rows()
    with pytest.raises(InputError, match="realm-x needs another corpus"):
        plan(rows=("realm-x",)).rows()
    with pytest.raises(InputError, match="published needs published weights"):
        plan(rows=("published",)).rows()
    assert list(plan().rows()) == [name for name in TABLE_1 if name not in ("realm-x", "published")]
    with pytest.raises(InputError, match="30 times stale"):
        plan(TABLE_2, rows=("stale",)).check()


def test_training_questions_that_a_test_asks_are_left_out() -> None:
    def question(name: str, text: str) -> tuple[str, Question]:
        return name, Question("1", text, ("x",))

    train = [
        question("a", "Who painted the Mona Lisa?"),
        *(question("b", f"What is {n}?") for n in range(20)),
    ]
    tests = [Question("t", "who painted mona lisa", ("y",))]
    kept, dev, dropped = split_questions(train, [], tests)
    assert (len(kept) + len(dev), dropped) == (20, 1)
    assert dev == [one for one in [*kept, *dev] if is_dev(one.question)]
    assert {one.id for one in [*kept, *dev]} == {"b:1"}
    kept, dev, dropped = split_questions(train, [question("d", "What is 3?")], tests)
    assert (len(kept), [one.id for one in dev], dropped) == (20, ["d:1"], 1)


RESPLIT = {
    "what two countries invaded poland in the beginning of ww2?": True,
    "who is the prime minister of ethiopia?": True,
    "what character did natalie portman play in star wars?": False,
    "what country is the grand bahama island in?": False,
}
"""Training question of WebQuestions -> whether it is in WebQuestions.resplit.dev."""


def test_dev_questions_are_those_of_orqas_resplit() -> None:
    assert [is_dev(question) for question in RESPLIT] == list(RESPLIT.values())


def test_shares_are_means_over_the_chosen_questions_and_seeds() -> None:
    correct_SN = np.array([[1, 0, 1, 0], [1, 1, 0, 0]], dtype=bool)
    f1_SN = correct_SN.astype(float)
    chosen_N = np.array([True, True, False, True])
    scored = results._answered(correct_SN, f1_SN, chosen_N)
    assert scored["n"] == 3
    assert scored["em"] == pytest.approx(100 * 3 / 6)
    assert scored["em_ci95"][0] < 50 < scored["em_ci95"][1]
    assert results._answered(correct_SN, f1_SN, np.zeros(4, dtype=bool))["n"] == 0
