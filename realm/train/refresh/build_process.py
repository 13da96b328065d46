"""The index build of a training run, in a process of its own.

    begin    starts `realm index` on RUN/snapshot; the output goes to RUN/index.log
    status   "running": the log grows and the deadline has not passed
             "done": the new version is on disk
             a build that died, printed nothing for `SILENCE` seconds or ran longer than `DEADLINE` seconds is killed and
             started again, `restarts` times; after that the run ends
    stop     kills the build and every process that the build started

A build ends when its trainer ends (`realm.watchdog`). `realm.train.refresh.refresher` decides when a build is due and
when the new version is used.
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realm.errors import RealmError, at_least
from realm.model.device import Precision
from realm.ray_actors import EngineConfig
from realm.store import vectors
from realm.watchdog import Child

SILENCE = 300.0
"""Seconds without a new line in the log after which a build is taken to be stuck."""
DEADLINE = 86400.0
"""Seconds that a build may take."""


@dataclass(frozen=True)
class BuildConfig(EngineConfig):
    """Where a background build runs, and how often a failed build is repeated."""

    threads: int = 1
    """CPU threads of the build, on each device."""
    device: str = ""
    """Device of the build: "cuda:1", or several, "cuda:1,cuda:2"; "": the device of the trainer, or on a Ray cluster
    the GPUs, if it has any."""
    restarts: int = 3
    """How often a failed build is started again before the run ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, threads=1, restarts=0)


class Builder(AbstractContextManager["Builder"]):
    """Builds the index of one snapshot at a time; leaving the `with` block kills a running build."""

    def __init__(
        self,
        kb: Path,
        run_folder: Path,
        config: BuildConfig,
        precision: Precision,
        report: Callable[[str], None],
    ):
        """`report` shows one line to the user."""
        self._kb, self._config, self._precision, self._report = kb, config, precision, report
        self.snapshot, self.folder = run_folder / "snapshot", run_folder / "index"
        self.log = run_folder / "index.log"
        self.seconds = 0.0
        """Duration of the last build."""
        self._child: Child | None = None

    @property
    def running(self) -> bool:
        """Whether a build process exists."""
        return self._child is not None

    def begin(self, step: int, after: int, device: str) -> None:
        """Starts to build the snapshot of `step`; the version of this build will have a number above `after`."""
        self._step, self._after = step, after
        self._device = self._config.device or ("auto" if self._config.engine == "ray" else device)
        self._failures = 0
        self._start()

    def status(self) -> Literal["running", "done"]:
        """State of the build that `begin` started; never waits.

        Raises:
            RealmError: the build failed more than `restarts` times; the message names the log.
        """
        assert self._child is not None
        if self._child.running():
            return "running"
        child, self._child = self._child, None
        self.seconds = child.seconds
        if self._committed():  # the version is all that is needed, even if the process failed afterwards
            return "done"
        self._restart(child.failure or "ended well, but its version is not there")
        return "running"

    def stop(self) -> None:
        """Kills a running build."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _committed(self) -> bool:
        newest, info = vectors.newest(self.folder), vectors.info_of(self.folder)
        return newest is not None and newest > self._after and info is not None and info.step == self._step

    def _restart(self, failure: str) -> None:
        self._failures += 1
        what = f"the index build of step {self._step} {failure}: see {self.log}"
        if self._failures > self._config.restarts:
            raise RealmError(
                f"{what}; it was tried {self._failures} times, the run stops at its last checkpoint"
            )
        self._report(f"{what}; starting it again")
        self._start()

    def _start(self) -> None:
        settings = {
            "threads": self._config.threads,
            "precision": self._precision,
            "device": self._device,
            "engine": self._config.engine,
            "ray_address": self._config.ray_address,
        }
        command = [sys.executable, "-m", "realm", "index", "--supervised", str(self.folder.absolute())]
        command += ["--kb", str(self._kb.absolute()), "--model", str(self.snapshot.absolute())]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        self._child = Child(command, self.log, DEADLINE, SILENCE)


class StepTimes:
    """Durations of steps, with and without a build beside them."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {b: deque(maxlen=100) for b in (False, True)}
        self._began: tuple[float, bool] | None = None

    def begin(self, beside_build: bool) -> None:
        """Marks the start of a step."""
        self._began = time.monotonic(), beside_build

    def end(self, beside_build: bool) -> None:
        """Marks the end of a step. The step counts if a build ran during all of it, or during none of it."""
        if self._began is not None and self._began[1] == beside_build:
            self._seconds[beside_build].append(time.monotonic() - self._began[0])

    def slowdown(self) -> float | None:
        """Median duration of a step beside a build over that of a step alone; None until both were seen."""
        alone, beside = self._seconds[False], self._seconds[True]
        return statistics.median(beside) / statistics.median(alone) if alone and beside else None
