"""Builds an index during training, in another process.

    begin    starts `realm index` on RUN/snapshot; the output goes to RUN/index.log
    poll     "running": the build has not ended, or was started again
             "done": the new version is on disk
    stop     kills the build and every process that the build started

A build fails if its process dies, ends without a new version, prints nothing for `SILENCE` seconds, or runs longer than
`DEADLINE` seconds. A failed build is started again. After `RESTARTS` such repetitions the training run ends.

A build ends when the training process ends (`realm.watchdog`). `realm.train.refresh.refresher` decides when a build is due and
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
"""Seconds without output after which a build counts as failed."""
DEADLINE = 86400.0
"""Longest duration of a build, in seconds."""
RESTARTS = 3
"""How often a failed build is started again. If the last of these builds fails too, the run ends."""


@dataclass(frozen=True)
class BuildConfig(EngineConfig):
    """Where builds run. If `device` is not "" or `engine` is "ray", builds for which training waits run there too, for example
    the first build; otherwise, they run in the training processes."""

    threads: int = 1
    """CPU threads of each process of the build; a build has one process per device."""
    device: str = ""
    """Device of the build, such as "cuda:1", or several devices, such as "cuda:1,cuda:2". "": the device of the training
    process; on a Ray cluster the GPUs, or the CPU cores if the cluster has no GPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, threads=1)

    @property
    def apart(self) -> bool:
        """Whether the settings name a place for builds outside the training process."""
        return bool(self.device) or self.engine == "ray"


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
        self.log, self.parts = run_folder / "index.log", run_folder / "parts"
        self.seconds = 0.0
        """Duration of the last build."""
        self._child: Child | None = None

    @property
    def running(self) -> bool:
        """Whether `begin` has started a build whose end `poll` has not reported yet."""
        return self._child is not None

    def begin(self, step: int, after: int, device: str) -> None:
        """Starts to build the index of the snapshot of `step`. The number of the new version will be above `after`."""
        self._step, self._after = step, after
        self._device = self._config.device or ("auto" if self._config.engine == "ray" else device)
        self._failures = 0
        self._start()

    def poll(self) -> Literal["running", "done"]:
        """State of the build that `begin` started; returns without waiting.

        Raises:
            RealmError: the build failed more than `RESTARTS` times; the message has the path of the log.
        """
        assert self._child is not None
        if self._child.poll():
            return "running"
        child, self._child = self._child, None
        self.seconds = child.seconds
        newest, info = vectors.newest(self.folder), vectors.info_of(self.folder)
        if newest is not None and newest > self._after and info is not None and info.step == self._step:
            return "done"  # only the version is needed, so a later failure of the process does not matter
        self._restart(child.failure or "ended without an error, but did not write its version")
        return "running"

    def stop(self) -> None:
        """Kills a running build."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _restart(self, failure: str) -> None:
        self._failures += 1
        what = f"the index build of step {self._step} {failure}: see {self.log}"
        if self._failures > RESTARTS:
            raise RealmError(
                f"{what}; the build failed {self._failures} times, so the run ends; its last checkpoint stays"
            )
        self._report(f"{what}; the build is started again")
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
    """Durations of training steps, separately for steps during a build and for steps without a build."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {b: deque(maxlen=100) for b in (False, True)}
        self._began: tuple[float, bool] | None = None

    def begin(self, beside_build: bool) -> None:
        """Marks the start of a step."""
        self._began = time.monotonic(), beside_build

    def end(self, beside_build: bool) -> None:
        """Marks the end of a step. The step counts if a build was running during the whole step, or if none was running."""
        if self._began is not None and self._began[1] == beside_build:
            self._seconds[beside_build].append(time.monotonic() - self._began[0])

    def slowdown(self) -> float | None:
        """Median duration of a step during a build, divided by that of a step without a build; None until both are known."""
        alone, beside = self._seconds[False], self._seconds[True]
        return statistics.median(beside) / statistics.median(alone) if alone and beside else None
