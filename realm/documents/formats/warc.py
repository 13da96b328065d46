"""WARC archives of web pages, such as those of Common Crawl and CC-News, become records, one per HTML page."""

import io
import mmap
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realm.documents.formats.compressed import decompressed, is_compressed
from realm.documents.formats.encodings import declared_encoding, decode
from realm.documents.formats.page_target import PageError
from realm.documents.formats.pages import read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need
from realm.errors import first_line
from realm.progress import counted

MOST_DAMAGES = 20
"""Number of damaged places after which an archive is not read further. Each place costs time."""
_MOST_TRIED = 1000
"""Number of places after a damaged one that are tried as the beginning of a record."""
_MEMBER = b"\x1f\x8b\x08"
"""The first bytes of compressed data in a `.gz` file."""


def warc(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each HTML page with status 200; the id is the address of the page. Other records of the archive are skipped.

    Each record of a `.warc.gz` is compressed alone, so reading goes on after damage with the next record that is intact.

    Raises:
        Unreadable: the file is not a WARC archive, is damaged, or warcio is not installed. Pages before the damage are read.
    """
    need("warcio", path)
    start = found = 0
    for number in range(1, MOST_DAMAGES + 1):
        with path.open("rb") as compressed, _opened(path, compressed, start) as file:
            try:
                for one in _records(path, file, limits):
                    found += 1
                    yield one
                break
            except Unreadable as problem:
                next_start = None if number == MOST_DAMAGES else _record_after(path, compressed)
                if problem.reason != Reason.DAMAGED or next_start is None:
                    raise
                start = next_start
                lost = f"the pages after the damage, up to byte {start:,} of the file, are left out"
                yield Unreadable(path, problem.reason, f"{problem}; {lost}")
    if not found:
        yield Unreadable(path, Reason.NO_TEXT, f"{path} has no HTML page with status 200")


@contextmanager
def _opened(path: Path, file: io.BufferedReader, start: int) -> Iterator["io.BufferedReader[Any]"]:
    """The decompressed bytes of a file from a place of the compressed file on."""
    file.seek(start)
    if is_compressed(path) and file.peek(1):  # an empty file is not a damaged file
        with decompressed(path, file) as reader:
            yield reader
    else:
        yield file


def _record_after(path: Path, file: io.BufferedReader) -> int | None:
    """Where the first record of a `.warc.gz` begins after the place up to which the file was read; None if there is none."""
    if path.suffix.lower() != ".gz":
        return None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = file.tell()
        for _ in range(_MOST_TRIED):
            place = data.find(_MEMBER, place)
            if place == -1:
                return None
            if _begins_a_record(data, place):
                return place
            place += 1
    return None


def _begins_a_record(data: mmap.mmap, start: int) -> bool:
    try:
        return zlib.decompressobj(31).decompress(data[start : start + 4096], 5) == b"WARC/"
    except zlib.error:
        return False


def _records(path: Path, file: "io.BufferedReader[Any]", limits: Limits) -> Iterator[Record | Unreadable]:
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    class Records(ArchiveIterator):
        # warcio prints this text for each damaged record, between the lines of the progress bar.
        INC_RECORD = ""

    try:
        records = Records(file)
        for one in records:
            if one.length is None:  # its content would be the rest of the file
                raise Unreadable(path, Reason.DAMAGED, f"{path} is damaged (a record has no Content-Length)")
            kind = one.http_headers.get_header("Content-Type", "") if one.http_headers else ""
            if one.rec_type != "response" or "html" not in kind or one.http_headers.get_statuscode() != "200":
                continue
            address = one.rec_headers.get_header("WARC-Target-URI", "")
            data = one.content_stream().read(limits.file_bytes + 1)
            try:
                yield _record(f"{path}: {address}", address, data, limits)
            except Unreadable as problem:
                yield problem
        if records.err_count:
            many = counted(records.err_count, "record")
            yield Unreadable(path, Reason.DAMAGED, f"{path} is damaged ({many} with a wrong Content-Length)")
    except Unreadable:
        raise
    except (ArchiveLoadFailed, EOFError, ValueError) as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path} is damaged ({first_line(error)})") from None


def _record(where: str, address: str, data: bytes, limits: Limits) -> Record:
    if len(data) > limits.file_bytes:
        raise Unreadable(where, Reason.TOO_LONG, f"{where}: the page has over {limits.file_bytes:,} bytes")
    text, assumed = decode(data, where, declared_encoding(data, where))
    try:
        page = read_page(text)
    except PageError as error:
        raise Unreadable(where, Reason.DAMAGED, f"{where}: {error}") from None
    if not page.text:
        raise Unreadable(where, Reason.NO_TEXT, f"{where} has no text")
    return Record(where, page.title or page.main_heading or address, page.text, address or None, assumed)
