"""WARC archives of web pages, such as those of Common Crawl and CC-News, become records, one per HTML page."""

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from realm.documents.formats.compressed import MOST_DAMAGES, MOST_TRIED, opened_at, resumed
from realm.documents.formats.encodings import declared_encoding, decode
from realm.documents.formats.page_target import PageError
from realm.documents.formats.pages import read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need
from realm.errors import first_line
from realm.progress import counted

_PART = 1 << 16
"""Bytes that are read at once to find a record."""
_MEMBER = b"\x1f\x8b\x08"
"""The first bytes of compressed data in a `.gz` file."""


def warc(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each HTML page with status 200; the id is the address of the page. Other records of the archive are skipped.

    Each record of a `.warc.gz` is compressed alone, so reading goes on after damage with a later record.

    Raises:
        Unreadable: the file is not a WARC archive, is damaged, or warcio is not installed. Pages before the damage are read.
    """
    need("warcio", path)
    start = found = 0
    for number in range(1, MOST_DAMAGES + 1):
        with path.open("rb") as data:
            data.seek(start)
            try:
                with opened_at(path, data) as file:
                    for one in _records(path, file, limits):
                        found += 1
                        yield one
                break
            except Unreadable as problem:
                can_go_on = problem.reason == Reason.DAMAGED and number < MOST_DAMAGES
                next_start = _record_after(path, data) if can_go_on else None
                if next_start is None:
                    raise
                start, found = next_start, found + 1
                yield resumed(problem, path, start)
    if not found:
        yield Unreadable(path, Reason.NO_TEXT, f"{path} has no HTML page with status 200")


def _record_after(path: Path, file: io.BufferedReader) -> int | None:
    """Where a record of a `.warc.gz` begins after the place up to which the file was read; None if there is none."""
    if path.suffix.lower() != ".gz":
        return None
    place, from_file = file.tell(), partial(os.pread, file.fileno())
    for _ in range(MOST_TRIED):
        while (data := from_file(_PART, place)) and (at := data.find(_MEMBER)) == -1:
            place += max(len(data) - len(_MEMBER) + 1, 1)
        if not data:
            return None
        place += at
        with suppress(zlib.error):
            if zlib.decompressobj(31).decompress(from_file(_PART, place), 5) == b"WARC/":
                return place
        place += 1
    return None


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
