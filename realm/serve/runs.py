"""Reads the metrics of training runs from disk, during and after the training. This file does not import `realm.train`.

The metrics of a run `NAME` are in `NAME/metrics.jsonl`, and in `NAME.training/metrics.jsonl` until the run is finished. A
process that trains holds a lock on `NAME.training/lock`; the system releases the lock when the process ends in any way.

Runs are also found in subfolders; the name of such a run is its path, such as `table1/realm`. The folder of runs may contain
files of other users. Therefore symbolic links in the folder are not followed, and a run that cannot be read is left out.
"""

import fcntl
import itertools
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
_TABLE = ".lance"
_AT_ONCE = 1 << 20
"""Largest number of bytes that are read for a response; longer lines are skipped."""
_LEVELS = 6
"""Largest number of folders in the name of a run."""
_FOLDERS = 1000
"""Largest number of folders that are searched for runs."""
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
    root: Path
    """The folder of all runs."""
    path: tuple[str, ...]
    """The names of the folders from `root` to the run."""


class Metrics(NamedTuple):
    """Lines of the metrics of a run."""

    rows: list[dict[str, Any]]
    damaged: int
    """Number of lines that are not JSON objects."""
    next: int
    """The byte at which the following lines begin."""


def runs(folder: Path) -> list[Run]:
    """The runs in a folder and its subfolders, the run with the latest change first. The folder itself can also be a run.

    The folders inside a run, folders of tables and hidden folders are not searched.

    Raises:
        OSError: the folder cannot be read.
    """
    root = folder.resolve()
    os.close(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    found = []
    for place, inner, _, descriptor in itertools.islice(os.fwalk(root), _FOLDERS):
        path = Path(place).relative_to(root).parts
        run = _run(root, path, descriptor)
        if run is not None:
            found.append(run)
        ends = (run is not None and path) or len(path) >= _LEVELS
        inner[:] = [] if ends else sorted(one for one in inner if one[0] != "." and not one.endswith(_TABLE))
    unfinished = {run.name for run in found if run.state != "finished"}
    shown = (run for run in found if run.state != "finished" or run.name not in unfinished)
    return sorted(shown, key=lambda run: -run.changed)


def read_metrics(run: Run, after: int) -> Metrics:
    """The complete lines from byte `after` on. A line that is not completely written yet is left for the next call.

    A file that is shorter than `after` was started again, and is read from the beginning.

    Raises:
        OSError: the metrics do not exist any more, or cannot be read.
    """
    with _folder(run) as descriptor, _metrics(descriptor) as file:
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


def _run(root: Path, path: tuple[str, ...], descriptor: int) -> Run | None:
    """The run in an open folder; None if the folder has no readable metrics."""
    try:
        with _metrics(descriptor) as file:
            changed = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    name = os.fsencode("/".join(path) or root.name).decode("utf-8", "replace")
    state: State = "finished"
    if name.endswith(_UNFINISHED):
        state = "training" if _is_locked(descriptor) else "stopped"
    return Run(name.removesuffix(_UNFINISHED), state, changed, root, path)


@contextmanager
def _folder(run: Run) -> Iterator[int]:
    """The open folder of a run. Raises OSError if a folder between `root` and the run is a symbolic link."""
    descriptor = os.open(run.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in run.path:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _metrics(folder: int) -> Iterator[BinaryIO]:
    """Opens the metrics in an open folder. Raises OSError if the file is a symbolic link or not a regular file."""
    descriptor = os.open(METRICS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{METRICS} is not a regular file")
        yield file


def _is_locked(folder: int) -> bool:
    """Whether a process holds the lock. The check itself holds the lock briefly; a run that starts retries for ten seconds."""
    try:
        descriptor = os.open(_LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
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
