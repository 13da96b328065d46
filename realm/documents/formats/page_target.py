"""Collects the visible text of a page, without scripts, navigation and what else is around its content. Of the
pages of MediaWiki, the text of the article is collected (`realm.documents.formats.mediawiki`).

The parser is libxml2 (through lxml), which tokenizes by the rules of HTML5. The parser emits tags and text as events and builds
no tree, so the time is linear in the length of the page. A page with too deeply nested elements is refused.

`realm.documents.formats.pages` makes a page of what is collected."""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from lxml import etree

from realm.documents.formats import mediawiki
from realm.documents.formats.grid import cell_of
from realm.documents.formats.page_marks import (
    as_code,
    first_headings,
    heading_mark,
    link_mark,
    plain,
    without_marks,
)
from realm.documents.formats.rows import Table, are_headings
from realm.text.fields import read_value

DEEPEST = 1_000
"""Deepest allowed nesting of elements; browsers flatten elements that are nested deeper than 512."""
_FED = 1 << 16


class PageError(ValueError):
    """The page is refused, because its elements are nested too deeply."""


def collected(source: str) -> "PageTarget":
    """What is collected of a page."""
    if "<" not in source and "&" not in source:  # there is no markup, and creating a parser is slow
        taken = PageTarget()
        taken.data(source)
        return taken
    found = (tag.group("furniture", "slash") for tag in _CLOSED_TAGS.finditer(source))
    tags = Counter((name.lower(), not slash) for name, slash in found if name)
    unclosed = (name for name, is_start in tags if is_start and tags[name, True] > tags[name, False])
    taken = PageTarget(frozenset(unclosed))
    _parse(source, taken)
    if taken.has_lost_most:
        taken = PageTarget(keeps_furniture=True)
        _parse(source, taken)
    return taken


def _parse(source: str, taken: "PageTarget") -> None:
    parser = etree.HTMLParser(target=taken, encoding="utf-8", huge_tree=True)
    for start in range(0, len(source), _FED):  # parts, so that an error is raised before the end of the page
        parser.feed(source[start : start + _FED].encode())
    with suppress(etree.XMLSyntaxError):  # the page has neither elements nor text
        parser.close()


_SEVERAL_BLOCKS = "\n\n"
"""Between two blocks in the text that is collected."""
_WHITE = re.compile(r"\s+")
_BLOCK = frozenset(
    "address article aside blockquote body caption dd dt dl details dialog div fieldset figcaption figure footer form"
    " h1 h2 h3 h4 h5 h6 header hr li main ol ul p pre section summary table tbody tfoot thead tr".split()
)
_ROW_GROUPS = frozenset("tbody tfoot thead".split())
_CELLS = frozenset("td th".split())
_HEADING = frozenset("h1 h2 h3 h4 h5 h6".split())
_UNSEEN = frozenset("script style template iframe".split())
_ASIDE = frozenset("nav select svg".split())
"""Elements that are skipped. Exception: an element with one of `_OWN_TEXT` inside was perhaps never closed, and is kept unless
most of its text is in links."""
_HOLDS_LINKS = frozenset("aside div dl footer header ol section table ul".split())
_NAVIGATION = re.compile(
    r"(doc-?)?nav(bar|header|footer|igation)?|breadcrumbs?|pagination|menu|menubar", re.IGNORECASE
)
"""Roles and classes of navigation. An element of `_HOLDS_LINKS` with one of these roles or classes is skipped."""
_OWN_TEXT = frozenset("article h1 p".split())
_CLOSED_TAGS = re.compile(
    r"<!--(?:-?>|.*?(?:--!?>|\Z))"
    r"|<(iframe|script|style|textarea|title|xmp)\b.*?(?:</\1\b|\Z)"
    r"|<(?P<slash>/?)(?P<furniture>aside|button|footer|noscript)\b",
    re.IGNORECASE | re.DOTALL,
)
"""A comment, an element without tags, or a tag of furniture that needs an end tag. If a page has fewer end tags than start
tags, only those elements are left out of which most of the text is in links."""
_CONTENT = frozenset("article blockquote section".split())
"""Elements whose asides and footers are notes on the text, such as footnotes."""
_OF_FURNITURE = frozenset(("", "complementary", "contentinfo"))
"""Roles of asides and footers; those with another role, such as "note", are text."""
_UNFOLDS = frozenset(("region", "tabpanel"))
"""Roles of elements that are hidden until the reader unfolds them."""
_NOT_SHOWN = re.compile(r"display\s*:\s*none", re.IGNORECASE)
_LABELS = frozenset("dt p summary".split())
"""Elements in which a button is part of the text."""
_ITEMS = frozenset("dd li td".split())
"""Elements in which a button is part of the text if other text is beside the button."""
_UNFOLDING = "aria-controls", "aria-expanded"
"""Attributes of buttons that unfold text, such as the answer to the question on the button."""
_LINE_NUMBERS = re.compile(r"(rouge-)?gutter|blob-num|line-?(no|num)\w*|ln|lntd?")
"""Classes of the numbers of the lines in program code."""
_NO_WORDS = re.compile(r"[\d\s.:|]*")
_MOST_OUTSIDE, _MOST_LEFT_OUT = 3, 10
"""Most text outside of the main element, and most text of furniture, for each character of the text that is kept; if there is
more, the page is built otherwise than it says."""
_FOR_BROWSERS = re.compile(
    r"(apple|msapplication|csrf|google|mobile-web-app|twitter)[-:].*|viewport|theme-color|color-scheme|robots|\w*bot|generator"
    r"|referrer|format-detection|handheldfriendly|application-name",
    re.IGNORECASE,
)
"""Names of `<meta>` elements that are for browsers and search engines, and say nothing about the document."""
_PERMALINKS = frozenset("¶ # § 🔗".split())
"""Signs behind a heading that are links to the heading itself, as Sphinx and MkDocs write them."""
_MOST_META = 1_000


