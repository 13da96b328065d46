"""ZIM archives, in which Kiwix distributes Wikipedia and other sites, become records, one per page. The parser is libzim."""

import os
import posixpath
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from realm.documents.formats.page_target import PageError
from realm.documents.formats.pages import Anchor, read_page
from realm.documents.formats.records import Limits, Pages, Reason, Record, Unreadable, need
from realm.documents.formats.titles import without_title
from realm.documents.wikipedia.titles import MOST_REDIRECTS, not_an_article
from realm.text.corpus import Link

_EVERY = 100
"""Entries between two reports of progress."""

# The format of the file: https://wiki.openzim.org/wiki/ZIM_file_format
_PLACES = 32
"""Byte of the header at which it says where the list of the places of the entries begins."""
_ENTRY = np.dtype(
    {"names": ["type", "cluster"], "formats": ["<u2", "<u4"], "offsets": [0, 8], "itemsize": 12}
)
"""The first bytes of an entry."""
_NO_CONTENT = 0xFFFD
"""The smallest type of entries without content: redirects, and entries that were deleted."""
_AT_A_TIME = 1 << 20
"""Entries whose first bytes are in memory together."""


def read(path: Path, limits: Limits) -> Iterator[Record | Unreadable | Pages]:
    """A record for each HTML page, ordered by cluster (`_by_cluster`); redirects, pictures and other files are skipped.

    Disambiguation pages, lists, indexes and outlines of Wikipedia are left out, as those of a dump.

    Raises:
        Unreadable: the file is not a ZIM archive, or libzim is not installed.
    """
    need("libzim", path)
    from libzim.reader import Archive

    try:
        archive = Archive(path)
    except RuntimeError as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path} is not a ZIM archive ({error})") from None
    numbers = _by_cluster(path, archive.all_entry_count)
    for done, number in enumerate(numbers):
        if done % _EVERY == 0:
            yield Pages(done, len(numbers))
        entry = archive._get_entry_by_id(int(number))
        item = entry.get_item()
        if not item.mimetype.startswith("text/html"):
            continue
        where = f"{path}: {entry.path}"
        if item.size > limits.file_bytes:
            yield Unreadable(
                where,
                Reason.TOO_LONG,
                f"{where}: {item.size:,} bytes, over the limit of {limits.file_bytes:,}",
            )
            continue
        try:
            page = read_page(bytes(item.content).decode(errors="replace"))
        except PageError as error:
            yield Unreadable(where, Reason.DAMAGED, f"{where}: {error}")
            continue
        title = entry.title or page.title
        if reason := Reason.DISAMBIGUATION if page.is_disambiguation else not_an_article(title):
            yield Unreadable(where, reason, f"{where} is not an article")
        elif text := without_title(title, page.text):
            links = _links(archive, entry.path, page.anchors, len(page.text) - len(text))
            yield Record(where, title, text, links=links)
        else:
            yield Unreadable(where, Reason.NO_TEXT, f"{where} has no text")


def _by_cluster(path: Path, count: int) -> np.ndarray:
    """Numbers of the entries with content, ordered by cluster, and within a cluster by path.

    Entries are numbered by path, and stored in clusters of about 2 MB, which are compressed as a whole. In the order of the
    numbers, almost every page would need another cluster. libzim has an iterator over clusters, but not in Python.

    Raises:
        Unreadable: an entry is not in the file.
    """
    entry_N = np.empty(count, dtype=[("type", np.uint16), ("cluster", np.uint32)])
    try:
        with path.open("rb") as file:
            from_file = partial(os.pread, file.fileno())
            begin = int.from_bytes(from_file(8, _PLACES), "little")
            for first in range(0, count, _AT_A_TIME):
                size = min(_AT_A_TIME, count - first)
                places = np.frombuffer(from_file(8 * size, begin + 8 * first), "<u8").tolist()
                some = b"".join(from_file(_ENTRY.itemsize, place) for place in places)
                entry_N[first : first + size] = np.frombuffer(some, _ENTRY)
    except (OverflowError, ValueError) as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path} is damaged: its list of entries ({error})") from None
    number_M = np.flatnonzero(entry_N["type"] < _NO_CONTENT)
    return number_M[np.argsort(entry_N["cluster"][number_M], kind="stable")]


def _links(archive: Any, path: str, anchors: Sequence[Anchor], gone: int) -> tuple[Link, ...]:
    """The links of the page at `path` to pages of the archive; `gone` characters were removed before the text."""
    found = ((start - gone, _title_at(archive, path, address)) for start, address in anchors if start >= gone)
    return tuple(Link(start, title) for start, title in found if title)


def _title_at(archive: Any, path: str, address: str) -> str:
    """Title of the page of the archive that an address on the page at `path` leads to; "" if there is no such page."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    if parts.scheme or parts.netloc or not parts.path:
        return ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(parts.path))).lstrip("/")
    try:
        entry = archive.get_entry_by_path(target)
        for _ in range(MOST_REDIRECTS):
            entry = entry.get_redirect_entry() if entry.is_redirect else entry
        is_page = not entry.is_redirect and entry.get_item().mimetype.startswith("text/html")
    except (KeyError, RuntimeError):
        return ""
    return str(entry.title) if is_page else ""
