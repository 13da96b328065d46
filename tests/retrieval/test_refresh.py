"""Index refreshes: on time, of the right weights, noticed when they die, and gone when the run is."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.config import InputError
from realm.retrieval import refresh, vectors
from realm.retrieval.embedding import embed_passages
from realm.retrieval.refresh import IndexRefresher, RefreshConfig


@pytest.fixture
def fake_build(tmp_path: Path, monkeypatch):
    """Puts a shell script in the place of the Python that a build runs in."""

    def install(script: str) -> None:
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(refresh.sys, "executable", str(file))

    return install


def refresher(kb, folder: Path, **config) -> IndexRefresher:
    return IndexRefresher(kb, folder, RefreshConfig(**{"every": 10, **config}), "fp32")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model.training"
    folder.mkdir()
    return folder


def expected(kb, model) -> np.ndarray:
    return embed_passages(
        model.embedder.passage, kb.tokens, np.arange(len(kb)), model.tokenizer, model.lengths, model.device
    )


def rows(version) -> np.ndarray:
    return version.index.rows(np.arange(len(version.index))).numpy()


def move(model) -> None:
    with torch.no_grad():
        for parameter in model.embedder.passage.projection.parameters():
            parameter.mul_(-1)


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def wait_until_ended(builds: IndexRefresher) -> None:
    """Looks at the child without taking its exit code away."""
    assert builds._build is not None
    os.waitid(os.P_PID, builds._build.pid, os.WEXITED | os.WNOWAIT)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()  # an orphan may wait for its reaper
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_refresh_in_the_foreground_comes_every_so_many_steps(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        first = builds.first(tiny_model, 0)
        assert first.step == 0
        np.testing.assert_allclose(rows(first), expected(tiny_kb, tiny_model), atol=4e-3)
        move(tiny_model)
        for step in range(1, 10):
            builds.request(tiny_model, step)
            assert builds.poll() is None
        builds.request(tiny_model, 10)
        second = builds.poll()
        assert second is not None and second.step == 10 and second.number > first.number
        np.testing.assert_allclose(rows(second), expected(tiny_kb, tiny_model), atol=4e-3)
        assert builds.poll() is None


def test_refresh_never_comes_with_every_0(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, every=0, in_background=False) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 1000)
        assert builds.poll() is None


def test_build_in_the_background_swaps_in_the_index_of_its_snapshot(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
        move(tiny_model)
        snapshot = expected(tiny_kb, tiny_model)
        builds.request(tiny_model, 10)
        move(tiny_model)  # back to the start: training goes on
        found: list = []
        wait_for(lambda: found.append(builds.poll()) or found[-1] is not None)
        version = found[-1]
        assert version.step == 10 and version.number == 2
        np.testing.assert_allclose(rows(version), snapshot, atol=4e-3)
        assert builds.poll() is None
    assert not (run_folder / "snapshot").exists()


def test_one_build_at_a_time(tiny_kb, tiny_model, run_folder, fake_build, tmp_path) -> None:
    fake_build(f"echo started >> {tmp_path}/starts; sleep 60")
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
        for step in (10, 20, 30):
            builds.request(tiny_model, step)
            assert builds.poll() is None
        wait_for((tmp_path / "starts").exists)
        assert (tmp_path / "starts").read_text() == "started\n"


def test_dead_build_is_one_line_that_names_its_log(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    fake_build("echo out of memory >&2; exit 3")
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)

        wait_until_ended(builds)
        with pytest.raises(InputError, match="step 10 failed with exit code 3") as error:
            builds.poll()
        assert "\n" not in str(error.value) and str(run_folder / "index.log") in str(error.value)
        assert "out of memory" in (run_folder / "index.log").read_text()
        kept = vectors.read(run_folder / "index", tiny_kb.keys_N)
        assert kept is not None and kept.version == 1


def test_leaving_the_block_kills_the_build(tiny_kb, tiny_model, run_folder, fake_build, tmp_path) -> None:
    """And whatever it started: embedding may have helpers of its own."""
    fake_build(
        f"sleep 60 & echo $! > {tmp_path}/helper.writing; mv {tmp_path}/helper.writing {tmp_path}/helper; wait"
    )
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        wait_for((tmp_path / "helper").exists)
        assert builds._build is not None
        pid, helper = builds._build.pid, int((tmp_path / "helper").read_text())
        assert alive(pid) and alive(helper)
    wait_for(lambda: not alive(pid))
    wait_for(lambda: not alive(helper))
    assert not (run_folder / "snapshot").exists()


def test_leaving_the_block_after_a_build_ended_unseen_is_quiet(
    tiny_kb, tiny_model, run_folder, fake_build
) -> None:
    fake_build("exit 0")
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        wait_until_ended(builds)
