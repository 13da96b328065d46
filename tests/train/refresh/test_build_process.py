"""Builds of a training run: noticed when they die, fall silent or are late, started again, and gone when the run is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from realm.errors import RealmError
from realm.store import vectors
from realm.store.tables import table
from realm.train.refresh import build_process
from realm.train.refresh.build_process import BuildConfig, Builder
from realm.train.refresh.refresher import IndexRefresher
from tests.train.refresh.refreshing import (
    PYTHON,
    alive,
    build_here,
    expected,
    move,
    refresher,
    rows,
    wait_for,
    wait_until_ended,
)


@pytest.fixture
def no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_process, "RESTARTS", 0)


@pytest.mark.usefixtures("no_restarts")
def test_dead_build_is_one_line_that_names_its_log(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    fake_build("echo out of memory >&2; exit 3")
    with refresher(tiny_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 10)

        wait_until_ended(builds)
        with pytest.raises(RealmError, match="step 10 failed with exit code 3") as error:
            builds.poll(10)
        assert "\n" not in str(error.value) and str(run_folder / "index.log") in str(error.value)
        assert "out of memory" in (run_folder / "index.log").read_text()
        kept = vectors.read(run_folder / "index", tiny_kb.keys_N)
        assert kept is not None and kept.version == 1


def counted(tmp_path: Path) -> int:
    return len((tmp_path / "tries").read_text().splitlines()) if (tmp_path / "tries").exists() else 0


def until_it_gives_up(builds: IndexRefresher) -> str:
    end = time.monotonic() + 60
    while True:
        try:
            assert builds.poll(10) is None and time.monotonic() < end
        except RealmError as error:
            return str(error)
        time.sleep(0.01)


def test_failed_build_is_started_again_and_then_ends_the_run(
    tiny_kb, tiny_model, run_folder, fake_build, tmp_path
) -> None:
    fake_build(f"echo >> {tmp_path}/tries; exit 7")
    reported: list[str] = []
    with refresher(tiny_kb, run_folder, report=reported.append) as builds:
        builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 10)
        error = until_it_gives_up(builds)
    assert (
        "the build failed 4 times" in error
        and "step 10 failed with exit code 7" in error
        and "index.log" in error
    )
    assert counted(tmp_path) == 4 and len(reported) == 3
    assert all(str(run_folder / "index.log") in text for text in reported)


@pytest.mark.parametrize(
    ("script", "limit", "how"),
    [
        ("sleep 60", ("SILENCE", 0.3), "printed nothing for 0.3 s"),
        ("while true; do echo slow; sleep 0.05; done", ("DEADLINE", 0.5), "took longer than 0.5 s"),
    ],
    ids=["stuck", "slow"],
)
@pytest.mark.usefixtures("no_restarts")
def test_stuck_and_slow_builds_are_killed_and_named_with_their_log(
    tiny_kb, tiny_model, run_folder, fake_build, script, limit, how, monkeypatch
) -> None:
    fake_build(script)
    monkeypatch.setattr(build_process, *limit)
    with refresher(tiny_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 10)
        pid = builds._builder._child.pid
        error = until_it_gives_up(builds)
        assert how in error and str(run_folder / "index.log") in error and not alive(pid)


@pytest.mark.usefixtures("no_restarts")
def test_build_killed_after_its_commit_counts(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    """Nothing more is wanted of it than its version."""
    fake_build("sleep 60")
    with refresher(tiny_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 10)
        build_here(tiny_kb, tiny_model, run_folder, step=10)
        os.kill(builds._builder._child.pid, signal.SIGKILL)
        wait_until_ended(builds)
        version = builds.poll(10)
        assert version is not None and (version.step, version.number) == (10, 2)


@pytest.mark.usefixtures("no_restarts")
def test_build_that_ends_well_without_its_version_has_failed(
    tiny_kb, tiny_model, run_folder, fake_build
) -> None:
    """As on another machine that does not share the folders."""
    fake_build("exit 0")
    with refresher(tiny_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 10)
        error = until_it_gives_up(builds)
    assert "step 10 ended without an error, but did not write its version" in error and "index.log" in error


def test_build_runs_realm_index_on_the_snapshot_with_the_runs_settings(
    tiny_kb, tmp_path, fake_build, monkeypatch
) -> None:
    fake_build(f'printf "%s\\n" "$@" > {tmp_path}/asked; mv {tmp_path}/asked {tmp_path}/words; exec sleep 60')
    monkeypatch.chdir(tmp_path)
    folder = Path("a run's folder")
    folder.mkdir()
    with Builder(tiny_kb.folder, folder, BuildConfig(threads=3, device="meta"), "fp32", print) as builder:
        builder.begin(10, 0, "cpu")
        wait_for((tmp_path / "words").exists)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:5] == ["-m", "realm", "index", "--supervised", str(tmp_path / folder / "index")]
    assert words[words.index("--model") + 1] == str(tmp_path / folder / "snapshot")
    assert {"threads=3", "device=meta"} <= set(words)


def test_build_without_a_trainer_ends_before_it_does_anything() -> None:
    """Not after the seconds that torch takes to be imported: the next run may have begun by then."""
    command = [
        sys.executable,
        "-m",
        "realm",
        "index",
        "--supervised",
        "here",
        "--kb",
        "none",
        "--model",
        "none",
    ]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr == "the parent process has ended\n"


class PowerCut(BaseException):
    """Nobody catches it."""


def test_half_written_version_is_never_loaded(tiny_kb, tiny_model, run_folder, monkeypatch) -> None:
    """Files are written, the commit is not: the old version is the newest, and the files go when the run goes on."""

    def cut(*_: object) -> None:
        raise PowerCut

    files = run_folder / "index" / "vectors.lance" / "data"
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        first = builds.build_initial(tiny_model, 0)
        start, place = rows(first).copy(), builds.state_dict(first)
        move(tiny_model)
        with monkeypatch.context() as patch:
            patch.setattr(vectors, "commit", cut)
            patch.setattr(table, "remove_uncommitted", lambda *_: None)  # nothing runs after a power cut
            with pytest.raises(PowerCut):
                builds.request(tiny_model, 10)
    assert len(list(files.iterdir())) == 2
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        again = builds.build_initial(tiny_model, 9, place)
        assert (again.number, again.step) == (1, 0) and (rows(again) == start).all()
        assert len(list(files.iterdir())) == 1
        builds.request(tiny_model, 10)
        second = builds.poll(10)
        assert second is not None and second.number == 2
        np.testing.assert_allclose(rows(second), expected(tiny_kb, tiny_model), atol=4e-3)


@pytest.mark.slow
def test_build_killed_before_its_commit_leaves_nothing_to_load(
    tiny_kb, tiny_model, run_folder, fake_build, tmp_path
) -> None:
    """A build that dies between its files and its commit leaves the old version the newest; the next try is whole."""
    code = (
        "import os, signal, sys; from realm.cli import main; "
        "from realm.store import vectors; "
        f"first = not os.path.exists('{tmp_path}/died'); open('{tmp_path}/died', 'a'); "
        "vectors.commit = (lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if first else vectors.commit; "
        "sys.exit(main(sys.argv[1:]))"
    )
    fake_build(f'shift 2; exec {PYTHON} -c "{code}" "$@"')
    reported: list[str] = []
    with refresher(tiny_kb, run_folder, report=reported.append) as builds:
        builds.build_initial(tiny_model, 0)
        move(tiny_model)
        builds.request(tiny_model, 10)
        files = run_folder / "index" / "vectors.lance" / "data"
        before = len(list(files.iterdir()))
        found: list = []

        def nothing_torn() -> bool:
            found.append(builds.poll(10))
            kept = vectors.read(run_folder / "index", tiny_kb.keys_N)
            assert kept is not None and kept.info.step == (10 if kept.version == 2 else 0)
            if reported and found[-1] is None and kept.version == 1:
                assert len(list(files.iterdir())) > before  # it had written all, and committed nothing
            return found[-1] is not None

        wait_for(nothing_torn)
        assert "failed with signal SIGKILL" in reported[0]
        np.testing.assert_allclose(rows(found[-1]), expected(tiny_kb, tiny_model), atol=4e-3)


def test_leaving_the_block_kills_the_build(tiny_kb, tiny_model, run_folder, fake_build, tmp_path) -> None:
    """And whatever it started: embedding may have helpers of its own."""
    fake_build(
        f"sleep 60 & echo $! > {tmp_path}/helper.writing; mv {tmp_path}/helper.writing {tmp_path}/helper; wait"
    )
    with refresher(tiny_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 10)
        wait_for((tmp_path / "helper").exists)
        assert builds._builder._child is not None
        pid, helper = builds._builder._child.pid, int((tmp_path / "helper").read_text())
        assert alive(pid) and alive(helper)
    wait_for(lambda: not alive(pid))
    wait_for(lambda: not alive(helper))


def test_leaving_the_block_after_a_build_ended_unseen_is_quiet(
    tiny_kb, tiny_model, run_folder, fake_build, capfd
) -> None:
    fake_build("exit 0")
    with refresher(tiny_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 10)
        wait_until_ended(builds)
        capfd.readouterr()
    assert capfd.readouterr() == ("", "")
