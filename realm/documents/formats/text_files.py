"""Files that are one document each: plain text, Markdown and HTML."""

import re
from collections.abc import Iterator
from pathlib import Path

from realm.documents.formats.compressed import uncompressed
from realm.documents.formats.encodings import whole
from realm.documents.formats.pages import Page, PageError, page_record, read_page
from realm.documents.formats.records import (
    DAMAGED,
    Limits,
    Record,
    Unreadable,
)


def plain_text(path: Path, limits: Limits) -> Iterator[Record]:
    """One record; its title is the first line if that is short and followed by a blank line, else the file name."""
    text, assumed = whole(path, limits)
    text = text.strip()
    first, _, rest = text.partition("\n")
    if len(first) <= 100 and rest.strip() and not rest.partition("\n")[0].strip():
        yield Record(str(path), first.strip(), rest.strip(), path.as_posix(), assumed)
    else:
        yield Record(str(path), uncompressed(path).stem, text, path.as_posix(), assumed)


def markdown(path: Path, limits: Limits) -> Iterator[Record]:
    """One record; its title is the title in the front matter, else the first heading."""
    from markdown_it import MarkdownIt

    source, assumed = whole(path, limits)
    title = ""
    if front := _FRONT_MATTER.match(source):
        source = source[front.end() :]
        if named := re.search(r"^title:[ \t]*(.+)$", front[1] or "", re.MULTILINE):
            title = named[1].strip().strip("\"'")
    # By way of HTML, because Markdown may contain HTML.
    page = _page(path, MarkdownIt("commonmark").enable("table").render(source))
    yield page_record(path, title or page.heading, page.text, assumed)


_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)?---[ \t]*(?:\n|\Z)", re.DOTALL)


def html(path: Path, limits: Limits) -> Iterator[Record]:
    """One record; its title is the title element, else the first heading."""
    source, assumed = whole(path, limits, html=True)
    page = _page(path, source)
    yield page_record(path, page.title or page.heading, page.text, assumed)


def _page(path: Path, source: str) -> Page:
    try:
        return read_page(source)
    except PageError as error:
        raise Unreadable(path, DAMAGED, f"{path}: {error}") from None
