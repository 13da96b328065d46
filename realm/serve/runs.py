"""Training runs as they are on disk: their metrics, finished or still growing. Reads files; knows nothing of training.

A run `NAME` has its metrics in `NAME/metrics.jsonl`, and in `NAME.training/metrics.jsonl` until it is finished. A process
that trains holds a lock on `NAME.training/lock`; the system frees the lock when the process ends, however it ends.
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

METRICS = "metrics.jsonl"
State = Literal["training", "stopped", "finished"]
"""`stopped`: interrupted, killed or crashed; the same command goes on from the last checkpoint."""
_UNFINISHED = ".training"
_LOCK = "lock"
_AT_ONCE = 5000
"""Most lines of an answer."""


class Run(NamedTuple):
    """A folder with metrics."""

    name: str
    state: State
    changed: float
    """When the metrics last grew, seconds since 1970."""
    file: Path


def runs(folder: Path) -> list[Run]:
    """The runs of a folder, or the folder itself where it is one, the latest first."""
    found = [run for one in (folder, *folder.iterdir()) if (run := _run(one)) is not None]
    unfinished = {run.name for run in found if run.state != "finished"}
    shown = (run for run in found if run.state != "finished" or run.name not in unfinished)
    return sorted(shown, key=lambda run: -run.changed)


def read_metrics(run: Run, after: int) -> tuple[list[dict[str, Any]], int]:
    """The lines behind byte `after`, and the byte to go on from; a line that is still being written waits.

    A file shorter than `after` was begun anew, and is read from its start.
    """
    if run.file.stat().st_size < after:
        after = 0
    with run.file.open("rb") as file:
        file.seek(after)
        lines = []
        for line in _whole_lines(file):
            after += len(line)
            lines.append(line)
    return [row for row in map(_row, lines) if row is not None], after


def _whole_lines(file: Any) -> Iterator[bytes]:
    for _, line in zip(range(_AT_ONCE), file, strict=False):
        if not line.endswith(b"\n"):
            return
        yield line


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_constant=lambda name: None)  # NaN, which is no JSON
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _run(folder: Path) -> Run | None:
    """The run in this folder; none where there is none, or none that may be read, or it goes at this moment."""
    file, name = folder / METRICS, folder.resolve().name
    try:
        found = file.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    state: State = "finished"
    if name.endswith(_UNFINISHED):
        state = "training" if _is_locked(folder / _LOCK) else "stopped"
    return Run(name.removesuffix(_UNFINISHED), state, found.st_mtime, file)


def _is_locked(file: Path) -> bool:
    """Whether a process holds the lock. The look takes it for a moment; a run that starts then tries for ten seconds."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
