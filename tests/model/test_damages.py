"""Whatever happens to one file of a model folder, commands answer as before or end with one line.

More of it: `python -m pytest -m slow tests/model/test_damages.py --trials 1000 --trials-seed 7`.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from realm import cli
from realm.model.bert import Bert
from realm.model.folder import load_model, save_model
from realm.model.masked_reader import MaskedReader
from realm.model.span_reader import SpanReader
from tests.damages import damage

COMMANDS = {
    "answer": ["answer", "on which river lies Arden?", "--set", "read=3"],
    "fill": ["fill", "Arden lies on the river [MASK]."],
}


@pytest.fixture
def model(own_kb, tiny_model_folder, tmp_path: Path) -> Path:
    """The tiny model with a copy head and a span reader of random weights; its parent's index serves it."""
    whole = load_model(tiny_model_folder)
    torch.manual_seed(1)
    whole.masked_reader = MaskedReader(whole.reader.bert, copy=True)
    whole.span_reader = SpanReader(Bert(whole.reader.config))
    save_model(whole, tmp_path / "model")
    return tmp_path / "model"


def asked(command: str, kb: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any] | str:
    """What a command reports, its clock aside; or the line that it ends with."""
    code = cli.main(
        [*COMMANDS[command], "--kb", str(kb), "--model", str(model), "--set", "device=cpu", "--json"]
    )
    said = capsys.readouterr()
    if code:
        assert code == 2 and said.err.startswith("realm: ") and said.err.count("\n") == 1, said.err
        return said.err
    report: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    report.pop("ms", None)
    return report


def trial(kb: Path, model: Path, commands: list[str], count: int, seed: int, capsys) -> None:
    wanted = {command: asked(command, kb, model, capsys) for command in commands}
    assert all(isinstance(report, dict) for report in wanted.values())
    whole = shutil.copytree(model, model.with_name("whole"))
    draw = random.Random(seed)
    refused = 0
    for number in range(count):
        what = damage(draw, sorted(path for path in model.rglob("*") if path.is_file()))
        for command in commands:
            got = asked(command, kb, model, capsys)
            assert isinstance(got, str) or got == wanted[command], f"seed {seed}, damage {number}: {what}"
            refused += isinstance(got, str)
        shutil.rmtree(model)
        shutil.copytree(whole, model)
    assert refused > count // 4


def test_a_damaged_model_answers_as_before_or_not_at_all(own_kb, model, capsys) -> None:
    trial(own_kb.folder, model, ["answer"], 20, 0, capsys)


@pytest.mark.slow
def test_many_damaged_models_answer_and_fill_as_before_or_not_at_all(own_kb, model, capsys, trials) -> None:
    trial(own_kb.folder, model, list(COMMANDS), trials.count(200), trials.seed, capsys)