class _Cell(NamedTuple):
    """A cell of the row that is being read."""

    place: int
    """Place in the collected text of the separator with which the cell begins."""
    is_heading: bool
    colspan: str | None
    rowspan: str | None


_Kind = Literal["navigation", "furniture", "unclosed", "line numbers"]
"""Kinds of elements that may be left out; "unclosed" is furniture without an end tag."""


class _Aside(NamedTuple):
    """An open element that may be left out, and the counts, the level and the address of `PageTarget` at its start."""

    depth: int
    start: int
    """Number of the pieces of text before the element."""
    kind: "_Kind"
    letters: int
    linked: int
    words: int
    own: int
    level: str | None
    address: str | None


class _Main(NamedTuple):
    """The main element, and the counts of `PageTarget` at its start; at its end, what was counted inside."""

    place: slice
    """Its pieces of text."""
    letters: int
    linked: int
    left: int


class _Table:
    """An open table, and the row that is being read."""

    def __init__(self) -> None:
        self.cells: list[_Cell] = []
        self.has_table = False
        """Whether a cell of the row has a table."""
        self.rows = Table()
        self._headings: list[tuple[int, list[str]]] = []
        """Place and parts in the collected text of each row of headings, until a sentence has the headings."""

    def end_row(self, text: list[str]) -> None:
        """Makes a sentence of the row at the end of `text`, if it can be one (`Table`).

        An empty row is removed, and so are the rows of headings if a sentence follows.
        """
        cells = [cell for cell in self.cells if cell.place < len(text)]
        ends = [*(cell.place for cell in cells[1:]), len(text)]
        if self.has_table:  # the text of a table in a table is joined once, not by each table around it
            words = [_SEVERAL_BLOCKS] * len(cells)
        else:
            words = [
                "".join(text[cell.place + 1 : end]).strip() for cell, end in zip(cells, ends, strict=False)
            ]
        read = [cell_of(one, *cell[1:]) for one, cell in zip(words, cells, strict=True)]
        if are_headings(read):
            read = [
                one if _SEVERAL_BLOCKS in one.text else one._replace(text=plain(one.text)) for one in read
            ]
        self.cells, self.has_table = [], False
        row = self.rows.row(read)
        if row.is_headings:
            self._headings.append((cells[0].place, text[cells[0].place :]))
        elif cells and not any(words):  # only the separators of empty cells
            del text[cells[0].place :]
        elif row.sentence:
            text[cells[0].place :] = ["\n\n", row.sentence]
            for place, parts in self._headings:
                if text[place : place + len(parts)] == parts:
                    text[place : place + len(parts)] = [""] * len(parts)
            self._headings = []


