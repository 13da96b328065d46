"""Runs a demo's stages: says what comes and why, skips what is there, and keeps what each stage cost."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple, TypedDict

from realm.demo.memory import PeakMemory
from realm.demo.tables import paragraph
from realm.files import read_json, write_json


class Section(NamedTuple):
    """A heading, and what happens under it and why."""

    title: str
    why: str


class Stage(NamedTuple):
    """One command."""

    section: Section
    name: str
    argv: tuple[str, ...]
    makes: Path | None = None
    """Skipped where this is there; without it, run every time."""
    measures: tuple[Path, ...] = ()
    """Files that make it due again when they are newer."""
    quiet: bool = False
    """What the command reports is not shown: the table will."""
    note: str = ""
    """Said after the command."""
    once: bool = False
    """Skipped where the record says that it was done, whatever it makes: for what changes a folder that others change again."""
    keeps: Path | None = None
    """A file that the command writes, and a later stage writes anew: it is copied to `makes`."""

    def is_done(self) -> bool:
        """Whether what it makes is there and up to date."""
        if self.makes is None or not self.makes.exists():
            return False
        made = self.makes.stat().st_mtime
        return all(path.stat().st_mtime <= made for path in self.measures)

    @property
    def measuring(self) -> bool:
        """Whether all that it makes are numbers for a table."""
        return bool(self.measures) or (self.once and self.quiet)


def run_stages(
    stages: Iterable[Stage], record: "Record", run_command: Callable[[Sequence[str]], None]
) -> None:
    """Runs each stage whose product is missing, as the command that is printed; whatever that raises passes through."""
    headed = explained = None
    measured = 0
    for stage in stages:
        if stage.section != headed:
            print(f"\n{stage.section.title}")
            headed = stage.section
        if record.has(stage) if stage.once else stage.is_done():
            measured += stage.measuring
            if stage.once and not stage.measuring:
                print(f"done before: {_typed(stage)}")
            elif not stage.measuring:
                print(f"skipped: {stage.makes} is there{record.other_maker(stage)}")
            continue
        if stage.section != explained:
            print(paragraph(stage.section.why))
            explained = stage.section
        print(f"\n$ {_typed(stage)}", flush=True)
        _run(stage, record, run_command)
        if stage.note:
            print(stage.note)
        sys.stdout.flush()
    if measured:
        print(f"skipped: {measured} measurements are there")


def _run(stage: Stage, record: "Record", run_command: Callable[[Sequence[str]], None]) -> None:
    if stage.makes is None and not stage.once:
        return run_command(stage.argv)
    with record.timing(stage):
        with redirect_stdout(StringIO()) if stage.quiet else nullcontext():
            run_command(stage.argv)
        if stage.keeps is not None and stage.makes is not None:
            stage.makes.parent.mkdir(parents=True, exist_ok=True)
            write_json(stage.makes, read_json(stage.keeps))
    seconds = record.spent(stage)
    print(f"({seconds:.1f} s)" if seconds < 100 else f"({seconds / 60:.1f} min)")


def _typed(stage: Stage) -> str:
    return shlex.join(("realm", *stage.argv))


class Spent(TypedDict):
    """What one stage cost."""

    command: str
    seconds: float
    done: bool


class Costs(TypedDict):
    """What stages.json holds: the stages by name, and the most memory of all sittings."""

    stages: dict[str, Spent]
    peak_memory_mb: float


class Record:
    """What each stage cost, in a file, so that a demo told in several sittings adds up."""

    def __init__(self, file: Path, memory: PeakMemory):
        self._file, self._memory = file, memory
        self._stages: dict[str, Spent] = {}
        self._memory_before, self._ran = 0.0, False
        if file.exists():
            saved = json.loads(file.read_text(encoding="utf-8"))
            self._stages, self._memory_before = saved["stages"], saved["peak_memory_mb"]

    @contextmanager
    def timing(self, stage: Stage) -> Iterator[None]:
        """Adds the seconds inside to the stage's, also where it is interrupted; a stage done before begins anew."""
        before = self._stages.get(stage.name)
        spent = before["seconds"] if before is not None and not before["done"] else 0.0
        started, done = time.monotonic(), False
        self._ran = True
        try:
            yield
            done = True
        finally:
            seconds = round(spent + time.monotonic() - started, 1)
            self._stages[stage.name] = {
                "command": _typed(stage),
                "seconds": seconds,
                "done": done,
            }
            costs: Costs = {"stages": self._stages, "peak_memory_mb": self.peak_memory_mb()}
            write_json(self._file, costs)

    def has(self, stage: Stage) -> bool:
        """Whether the stage was done, and no stage was run since this record was opened: those after it are done again."""
        known = self._stages.get(stage.name)
        return known is not None and known["done"] and not self._ran

    def forget(self) -> None:
        """Forgets what was done, where it is gone."""
        self._stages = {}

    def spent(self, stage: Stage) -> float:
        """Seconds of a stage, all sittings."""
        return float(self._stages[stage.name]["seconds"])

    def other_maker(self, stage: Stage) -> str:
        """Where what a stage makes came from another command: says so."""
        made = self._stages[stage.name]["command"] if stage.name in self._stages else _typed(stage)
        return "" if made == _typed(stage) else f", made by: {made}"

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, and their total."""
        spent = {name: stage["seconds"] for name, stage in self._stages.items()}
        return spent | {"total": round(sum(spent.values()), 1)}

    def peak_memory_mb(self) -> float:
        """The most memory of all sittings."""
        return max(self._memory_before, self._memory.mb)
