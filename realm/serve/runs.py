"""Training runs as they are on disk: their metrics, finished or still growing. Reads files; knows nothing of training.

A run `NAME` has its metrics in `NAME/metrics.jsonl`, and in `NAME.training/metrics.jsonl` until it is finished. A process
that trains holds a lock on `NAME.training/lock`; the system frees the lock when the process ends, however it ends.

Others may write into the folder: no symbolic link in it is followed, and what cannot be shown spoils nothing beside it.
"""

import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

METRICS = "metrics.jsonl"
State = Literal["training", "stopped", "finished"]
"""`stopped`: interrupted, killed or crashed; the same command goes on from the last checkpoint."""
_UNFINISHED = ".training"
_LOCK = "lock"
_AT_ONCE = 1 << 20
"""Most bytes of an answer, and of a line."""
_DEPTH = 8
"""Most lists and objects in each other; deeper ones are null."""
_LARGEST = 2**53
"""Integers beyond are null: a page's numbers do not hold them."""


class Run(NamedTuple):
    """A folder with metrics."""

    name: str
    state: State
    changed: float
    """When the metrics last grew, seconds since 1970."""
    folder: Path


class Metrics(NamedTuple):
    """Lines of a run's metrics."""

    rows: list[dict[str, Any]]
    damaged: int
    """Lines that are no JSON object."""
    next: int
    """The byte to go on from."""


def runs(folder: Path) -> list[Run]:
    """The runs of a folder, or the folder itself where it is one, the latest first."""
    folder = folder.resolve()
    found = [run for one in (folder, *folder.iterdir()) if (run := _run(one)) is not None]
    unfinished = {run.name for run in found if run.state != "finished"}
    shown = (run for run in found if run.state != "finished" or run.name not in unfinished)
    return sorted(shown, key=lambda run: -run.changed)


def read_metrics(run: Run, after: int) -> Metrics:
    """The lines behind byte `after`; a line that is still being written waits.

    A file shorter than `after` was begun anew, and is read from its start.

    Raises:
        OSError: the metrics are gone, or may not be read.
    """
    with _opened(run.folder) as file:
        if os.fstat(file.fileno()).st_size < after:
            after = 0
        file.seek(after)
        read = file.read(_AT_ONCE)
    whole = read[: read.rfind(b"\n") + 1]
    if not whole and len(read) == _AT_ONCE:  # a line too long to be one of ours: it is passed over in pieces
        return Metrics([], 1, after + len(read))
    lines = [_row(line) for line in whole.splitlines()]
    rows = [row for row in lines if row is not None]
    return Metrics(rows, len(lines) - len(rows), after + len(whole))


def _row(line: bytes) -> dict[str, Any] | None:
    """The object on a line as it can be sent on; None where there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return _plain(row) if isinstance(row, dict) else None


def _plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON in UTF-8 can hold it: null for numbers that are not finite, U+FFFD for half characters."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case bool() | None:
            return value
        case int():
            return value if abs(value) <= _LARGEST else None
        case str():
            return _shown(value)
        case _ if depth == _DEPTH:
            return None
        case dict():
            return {_shown(key): _plain(one, depth + 1) for key, one in value.items()}
    return [_plain(one, depth + 1) for one in value]


def _shown(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _run(folder: Path) -> Run | None:
    """The run in this folder; none where there is none, or none that may be read, or it goes at this moment."""
    try:
        with _opened(folder) as file:
            changed = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    name = os.fsencode(folder.name).decode("utf-8", "replace")
    state: State = "finished"
    if name.endswith(_UNFINISHED):
        state = "training" if _is_locked(folder / _LOCK) else "stopped"
    return Run(name.removesuffix(_UNFINISHED), state, changed, folder)


@contextmanager
def _opened(folder: Path) -> Iterator[BinaryIO]:
    """The metrics in a folder. Raises OSError where folder or file is a symbolic link, or the file is no ordinary one."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        descriptor = os.open(METRICS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    finally:
        os.close(inside)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{folder / METRICS} is no ordinary file")
        yield file


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
