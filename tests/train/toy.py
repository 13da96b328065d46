"""A training stage in small: random rows by step, dropout, and something of its own to remember."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import torch

from realm.model.folder import load_model
from realm.train.loop import TrainRun
from realm.train.run_config import RunConfig, generator

DATA = torch.from_numpy(np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32))


def config(**values) -> RunConfig:
    defaults = {
        "steps": 12,
        "warmup": 3,
        "log_every": 3,
        "device": "cpu",
        "precision": "fp32",
        "dropout": 0.3,
    }
    return RunConfig(**{**defaults, **values})


def train(
    model, out: Path, settings: RunConfig, before_update=lambda run: None, after_update=lambda run: None
) -> Path:
    """A stage in small: random rows by step, dropout, and something of its own to remember."""
    part = model.embedder.query
    with TrainRun("toy", out, settings, model, {part: 0.05}, {"data": "rows"}) as run:
        for step in run.steps():
            rows = DATA[torch.from_numpy(generator(settings.seed, step).permutation(200)[:4])]
            loss = (part.encoder.embeddings.dropout(part.projection(rows)) ** 2).mean()
            before_update(run)
            run.update(loss, {"retrieval_utility": float(step)})
            run.state["total"] = run.state.get("total", 0.0) + loss.item()
            if run.step % 4 == 0:
                run.log({"total": run.state["total"]})
            after_update(run)
        return run.finish()


def lines(out: Path) -> list[dict]:
    """metrics.jsonl without its clock."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder).embedder.query.state_dict()


def assert_same_result(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    mine, theirs = weights(one), weights(other)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def at(step: int, do):
    """Does something once, when `step` steps are done."""
    return lambda run: do() if run.step == step else None


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crash() -> None:
    raise RuntimeError("power cut")


def checkpoints(out: Path) -> list[str]:
    return sorted(file.name for file in out.with_name(out.name + ".training").glob("checkpoint-*"))
