"""What the tests of all training stages do: run the tiny preset, stop it, and look at what it left."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from realm.model.folder import load_model
from realm.settings import read_config
from realm.store.knowledge_base import KnowledgeBase
from realm.train.loop import TrainRun

T = TypeVar("T")
CLOCK = {
    "seconds",
    "building",
    "build_seconds",
    "build_passages_per_second",
    "build_slowdown",
    "swap_seconds",
}
CONTRACT = {"step", "loss", "retrieval_utility", "null_probability", "index_age"}


def tiny(cls: type[T], section: str, *overrides: str) -> T:
    """The tiny preset, in full precision on the CPU."""
    return read_config(cls, "tiny", section, ["device=cpu", "precision=fp32", *overrides])


def metrics(out: Path, ignored: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their clock and the `ignored` numbers."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK | ignored} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    parts = load_model(folder).parts()
    return {
        f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()
    }


def changed(one: Path, other: Path) -> set[str]:
    """The parts, and the towers of the embedder, in which two models differ."""
    mine, theirs = weights(one), weights(other)
    different = {n for n in mine.keys() & theirs.keys() if not torch.equal(mine[n], theirs[n])}
    different |= mine.keys() ^ theirs.keys()
    return {".".join(n.split(".")[: 2 if n.startswith("embedder") else 1]) for n in different}


def assert_same_result(one: Path, other: Path, ignored: frozenset[str] = frozenset()) -> None:
    assert metrics(one, ignored) == metrics(other, ignored)
    assert changed(one, other) == set()


def pretraining(kb: KnowledgeBase, model: Path, settings: Sequence[str]) -> list[str]:
    """The words of `realm pretrain` with the tiny preset, all but --out."""
    words = ["pretrain", "--kb", str(kb.folder), "--model", str(model), "--config", "tiny"]
    return words + [word for setting in settings for word in ("--set", setting)]


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch, train: Callable[[], object]) -> None:
    """Runs a stage that gets the signal to stop while it does the given step."""
    update = TrainRun.update

    def with_signal(run: TrainRun, *args: Any) -> None:
        if run.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        update(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TrainRun, "update", with_signal)
        with pytest.raises(KeyboardInterrupt):
            train()
