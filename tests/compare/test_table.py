"""`realm compare` and `realm ablate` on a dozen made-up towns with random weights."""

import copy
import json
import os
import re
import shutil
import string
import unicodedata
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest

from realm import cli
from realm.compare import plots, results
from realm.compare.rows import TABLE_1, TABLE_2
from realm.compare.table import DataJson
from realm.errors import InputError
from realm.interop.blocks import convert_checkpoint
from realm.model.folder import load_model
from realm.model.manifest import read_manifest
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.predictions import read_predictions
from realm.qa.question_files import read_questions
from realm.store.knowledge_base import KnowledgeBase
from tests.schemas import assert_holds
from tests.towns import TOWNS, write_corpus, write_encoder


def printed(*words: str) -> str:
    """What a command prints."""
    out = StringIO()
    with redirect_stdout(out):
        assert cli.main(words) == 0
    return out.getvalue()


class Home(NamedTuple):
    """A folder with the documents and the encoder of the tables."""

    folder: Path

    def words(self, command: str, folder: Path, *more: str, asked: bool = True) -> list[str]:
        """A command with the preset `tables-tiny` on these documents, and on the questions if they are `asked`."""
        data = {
            "corpus": f'["{self.folder / "towns.jsonl"}"]',
            "text": f'["{self.folder / "towns.jsonl"}"]',
            "encoder": self.folder / "encoder",
            "documents": 0,
        }
        if asked:
            data["train"] = f'["{self.folder / "train.jsonl"}"]'
            data |= {f"tests.{test}": self.folder / f"{test}.jsonl" for test in TESTS}
        given = [word for key, value in data.items() for word in ("--set", f"data.{key}={value}")]
        return [command, "tables-tiny", "--dir", str(folder), *given, *more]

    @property
    def table1(self) -> Path:
        return self.folder / "table1"

    @property
    def table2(self) -> Path:
        return self.folder / "table2"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("tables"))
    texts = write_corpus(home.folder / "towns.jsonl")
    write_encoder(home.folder / "encoder", texts)
    write_questions(home.folder, texts)
    return home


TESTS = ("spans", "patterns")


def write_questions(folder: Path, texts: list[str]) -> None:
    """Questions that models with random weights answer and find in part.

    Every other question of a test has the name of its town as the answer, so that only one document holds it. The answers of
    the others are all spans of up to six words of the document in "spans", and any letter in "patterns". One question is for
    training and in a test.
    """
    asked: dict[str, list[dict[str, Any]]] = {"train": [], "spans": [], "patterns": []}
    for place, (town, text) in enumerate(zip(TOWNS, texts, strict=True)):
        words = text.split()
        every = [
            " ".join(words[start : start + width]) for start in range(len(words)) for width in range(1, 7)
        ]
        year = re.findall(r"\d+", text)[0]
        asked["train"].append({"question": f"when was {town} founded?", "answers": [year]})
        asked["train"].append({"question": f"on which river lies {town}?", "answers": ["Ystra"]})
        spans, pattern = ([town], town) if place % 2 else (every, "[a-z]")
        other = TOWNS[place - 1]
        asked["spans"].append({"question": f"what stands near {other}?", "answers": spans})
        asked["patterns"].append(
            {"question": f"who keeps bees near {other}?", "answers": [pattern], "regex": True}
        )
    asked["spans"].append(asked["train"][0])
    for name, lines in asked.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def compared(home: Home) -> dict[str, Any]:
    """The report of `realm compare`, which is also in table1/table1.json."""
    text = printed(*home.words("compare", home.table1))
    assert "REALM + BM25" in text
    assert "The row published is left out, because it needs published weights: give a checkpoint" in text
    assert "realm-x is left out" not in text
    assert "Training and dev questions that are left out because they are also in a test: 1." in text
    return json.loads((home.table1 / "table1.json").read_text())


@pytest.fixture(scope="module")
def ablated(home: Home, compared) -> dict[str, Any]:
    """The report of `realm ablate`, which continues from the starts of `realm compare`."""
    shutil.copytree(home.table1, home.table2)
    printed(*home.words("ablate", home.table2))
    assert json.loads((home.table2 / "table1.json").read_text()) == compared  # both tables may share a folder
    return json.loads((home.table2 / "table2.json").read_text())


