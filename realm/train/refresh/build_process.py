"""The index build of a training run: a process of its own, seen to its end.

    begin    `realm index` starts on RUN/snapshot, its output goes to RUN/index.log
    look     going: its log grows, its deadline is far
             done: its version is on disk
             dead, silent or late: killed, named with its log, started again after a while, so many times; then the
             run ends, or the build is given up, as told
    stop     it ends, with whatever it started

A build ends when its trainer does (`realm.index.watchdog`). When one is due, and what becomes of its version, says
`realm.train.refresh.refresher`.
"""

import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realm.errors import InputError
from realm.index.watchdog import Child
from realm.model.device import Precision
from realm.store import vectors


@dataclass(frozen=True)
class BuildConfig:
    """Where a build in the background runs, and what happens when it fails."""

    threads: int = 1
    """Its CPU threads, on each device."""
    device: str = ""
    """Where it runs: "cuda:1", say, or several, "cuda:1,cuda:2"; "": where training does."""
    launch: str = ""
    """Words put before its command: "nice -n 10", or "ssh other-machine" where that shares the folders."""
    silence: float = 300.0
    """Seconds without a sign of life after which it is stuck."""
    deadline: float = 86400.0
    """Seconds that it may take."""
    restarts: int = 3
    """How often a failed one is started again."""
    backoff: float = 10.0
    """Seconds before the first restart; twice as long before each one after it."""
    on_failure: Literal["stop", "continue"] = "stop"
    """When restarts are used up: end the run, whose last checkpoint stays, or train on with the old index until the next
    build is due."""

    def __post_init__(self) -> None:
        if self.threads < 1 or self.restarts < 0:
            raise ValueError(
                f"threads and restarts are {self.threads} and {self.restarts}: "
                "the first must be 1 or more, the second 0 or more"
            )
        if min(self.silence, self.deadline) <= 0 or self.backoff < 0:
            raise ValueError(
                f"silence, deadline and backoff are {self.silence}, {self.deadline} and {self.backoff}: "
                "the first two must be above 0, the last 0 or more"
            )


class Builder(AbstractContextManager["Builder"]):
    """Builds the index of one snapshot at a time; leaving the `with` block stops a build that is still going."""

    def __init__(
        self,
        kb: Path,
        run_folder: Path,
        config: BuildConfig,
        precision: Precision,
        say: Callable[[str], None],
    ):
        """`say` tells the person who watches."""
        self._kb, self._config, self._precision, self._say = kb, config, precision, say
        self.snapshot, self.folder = run_folder / "snapshot", run_folder / "index"
        self.log = run_folder / "index.log"
        self.seconds = 0.0
        """What the last build took."""
        self._child: Child | None = None

    @property
    def running(self) -> bool:
        """Whether a process of its own runs now; between two tries none does."""
        return self._child is not None

    def begin(self, step: int, after: int, device: str) -> None:
        """Starts to build the snapshot, which was made at `step`; its version will have a number above `after`."""
        self._step, self._after = step, after
        self._device = self._config.device or device
        self._failures, self._retry_at = 0, 0.0
        self._start()

    def look(self) -> Literal["going", "done", "given up"]:
        """How the build stands, which has begun and was not done yet; never waits.

        Raises:
            InputError: it failed more often than it may, and the run is to end with it; the message names its log.
        """
        if self._child is None:
            if time.monotonic() >= self._retry_at:
                self._start()
            return "going"
        if self._child.running():
            return "going"
        child, self._child = self._child, None
        self.seconds = child.seconds
        if self._committed():  # nothing more is wanted of it, however it ended
            return "done"
        return self._failed(child.failure or "ended well, but its version is not there")

    def stop(self) -> None:
        """Ends a build that is still going."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _committed(self) -> bool:
        newest, info = vectors.newest(self.folder), vectors.info_of(self.folder)
        return newest is not None and newest > self._after and info is not None and info.step == self._step

    def _failed(self, how: str) -> Literal["going", "given up"]:
        self._failures += 1
        what = f"the index build of step {self._step} {how}: see {self.log}"
        if self._failures <= self._config.restarts:
            wait = self._config.backoff * 2 ** (self._failures - 1)
            self._retry_at = time.monotonic() + wait
            self._say(f"{what}; starting it again in {wait:g} s")
            return "going"
        if self._config.on_failure == "stop":
            raise InputError(
                f"{what}; it was tried {self._failures} times, the run stops at its last checkpoint"
            )
        self._say(f"{what}; going on with the old index until the next build is due")
        return "given up"

    def _start(self) -> None:
        settings = {
            "folder": self.folder.absolute(),
            "threads": self._config.threads,
            "precision": self._precision,
            "keep": 0,  # the refresher knows which are needed
            "device": self._device,
        }
        command = [sys.executable, "-m", "realm", "index", "--supervised"]
        command += ["--kb", str(self._kb.absolute()), "--model", str(self.snapshot.absolute())]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        launch = shlex.split(self._config.launch)
        if launch and Path(launch[0]).name == "ssh":  # a shell there takes the words apart once more
            command = [shlex.quote(word) for word in command]
        self._child = Child([*launch, *command], self.log, self._config.deadline, self._config.silence)


class StepTimes:
    """How long steps take, alone and beside a build."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {b: deque(maxlen=100) for b in (False, True)}
        self._began: tuple[float, bool] | None = None

    def begin(self, beside_build: bool) -> None:
        """A step begins."""
        self._began = time.monotonic(), beside_build

    def end(self, beside_build: bool) -> None:
        """It ends; it counts where a build ran all the time, or never."""
        if self._began is not None and self._began[1] == beside_build:
            self._seconds[beside_build].append(time.monotonic() - self._began[0])

    def slowdown(self) -> float | None:
        """How many times longer a step takes beside a build; none before both were seen."""
        alone, beside = self._seconds[False], self._seconds[True]
        return statistics.median(beside) / statistics.median(alone) if alone and beside else None
