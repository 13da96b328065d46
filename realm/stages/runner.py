"""Runs the stages of a demo: prints each section and command, skips stages that are done, and records time and memory."""

import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple, TypedDict

from realm import __version__
from realm.errors import DamagedError
from realm.files import read_json, write_json
from realm.qa.scoring.tables import paragraph
from realm.stages.memory import PeakMemory


class Section(NamedTuple):
    """A heading in the output of the demo, and an explanation of the commands under this heading."""

    title: str
    why: str


class Stage(NamedTuple):
    """One command of a demo."""

    section: Section
    name: str
    argv: tuple[str, ...]
    makes: Path | None = None
    """File or folder that the command makes. If `makes` exists, the stage is skipped. If it is None, the stage always runs."""
    measures: tuple[Path, ...] = ()
    """Files that the command measures. If one of these files is newer than `makes`, the stage runs again."""
    quiet: bool = False
    """Whether to hide the output of the command, because a table shows the results later."""
    note: str = ""
    """Line to print after the command."""
    once: bool = False
    """True: the stage is skipped if stages.json lists the stage as done. For commands that change a shared folder."""
    also_makes: Path | None = None
    """Further file that the command makes. If this file does not exist, the stage runs again."""
    keeps: Path | None = None
    """A file that the command writes and a later stage overwrites. The file is copied to `makes`."""

    def is_done(self) -> bool:
        """Whether all files that the command makes exist, and `makes` is not older than any file of `measures`."""
        if self.makes is None or not self.makes.exists():
            return False
        if self.also_makes is not None and not self.also_makes.exists():
            return False
        made = self.makes.stat().st_mtime
        return all(path.stat().st_mtime <= made for path in self.measures)

    @property
    def measuring(self) -> bool:
        """Whether the stage only computes numbers for a table."""
        return bool(self.measures) or (self.once and self.quiet)


def run_stages(
    stages: Iterable[Stage], record: "Record", run_command: Callable[[Sequence[str]], None]
) -> None:
    """Prints and runs the command of each stage that is not done. Exceptions of a command are not caught."""
    printer = Printer(record)
    for stage in stages:
        if printer.skips(stage):
            continue
        printer.begins(stage)
        _run(stage, record, run_command)
        if stage.note:
            print(stage.note)
        sys.stdout.flush()
    printer.ends()


class Printer:
    """Prints the headings of sections, and the commands that are run or skipped."""

    def __init__(self, record: "Record"):
        self._record = record
        self._headed: Section | None = None
        self._explained: Section | None = None
        self._measured = 0

    def skips(self, stage: Stage) -> bool:
        """Whether the stage is done. If it is done, a line is printed, except for measurements, which are counted."""
        if stage.section != self._headed:
            print(f"\n{stage.section.title}")
            self._headed = stage.section
        if not (self._record.has(stage) if stage.once else stage.is_done()):
            return False
        if stage.measuring:
            self._measured += 1
        elif stage.once:
            print(f"done before: {command_line(stage)}")
        else:
            print(f"skipped: {stage.makes} exists{self._record.other_maker(stage)}")
        return True

    def begins(self, stage: Stage) -> None:
        """Prints the command of a stage that runs now."""
        if stage.section != self._explained:
            print(paragraph(stage.section.why))
            self._explained = stage.section
        print(f"\n$ {command_line(stage)}", flush=True)

    def ends(self) -> None:
        """Prints the number of measurements that were skipped."""
        if self._measured:
            print(f"skipped: {self._measured} measurements that exist", flush=True)


def _run(stage: Stage, record: "Record", run_command: Callable[[Sequence[str]], None]) -> None:
    if stage.makes is None and not stage.once:
        return run_command(stage.argv)
    with record.timing(stage):
        with redirect_stdout(StringIO()) if stage.quiet else nullcontext():
            run_command(stage.argv)
        if stage.keeps is not None and stage.makes is not None:
            stage.makes.parent.mkdir(parents=True, exist_ok=True)
            write_json(stage.makes, read_json(stage.keeps))
    print(f"({spent_words(record.spent(stage))})")


