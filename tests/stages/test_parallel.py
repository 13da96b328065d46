"""Stages in several processes: their order, failures, interruptions and kills, and the same results as one after another."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from realm import cli
from realm.errors import RealmError
from realm.files import read_json
from realm.stages import parallel
from realm.stages.memory import PeakMemory
from realm.stages.parallel import Chain, environments, run_chains
from realm.stages.runner import Record, Section, Stage
from realm.store.knowledge_base import KnowledgeBase
from tests.train.refresh.refreshing import alive

SECTION = Section("1. A section", "What and why.")

PROGRAM = """
import pathlib, signal, sys, time
made, waits_for, fails = sys.argv[1:]
def stopped(*_):
    pathlib.Path(made + ".stopped").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, stopped)
pathlib.Path(made + ".began").write_text(str(time.monotonic()))
end = time.monotonic() + 60
while waits_for and not pathlib.Path(waits_for).exists() and time.monotonic() < end:
    time.sleep(0.01)
if fails:
    print("realm: the disk is full", file=sys.stderr)
    sys.exit(2)
pathlib.Path(made).write_text(str(time.monotonic()))
"""
"""Takes the place of `realm`, so that a stage takes no time for imports."""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    monkeypatch.setattr(parallel, "_PROGRAM", PROGRAM)
    return Record(tmp_path / "stages.json", PeakMemory())


def stage(made: Path, waits_for: Path | str = "", fails: str = "") -> Stage:
    """A stage that makes a file, or fails, as soon as the file `waits_for` exists, or after a minute."""
    return Stage(SECTION, f"make {made.name}", (str(made), str(waits_for), fails), made)


def began(made: Path) -> Path:
    """A file that exists as soon as a stage has begun."""
    return made.with_name(f"{made.name}.began")


def times(made: Path) -> tuple[float, float]:
    """When a stage began and ended."""
    return float(began(made).read_text()), float(made.read_text())


def test_chains_run_at_the_same_time_and_after_what_they_need(tmp_path: Path, record: Record) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    made_by_then: list[bool] = []

    def lazy():
        yield stage(a, began(c))
        made_by_then.append(a.exists())
        yield stage(b)

    chains = [Chain("first", lazy()), Chain.of(stage(c, began(a))), Chain.of(stage(d), after=("first",))]
    run_chains(chains, record, tmp_path / "logs", 2)
    assert made_by_then == [True]
    assert max(times(a)[0], times(c)[0]) < min(times(a)[1], times(c)[1])  # a and c at the same time
    assert times(b)[0] >= times(a)[1]
    assert times(d)[0] >= times(b)[1]
    assert {f"make {name}" for name in "abcd"} < set(record.seconds())


def test_there_are_never_more_processes_than_jobs(tmp_path: Path, record: Record) -> None:
    made = [tmp_path / str(place) for place in range(5)]
    run_chains([Chain.of(stage(one)) for one in made], record, tmp_path / "logs", 2)
    spans = [times(one) for one in made]
    assert max(sum(begin <= at < end for begin, end in spans) for at, _ in spans) <= 2


def test_finished_stages_are_skipped(tmp_path: Path, record: Record, capsys) -> None:
    (tmp_path / "a").touch()
    run_chains([Chain("both", [stage(tmp_path / "a"), stage(tmp_path / "b")])], record, tmp_path / "logs", 2)
    assert not (tmp_path / "a.began").exists() and (tmp_path / "b.began").exists()
    assert f"skipped: {tmp_path / 'a'} exists" in capsys.readouterr().out


def test_a_failed_stage_stops_the_others_and_is_one_line(tmp_path: Path, record: Record) -> None:
    fails, other, later = tmp_path / "fails", tmp_path / "other", tmp_path / "later"
    chains = [
        Chain("bad", [stage(fails, began(other), "fails"), stage(later)]),
        Chain("good", [stage(other, tmp_path / "absent"), stage(tmp_path / "never")]),
    ]
    with pytest.raises(RealmError, match="the disk is full") as error:
        run_chains(chains, record, tmp_path / "logs", 2)
    assert str(tmp_path / "logs" / "make-fails.log") in str(error.value)
    assert (tmp_path / "other.stopped").exists()
    assert not later.exists() and not (tmp_path / "never.began").exists()
    done = {name: one["done"] for name, one in read_json(tmp_path / "stages.json")["stages"].items()}
    assert done == {"make fails": False, "make other": False}


SCRIPT = """
import signal, sys
from pathlib import Path
from realm.stages import parallel
from realm.stages.memory import PeakMemory
from realm.stages.runner import Record, Section, Stage
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run with SIGINT ignored
folder = Path(sys.argv[1])
parallel._PROGRAM = "from realm.watchdog import end_with_parent; end_with_parent()\\n" + {program!r}
made = [folder / name for name in "ab"]
stages = [Stage(Section("", ""), one.name, (str(one), str(folder / "absent"), ""), one) for one in made]
record = Record(folder / "stages.json", PeakMemory())
parallel.run_chains(map(parallel.Chain.of, stages), record, folder / "logs", 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_processes_end_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT.format(program=PROGRAM)), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        wait_for(lambda: all(began(tmp_path / name).exists() for name in "ab"))
        children = [
            int(child)
            for task in Path(f"/proc/{process.pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
        assert len(children) == 2
        os.kill(process.pid, number)
        process.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, children)))
    stopped = [tmp_path / f"{name}.stopped" for name in "ab"]
    assert [file.exists() for file in stopped] == [number != signal.SIGKILL] * 2


