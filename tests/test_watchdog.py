"""A child process: noticed when it dies, falls silent or is late, and gone when we are."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from realm.watchdog import Child
from tests.train.refresh.refreshing import alive


@pytest.fixture
def start(tmp_path: Path):
    """Runs a shell script as a child with its log in `tmp_path`."""

    def begin(script: str, deadline: float = 60, silence: float = 60) -> Child:
        return Child(["sh", "-c", script], tmp_path / "log", deadline, silence)

    return begin


def ended(child: Child, seconds: float = 30) -> str:
    end = time.monotonic() + seconds
    while child.poll():
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.01)
    return child.failure


def test_child_that_ends_well_has_no_failure_and_its_output_in_the_log(start, tmp_path) -> None:
    (tmp_path / "log").write_text("before\n")
    with start("echo out; echo error >&2") as child:
        assert ended(child) == "" and not child.poll()
    assert (tmp_path / "log").read_text() == "before\nout\nerror\n"


def test_child_of_a_rank_is_no_rank(start, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "realm")
    with start("echo run $TORCHELASTIC_RUN_ID") as child:
        assert ended(child) == ""
    assert (tmp_path / "log").read_text() == "run\n"


def test_dead_child_is_named_by_its_exit_code_or_signal(start) -> None:
    with start("exit 3") as child:
        assert ended(child) == "failed with exit code 3"
    with start("kill -9 $$") as child:
        assert ended(child) == "failed with signal SIGKILL"


def test_child_without_a_sign_of_life_is_killed(start) -> None:
    with start("sleep 60", silence=0.3) as child:
        assert ended(child) == "printed nothing for 0.3 s"
        assert not alive(child.pid) and child.seconds < 30


def test_child_that_goes_on_talking_is_left_alone(start) -> None:
    with start("for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.1; done", silence=0.5) as child:
        assert ended(child) == "" and child.seconds > 0.9


def test_child_that_is_late_is_killed_however_much_it_talks(start) -> None:
    with start("while true; do echo here; sleep 0.05; done", deadline=0.4) as child:
        assert ended(child) == "took longer than 0.4 s"


def test_stopped_child_takes_what_it_started_with_it(start, tmp_path) -> None:
    with start(f"sleep 60 & echo $! > {tmp_path}/helper; wait") as child:
        while not (tmp_path / "helper").exists() or not (tmp_path / "helper").read_text():
            assert child.poll()
            time.sleep(0.01)
        helper = int((tmp_path / "helper").read_text())
        assert alive(helper)
    assert not alive(child.pid)
    end = time.monotonic() + 10
    while alive(helper):
        assert time.monotonic() < end


PARENT = """
import sys, time
from pathlib import Path
from realm.watchdog import Child
child = Child([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), 60, 60)
print(child.pid, flush=True)
time.sleep(60)
"""
LOYAL = """
import time
from realm.watchdog import end_with_parent
end_with_parent()
print("up", flush=True)
time.sleep(60)
"""


def test_child_dies_with_a_parent_that_was_killed(tmp_path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, LOYAL, str(log)], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    end = time.monotonic() + 30
    while "up" not in log.read_text():
        assert time.monotonic() < end and alive(child)
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    while alive(child):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "the parent process has ended" in log.read_text()