class PageTarget:
    """Target of the parser (an interface of lxml): collects the title, the headings and the text, element by element."""

    def __init__(self, unclosed: frozenset[str] = frozenset(), *, keeps_furniture: bool = False) -> None:
        self._unclosed = unclosed
        self._keeps_furniture = keeps_furniture
        self._letters = self._linked = self._left = 0
        """Characters of text, characters of text in links, and characters of furniture outside of links."""
        self._words = self._own = 0
        """Pieces of text with words, and elements of `_OWN_TEXT`."""
        self._mains = self._main_depth = 0
        """Number of main elements, and depth of the open one."""
        self._main = _Main(slice(0), 0, 0, 0)
        self._reads_main = False
        """Whether the text of the page is that of its main element, which is known at the end."""
        self.title: list[str] = []
        self.text: list[str] = []
        self.fields: dict[str, Any] = {}
        self.addresses: list[str] = []
        """Address of each link, by number of the link."""
        self.is_disambiguation = False
        self._depth = 0
        self._open = Counter[str]()  # open elements that change the handling of text, by kind
        self._asides: list[_Aside] = []
        self._titles = 0
        self._level: str | None = None  # level of a heading that has begun, and has no text yet
        self._address: str | None = None  # address of a link that has begun, and has no text yet
        self._tables: list[_Table] = []
        """The open tables, the innermost last."""
        self._row_started = False
        self._cell_has_text = False
        self._paragraph_ended = False  # in a cell: if more text follows, a blank line comes first
        self._of_mediawiki = False
        self._buttons: list[slice] = []
        """Pieces of text of the buttons in `_ITEMS` that are kept if other words are in the same block."""
        self._before_block = 0
        """Characters of text before the block or cell that began or ended last."""
        self._left_out = 0
        """Depth of the open element of a page of MediaWiki that is left out; 0 if there is none."""
        self._heading: tuple[int, int] | None = None
        """Of the open heading of a page of MediaWiki: its level, and where its text starts."""
        self._sources: tuple[int, int] | None = None
        """The same of the heading of the open section that is left out."""
        self._footer: int | None = None
        """Where the text of the open footer starts, which mwoffliner puts between two comments."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise PageError(f"elements are nested over {DEEPEST:,} deep")
        if self._left_out:
            return
        if self._of_mediawiki:
            self._start_of_mediawiki(tag, attributes)
            if self._left_out:
                return
        else:
            self._of_mediawiki = mediawiki.is_page(tag, attributes)
        self._open[_kind(tag)] += 1
        self._titles += tag == "title" and not self._open["svg"]
        if tag == "a":
            self._address = attributes.get("href")
        elif tag == "meta":
            self._take_meta(attributes.get("name", "").strip(), attributes.get("content", "").strip())
        self._own += tag in _OWN_TEXT
        if tag in _BLOCK or tag in _CELLS:
            self._end_line()
        is_main = tag == "main" or attributes.get("role") == "main"
        if is_main and not self._main_depth and not self._tables:
            self._start_main()
        elif kind := self._kind_of_aside(tag, attributes):
            counts = self._letters, self._linked, self._words, self._own
            begun = self._level, self._address
            self._asides.append(_Aside(self._depth, len(self.text), kind, *counts, *begun))
        if tag == "table":
            if self._tables:
                self._tables[-1].has_table = True
            self._tables.append(_Table())
        elif tag in _ROW_GROUPS and self._tables:
            self._tables[-1].rows.end_group()
            if tag == "tfoot":  # the totals, which older pages have above the other rows
                self._tables[-1].rows.end_headings()
        if tag == "p" and self._in_cell():
            self._paragraph_ended = self._cell_has_text
        elif tag in _BLOCK:
            self._break()
            self._level = tag[1] if tag in _HEADING and not self._in_cell() else None
        elif tag == "br":
            self.text.append("\n")
        elif tag in _CELLS:
            if self._tables:
                spans = attributes.get("colspan"), attributes.get("rowspan")
                self._tables[-1].cells.append(_Cell(len(self.text), tag == "th", *spans))
            self.text.append(" | " if self._row_started else "\n\n")
            self._row_started = True
            self._cell_has_text = self._paragraph_ended = False
            self._level = None  # a heading around a table is never closed

    def _kind_of_aside(self, tag: str, attributes: Mapping[str, str]) -> "_Kind | None":
        """As what the element may be left out."""
        if not self._keeps_furniture and (self._is_furniture(tag, attributes) or _is_hidden(tag, attributes)):
            return "unclosed" if tag in self._unclosed else "furniture"
        if tag in _ASIDE:
            return "navigation"
        of_code = tag in _CELLS or self._open["pre"]
        names = _NAVIGATION if tag in _HOLDS_LINKS else _LINE_NUMBERS if of_code else None
        if names is None or not attributes:
            return None
        named = f"{attributes.get('role', '')} {attributes.get('class', '')}".split()
        if not any(map(names.fullmatch, named)):
            return None
        return "navigation" if tag in _HOLDS_LINKS else "line numbers"

    def _is_furniture(self, tag: str, attributes: Mapping[str, str]) -> bool:
        """Whether the element is no part of the content of the page."""
        if tag == "button":  # the text of a heading can be a button that unfolds the text below
            is_label = any(self._open[one] for one in _LABELS) or any(one in attributes for one in _UNFOLDING)
            return self._level is None and not is_label
        if tag in ("aside", "footer"):
            role = attributes.get("role") or attributes.get("epub:type") or ""
            in_content = self._main_depth or any(self._open[one] for one in _CONTENT)
            return not in_content and role in _OF_FURNITURE
        return tag == "noscript"

    def _end_aside(self, tag: str) -> None:
        """Removes the text of the innermost open aside, if it is one."""
        aside = self._asides.pop()
        letters, linked = self._letters - aside.letters, self._linked - aside.linked
        is_of_links = 2 * linked > letters
        match aside.kind:
            case "line numbers" if self._words > aside.words:
                return
            case "navigation" if self._own > aside.own and not is_of_links:
                return
            case "unclosed" if not is_of_links:
                return
            case "furniture":
                self._left += max(letters - linked, min(letters, 1))  # also if the page has links alone
        self._letters, self._linked = aside.letters, aside.linked
        # The marks of an open heading and link may be in the text that is removed.
        self._level, self._address = aside.level, aside.address
        self._before_block = min(self._before_block, self._letters)
        while self._buttons and self._buttons[-1].start >= aside.start:
            self._buttons.pop()
        if tag == "button" and any(self._open[one] for one in _ITEMS):
            self._buttons.append(slice(aside.start, len(self.text)))
            return
        del self.text[aside.start :]
        cells = self._tables[-1].cells if self._tables else []
        while cells and cells[-1].place >= aside.start:
            cells.pop()
            self._row_started = bool(cells)

    def _end_line(self) -> None:
        """Removes the buttons of a block or a cell, which begins or ends, if no other words are in it."""
        for button in self._buttons:
            words = self.text[button]
            if self._letters > self._before_block:
                self._letters += len("".join(words).strip())
            else:
                self.text[button] = [""] * len(words)
        self._buttons.clear()
        self._before_block = self._letters

    def _start_main(self) -> None:
        self._asides.clear()  # an element around it was never closed
        self._mains += 1
        self._main_depth = self._depth
        self._main = _Main(slice(len(self.text), None), self._letters, self._linked, self._left)

    def _end_main(self) -> None:
        place, letters, linked, left = self._main
        inside = self._letters - letters, self._linked - linked, self._left - left
        self._main = _Main(slice(place.start, len(self.text)), *inside)
        self._main_depth = 0

    @property
    def has_lost_most(self) -> bool:
        """Whether nearly all text outside of links was left out as furniture, which then was the content."""
        if self._reads_main:
            return self._main.left > _MOST_LEFT_OUT * self._main.letters
        return self._left > _MOST_LEFT_OUT * self._letters

    def _start_of_mediawiki(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Sees whether an element of a page of MediaWiki is left out, and whether it ends a section that is left out."""
        self.is_disambiguation = self.is_disambiguation or mediawiki.is_disambiguation(attributes)
        if mediawiki.is_left_out(tag, attributes):
            self._left_out = self._depth
            if tag in _BLOCK and not self._in_cell():
                self._break()
        elif tag in _HEADING and not self._in_cell():
            level = int(tag[1])
            if self._sources and level <= self._sources[0]:
                self._end_sources()
            self._heading = level, len(self.text)

    def _end_heading(self) -> None:
        """Begins a section that is left out, if the words of the heading name sources. The title of a page has level 1."""
        if self._heading and self._heading[0] > 1 and not self._sources:
            words = plain("".join(self.text[self._heading[1] :]))
            if words.lower() in mediawiki.SOURCE_SECTIONS:
                self._sources = self._heading
        self._heading = None

    def _end_sources(self) -> None:
        """Removes the open section that is left out, and what was not closed in it."""
        if self._sources:
            del self.text[self._sources[1] :]
            self._tables.clear()
            self._asides.clear()
        self._sources = None

    def end(self, tag: str) -> None:
        if self._left_out:
            self._left_out = 0 if self._left_out == self._depth else self._left_out
            self._depth -= 1
            return
        if tag in _HEADING:
            self._end_heading()
            self._level = None
        if self._asides and self._asides[-1].depth == self._depth:
            self._end_aside(tag)
        if tag in _BLOCK or tag in _CELLS:
            self._end_line()
        if self._main_depth == self._depth:
            self._end_main()
        self._depth -= 1
        self._open[_kind(tag)] -= 1
        if tag == "a":
            self._address = None
        if tag in ("tr", "table") and self._tables:
            self._tables[-1].end_row(self.text)
        elif tag in _ROW_GROUPS and self._tables:
            self._tables[-1].rows.end_group()
        if tag == "table" and self._tables:
            self._tables.pop()
        if tag == "p" and self._in_cell():
            self._paragraph_ended = self._cell_has_text
        elif tag in _BLOCK:
            self.text.append("\n\n")

    def data(self, data: str) -> None:
        if self._left_out or self._open["unseen"]:
            return
        data = without_marks(data)
        if self._open["title"]:
            if self._titles == 1 and not self._open["svg"]:
                self.title.append(data)
            return
        if self._open["a"] and data.strip() in _PERMALINKS and (self._address or "").startswith("#"):
            return
        if data and not data.isspace():
            if self._paragraph_ended:
                self._break()
            self._cell_has_text = True
            letters = len(data.strip())
            self._letters += letters
            self._linked += letters if self._open["a"] else 0
            if self._asides:
                self._words += not _NO_WORDS.fullmatch(data)
        if not self._open["pre"]:
            text = _WHITE.sub(" ", data)
        elif self._level is None:
            text = as_code(data)
        else:  # a heading, which has no white space before its first word
            text = data
        marked = self._level is not None or self._address is not None
        if marked and (words := text.lstrip()):
            self.text += [text[: -len(words)], self._marks()]
            text = words
        self.text.append(text)

    def _marks(self) -> str:
        """The marks of a heading and a link that begin with the next word."""
        marks = ""
        if self._level is not None:
            marks = heading_mark(self._level)
            self._level = None
        if self._address is not None:
            marks += link_mark(len(self.addresses))
            self.addresses.append(self._address)
            self._address = None
        return marks

    def _take_meta(self, name: str, content: str) -> None:
        if not name or not content or _FOR_BROWSERS.fullmatch(name) or len(self.fields) >= _MOST_META:
            return
        value = read_value(content)
        before = self.fields.setdefault(name, value)
        if isinstance(before, list):
            before.append(value)
        elif before is not value:
            self.fields[name] = [before, value]

    def _in_cell(self) -> bool:
        return self._open["td"] > 0 or self._open["th"] > 0

    def _break(self) -> None:
        self.text.append("\n\n")
        self._row_started = self._paragraph_ended = False

    def comment(self, words: str) -> None:
        match words.strip():
            case "htdig_noindex" if self._of_mediawiki:
                self._footer = len(self.text)
            case "/htdig_noindex" if self._footer is not None:
                del self.text[self._footer :]
                self._footer = None

    def close(self) -> None:
        """The parser calls this at the end of the page; the results are attributes."""
        self._end_sources()
        place, letters, linked, _ = self._main
        outside = (self._letters - letters) - (self._linked - linked)
        has_text = self._mains == 1 and any(map(str.strip, self.text[place]))
        self._reads_main = has_text and outside <= _MOST_OUTSIDE * letters
        if self._reads_main:
            main, *around = (
                "".join(self.text[part]) for part in (place, slice(place.start), slice(place.stop, None))
            )
            names = [] if first_headings(main) else first_headings("\n\n".join(around))
            if len(names) == 1 and not any(map(str.strip, self.title)):
                self.title = names
            self.text = [main]


def _is_hidden(tag: str, attributes: Mapping[str, str]) -> bool:
    """Whether the element is not shown, and no part that the reader can unfold."""
    if not attributes or tag in ("html", "body", "main"):
        return False
    is_hidden = (
        attributes.get("hidden", "until-found") != "until-found"
        or attributes.get("aria-hidden") == "true"
        or _NOT_SHOWN.search(attributes.get("style", "")) is not None
    )
    return is_hidden and attributes.get("role") not in _UNFOLDS


def _kind(tag: str) -> str:
    return "unseen" if tag in _UNSEEN else tag
