"""Splits a dump that was compressed as many bzip2 streams, so that several processes can read the parts of the dump.

Wikimedia's files `pages-articles-multistream.xml.bz2` have one stream for the first lines, one for each hundred pages, and one
for the last line. Each part begins with a page. Other programs compress a file as many streams too, but cut it anywhere; such a
file is not split.
"""

import bz2
import io
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from realm.documents.formats.compressed import MOST_DAMAGES, MOST_TRIED, decompressed, resumed
from realm.documents.formats.records import Reason, Unreadable
from realm.progress import progress

T = TypeVar("T")

PART_BYTES = 8 << 20
"""Smallest size of a part in compressed bytes: about 4,000 pages, which need about a minute to be parsed."""
MOST_PART_BYTES = 64 << 20
"""Size of a part above which a dump is not split, because a part is read into memory."""
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
"""The first bytes of a stream: the level of compression, and the number of the first block."""


class DumpPart(NamedTuple):
    """Bytes `start` to `end` of a dump. The first `head` bytes of the dump are the stream with its first lines."""

    path: Path
    head: int
    start: int
    end: int


def parts_of(path: Path) -> list[DumpPart]:
    """The parts of a dump, in order; an empty list if the dump is small or cannot be split.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    if path.suffix.lower() != ".bz2" or size < 2 * PART_BYTES:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        head = _head_of(data)
        if head == 0:
            return []
        starts = [0]
        places = range(PART_BYTES, size - PART_BYTES, PART_BYTES)
        for place in progress(places, total=len(places), description="find parts", unit="part", leave=False):
            found = _STREAM.search(data, place, place + PART_BYTES)
            if found and _begins_with_page(data, found.start()):
                starts.append(found.start())
        # If the first pages are damaged, later streams show that the dump can be split.
        if len(starts) == 1 and not _begins_with_page(data, head):
            return []
    parts = [DumpPart(path, head, start, end) for start, end in pairwise([*starts, size])]
    return parts if all(part.end - part.start <= MOST_PART_BYTES for part in parts) else []


def _head_of(data: mmap.mmap) -> int:
    """Length of the first stream of a dump; 0 if the stream is damaged, or has something else than the first lines."""
    decompressor, first = bz2.BZ2Decompressor(), data[:PART_BYTES]
    try:
        text = decompressor.decompress(first, max_length=1 << 16)
    except OSError:
        return 0
    is_head = decompressor.eof and b"<mediawiki" in text and b"<page>" not in text
    return len(first) - len(decompressor.unused_data) if is_head else 0


def _begins_with_page(data: mmap.mmap | bytes, start: int) -> bool:
    return _text(data, start).lstrip().startswith(b"<page>")


def _text(data: mmap.mmap | bytes, start: int) -> bytes:
    """The first bytes of the text of a stream, at most 64 kB; no bytes if the stream is damaged."""
    # A block has at most 900,000 bytes before compression, and can be larger after compression.
    try:
        return bz2.BZ2Decompressor().decompress(data[start : start + (1 << 20)], max_length=1 << 16)
    except OSError:
        return b""


def read_part(
    part: DumpPart, read: Callable[["io.BufferedReader[Any]"], Iterator[T]]
) -> Iterator[T | Unreadable]:
    """What `read` finds in a part of a dump. A damaged place becomes a problem, and reading continues with a later stream.

    Raises:
        Unreadable: the part has another problem.
    """
    for number in range(1, MOST_DAMAGES + 1):
        with _opened(part) as (file, place):
            try:
                yield from read(file)
                return
            except Unreadable as problem:
                if problem.reason != Reason.DAMAGED:
                    raise
                start = part.end if number == MOST_DAMAGES else _stream_after(part, place())
                yield resumed(problem, part.path, start)
        if start == part.end:
            return
        part = part._replace(start=start)


def _stream_after(part: DumpPart, place: int) -> int:
    """Where the first stream after `place` begins that begins with a page; the end of the part if there is no such stream."""
    place = min(place, part.end)
    with part.path.open("rb") as file:
        file.seek(place)
        data = file.read(part.end - place)
    starts = (found.start() for found in islice(_STREAM.finditer(data), MOST_TRIED))
    return place + next((start for start in starts if _begins_with_page(data, start)), len(data))


@contextmanager
def _opened(part: DumpPart) -> Iterator[tuple["io.BufferedReader[Any]", Callable[[], int]]]:
    """A dump that has only the pages of a part, and a function for the place up to which the file was read."""
    with part.path.open("rb") as file:
        head = file.read(part.head if part.start else 0)
        file.seek(part.start)
        pages = file.read(part.end - part.start)
        end = b"" if not file.read(1) else bz2.compress(b"</mediawiki>")
    compressed = io.BytesIO(head + pages + end)
    with decompressed(part.path, compressed) as reader:
        yield reader, lambda: part.start + max(0, compressed.tell() - len(head))
