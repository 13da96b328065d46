"""WARC archives of web pages, such as those of Common Crawl and CC-News, become records, one per HTML page."""

from collections.abc import Iterator
from pathlib import Path

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import declared_encoding, decode
from realm.documents.formats.page_target import PageError
from realm.documents.formats.pages import read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need
from realm.errors import first_line
from realm.progress import counted


def warc(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each HTML page with status 200; the id is the address of the page. Other records of the archive are skipped.

    Raises:
        Unreadable: the file is not a WARC archive, is damaged, or warcio is not installed. Pages before the damage are read.
    """
    need("warcio", path)
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    class Records(ArchiveIterator):
        # warcio prints this text for each damaged record, between the lines of the progress bar.
        INC_RECORD = ""

    with opened(path) as file:
        try:
            records, pages = Records(file), 0
            for one in records:
                if one.length is None:  # its content would be the rest of the file
                    raise Unreadable(
                        path, Reason.DAMAGED, f"{path} is damaged (a record has no Content-Length)"
                    )
                kind = one.http_headers.get_header("Content-Type", "") if one.http_headers else ""
                if (
                    one.rec_type != "response"
                    or "html" not in kind
                    or one.http_headers.get_statuscode() != "200"
                ):
                    continue
                address = one.rec_headers.get_header("WARC-Target-URI", "")
                pages += 1
                data = one.content_stream().read(limits.file_bytes + 1)
                try:
                    yield _record(f"{path}: {address}", address, data, limits)
                except Unreadable as problem:
                    yield problem
            if records.err_count:
                many = counted(records.err_count, "record")
                yield Unreadable(
                    path, Reason.DAMAGED, f"{path} is damaged ({many} with a wrong Content-Length)"
                )
            elif not pages:
                yield Unreadable(path, Reason.NO_TEXT, f"{path} has no HTML page with status 200")
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
