"""WARC archives of web pages, such as those of Common Crawl and CC-News, become records, one per HTML page."""

from collections.abc import Iterator
from pathlib import Path

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import declared_encoding, decode
from realm.documents.formats.pages import PageError, read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need
from realm.errors import first_line


def warc(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each HTML page with status 200; the id is the address of the page. Other records of the archive are skipped.

    Raises:
        Unreadable: the file is not a WARC archive, is damaged, or warcio is not installed. Pages before the damage are read.
    """
    need("warcio", path)
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    class Records(ArchiveIterator):
        INC_RECORD = (
            ""  # warcio prints this text for each damaged record, between the lines of the progress bar
        )

    with opened(path) as file:
        try:
            for one in Records(file):
                kind = one.http_headers.get_header("Content-Type", "") if one.http_headers else ""
                if (
                    one.rec_type != "response"
                    or "html" not in kind
                    or one.http_headers.get_statuscode() != "200"
                ):
                    continue
                address = one.rec_headers.get_header("WARC-Target-URI", "")
                data = one.content_stream().read(limits.file_bytes + 1)
                try:
                    yield _record(f"{path}: {address}", address, data, limits)
                except Unreadable as problem:
                    yield problem
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
