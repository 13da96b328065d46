"""Decompresses files while they are read: `.gz`, `.bz2` and `.xz` with Python's modules, `.zst` with pyarrow.

A few bytes can expand to gigabytes, so the decompressed bytes are counted, and only a part of them is in memory at a time.
"""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from realm.documents.formats.records import Reason, Unreadable
from realm.errors import first_line, shortened

MOST_DAMAGES = 20
"""Number of damaged places after which a file is not read further. Each place costs time."""
MOST_TRIED = 1000
"""Number of places after a damaged one that are tried as a place from which the file can be read on."""
_SMALL = 256 << 20
"""Bytes to which a file of any size may decompress; a larger file may decompress to 100 times its size."""


def _zstd(file: IO[bytes]) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(file, "zstd")


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}

COMPRESSIONS = tuple(_OPENERS)


def is_compressed(path: Path) -> bool:
    """Whether the name of a file ends in one of `COMPRESSIONS`."""
    return path.suffix.lower() in _OPENERS


def uncompressed(path: Path) -> Path:
    """The path of a file without the extension of the compression.

    >>> uncompressed(Path("notes.txt.gz")).name, uncompressed(Path("notes.txt")).name
    ('notes.txt', 'notes.txt')
    """
    return path.with_suffix("") if is_compressed(path) else path


@contextmanager
def opened(path: Path) -> Iterator["io.BufferedReader[Any]"]:
    """The bytes of a file, decompressed if its name ends in one of `COMPRESSIONS`.

    Reading raises Unreadable if the file is damaged, or decompresses to too many bytes for its size.
    """
    with path.open("rb") as file, opened_at(path, file) as reader:
        yield reader


@contextmanager
def opened_at(path: Path, file: io.BufferedReader) -> Iterator["io.BufferedReader[Any]"]:
    """The bytes of an open file from its place on, as from `opened`."""
    if not is_compressed(path) or not file.peek(1):  # an empty file is not a damaged file
        yield file
    else:
        with decompressed(path, file) as reader:
            yield reader


def resumed(problem: Unreadable, path: Path, start: int) -> Unreadable:
    """The problem of a damaged file of compressed pages that is read on from byte `start` of the file."""
    lost = f"the pages near the damage, up to byte {start:,} of the file, are left out"
    return Unreadable(path, problem.reason, f"{problem}; {lost}")


@contextmanager
def decompressed(path: Path, data: IO[bytes]) -> Iterator["io.BufferedReader[Any]"]:
    """The decompressed bytes of `data`, which are compressed bytes of a file. The name of the file has the compression."""
    opener = _OPENERS[path.suffix.lower()]
    with opener(data) as stream, io.BufferedReader(_Decompressed(path, stream), 1 << 16) as reader:
        yield reader


class _Decompressed(io.RawIOBase):
    """Counts the decompressed bytes, and adds the name of the file to the errors of the library."""

    def __init__(self, path: Path, stream: Any):
        self._path, self._stream = path, stream
        self._size = path.stat().st_size
        self._left = self._most = max(_SMALL, 100 * self._size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except Exception as error:  # EOFError, OSError, and the library's own errors
            if isinstance(error, OSError) and error.errno:  # an error of the system, not of the library
                raise
            reason = shortened(first_line(error))
            raise Unreadable(
                self._path, Reason.DAMAGED, f"{self._path} cannot be decompressed ({reason})"
            ) from None
        self._left -= len(data)
        if self._left < 0:
            message = (
                f"{self._size:,} bytes decompress to over {self._most:,}: decompress the file and split it"
            )
            raise Unreadable(self._path, Reason.TOO_LONG, f"{self._path}: {message}")
        buffer[: len(data)] = data
        return len(data)
