"""Saves the vectors of an unfinished index build, so that the next build of the same index continues after a kill.

    KB/indexes/<fingerprint>/unfinished-<model>-<share>    a record per passage: key, vector, CRC-32 of key and vector

<model> is the fingerprint of the model. <share> stands for the passages of one process: 0-of-2 is every second passage, from
passage 0 on. A training run with a frozen passage encoder saves the states of passages in its folder in the same way.

A build appends the records of each batch, and removes the file after the version is published. Records that are incomplete or
damaged, for example after a kill or a power failure, are ignored.

Axis letters: n passages to embed, D embedding.
"""

import fcntl
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from realm.errors import writing
from realm.keys import Lookup

NAME = "unfinished"
WORTH_KEEPING = 1000
"""Smallest number of passages whose vectors are saved; fewer passages are embedded in seconds."""


class Kept:
    """A file with the vectors of n passages, which have the numbers 0 to n - 1. Only this process writes the file."""

    def __init__(self, file: BinaryIO, keys_n: np.ndarray, dim: int):
        self._file, self._keys_n = file, keys_n
        self._record = np.dtype([("key", "<u8"), ("vector", "<f2", dim), ("sum", "<u4")])

    def recover(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the passages with a saved vector, and their vectors [., D] float16."""
        self._file.seek(0)
        there = self._file.read()
        records: np.ndarray = np.frombuffer(
            there, dtype=self._record, count=len(there) // self._record.itemsize
        )
        self._file.truncate(records.nbytes)  # removes an incomplete record at the end
        number, known = Lookup(self._keys_n).find(records["key"])
        good = known & (_sums(records) == records["sum"])
        return number[good], records["vector"][good]

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Appends the vectors [., D] of some passages."""
        records = np.zeros(len(numbers), dtype=self._record)
        records["key"], records["vector"] = self._keys_n[numbers], vectors
        records["sum"] = _sums(records)
        with writing(self._file.name):
            self._file.write(records.tobytes())
            self._file.flush()


def _sums(records: np.ndarray) -> np.ndarray:
    rows = records.view(np.uint8).reshape(len(records), records.dtype.itemsize)
    return np.array([zlib.crc32(row) for row in rows[:, :-4]], dtype=np.uint32)


@contextmanager
def kept(folder: Path, model: str, share: str, keys_n: np.ndarray, dim: int) -> Iterator[Kept | None]:
    """Opens the file with the vectors that `model` computed for the passages with the keys `keys_n`.

    The result is None if there are few passages, or if another process is embedding the same passages.
    """
    if len(keys_n) < WORTH_KEEPING:
        yield None
        return
    name = folder / f"{NAME}-{model}-{share}"
    with writing(name):
        opened = name.open("a+b")
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = Kept(file, keys_n, dim)
        except OSError:
            mine = None
        yield mine


def forget(folder: Path, model: str = "*") -> None:
    """Removes the saved vectors of a model, or of all models, after the build or if the vectors are no longer needed."""
    for file in folder.glob(f"{NAME}-{model}-*"):
        with suppress(OSError):
            file.unlink()
