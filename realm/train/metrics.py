"""The metrics of a training run: metrics.jsonl, its means over steps, and TensorBoard events."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from realm.errors import InputError

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
REQUIRED = ("loss", "retrieval_utility", "null_probability", "index_age")
"""Keys of every line of metrics.jsonl; null if a stage or a line has no such number."""


class MetricsLine(TypedDict):
    """Keys that every line of metrics.jsonl has; stages add numbers."""

    step: int
    seconds: float
    loss: float | None
    retrieval_utility: float | None
    null_probability: float | None
    index_age: float | None


class StepMeans:
    """Numbers of several steps that become one line of their means."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        """The numbers since the last line; part of a checkpoint."""

    def add(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.sums.setdefault(name, []).append(number)

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = {name: sum(values) / len(values) for name, values in self.sums.items()}
        self.sums = {}
        return means


class MetricsLog:
    """metrics.jsonl in the folder of a run, cut back to a checkpoint's length, and TensorBoard events if asked for."""

    def __init__(self, folder: Path, length: int, step: int, tensorboard: bool):
        """`length` and `step` are those of the checkpoint that the run resumes from, or 0."""
        self.file = folder / METRICS
        self._stream = self.file.open("a", encoding="utf-8")
        size = self.file.stat().st_size
        self.lost_lines = size < length
        """Whether the file is shorter than at the checkpoint."""
        self._stream.truncate(min(size, length))
        self._stream.seek(0, os.SEEK_END)  # truncating leaves the position
        self._events = _event_writer(folder / TENSORBOARD, step) if tensorboard else None

    def write(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a line, with floats rounded to six digits -> the line.

        Raises:
            OSError: the file system refused.
        """
        rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in line.items()}
        self._stream.write(json.dumps(rounded) + "\n")
        self._stream.flush()
        if self._events is not None:
            for name, value in rounded.items():
                if name != "step" and isinstance(value, int | float):
                    self._events.add_scalar(name, value, rounded["step"])
        return rounded

    def sync(self) -> int:
        """Makes all lines survive a power cut -> the length of the file, for a checkpoint."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._stream.tell()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # lines that did not fit raised an error when they were written
            self._stream.close()
        if self._events is not None:
            self._events.close()


def _event_writer(folder: Path, step: int) -> Any:
    """TensorBoard's writer, which hides events of an interrupted run from `step` on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "tensorboard is not installed: `pip install realm-lm[tensorboard]`, or leave it off"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)
