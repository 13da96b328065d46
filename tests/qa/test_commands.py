"""`realm evaluate` and its neighbours from the command line: what they print and what they write."""

import json
from pathlib import Path
from typing import Any

import pytest

from realm import cli
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
    means = {key: 100 * sum(outcome[key] for outcome in outcomes) / 14 for key in ("correct", "f1")}
    assert printed["em"] == pytest.approx(means["correct"], abs=0.01)
    assert printed["f1"] == pytest.approx(means["f1"], abs=0.01)
    hits = sum(1 <= outcome["rank"] <= 5 for outcome in outcomes)
    assert printed["recall"]["5"] == pytest.approx(100 * hits / 14, abs=0.01)


def test_a_written_probe_is_the_printed_one_with_each_facts_outcome_beside_it(
    tiny_kb, tiny_model_folder, tmp_path, capsys
) -> None:
    out = tmp_path / "probe.json"
    words = ["--kb", str(tiny_kb.folder), "--model", str(tiny_model_folder)]
    settings = ["held_out=0.6", "queries=10", "read=2", "device=cpu"]
    words += [word for setting in settings for word in ("--set", setting)]
    printed = said(capsys, "probe", *words, "--out", str(out))
    written = json.loads(out.read_text())
    outcomes = written.pop("outcomes")
    assert written == printed
    assert len({outcome["passage"] for outcome in outcomes} & set(tiny_kb.ids)) == 10
    hits = sum(1 <= outcome["rank"] <= 5 for outcome in outcomes)
    assert printed["recall"]["5"] == 10 * hits
