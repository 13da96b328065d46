"""What the tests of index refreshes share: a refresher of a tiny run, builds that are shell scripts, and what they left."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from realm.index.embedding import embed_passages
from realm.index.versions import publish
from realm.train.refresh.refresher import IndexRefresher, RefreshConfig

PYTHON = sys.executable
"""Before `fake_build` puts another in its place."""


def refresher(kb, folder: Path, report=print, **config) -> IndexRefresher:
    return IndexRefresher(kb, folder, RefreshConfig(**{"every": 10, **config}), "fp32", report)


def expected(kb, model) -> np.ndarray:
    return embed_passages(model, kb.tokens, np.arange(len(kb)))


def rows(version) -> np.ndarray:
    return version.index.rows(np.arange(len(version.index))).numpy()


def move(model) -> None:
    with torch.no_grad():
        for parameter in model.embedder.passage.projection.parameters():
            parameter.mul_(-1)


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def wait_until_ended(builds: IndexRefresher) -> None:
    """Looks at the child without taking its exit code away."""
    assert builds._builder._child is not None
    os.waitid(os.P_PID, builds._builder._child.pid, os.WEXITED | os.WNOWAIT)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()  # an orphan may wait for its reaper
    except (ProcessLookupError, FileNotFoundError):
        return False


def build_here(kb, model, run_folder: Path, step: int) -> None:
    """Does the work of a build whose process is a fake."""
    publish(kb, replace(model, step=step), "snapshot", run_folder / "index")