def wait_for(happened) -> None:
    end = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("print('40 of 100'); import os; os.kill(os.getpid(), 9)", "signal SIGKILL"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import sys; sys.exit('realm: no such file')", "kb build: no such file (log: "),
    ],
)
def test_the_reason_of_a_failure_is_not_that_of_an_earlier_run(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_PROGRAM", program)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "build.log").write_text("realm: an old error\n")
    record = Record(tmp_path / "stages.json", PeakMemory())
    stages = [Stage(SECTION, "build", ("kb", "build"), tmp_path / "kb")]
    with pytest.raises(RealmError, match=re.escape(why)):
        run_chains([Chain("one", stages)], record, tmp_path / "logs", 2)


def test_each_process_has_its_share_of_the_threads_and_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "usable_cores", lambda: 9)
    shares = environments(4, ["0", "1", "5"], {"HOME": "h"})
    assert [one["OMP_NUM_THREADS"] for one in shares] == ["2"] * 4
    assert [one["CUDA_VISIBLE_DEVICES"] for one in shares] == ["0", "1", "5", "0"]
    assert environments(1, [], {"OMP_NUM_THREADS": "3"}) == [{"OMP_NUM_THREADS": "3"}]
    assert environments(16, ["0"], {})[0] == {"OMP_NUM_THREADS": "1"}


def test_real_commands_make_what_they_make_alone(tmp_path: Path) -> None:
    stages = []
    for name in ("one", "other"):
        source = tmp_path / f"{name}.txt"
        source.write_text(f"{name} town lies on the Ystra. It was founded in 1204 by Alba.")
        argv = ["kb", "build", str(source), "--tagger", "rules", "--tokenizer", "package:realm-mini", "--out"]
        assert cli.main([*argv, str(tmp_path / f"{name}-alone")]) == 0
        made = tmp_path / name
        stages.append(Stage(SECTION, f"kb build {name}", (*argv, str(made)), made))
    record = Record(tmp_path / "stages.json", PeakMemory())
    run_chains(map(Chain.of, stages), record, tmp_path / "logs", 2)
    for name in ("one", "other"):
        alone = KnowledgeBase.open(tmp_path / f"{name}-alone")
        assert KnowledgeBase.open(tmp_path / name).fingerprint == alone.fingerprint
        assert "the knowledge base is in" in (tmp_path / "logs" / f"kb-build-{name}.log").read_text()
