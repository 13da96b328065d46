"""A full disk at any place of a run is one line, and loses nothing earlier."""

import itertools
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from realm.errors import RealmError
from realm.model.folder import load_model
from tests.damages import full_disk_at
from tests.train.toy import assert_same_result, at, checkpoints, config, train


def limited_to(size: int):
    """No file may grow beyond this; Python gets EFBIG, as it would get ENOSPC from a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_checkpoint_that_does_not_fit_is_one_line_and_loses_nothing_earlier(
    tiny_model_folder, tmp_path, plain
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(run) -> None:
        size = (run.folder / "checkpoint-00000003.pt").stat().st_size
        limited_to(size // 2)

    try:
        with pytest.raises(
            RealmError, match=r"checkpoint-00000006\.pt cannot be written: File too large"
        ) as error:
            train(
                load_model(tiny_model_folder), out, settings, before_update=lambda r: r.step == 4 and fill(r)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value) and "checkpoint-00000003.pt stays" in str(error.value)
    assert checkpoints(out) == ["checkpoint-00000003.pt"]
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def test_model_that_does_not_fit_is_one_line_and_the_run_stays(tiny_model_folder, tmp_path, plain) -> None:
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(RealmError, match="out cannot be written: ") as error:
            train(
                load_model(tiny_model_folder), out, config(), after_update=at(12, lambda: limited_to(20_000))
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.training"]
    train(load_model(tiny_model_folder), out, config())
    assert_same_result(out, plain)


def test_metrics_that_do_not_fit_are_one_line_and_lose_nothing_earlier(
    tiny_model_folder, tmp_path, plain
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(run) -> None:
        limited_to((run.folder / "metrics.jsonl").stat().st_size + 5)

    try:
        with pytest.raises(RealmError, match=r"metrics\.jsonl cannot be written: File too large") as error:
            train(
                load_model(tiny_model_folder), out, settings, before_update=lambda r: r.step == 4 and fill(r)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value) and "checkpoint-00000003.pt stays" in str(error.value)
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


@pytest.mark.slow
def test_a_full_disk_at_any_step_of_a_run_is_one_line_and_the_run_goes_on(
    tiny_model_folder, tmp_path, plain, monkeypatch
) -> None:
    settings = config(checkpoint_seconds=0.0)
    for number in itertools.count():
        out, model = tmp_path / f"out{number}", load_model(tiny_model_folder)
        try:
            with full_disk_at(number, monkeypatch) as steps:
                train(model, out, settings)
        except (RealmError, OSError) as error:  # the command line makes one line of both
            said = str(error)
        else:
            break
        assert "No space left on device" in said and "\n" not in said, steps
        assert not out.exists(), steps
        train(load_model(tiny_model_folder), out, settings)
        assert_same_result(out, plain)
        shutil.rmtree(out)
        assert not list(tmp_path.iterdir()), steps
    assert number > 40


@pytest.mark.slow
def test_full_disk_is_one_line_of_the_command_and_the_run_goes_on_when_there_is_room(
    tiny_kb, tiny_model_folder, tmp_path
) -> None:
    """A real small file system, where the system lets an ordinary user mount one."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this system mounts nothing for an ordinary user")
    sets = "steps=30 batch_size=4 log_every=1 checkpoint_seconds=0 device=cpu refresh.every=10".split()
    command = (
        f"{sys.executable} -m realm pretrain --kb {tiny_kb.folder} --model {tiny_model_folder} --config tiny"
    )
    command += "".join(f" --set {one}" for one in sets) + f" --out {tmp_path}/disk/out"
    (tmp_path / "disk").mkdir()
    script = f"""
        cd {tmp_path}; mount -t tmpfs -o size=30m none disk || exit 99
        (until ls disk/out.training/checkpoint-*.pt; do sleep 0.05; done; dd if=/dev/zero of=disk/filler) 2> /dev/null &
        {command}; echo "first $?" >&2; ls disk/out.training >&2; kill %1; rm -f disk/filler
        {command}; echo "second $?" >&2; ls disk >&2
    """
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    said = ran.stderr
    assert "first 2" in said and "second 0" in said, said
    assert "No space left on device" in said and "Traceback" not in said
    assert len([line for line in said.splitlines() if line.startswith("realm:")]) == 1
    assert "checkpoint-" in said.split("first 2")[1].split("second 0")[0]
    assert said.split("second 0")[1].split() == ["out"]
