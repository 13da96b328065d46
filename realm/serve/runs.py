"""Training runs as they are on disk: their metrics, finished or still growing. Reads files; knows nothing of training.

A run `NAME` has its metrics in `NAME/metrics.jsonl`, and in `NAME.training/metrics.jsonl` until it is finished.
"""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

METRICS = "metrics.jsonl"
_UNFINISHED = ".training"
_AT_ONCE = 5000
"""Most lines of an answer."""


class Run(NamedTuple):
    """A folder with metrics."""

    name: str
    training: bool
    """Not finished, perhaps still running."""
    changed: float
    """When the metrics last grew, seconds since 1970."""
    file: Path


def runs(folder: Path) -> list[Run]:
    """The runs of a folder, or the folder itself where it is one, the latest first."""
    found = [run for one in (folder, *folder.iterdir()) if (run := _run(one)) is not None]
    unfinished = {run.name for run in found if run.training}
    return sorted((r for r in found if r.training or r.name not in unfinished), key=lambda r: -r.changed)


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
    return Run(name.removesuffix(_UNFINISHED), name.endswith(_UNFINISHED), found.st_mtime, file)