def spent_words(seconds: float) -> str:
    """Seconds, or minutes if there are many seconds."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def command_line(stage: Stage) -> str:
    """The command of a stage, as a user types it."""
    return shlex.join(("realm", *stage.argv))


class Spent(TypedDict):
    """Cost of one stage."""

    command: str
    seconds: float
    done: bool
    version: str
    """Version of realm that finished the stage."""


class Costs(TypedDict):
    """Content of stages.json: name of a stage -> its cost, and the peak memory over all runs of the demo."""

    stages: dict[str, Spent]
    peak_memory_mb: float


def _read_costs(file: Path) -> Costs:
    """The content of stages.json.

    Raises:
        DamagedError: the file is damaged.
    """
    saved = read_json(file)
    try:
        costs: Costs = {"stages": saved["stages"], "peak_memory_mb": float(saved["peak_memory_mb"])}
        for spent in costs["stages"].values():
            if not Spent.__required_keys__ <= spent.keys() or not isinstance(spent["seconds"], int | float):
                raise TypeError
        return costs
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DamagedError(
            f"{file} is damaged: put the file back, or remove it (the times of the finished stages are then lost)"
        ) from None


class Record:
    """The cost of each stage, stored in a file, so that the costs of an interrupted demo are added up."""

    def __init__(self, file: Path, memory: PeakMemory, version: str = __version__):
        self._file, self._memory, self._version = file, memory, version
        self._writing = threading.Lock()  # stages that run at the same time are timed in several threads
        self._stages: dict[str, Spent] = {}
        self._memory_before, self._ran = 0.0, False
        if file.exists():
            saved = _read_costs(file)
            self._stages, self._memory_before = saved["stages"], saved["peak_memory_mb"]

    @contextmanager
    def timing(self, stage: Stage) -> Iterator[None]:
        """Adds the seconds of the `with` block to a stage, also after an interruption. A stage that was done starts at 0."""
        before = self._stages.get(stage.name)
        spent = before["seconds"] if before is not None and not before["done"] else 0.0
        started, done = time.monotonic(), False
        self._ran = True
        try:
            yield
            done = True
        finally:
            seconds = round(spent + time.monotonic() - started, 1)
            with self._writing:
                self._stages[stage.name] = {
                    "command": command_line(stage),
                    "seconds": seconds,
                    "done": done,
                    "version": self._version,
                }
                costs: Costs = {"stages": self._stages, "peak_memory_mb": self.peak_memory_mb()}
                write_json(self._file, costs)

    def has(self, stage: Stage) -> bool:
        """Whether the stage is done. If a stage has run in this process, all later stages count as not done."""
        known = self._stages.get(stage.name)
        return known is not None and known["done"] and not self._ran

    def forget(self) -> None:
        """Marks all stages as not done, for a folder whose files were removed."""
        self._stages = {}

    def spent(self, stage: Stage) -> float:
        """Seconds of a stage, over all runs of the demo."""
        return float(self._stages[stage.name]["seconds"])

    def other_maker(self, stage: Stage) -> str:
        """Note for the output if the files of the stage were made by a different command; otherwise ""."""
        made = self._stages[stage.name]["command"] if stage.name in self._stages else command_line(stage)
        return "" if made == command_line(stage) else f", made by: {made}"

    def versions(self) -> list[str]:
        """The different versions of realm that finished the stages, sorted."""
        return sorted({one["version"] for one in self._stages.values() if one["done"]})

    def seconds(self) -> dict[str, float]:
        """Name of a stage -> seconds, and "total" -> sum of these seconds."""
        spent = {name: stage["seconds"] for name, stage in self._stages.items()}
        return spent | {"total": round(sum(spent.values()), 1)}

    def peak_memory_mb(self) -> float:
        """Peak memory in megabytes, over all runs of the demo."""
        return max(self._memory_before, self._memory.mb)
