"""Runs the programs of examples/ unchanged."""

import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from realm.workspace.settings import FitConfig

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, *given: object) -> None:
    runpy.run_path(str(EXAMPLES / name))["main"](*given)


def test_the_example_of_asking_prints_answers_with_evidence(
    home: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    tiny = tuple(getattr(config, field.name) for field in fields(FitConfig))
    monkeypatch.setattr(FitConfig.__init__, "__defaults__", tiny)
    run("ask.py", "docs", "towns", "when was arden founded?")
    out = capsys.readouterr().out
    assert "(probability " in out and "[[" in out and "\n3. " in out


def test_the_example_of_changing_adds_and_deletes_a_document(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("change.py", "towns")
    before, added, deleted = (line.partition(": ")[2] for line in capsys.readouterr().out.splitlines())
    assert before == deleted and before.startswith("14 documents") and added.startswith("15 documents")


def test_the_example_of_training_measures_its_model_and_can_be_run_again(home: Path, capsys) -> None:
    for _ in range(2):
        run("stages.py", "towns", "models", 2)
    first, second = capsys.readouterr().out.splitlines()
    assert "held-out masked facts, found in the first 5 passages: " in first == second


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"ask.py", "change.py", "stages.py"}
