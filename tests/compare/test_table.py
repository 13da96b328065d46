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
from realm.compare.plan import DataConfig, Plan, TableConfig, is_dev, split_questions
from realm.compare.rows import STARTS, TABLE_1, TABLE_2
from realm.errors import InputError
from realm.qa.question_files import Question
from tests.schemas import assert_holds
from tests.towns import write_corpus, write_encoder

SETTINGS = """
[data]
corpus = ["{corpus}"]
text = ["{corpus}"]
encoder = "{encoder}"

[compare]
rows = ["bm25-reader", "t5", "drqa", "hard-em", "graph", "path", "orqa", "realm", "realm-x", "realm-mixture", "hybrid"]

[ablate]
rows = ["realm", "realm-retriever", "realm-encoder", "orqa", "bert-masks", "no-null", "own-passage"]
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
    assert list(compared["rows"]) == list(TABLE_1)
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
            assert one["retrieved"]["recall"] == again["recall"]
            assert one["retrieved"]["mrr"] == again["mrr"]


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
        "encoder",
        "ict",
        "realm",
        "realm-retriever",
        "realm-encoder",
        "bert-masks",
        "no-null",
        "own-passage",
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
    table = (home / "table2" / "table.md").read_text()
    assert "| realm-retriever |" in table


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
    assert f"REALM, X = Z is right, ORQA is wrong: {counts['only_a']}" in text
    assert f"ORQA is right, REALM, X = Z is wrong: {counts['only_b']}" in text


# -- parts


def plan(table=TABLE_1, text: tuple[str, ...] = (), **settings: Any) -> Plan:
    return Plan(TableConfig(**settings), DataConfig(text=text), None, Path("t"), table)


def test_rows_and_starts_are_made_after_what_they_need() -> None:
    for table in (TABLE_1, TABLE_2):
        every = plan(table, text=("x",))
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
    assert "realm-x" not in plan().rows()
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
    kept, dev = split_questions(train, [], tests)
    assert len(kept) + len(dev) == 20
    assert dev == [one for one in [*kept, *dev] if is_dev(one.question)]
    assert {one.id for one in [*kept, *dev]} == {"b:1"}
    kept, dev = split_questions(train, [question("d", "What is 3?")], tests)
    assert (len(kept), [one.id for one in dev]) == (20, ["d:1"])


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
