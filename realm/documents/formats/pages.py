"""HTML to text: the visible text of a page without scripts and navigation.

The parser is libxml2 through lxml, which tokenizes by the rules of HTML5. It emits tags and text as events, without a tree, in
time linear in the page. Pages with too deeply nested elements are refused."""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lxml import etree

from realm.documents.formats.compressed import uncompressed
from realm.documents.formats.records import NO_TEXT, Record, Unreadable


class Page(NamedTuple):
    """The title element, the first heading, and the text with blank lines between its blocks."""

    title: str
    heading: str
    text: str


DEEPEST = 1_000
"""Deepest nesting of elements; browsers flatten elements nested deeper than 512."""
_LONGEST_TITLE = 1_000
_FED = 1 << 16


class PageError(ValueError):
    """A page that is refused."""


def read_page(source: str) -> Page:
    """The visible text of a page, with blank lines between blocks and " | " between the cells of a row.

    Raises:
        PageError: elements are nested deeper than `DEEPEST`.
    """
    taken = _Taken()
    if "<" in source or "&" in source:
        _parse(source, taken)
    else:  # without markup: creating a parser is slow
        taken.data(source)
    lines = (_SPACES.sub(" ", line).strip() for line in "".join(taken.text).split("\n"))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    title, heading = (" ".join("".join(words).split()) for words in (taken.title, taken.heading))
    if len(title) > _LONGEST_TITLE:  # an unclosed title element contains the whole page
        title, text = "", f"{title}\n\n{text}".strip()
    return Page(title, heading, text)


def page_record(path: Path, title: str, text: str, assumed: str | None = None) -> Record:
    """The record of a page in a file; without a title, the file name is the title.

    Raises:
        Unreadable: it has no text.
    """
    title = title or uncompressed(path).stem
    # The title is stored beside the text; without this the first passage would have it twice.
    if text == title or text.startswith(f"{title}\n"):
        text = text[len(title) :].lstrip()
    if not text:
        raise Unreadable(path, NO_TEXT, f"{path} has no text, only a title or markup")
    return Record(str(path), title, text, path.as_posix(), assumed)


def _parse(source: str, taken: "_Taken") -> None:
    parser = etree.HTMLParser(target=taken, encoding="utf-8", huge_tree=True)
    for start in range(
        0, len(source), _FED
    ):  # in parts, so that errors are raised before the end of the page
        parser.feed(source[start : start + _FED].encode())
    with suppress(etree.XMLSyntaxError):  # a page without any element or text
        parser.close()


_SPACES = re.compile(r"[^\S\n]+")
_WHITE = re.compile(r"\s+")
_BLOCK = frozenset(
    "address article aside blockquote body caption dd dt dl details dialog div fieldset figcaption figure footer form"
    " h1 h2 h3 h4 h5 h6 header hr li main ol ul p pre section summary table tbody tfoot thead tr".split()
)
_HEADING = frozenset("h1 h2 h3 h4 h5 h6".split())
_UNSEEN = frozenset("script style template iframe".split())
_ASIDE = frozenset("nav select svg".split())
"""Elements that are skipped, unless they contain the text of the page because they were never closed."""
_HOLDS_LINKS = frozenset("aside div dl footer header ol section table ul".split())
_NAVIGATION = re.compile(
    r"(doc-?)?nav(bar|header|footer|igation)?|breadcrumbs?|pagination|menu|menubar", re.IGNORECASE
)
"""A role or class of `_HOLDS_LINKS` that are not taken, as those above are not."""
_OWN_TEXT = frozenset("article h1 main p".split())


class _Taken:
    """Target of the parser: collects the title, the first heading and the text, element by element."""

    def __init__(self) -> None:
        self.title: list[str] = []
        self.heading: list[str] = []
        self.text: list[str] = []
        self._depth = 0
        self._open = Counter[str]()  # open elements that change the handling of text, by kind
        self._asides: list[tuple[int, int]] = []  # depth of each open one, and the start of its text
        self._titles = 0
        self._heading_read = False
        self._row_started = False
        self._cell_has_text = False
        self._paragraph_ended = False  # in a cell: a blank line follows if text does

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise PageError(f"elements are nested over {DEEPEST:,} deep")
        self._open[_kind(tag)] += 1
        self._titles += tag == "title" and not self._open["svg"]
        named = f"{attributes.get('role', '')} {attributes.get('class', '')}".split()
        if tag in _ASIDE or (tag in _HOLDS_LINKS and any(map(_NAVIGATION.fullmatch, named))):
            self._asides.append((self._depth, len(self.text)))
        elif tag in _OWN_TEXT:
            self._asides.clear()
        if tag == "p" and self._in_cell():
            self._paragraph_ended = self._cell_has_text
        elif tag in _BLOCK:
            self._break()
        elif tag == "br":
            self.text.append("\n")
        elif tag in ("td", "th"):
            self.text.append(" | " if self._row_started else "\n\n")
            self._row_started = True
            self._cell_has_text = self._paragraph_ended = False

    def end(self, tag: str) -> None:
        if self._asides and self._asides[-1][0] == self._depth:
            del self.text[self._asides.pop()[1] :]
        self._depth -= 1
        self._open[_kind(tag)] -= 1
        if tag in _HEADING:
            self._heading_read = self._heading_read or bool("".join(self.heading).strip())
        if tag == "p" and self._in_cell():
            self._paragraph_ended = self._cell_has_text
        elif tag in _BLOCK:
            self.text.append("\n\n")

    def data(self, data: str) -> None:
        if self._open["unseen"]:
            return
        if self._open["title"]:
            if self._titles == 1 and not self._open["svg"]:
                self.title.append(data)
            return
        if self._open["heading"] and not self._heading_read and not self._asides:
            self.heading.append(data)
        if data and not data.isspace():
            if self._paragraph_ended:
                self._break()
            self._cell_has_text = True
        self.text.append(data if self._open["pre"] else _WHITE.sub(" ", data))

    def _in_cell(self) -> bool:
        return self._open["td"] > 0 or self._open["th"] > 0

    def _break(self) -> None:
        self.text.append("\n\n")
        self._row_started = self._paragraph_ended = False

    def close(self) -> None:
        """Called by the parser at the end; the results are attributes."""


def _kind(tag: str) -> str:
    if tag in _UNSEEN:
        return "unseen"
    return "heading" if tag in _HEADING else tag
