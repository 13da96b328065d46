"""ZIM archives, in which Kiwix distributes Wikipedia and other sites, become records, one per page. The parser is libzim."""

import hashlib
import os
import posixpath
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from realm.documents.formats.page_target import PageError
from realm.documents.formats.pages import Anchor, read_page
from realm.documents.formats.records import Clusters, Limits, Pages, Reason, Record, Unreadable, need
from realm.documents.formats.titles import without_title
from realm.documents.wikipedia.titles import MOST_REDIRECTS, not_an_article
from realm.errors import first_line, shortened
from realm.progress import progress
from realm.text.corpus import Link

PART_BYTES = 8 << 20
"""Size of the parts into which an archive is divided: a hundred to a thousand articles, which need seconds to be parsed."""
_EVERY = 100
"""Entries between two reports of progress."""

# The format of the file: https://wiki.openzim.org/wiki/ZIM_file_format
_CLUSTER_COUNT, _PLACES, _CHECKSUM, _HEADER = 28, 32, 72, 80
"""Bytes of the header with the number of clusters, and with the places of the list of entries and of the checksum, which is in
the last 16 bytes of the file; and the length of the header."""
_CHECKED = 1 << 20
"""Bytes of the file that are in memory together while the checksum is computed."""
_ENTRY = np.dtype(
    {"names": ["type", "cluster"], "formats": ["<u2", "<u4"], "offsets": [0, 8], "itemsize": 12}
)
"""The first bytes of an entry."""
_NO_CONTENT = 0xFFFD
"""The smallest type of entries without content: redirects, and entries that were deleted."""
_AT_A_TIME = 1 << 16
"""Entries whose first bytes are in memory together."""


def is_archive(path: Path) -> bool:
    """Whether the name of a file is that of a ZIM archive."""
    return path.suffix.lower() == ".zim"


