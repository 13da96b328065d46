"""ZIM archives, in which Kiwix distributes Wikipedia and other sites, become a record per page, read by libzim."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from realm.documents.formats.pages import PageError, read_page
from realm.documents.formats.records import (
    DAMAGED,
    NO_TEXT,
    NOT_INSTALLED,
    TOO_LONG,
    Limits,
    Pages,
    Record,
    Unreadable,
)
from realm.documents.wikipedia.titles import not_an_article

_EVERY = 100
"""Entries between two reports of progress."""


def read(path: Path, limits: Limits) -> Iterator[Record | Unreadable | Pages]:
    """A record for each page in HTML; redirects, pictures and other files are passed over.

    Raises:
        Unreadable: no ZIM archive, or libzim is not installed.
    """
    if find_spec("libzim") is None:
        raise Unreadable(path, NOT_INSTALLED, f"{path} needs libzim: pip install 'realm-lm[documents]'")
    from libzim.reader import Archive

    try:
        archive = Archive(path)
    except RuntimeError as error:
        raise Unreadable(path, DAMAGED, f"{path} is no ZIM archive ({error})") from None
    total = archive.all_entry_count
    for number in range(total):
        if number % _EVERY == 0:
            yield Pages(number, total)
        entry = archive._get_entry_by_id(number)
        if entry.is_redirect:
            continue
        item = entry.get_item()
        if not item.mimetype.startswith("text/html"):
            continue
        where = f"{path}: {entry.path}"
        if item.size > limits.file_bytes:
            yield Unreadable(where, TOO_LONG, f"{where}: {item.size:,} bytes, over {limits.file_bytes:,}")
            continue
        try:
            page = read_page(bytes(item.content).decode(errors="replace"))
        except PageError as error:
            yield Unreadable(where, DAMAGED, f"{where}: {error}")
            continue
        title = entry.title or page.title
        if reason := not_an_article(title):
            yield Unreadable(where, reason, f"{where} is no article")
        elif text := page.text.removeprefix(title).strip():
            yield Record(where, title, text)
        else:
            yield Unreadable(where, NO_TEXT, f"{where} has no text")