def test_every_row_is_trained_and_measured_on_the_same_questions(compared, ablated) -> None:
    for report, table in ((compared, TABLE_1), (ablated, TABLE_2)):
        assert_holds(results.TableJson, report)
        assert list(report["rows"]) == [name for name in table if name != "published"]
        for test in TESTS:
            tests = [row["tests"][test] for row in report["rows"].values()]
            assert len({one["all"]["n"] for one in tests}) == 1
            assert all(one["seen"]["n"] + one["unseen"]["n"] == one["all"]["n"] for one in tests)
            assert report["rows"]["realm"]["tests"][test]["less"] is None
        assert report["masked_facts"]["n"] > 0


# -- the numbers, computed once more


def plain(text: str) -> list[str]:
    """Words of an answer without articles and punctuation."""
    kept = "".join(one for one in unicodedata.normalize("NFD", text).lower() if one not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def f1_of(answer: str, right: str) -> float:
    one, other = Counter(plain(answer)), Counter(plain(right))
    common = sum(min(one[word], other[word]) for word in one)
    return 2 * common / (sum(one.values()) + sum(other.values())) if common else 0.0


def holds(text: str, question: dict[str, Any]) -> bool:
    """Whether a passage holds an answer, as whole words, or a match of a pattern."""
    if question.get("regex"):
        return any(re.search(answer, text, re.IGNORECASE) for answer in question["answers"])
    return any(
        re.search(rf"(?<!\w){re.escape(answer.lower())}(?!\w)", text.lower())
        for answer in question["answers"]
    )


def first_with(question: dict[str, Any], texts: list[str]) -> int:
    """Rank of the first text with an answer; 0 for none."""
    return next((rank for rank, text in enumerate(texts, start=1) if holds(text, question)), 0)


def recall_and_rank(ranks: list[int]) -> dict[str, Any]:
    share = {str(k): 100 * mean(0 < rank <= k for rank in ranks) for k in (1, 5, 20, 100)}
    return {"n": len(ranks), "recall": share, "mrr": 100 * mean(1 / rank if rank else 0 for rank in ranks)}


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def scored(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Exact match and F1 of pairs of a question and its prediction."""
    exact, f1 = [], []
    for question, found in rows:
        if question.get("regex"):
            exact.append(any(re.search(one, found["answer"], re.IGNORECASE) for one in question["answers"]))
            f1.append(float(exact[-1]))
        else:
            exact.append(any(plain(found["answer"]) == plain(one) for one in question["answers"]))
            f1.append(max(f1_of(found["answer"], one) for one in question["answers"]))
    return {"n": len(rows), "em": 100 * mean(exact), "f1": 100 * mean(f1)}


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("table", ["table1", "table2"])
def test_report_says_what_an_independent_scorer_computes_from_the_saved_files(
    home, compared, ablated, table, test
) -> None:
    report, folder = (compared, home.table1) if table == "table1" else (ablated, home.table2)
    texts = {passage.id: passage.text for passage in KnowledgeBase.open(folder / "kb")}
    questions = read_lines(home.folder / f"{test}.jsonl")
    trained = [one for line in read_lines(folder / "questions" / "train.jsonl") for one in line["answers"]]
    if test == "patterns":
        seen = [any(re.search(question["answers"][0], one) for one in trained) for question in questions]
    else:
        known = [plain(one) for one in trained]
        seen = [any(plain(one) in known for one in question["answers"]) for question in questions]
    predicted = {name: read_lines(folder / "predictions" / f"{name}.{test}.jsonl") for name in report["rows"]}
    ranks = {
        name: [
            first_with(question, [texts[one] for one in found["passages"]])
            for question, found in zip(questions, lines, strict=True)
        ]
        for name, lines in predicted.items()
    }
    retrieved = {
        name: retrieved_ranks(folder, name, home.folder / f"{test}.jsonl", questions)
        for name in report["starts"]
    }
    found_by = [*ranks.values(), *retrieved.values()]
    answerable = [any(own[place] for own in found_by) for place in range(len(questions))]
    for name, row in report["rows"].items():
        lines, one = predicted[name], row["tests"][test]
        pairs = list(zip(questions, lines, strict=True))
        parts = {"all": [True] * len(pairs), "answerable": answerable, "seen": seen}
        parts["unseen"] = [not known for known in seen]
        for part, chosen in parts.items():
            kept = [pair for pair, taken in zip(pairs, chosen, strict=True) if taken]
            assert one[part]["n"] == len(kept)
            for key, value in scored(kept).items() if kept else ():
                assert one[part][key] == pytest.approx(value, abs=0.006), (name, part, key)
            for key in ("em", "f1") if kept else ():
                low, high = one[part][f"{key}_ci95"]
                assert low <= one[part][key] <= high
        assert one["ms"] == pytest.approx(mean(line["ms"] for line in lines), abs=0.06)
        if name == "t5":
            assert one["retrieved"] is None
        else:
            check_retrieval(one["retrieved"], ranks[name], answerable)
    for name, start in report["starts"].items():
        check_retrieval(start["tests"][test], retrieved[name], answerable)
    assert any(0 < row["tests"][test]["all"]["f1"] < 100 for row in report["rows"].values())
    assert any(0 < row["tests"][test]["all"]["em"] < 100 for row in compared["rows"].values())
    assert any(0 < start["tests"][test]["all"]["recall"]["5"] < 100 for start in report["starts"].values())


def test_report_says_how_many_passages_were_read(home, compared) -> None:
    for name, row in compared["rows"].items():
        lines = [
            line
            for test in TESTS
            for line in read_lines(home.table1 / "predictions" / f"{name}.{test}.jsonl")
        ]
        assert row["read"] == pytest.approx(mean(line["read"] for line in lines), abs=0.06)
        assert (row["read"] == 0) == (name == "t5")
    assert compared["rows"]["realm"]["read"] == 5


def retrieved_ranks(folder: Path, start: str, file: Path, questions: list[dict[str, Any]]) -> list[int]:
    """Ranks of answers in what `realm retrieve` finds."""
    out = folder / "retrieved" / f"{start}.jsonl"
    words = ["--kb", str(folder / "kb"), "--questions", str(file), "--out", str(out)]
    model = ["--method", "bm25"] if start == "bm25" else ["--model", str(folder / "models" / start)]
    assert cli.main(["retrieve", *words, *model, "--top-k", "100"]) == 0
    found = [[one["text"] for one in line["passages"]] for line in read_lines(out)]
    return [first_with(question, texts) for question, texts in zip(questions, found, strict=True)]


def check_retrieval(one: dict[str, Any], ranks: list[int], answerable: list[bool]) -> None:
    for part, own in (
        ("all", ranks),
        ("answerable", [rank for rank, taken in zip(ranks, answerable, strict=True) if taken]),
    ):
        wanted = recall_and_rank(own)
        assert (one[part]["n"], one[part]["mrr"]) == (wanted["n"], pytest.approx(wanted["mrr"], abs=0.006))
        assert one[part]["recall"] == pytest.approx(wanted["recall"], abs=0.006)


def test_saved_predictions_score_as_the_table(home, compared, capsys) -> None:
    words = ["evaluate", "--kb", str(home.table1 / "kb"), "--json", "--questions"]
    for test in TESTS:
        for name, row in compared["rows"].items():
            saved = home.table1 / "predictions" / f"{name}.{test}.jsonl"
            assert cli.main([*words, str(home.folder / f"{test}.jsonl"), "--predictions", str(saved)]) == 0
            again, one = json.loads(capsys.readouterr().out.splitlines()[-1]), row["tests"][test]["all"]
            assert all(again[key] == one[key] for key in ("n", "em", "f1", "em_ci95")), name


def test_the_picture_shows_every_value_within_its_interval(home, compared) -> None:
    assert (home.table1 / "table1.png").read_bytes().startswith(b"\x89PNG")
    drawn = plots.panels(compared)
    assert [len(panel.labels) for panel in drawn] == [len(compared["rows"]), len(compared["starts"])] * 2
    for panel in drawn:
        for value, (low, high) in zip(panel.values, panel.intervals, strict=True):
            assert low - 0.01 <= value <= high + 0.01


def test_a_finished_table_is_only_read_again(home, compared) -> None:
    text = printed(*home.words("compare", home.table1))
    assert "$ realm" not in text
    assert json.loads((home.table1 / "table1.json").read_text()) == compared


def test_a_folder_keeps_to_the_data_that_it_was_made_with(home, compared, tmp_path, capsys) -> None:
    assert_holds(DataJson, json.loads((home.table1 / "data.json").read_text()))
    other = tmp_path / "spans.jsonl"
    other.write_text((home.folder / "spans.jsonl").read_text().replace("what", "which"))
    for setting, part in (
        (f"data.tests.spans={other}", "spans"),
        ("data.documents=3", "documents"),
        ("data.encoder=package:realm-mini", "encoder"),
        (f'data.train=["{other}"]', "train, dev"),
        ("data.train=[]", "train, dev"),
        ("seeds=[1]", "first_seed"),
    ):
        words = home.words("compare", home.table1, "--set", setting)
        assert cli.main(words) == 2
        assert f"table1 was made with other data ({part}): use another --dir" in capsys.readouterr().err
    made = json.loads((home.table1 / "data.json").read_text()) | {"questions": {}}
    (tmp_path / "data.json").write_text(json.dumps(made))
    assert cli.main(home.words("compare", tmp_path)) == 2
    assert "was made with other data (train, dev): use another --dir" in capsys.readouterr().err


def test_ablations_differ_in_what_they_name_only(home, ablated) -> None:
    starts, models = ablated["starts"], home.table2 / "models"
    assert starts["realm-retriever"]["tests"] == starts["realm"]["tests"]  # the same retriever
    assert starts["realm-encoder"]["tests"] == starts["ict"]["tests"]
    assert starts["towers-encoder"]["tests"] == starts["encoder"]["tests"]
    encoder = {
        name: (models / name / "encoder" / "model.safetensors").read_bytes()
        for name in ("ict", "realm", "realm-retriever", "realm-encoder")
    }
    assert encoder["realm-retriever"] == encoder["ict"] != encoder["realm"] == encoder["realm-encoder"]
    last = {name: read_manifest(models / name) for name in starts if name not in ("bm25", "encoder")}
    for name, manifest in last.items():
        assert manifest["embedder"]["shared"] == (
            name not in ("towers-encoder", "towers-ict", "two-towers")
        ), name
    base = last["realm"]["stages"][-1]
    changed = {
        name: {key for key in base if manifest["stages"][-1][key] != base[key]} - {"init", "seconds"}
        for name, manifest in last.items()
        if manifest["stages"][-1]["stage"] == "pretrain"
    }
    assert changed == {
        "realm": set(),
        "random-masks": {"masking"},
        "bert-masks": {"masking"},
        "random-spans": {"masking"},
        "stale": {"refresh"},
        "no-null": {"null_passage"},
        "own-passage": {"exclude_own"},
        "per-token": {"marginal"},
        "two-towers": set(),
        "no-ict": {"ict"},
        "no-warmup": {"warmup"},
        "no-guard": set(),  # the preset has none
        "no-injected": {"injected"},
    }
    assert last["stale"]["stages"][-1]["refresh"]["every"] == 30 * base["refresh"]["every"]
    assert len(last["no-ict"]["stages"]) == len(last["realm"]["stages"]) - 1


def test_training_time_is_that_of_all_models_that_a_row_started_from(home, compared, ablated) -> None:
    def seconds(folder: Path) -> list[float]:
        manifest = "realm.json" if (folder / "realm.json").exists() else "system.json"
        return [one.get("seconds", 0.0) for one in json.loads((folder / manifest).read_text())["stages"]]

    rows, models = home.table2 / "rows", home.table2 / "models"
    for name in ("realm", "stale", "realm-retriever"):
        assert ablated["rows"][name]["seconds"] == pytest.approx(sum(seconds(rows / name)), abs=0.06)
    tuned = sum(seconds(models / "realm")) + seconds(rows / "realm-encoder")[-1]
    assert ablated["rows"]["realm-encoder"]["seconds"] == pytest.approx(tuned, abs=0.06)
    rows, encoder = home.table1 / "rows", sum(seconds(home.table1 / "models" / "encoder"))
    for name in ("t5", "drqa", "graph", "path"):
        before = encoder if name in ("graph", "path") else 0.0
        assert compared["rows"][name]["seconds"] == pytest.approx(
            before + sum(seconds(rows / name)), abs=0.06
        )


def test_retrieval_is_measured_before_any_question_for_every_seed(home, ablated, tmp_path) -> None:
    folder = tmp_path / "table2"
    shutil.copytree(home.table2, folder)
    more = ["--rows", "realm", "orqa", "--set", "seeds=[0, 1]", "--set", "answer_seeds=0"]
    printed(*home.words("ablate", folder, *more))
    report = json.loads((folder / "table2.json").read_text())
    assert_holds(results.TableJson, report)
    assert report["rows"] == {}
    assert list(report["starts"]) == ["bm25", "encoder", "ict", "realm"]
    assert (folder / "models" / "realm-1").is_dir()
    reports = [
        json.loads((folder / "reports" / f"retrieval-{name}.spans.json").read_text())["recall"]["5"]
        for name in ("realm", "realm-1")
    ]
    one = report["starts"]["realm"]["tests"]["spans"]["all"]
    assert one["recall"]["5"] == pytest.approx(mean(reports), abs=0.006)
    assert "seeds 0, 1; number of seeds with training on questions: 0" in (folder / "table2.md").read_text()


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


def test_scores_are_checked_against_an_earlier_report(home, compared, capsys) -> None:
    words = home.words("compare", home.table1)
    assert cli.main([*words, "--check", str(home.table1 / "table1.json")]) == 0
    other = copy.deepcopy(compared)
    other["rows"]["realm"]["tests"]["spans"]["all"]["em"] += 50
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, "--check", str(home.folder / "other.json")]) == 2
    assert "realm, spans, exact match" in capsys.readouterr().err
    assert cli.main([*words, "--check", str(home.folder / "other.json"), "--tolerance", "50.1"]) == 0


def test_a_check_of_some_rows_compares_only_these_rows(home, compared, tmp_path, capsys) -> None:
    folder = tmp_path / "table1"
    shutil.copytree(home.table1, folder)
    words = [*home.words("compare", folder, "--rows", "orqa"), "--check"]
    assert cli.main([*words, str(home.table1 / "table1.json")]) == 0
    other = copy.deepcopy(compared)
    other["rows"]["realm"]["tests"]["spans"]["all"]["em"] += 50
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, str(home.folder / "other.json")]) == 0
    other["rows"]["orqa"]["tests"]["spans"]["all"]["em"] += 50
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, str(home.folder / "other.json")]) == 2
    found = capsys.readouterr().err
    assert "orqa, spans, exact match" in found and "missing" not in found
    none = {key: {} for key in ("rows", "starts")}
    (home.folder / "other.json").write_text(json.dumps(other | none))
    assert cli.main([*words, str(home.folder / "other.json")]) == 2
    assert "no score of the rows and tests of this table" in capsys.readouterr().err


def test_a_row_that_was_trained_again_is_measured_again(home, compared, tmp_path) -> None:
    folder = tmp_path / "table1"
    shutil.copytree(home.table1, folder)
    for model in (folder / "rows" / "orqa" / "realm.json", folder / "rows" / "drqa" / "system.json"):
        later = model.stat().st_mtime + 1000
        os.utime(model, (later, later))
    text = printed(*home.words("compare", folder))
    run = {
        line.split("rows/")[1].split()[0] for line in text.splitlines() if line.startswith("$ realm evaluate")
    }
    assert run == {"orqa", "drqa"}


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


def test_disagreements_name_questions_that_only_one_row_answers(home, compared) -> None:
    text = printed(*home.words("compare", home.table1, "--diff", "orqa", "realm"))
    for test in TESTS:
        counts = compared["rows"]["orqa"]["tests"][test]["less"]
        assert f"{test}: REALM, X = Z is right and ORQA is wrong for {counts['only_a']} questions" in text
        assert f"{test}: ORQA is right and REALM, X = Z is wrong for {counts['only_b']} questions" in text
