"""The metrics of a training run: metrics.jsonl, means over steps, and TensorBoard events."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realm import distributed
from realm.errors import InputError

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
REQUIRED = ("loss", "retrieval_utility", "null_probability", "index_age")
"""Keys of every line of metrics.jsonl; the value is null if a stage or a line has no such number."""


class StepMeans:
    """Collects the numbers of several steps and computes their means for one line of metrics.jsonl.

    The numbers stay on their device until `read` is called, because reading a number of a GPU waits for all work of the GPU.
    """

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        """The numbers since the last line that have been read; a checkpoint contains these numbers."""
        self._unread: list[tuple[int, dict[str, Tensor | float]]] = []

    def add(self, step: int, numbers: Mapping[str, Tensor | float]) -> None:
        """Adds the numbers of a step. Tensors must be scalars."""
        kept = {
            name: value.detach() if isinstance(value, Tensor) else value for name, value in numbers.items()
        }
        self._unread.append((step, kept))

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Reads the numbers that were added since the last call, as means over the ranks -> for each step, its numbers.

        All ranks call this together, after they have added numbers with the same names.
        """
        given = [value for _, numbers in self._unread for value in numbers.values()]
        scalars = [value.float() for value in given if isinstance(value, Tensor)]
        # One transfer for all numbers.
        read = iter(torch.stack(scalars).tolist() if scalars else [])
        means = iter(
            distributed.all_reduce_mean([next(read) if isinstance(v, Tensor) else float(v) for v in given])
        )
        found = [(step, {name: next(means) for name in numbers}) for step, numbers in self._unread]
        for _, numbers in found:
            for name, number in numbers.items():
                self.sums.setdefault(name, []).append(number)
        self._unread = []
        return found

    def take(self) -> dict[str, float]:
        """The means of the numbers that were read since the last call."""
        means = {name: sum(values) / len(values) for name, values in self.sums.items()}
        self.sums = {}
        return means


class MetricsLog:
    """Writes metrics.jsonl in the folder of a run, and TensorBoard events if `tensorboard` is set.

    Lines that an interrupted run wrote after its last checkpoint are removed.
    """

    def __init__(self, folder: Path, length: int, step: int, tensorboard: bool):
        """`length`, the length of metrics.jsonl, and `step` are from the checkpoint from which the run resumes; both are 0 if
        there is no checkpoint."""
        self.file = folder / METRICS
        self._stream = self.file.open("a", encoding="utf-8")
        size = self.file.stat().st_size
        self.lost_lines = size < length
        """Whether the file is shorter than at the checkpoint."""
        self._stream.truncate(min(size, length))
        self._stream.seek(0, os.SEEK_END)  # truncating does not change the position
        self._events = _event_writer(folder / TENSORBOARD, step) if tensorboard else None

    def write(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a line, with floats rounded to six digits -> the line.

        Raises:
            OSError: the line cannot be written.
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
        """Syncs all lines to the disk, so that a power cut does not lose lines -> length of the file, for a checkpoint."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._stream.tell()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` has already raised the error
            self._stream.close()
        if self._events is not None:
            self._events.close()


def _event_writer(folder: Path, step: int) -> Any:
    """A writer of TensorBoard events; TensorBoard then does not show events of an interrupted run after `step`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "tensorboard is not installed: `pip install realm-lm[tensorboard]`, or set tensorboard to false"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)
