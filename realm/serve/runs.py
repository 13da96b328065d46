"""Reads the metrics of training runs from disk, during and after the training. This file does not import `realm.train`.

The metrics of a run `NAME` are in `NAME/metrics.jsonl`, and in `NAME.training/metrics.jsonl` until the run is finished. A
process that trains holds a lock on `NAME.training/lock`; the system releases the lock when the process ends in any way.

The folder of runs may contain files of other users. Therefore symbolic links in the folder are not followed, and a run that
cannot be read is left out.
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
"""`stopped`: the run was interrupted, killed or has crashed; the same command continues from the last checkpoint."""
_UNFINISHED = ".training"
_LOCK = "lock"
_AT_ONCE = 1 << 20
"""Largest number of bytes that are read for a response; longer lines are skipped."""
_DEPTH = 8
"""Largest nesting of lists and objects; values that are nested deeper become null."""
_LARGEST = 2**53
"""Largest absolute value of an integer. Larger integers become null, because JavaScript cannot represent them exactly."""


class Run(NamedTuple):
    """A training run: a folder with metrics."""

    name: str
    state: State
    changed: float
    """Time of the last change of the metrics, in seconds since 1970."""
    folder: Path


class Metrics(NamedTuple):
    """Lines of the metrics of a run."""

    rows: list[dict[str, Any]]
    damaged: int
    """Number of lines that are not JSON objects."""
    next: int
    """The byte at which the following lines begin."""


def runs(folder: Path) -> list[Run]:
    """The runs in a folder, the run with the latest change first. The folder itself can also be a run."""
    folder = folder.resolve()
    found = [run for one in (folder, *folder.iterdir()) if (run := _run(one)) is not None]
    unfinished = {run.name for run in found if run.state != "finished"}
    shown = (run for run in found if run.state != "finished" or run.name not in unfinished)
    return sorted(shown, key=lambda run: -run.changed)


def read_metrics(run: Run, after: int) -> Metrics:
    """The complete lines from byte `after` on. A line that is not completely written yet is left for the next call.

    A file that is shorter than `after` was started again, and is read from the beginning.

    Raises:
        OSError: the metrics do not exist any more, or cannot be read.
    """
    with _opened(run.folder) as file:
        if os.fstat(file.fileno()).st_size < after:
            after = 0
        file.seek(after)
        read = file.read(_AT_ONCE)
    whole = read[: read.rfind(b"\n") + 1]
    if not whole and len(read) == _AT_ONCE:  # no line of metrics is so long: this part is skipped
        return Metrics([], 1, after + len(read))
    lines = [_row(line) for line in whole.splitlines()]
    rows = [row for row in lines if row is not None]
    return Metrics(rows, len(lines) - len(rows), after + len(whole))


def _row(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, cleaned by `_plain`; None if the line is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return _plain(row) if isinstance(row, dict) else None


def _plain(value: Any, depth: int = 0) -> Any:
    """The value as valid JSON in UTF-8: numbers that are not finite become null, and lone surrogates become U+FFFD."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case bool() | None:
            return value
        case int():
            return value if abs(value) <= _LARGEST else None
        case str():
            return _valid_text(value)
        case _ if depth == _DEPTH:
            return None
        case dict():
            return {_valid_text(key): _plain(one, depth + 1) for key, one in value.items()}
    return [_plain(one, depth + 1) for one in value]


def _valid_text(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _run(folder: Path) -> Run | None:
    """The run in this folder; None if the folder has no readable metrics."""
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
    """Opens the metrics in a folder. Raises OSError if folder or file is a symbolic link, or the file is not a regular file."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        descriptor = os.open(METRICS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    finally:
        os.close(inside)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{folder / METRICS} is not a regular file")
        yield file


def _is_locked(file: Path) -> bool:
    """Whether a process holds the lock. The check itself holds the lock briefly; a run that starts retries for ten seconds."""
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
