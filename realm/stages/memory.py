"""Measures the peak memory of this process and all its descendants together.

`getrusage` cannot measure this memory, because a child process starts with the peak of its parent, and because the peaks of
several processes occur at different times.
"""

import os
import resource
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

EVERY = 1.0
"""Seconds between two measurements."""


class PeakMemory(AbstractContextManager["PeakMemory"]):
    """Measures memory every second during the `with` block. Without /proc, only the memory of this process is measured."""

    def __init__(self) -> None:
        self._seen = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def mb(self) -> float:
        """Peak memory in megabytes; pages that several processes share count once."""
        # The unit in bytes: `ru_maxrss` is in bytes on macOS, else in units of 1,024 bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
        return round(max(own, self._seen), 1)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(EVERY):
            self._seen = max(self._seen, together_mb(os.getpid()))


def together_mb(pid: int) -> float:
    """Current memory of a process and all its descendants in megabytes; 0 without /proc."""
    parent_of = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        text = _read(stat)
        if text:
            parent_of[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    family, grown = {pid}, 0
    while len(family) > grown:
        grown = len(family)
        family |= {child for child, parent in parent_of.items() if parent in family}
    return sum(map(_share_mb, family))


def _share_mb(pid: int) -> float:
    """Proportional set size of a process in megabytes: shared pages are divided among the processes that share them."""
    lines = _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:")), 0.0)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""
