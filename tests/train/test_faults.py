"""kill -9 of trainer and build at random moments: every rerun goes on, and the curve is that of a run nobody touched.

More of it: `python -m pytest -m slow tests/train/test_faults.py --kills 100 --kills-seed 7 -s`.

Real processes of the real command line, forked from one that has imported torch. With `lag`, the run with background
builds repeats exactly too, so both are compared bit for bit.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from realm.model.folder import load_model
from realm.retrieval import vectors
from tests.train.stages import assert_same_result, children_of, pretraining

SMALL = (
    "steps=12 batch_size=4 log_every=2 checkpoint_seconds=0 device=cpu precision=fp32 refresh.every=4 refresh.lag=2 "
    "refresh.restarts=1000 refresh.backoff=0.05 health.queries=8 health.read=4"
).split()


def command(argv: list[str], log: Path) -> None:
    """What a forked process does: a command of ours, with its output in a file."""
    from realm.cli import main

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    sys.exit(main(argv))


@pytest.fixture
def start(tiny_kb, tiny_model_folder, tmp_path, monkeypatch):
    """Starts the run `name`; the same name goes on with it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["realm.cli", "realm.train.pretrain", "realm.retrieval.refresh"])

    def begin(name: str, background: bool):
        settings = [*SMALL, f"refresh.in_background={json.dumps(background)}"]
        argv = pretraining(tiny_kb, tiny_model_folder, settings)
        process = forks.Process(
            target=command, args=([*argv, "--out", str(tmp_path / name)], tmp_path / f"{name}.log")
        )
        process.start()
        return process

    return begin


def assert_nothing_is_corrupt(out: Path, kb) -> None:
    """Whatever is on disk under its final name can be read, whole."""
    if out.exists():
        load_model(out)
    folder = out.with_name(out.name + ".training")
    for file in folder.glob("checkpoint-*.pt"):
        with suppress(FileNotFoundError):
            place = torch.load(file, weights_only=True)["state"]["index"]
            found = vectors.read(folder / "index", kb.keys_N, place["version"])
            assert found is not None and len(found.missing) == 0
    if (folder / "index").exists() and vectors.newest(folder / "index") is not None:
        assert vectors.read(folder / "index", kb.keys_N) is not None
    if (folder / "settings.json").exists():
        json.loads((folder / "settings.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_killed_at_any_moment_a_run_goes_on_and_its_curve_is_the_same(
    start, tiny_kb, tmp_path, pytestconfig, background
) -> None:
    wanted, draw = pytestconfig.getoption("--kills"), random.Random(pytestconfig.getoption("--kills-seed"))
    for name in ("plain", "again"):  # the first one waits for torch to be imported
        began = time.monotonic()
        process = start(name, background)
        process.join()
        usual = time.monotonic() - began
        assert process.exitcode == 0, (tmp_path / f"{name}.log").read_text()
    assert_same_result(tmp_path / "again", tmp_path / "plain")
    killed: Counter[str] = Counter()
    runs = 0
    while killed.total() < wanted:
        name = f"run{runs}"
        out, log, runs = tmp_path / name, tmp_path / f"{name}.log", runs + 1
        while True:
            process = start(name, background)
            while process.is_alive():
                process.join(draw.uniform(0, usual))
                if not process.is_alive() or killed.total() >= wanted:
                    continue
                builds = children_of(process.pid)  # index builds
                victim = draw.choice([process.pid, *builds])
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed["trainer" if victim == process.pid else "build"] += 1
                if victim == process.pid:
                    process.join()
                    end = time.monotonic() + 10  # a build ends with its trainer
                    while any(Path(f"/proc/{build}").exists() for build in builds):
                        assert time.monotonic() < end, "a build outlived its trainer"
                        time.sleep(0.01)
                    assert_nothing_is_corrupt(out, tiny_kb)
            assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
            if process.exitcode == 0:
                break
        assert "Traceback" not in log.read_text()
        assert_same_result(out, tmp_path / "plain")
        assert sorted(p.name for p in tmp_path.glob("run*")) == sorted(
            f"run{n}{end}" for n in range(runs) for end in ("", ".log")
        )
    print(
        f"\n{dict(killed)} killed in {runs} runs, {time.monotonic() - began:.0f} s: every curve is the same"
    )
