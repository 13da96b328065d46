"""Stages that run once, go on after an interruption, and are run again where what they measure is newer; memory."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest

from realm.errors import DamagedError
from realm.stages.memory import PeakMemory, together_mb
from realm.stages.runner import Record, Section, Stage, run_stages

SECTION = Section("1. A section", "What and why.")


def stage_that_makes(file: Path, **more: Any) -> Stage:
    return Stage(SECTION, file.name, ("make", str(file)), file, **more)


def test_an_interrupted_stage_is_run_again_and_its_seconds_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    # the stage's clock alone: an event loop in another thread that saw time go back would sleep for ever
    monkeypatch.setattr("realm.stages.runner.time", SimpleNamespace(monotonic=lambda: now))
    stages = [stage_that_makes(tmp_path / "first"), stage_that_makes(tmp_path / "second")]
    stopped = False

    def run(argv: Sequence[str]) -> None:
        nonlocal now, stopped
        now += 10
        if argv[1].endswith("second") and not stopped:
            stopped = True
            raise KeyboardInterrupt
        Path(argv[1]).touch()

    with pytest.raises(KeyboardInterrupt):
        run_stages(stages, Record(tmp_path / "stages.json", PeakMemory()), run)
    capsys.readouterr()
    record = Record(tmp_path / "stages.json", PeakMemory())
    run_stages(stages, record, run)
    assert record.seconds() == {"first": 10, "second": 20, "total": 30}
    printed = capsys.readouterr().out
    assert f"skipped: {tmp_path / 'first'} exists" in printed
    assert f"$ realm make {tmp_path / 'second'}\n(20.0 s)" in printed


def test_a_measurement_is_due_again_when_what_it_measures_is_newer(tmp_path: Path) -> None:
    model, outcome = tmp_path / "realm.json", tmp_path / "outcome.json"
    stage = stage_that_makes(outcome, measures=(model,))
    model.touch()
    assert not stage.is_done()
    outcome.touch()
    assert stage.is_done()
    os.utime(outcome, (1, 1))
    assert not stage.is_done()


def test_a_stage_that_lacks_one_of_its_files_is_run_again(tmp_path: Path) -> None:
    stage = stage_that_makes(tmp_path / "report", also_makes=tmp_path / "predictions")
    (tmp_path / "report").touch()
    assert not stage.is_done()
    (tmp_path / "predictions").touch()
    assert stage.is_done()


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"stages": {"a": 1}, "peak_memory_mb": 1}', '{"stages": {"a": {}}}']
)
def test_a_damaged_record_of_stages_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text(content)
    with pytest.raises(DamagedError, match=r"stages\.json is damaged"):
        Record(tmp_path / "stages.json", PeakMemory())


def test_a_report_that_the_table_replaces_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: Sequence[str]) -> None:
        print("em 3")

    quiet = [stage_that_makes(tmp_path / "a", quiet=True), stage_that_makes(tmp_path / "b")]
    run_stages(quiet, Record(tmp_path / "stages.json", PeakMemory()), run)
    assert capsys.readouterr().out.count("em 3") == 1


def test_a_stage_that_runs_once_is_run_again_only_after_one_before_it(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(argv: Sequence[str]) -> None:
        ran.append(argv[1])

    def ran_stages(*names: str, forget: bool = False) -> list[str]:
        ran.clear()
        record = Record(tmp_path / "stages.json", PeakMemory())
        if forget:
            record.forget()
        run_stages([Stage(SECTION, name, ("make", name), once=True) for name in names], record, run)
        return list(ran)

    assert ran_stages("first", "third") == ["first", "third"]
    assert ran_stages("first", "third") == []
    assert ran_stages("first", "second", "third") == [
        "second",
        "third",
    ]  # the third is about what the second changed
    assert ran_stages("first", "second", "third", forget=True) == ["first", "second", "third"]


def test_a_report_that_a_later_stage_writes_anew_is_copied(tmp_path: Path) -> None:
    report, copy = tmp_path / "report.json", tmp_path / "reports" / "first.json"
    record = Record(tmp_path / "stages.json", PeakMemory())
    stages = [
        Stage(SECTION, "first", ("1",), copy, once=True, keeps=report),
        Stage(SECTION, "second", ("2",), once=True),
    ]
    run_stages(stages, record, lambda argv: report.write_text(argv[0]) and None)
    assert (copy.read_text().strip(), report.read_text()) == ("1", "2")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
def test_memory_of_children_counts_too() -> None:
    """Measured for a parent that shares little with the other processes of a test run, which start and end meanwhile."""
    code = "print('small', flush=True); input(); held = bytearray(b'x') * 100_000_000; print('large', flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=PIPE, stdout=PIPE, text=True) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        assert started.stdout.readline() == "small\n"
        before = together_mb(started.pid)
        started.stdin.write("\n")
        started.stdin.flush()
        assert started.stdout.readline() == "large\n"
        assert 95 < together_mb(started.pid) - before < 105
        started.communicate("\n")