def parts_of(path: Path) -> list[Clusters]:
    """The parts of an archive, in order; an empty list if the archive is small, was cut, has no checksum or no cluster, or if
    libzim is not installed.

    Raises:
        Unreadable: the archive is damaged (`check`).
        OSError: the file cannot be read.
    """
    state = path.stat()
    size, time = state.st_size, state.st_mtime_ns
    if size < 2 * PART_BYTES or find_spec("libzim") is None:
        return []
    with path.open("rb") as file:
        head = file.read(_HEADER)
    count = int.from_bytes(head[_CLUSTER_COUNT : _CLUSTER_COUNT + 4], "little")
    if not _has_checksum(head, size) or count == 0:
        return []
    check(path)
    parts = min(size // PART_BYTES, count)
    # A damaged entry can have any number as its cluster; the last part reports the damage.
    ends = [*(count * part // parts for part in range(parts)), 1 << 32]
    return [Clusters(first, end - 1, size, time) for first, end in pairwise(ends)]


def check(path: Path, shown: bool = True) -> None:
    """Compares the content of an archive with its checksum, because libzim can decompress a damaged cluster to wrong words.

    With `shown`, a progress bar counts megabytes. An archive that was cut is not checked: libzim refuses it.

    Raises:
        Unreadable: the content does not match the checksum, or libzim is not installed.
        OSError: the file cannot be read.
    """
    need("libzim", path)
    size, digest = path.stat().st_size, hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        if not _has_checksum(file.read(_HEADER), size):
            return
        file.seek(0)
        parts = range(0, size - 16, _CHECKED)
        name = f"check {shortened(path.name, 30)}"
        for start in progress(parts, total=len(parts), description=name, unit="MB", shown=shown, leave=False):
            digest.update(file.read(min(_CHECKED, size - 16 - start)))
        if file.read(17) != digest.digest():
            message = f"{path} is damaged (it does not match its checksum): copy or download it again"
            raise Unreadable(path, Reason.DAMAGED, message)


def _has_checksum(head: bytes, size: int) -> bool:
    """Whether an archive of `size` bytes has its checksum at the end, where the header says that it is."""
    return int.from_bytes(head[_CHECKSUM:_HEADER], "little") == size - 16


def read(
    path: Path, limits: Limits, clusters: Clusters | None = None
) -> Iterator[Record | Unreadable | Pages]:
    """A record for each HTML page, ordered by cluster (`_by_cluster`); redirects, pictures and other files are skipped.

    With `clusters`, only the pages in these clusters are read. Disambiguation pages, lists, indexes and outlines of Wikipedia
    are left out; a dump is read by the same rule.

    Raises:
        Unreadable: the file is not a ZIM archive, or was changed after it was divided, or libzim is not installed.
    """
    need("libzim", path)
    from libzim.reader import Archive

    state = path.stat()
    size, time = state.st_size, state.st_mtime_ns
    if clusters is not None and (size, time) != (clusters.size, clusters.time):
        raise Unreadable(path, Reason.DAMAGED, f"{path} was changed while it was read")
    try:
        archive = Archive(path)
        number_M, cluster_M = _by_cluster(path, archive.all_entry_count, size, time)
    except RuntimeError as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path} is not a ZIM archive ({error})") from None
    if clusters is not None:
        first, last = np.array([clusters.first, clusters.last], dtype=cluster_M.dtype)
        number_M = number_M[np.searchsorted(cluster_M, first) : np.searchsorted(cluster_M, last, "right")]
    for done, number in enumerate(number_M):
        if done % _EVERY == 0:
            yield Pages(done, len(number_M))
        where = f"{path}: entry {number}"
        try:
            entry = archive._get_entry_by_id(int(number))
            where = f"{path}: {entry.path}"
            item = entry.get_item()
            if item.mimetype.startswith("text/html"):
                yield _record(archive, entry, item, where, limits)
        except Unreadable as problem:
            yield problem
        except RuntimeError as error:  # libzim cannot decompress the cluster of the entry
            yield Unreadable(where, Reason.DAMAGED, f"{where} cannot be read ({first_line(error)})")


def _record(archive: Any, entry: Any, item: Any, where: str, limits: Limits) -> Record:
    if item.size > limits.file_bytes:
        message = f"{where}: {item.size:,} bytes, over the limit of {limits.file_bytes:,}"
        raise Unreadable(where, Reason.TOO_LONG, message)
    try:
        # All pages are in UTF-8, also those that declare the encoding of the site from which they were made.
        page = read_page(bytes(item.content).decode(errors="replace"))
    except PageError as error:
        raise Unreadable(where, Reason.DAMAGED, f"{where}: {error}") from None
    title = entry.title or page.title
    if reason := Reason.DISAMBIGUATION if page.is_disambiguation else not_an_article(title):
        raise Unreadable(where, reason, f"{where} is not an article")
    text = without_title(title, page.text)
    if not text:
        raise Unreadable(where, Reason.NO_TEXT, f"{where} has no text")
    links = _links(archive, entry.path, page.anchors, len(page.text) - len(text))
    return Record(where, title, text, links=links)


@lru_cache(maxsize=1)  # a process reads several parts of an archive
def _by_cluster(path: Path, count: int, size: int, time: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the entries with content, ordered by cluster, and within a cluster by path; and the cluster of each.

    Entries are numbered by path, and stored in clusters of about 2 MB, which are compressed as a whole. In the order of the
    numbers, almost every page would need another cluster. libzim has an iterator over clusters, but not in Python. `size` and
    `time` are those of the file, so that the result is not used for another file.

    Raises:
        Unreadable: an entry is not in the file.
    """
    entry_N = np.empty(count, dtype=[("type", np.uint16), ("cluster", np.uint32)])
    try:
        with path.open("rb") as file:
            from_file = partial(os.pread, file.fileno())
            begin = int.from_bytes(from_file(8, _PLACES), "little")
            for first in range(0, count, _AT_A_TIME):
                number = min(_AT_A_TIME, count - first)
                places = np.frombuffer(from_file(8 * number, begin + 8 * first), "<u8").tolist()
                some = b"".join(from_file(_ENTRY.itemsize, place) for place in places)
                entry_N[first : first + number] = np.frombuffer(some, _ENTRY)
    except (OverflowError, ValueError) as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path} is damaged: its list of entries ({error})") from None
    number_M = np.flatnonzero(entry_N["type"] < _NO_CONTENT).astype(np.uint32)
    cluster_M = entry_N["cluster"][number_M]
    order_M = np.argsort(cluster_M, kind="stable")
    return number_M[order_M], cluster_M[order_M]


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
