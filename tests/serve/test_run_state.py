"""Whether a run is training, stopped or finished, as the page of training runs says."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from realm.serve.runs import runs
from realm.train.loop import TrainRun
from realm.train.run_config import RunConfig

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
CONFIG = RunConfig(steps=2, device="cpu", precision="fp32", log_every=1)


def states(folder: Path) -> dict[str, str]:
    return {run.name: run.state for run in runs(folder)}


def train(model, out: Path, after_step=lambda: None) -> None:
    part = model.embedder.query
    with TrainRun("toy", out, CONFIG, model, {part: 0.1}) as run:
        for _ in run.steps():
            run.update(part.projection(torch.ones(1, 32)).sum(), {})
            after_step()
        run.finish()


def test_a_run_is_training_while_its_process_lives_stopped_afterwards_and_finished_at_its_end(
    tiny_model, tmp_path
) -> None:
    def look_and_crash() -> None:
        assert states(tmp_path) == {"model": "training"}
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(tiny_model, tmp_path / "model", look_and_crash)
    assert states(tmp_path) == {"model": "stopped"}
    train(tiny_model, tmp_path / "model")
    assert states(tmp_path) == {"model": "finished"}


def test_a_killed_run_is_stopped(tmp_path) -> None:
    (tmp_path / "model.training").mkdir()
    (tmp_path / "model.training" / "metrics.jsonl").write_text('{"step": 1}\n')
    command = [sys.executable, "-c", HOLD, str(tmp_path / "model.training" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        assert states(tmp_path) == {"model": "training"}
        process.kill()
        process.wait()
    assert states(tmp_path) == {"model": "stopped"}


@pytest.mark.parametrize("lock", ["none", "link", "folder"])
def test_a_lock_that_is_no_file_is_held_by_nobody(tmp_path, lock: str) -> None:
    folder = tmp_path / "model.training"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    if lock == "link":
        (folder / "lock").symlink_to("/dev/zero")
    elif lock == "folder":
        (folder / "lock").mkdir()
    assert states(tmp_path) == {"model": "stopped"}
