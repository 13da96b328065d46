"""`realm evaluate`, `retrieve`, `probe` and `answer` from the command line: output and files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from realm import cli
from realm.qa import pipeline
from realm.questions import MadeQuestion
from realm.search.bm25 import Bm25Index
from tests.conftest import RIVERS, TOWNS

LINES = [
    {"id": f"q{n}", "question": f"on which river lies {town}?", "answers": [RIVERS[n % 4]]}
    for n, town in enumerate(TOWNS)
]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_written_report_is_the_printed_one_with_each_questions_outcome_beside_it(
    tiny_kb, qa_folder, asked, tmp_path, capsys
) -> None:
    out = tmp_path / "made" / "report.json"
    words = ["--kb", str(tiny_kb.folder), "--model", str(qa_folder), "--set", "device=cpu"]
    printed = said(capsys, "evaluate", *words, "--questions", str(asked), "--out", str(out))
    written = json.loads(out.read_text())
    outcomes = written.pop("outcomes")
    assert written == printed
    assert [outcome["id"] for outcome in outcomes] == [line["id"] for line in LINES]
    means = {
        key: 100 * sum(outcome[key] for outcome in outcomes) / 14 for key in ("correct", "contains", "f1")
    }
    assert printed["em"] == pytest.approx(means["correct"], abs=0.01)
    assert printed["contains"] == pytest.approx(means["contains"], abs=0.01)
    assert printed["f1"] == pytest.approx(means["f1"], abs=0.01)
    hits = sum(1 <= outcome["rank"] <= 5 for outcome in outcomes)
    assert printed["recall"]["5"] == pytest.approx(100 * hits / 14, abs=0.01)


def test_every_command_that_answers_reads_the_passages_of_the_named_method(
    tiny_kb, qa_folder, tmp_path, capsys
) -> None:
    question = "who built a tower in Arden?"
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": question, "answers": ["x"]}))
    words = ["--kb", str(tiny_kb.folder), "--set", "device=cpu"]
    ranked = {}
    for method in ("dense", "bm25", "hybrid"):
        chosen = [*words, "--model", str(qa_folder), "--method", method]
        found = said(capsys, "answer", question, *chosen, "--set", "answers=500")["answers"]
        ranks = {answer["passage"]["rank"]: answer["passage"]["id"] for answer in found}
        out = tmp_path / f"{method}.jsonl"
        asked = ["--questions", str(tmp_path / "q.jsonl"), "--out", str(out)]
        assert cli.main(["retrieve", *chosen, *asked]) == 0
        ranked[method] = [passage["id"] for passage in json.loads(out.read_text())["passages"]]
        assert ranks.keys() <= {1, 2, 3, 4, 5}
        assert all(ranked[method][rank - 1] == id for rank, id in ranks.items())
    assert len({tuple(ids[:5]) for ids in ranked.values()}) == 3


def test_evaluation_by_words_needs_no_model_and_reports_no_answers(
    tiny_kb, qa_folder, asked, tmp_path, capsys
) -> None:
    out = tmp_path / "report.json"
    words = ["evaluate", "--kb", str(tiny_kb.folder), "--questions", str(asked), "--method", "bm25"]
    report = said(capsys, *words, "--out", str(out))
    read = said(capsys, *words, "--model", str(qa_folder), "--set", "device=cpu")
    assert report["em"] is report["em_ci95"] is report["contains"] is report["f1"] is None
    assert read["em"] is not None and read["f1"] is not None
    assert all(report[name] == read[name] for name in ("n", "recall", "mrr"))
    for outcome in json.loads(out.read_text())["outcomes"]:
        assert outcome["correct"] is outcome["contains"] is outcome["f1"] is None and outcome["rank"] >= 0
    assert cli.main([*words[:-1], "hybrid"]) == 2
    assert "--method hybrid needs --model" in capsys.readouterr().err


def test_settings_that_a_ranking_by_words_does_not_use_are_refused(tiny_kb, asked, tmp_path, capsys) -> None:
    words = ["--kb", str(tiny_kb.folder), "--method", "bm25", "--out", str(tmp_path / "out")]
    (tmp_path / "preset.toml").write_text("[answer]\nread = 3\n")
    for command in (["evaluate", "--questions", str(asked)], ["retrieve", "--questions", str(asked)]):
        assert cli.main([*command, *words, "--set", "read=3"]) == 2
        assert "--method bm25 without --model uses no settings: leave out --set" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert cli.main([*command, *words, "--config", str(tmp_path / "preset.toml")]) == 0


def test_evaluation_of_retrieval_alone_reads_no_answers_and_reports_the_same_ranks(
    tiny_kb, qa_folder, asked, tmp_path, capsys, monkeypatch
) -> None:
    words = ["evaluate", "--kb", str(tiny_kb.folder), "--model", str(qa_folder), "--questions", str(asked)]
    words += ["--set", "device=cpu", "--out", str(tmp_path / "report.json")]
    read = said(capsys, *words)
    monkeypatch.setattr(pipeline.Answerer, "answer_from", None)
    report = said(capsys, *words, "--retrieval-only")
    assert report["em"] is report["f1"] is None and read["em"] is not None
    assert all(report[name] == read[name] for name in ("n", "recall", "mrr"))
    monkeypatch.setattr(pipeline.Answerer, "load", None)
    saved = ["--save-predictions", str(tmp_path / "p.jsonl")]
    for flags in (["--gold"], ["--unanswerable"], saved, ["--reader", "span"]):
        assert cli.main([*words, "--retrieval-only", *flags]) == 2
        assert "leave out --retrieval-only" in capsys.readouterr().err
    for other in (["--predictions", str(asked)], ["--beir", str(tmp_path)]):
        assert cli.main(["evaluate", "--kb", str(tiny_kb.folder), "--retrieval-only", *other]) == 2


def test_retrieval_by_words_needs_neither_model_nor_index(tiny_kb, asked, tmp_path, monkeypatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    kb = tmp_path / "kb"
    shutil.copytree(tiny_kb.folder, kb, ignore=shutil.ignore_patterns("indexes"))
    assert {path.name for path in kb.iterdir()} < {path.name for path in Path(tiny_kb.folder).iterdir()}
    monkeypatch.setattr(pipeline, "load_model", load)
    monkeypatch.setattr(pipeline, "complete_index", load)
    words = ["retrieve", "--kb", str(kb), "--questions", str(asked), "--method", "bm25"]
    assert cli.main([*words, "--out", str(tmp_path / "hits.jsonl"), "--top-k", "3"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "hits.jsonl").read_text().splitlines()]
    expected = Bm25Index(tiny_kb.titles, tiny_kb.texts()).search([row["question"] for row in LINES], 3)
    assert [[p["id"] for p in row["passages"]] for row in rows] == [
        [tiny_kb.ids[n] for n in numbers if n >= 0] for numbers in expected.number_BK
    ]


def test_a_written_probe_is_the_printed_one_with_each_facts_outcome_beside_it(
    tiny_kb, tiny_model_folder, tmp_path, capsys
) -> None:
    out = tmp_path / "probe.json"
    words = ["--kb", str(tiny_kb.folder), "--model", str(tiny_model_folder)]
    settings = ["queries=3", "read=2", "device=cpu"]
    words += [word for setting in settings for word in ("--set", setting)]
    printed = said(capsys, "probe", *words, "--out", str(out))
    written = json.loads(out.read_text())
    outcomes = written.pop("outcomes")
    assert written == printed
    assert len({outcome["passage"] for outcome in outcomes} & set(tiny_kb.ids)) == printed["n"] >= 2
    hits = sum(1 <= outcome["rank"] <= 5 for outcome in outcomes)
    assert printed["recall"]["5"] == pytest.approx(100 * hits / printed["n"], abs=0.01)


def test_made_questions_are_answered_from_the_documents_from_which_they_were_made(
    tiny_kb, qa_folder, tmp_path, capsys
) -> None:
    passages = list(tiny_kb)
    made = [
        MadeQuestion(
            f"{n}",
            "which river?",
            (river,),
            passage.id,
            passage.document_id,
            passage.title,
            at,
            at + len(river),
        )
        for n, passage in enumerate(passages)
        for river in RIVERS
        if (at := passage.text.find(river)) >= 0
    ]
    by_hand = [
        {"id": one.id, "question": one.question, "answers": one.answers, "passage_id": one.document_id}
        for one in made
    ]
    words = ["--kb", str(tiny_kb.folder), "--model", str(qa_folder), "--set", "device=cpu", "--gold"]
    reports = []
    for name, lines in (("made", [one._asdict() for one in made]), ("by hand", by_hand)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        reports.append(said(capsys, "evaluate", *words, "--questions", str(file)))
    assert reports[0] == reports[1] and reports[0]["n"] == len(made) > 1
