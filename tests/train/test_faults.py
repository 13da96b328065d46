"""kill -9 of every training command, and of its builds, at random moments: every rerun goes on, and model and curve are those
of a run nobody touched, bit for bit.

More of it: `python -m pytest -m slow tests/train/test_faults.py --trials 100 --trials-seed 7 -s`.

Real processes of the real command line, forked from one that has imported torch. With `lag`, the run with background
builds repeats exactly too, so both are compared bit for bit.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from realm.model.folder import load_model
from realm.store import vectors
from tests.train.stages import assert_same_result, children_of
from tests.train.test_finetune import DEV, TRAIN

SMALL = "steps=12 batch_size=4 log_every=2 checkpoint_seconds=0 device=cpu precision=fp32".split()
BUILDS = "refresh.every=4 refresh.lag=2".split()
FOREGROUND, BACKGROUND = ("refresh.in_background=false",), (*BUILDS, "refresh.in_background=true")
JUDGED = ("health.queries=8", "health.read=4")
COMMANDS = {
    "mlm": ("mlm", "--init", []),
    "ict": ("ict", "--init", []),
    "pretrain, builds in the foreground": ("pretrain", "--model", [*BUILDS, *JUDGED, *FOREGROUND]),
    "pretrain, builds in the background": ("pretrain", "--model", [*JUDGED, *BACKGROUND]),
    "adapt": ("adapt", "--model", ["rounds=3", "sentences=20"]),
    "finetune": ("finetune", "--model", ["dev_every=5"]),
    "finetune, passages move": ("finetune", "--model", ["dev_every=5", "update_passages=true", *BACKGROUND]),
}
"""What is killed: the verb, how it names its start, and its settings."""


def command(argv: list[str], log: Path) -> None:
    """What a forked process does: a command of ours, with its output in a file."""
    from realm.cli import main
    from realm.train.refresh import build_process

    build_process.RESTARTS = 1000
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    sys.exit(main(argv))


@pytest.fixture
def start(own_kb, tiny_model_folder, tmp_path, monkeypatch):
    """Starts the run `name` of a command; the same name goes on with it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(
        ["realm.cli", "realm.train.pretrain", "realm.train.finetune", "realm.train.mlm"]
    )
    files = []
    for flag, questions in (("--train", TRAIN), ("--dev", DEV)):
        file = tmp_path / f"{flag[2:]}.jsonl"
        file.write_text("".join(json.dumps(question._asdict()) + "\n" for question in questions))
        files += [flag, str(file)]

    def begin(what: str, name: str):
        verb, flag, settings = COMMANDS[what]
        argv = [verb, "--kb", str(own_kb.folder), flag, str(tiny_model_folder), "--config", "tiny"]
        argv += [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
        argv += [*(files if verb == "finetune" else []), "--out", str(tmp_path / name)]
        process = forks.Process(target=command, args=(argv, tmp_path / f"{name}.log"))
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
            state = torch.load(file, weights_only=True)["state"]
            if "index" in state:
                found = vectors.read(folder / "index", kb.keys_N, state["index"]["version"])
                assert found is not None and len(found.missing) == 0
    for index in (folder / "index", *vectors.folders(kb.folder)):
        if index.exists() and vectors.newest(index) is not None:
            assert vectors.read(index, kb.keys_N) is not None
    if (folder / "settings.json").exists():
        json.loads((folder / "settings.json").read_text())


def is_complete(out: Path) -> bool:
    return out.exists() and not out.with_name(out.name + ".training").exists()


def take_index(kb, out: Path) -> bytes:
    """The vectors that a model finds in the knowledge base, which go, so that the next run has to publish them itself."""
    folder = vectors.folder_of(kb.folder, load_model(out).compute_passage_fingerprint())
    found = vectors.read(folder, kb.keys_N)
    assert found is not None and len(found.missing) == 0
    shutil.rmtree(folder)
    return found.array.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("what", COMMANDS)
def test_killed_at_any_moment_a_run_goes_on_and_its_model_and_curve_are_the_same(
    start, own_kb, tmp_path, trials, what
) -> None:
    wanted, draw = trials.count(20), random.Random(trials.seed)
    for name in ("plain", "again"):  # the first one waits for torch to be imported
        began = time.monotonic()
        process = start(what, name)
        process.join()
        usual = time.monotonic() - began
        assert process.exitcode == 0, (tmp_path / f"{name}.log").read_text()
    assert_same_result(tmp_path / "again", tmp_path / "plain")
    publishes = COMMANDS[what][0] == "pretrain"
    index = take_index(own_kb, tmp_path / "plain") if publishes else b""
    killed: Counter[str] = Counter()
    runs = 0
    while killed.total() < wanted:
        name = f"run{runs}"
        out, log, runs = tmp_path / name, tmp_path / f"{name}.log", runs + 1
        while True:
            process = start(what, name)
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
                    assert_nothing_is_corrupt(out, own_kb)
            assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
            if process.exitcode == 0 or is_complete(out):
                break
        assert "Traceback" not in log.read_text()
        # After a kill between the commit of an index and the next checkpoint, the index is built again, as a later version.
        assert_same_result(out, tmp_path / "plain", ignored=frozenset({"index_number"}))
        assert not publishes or take_index(own_kb, out) == index
        assert sorted(p.name for p in tmp_path.glob("run*")) == sorted(
            f"run{n}{end}" for n in range(runs) for end in ("", ".log")
        )
    print(
        f"\n{what}: {dict(killed)} killed in {runs} runs, {time.monotonic() - began:.0f} s: every curve is the same"
    )
