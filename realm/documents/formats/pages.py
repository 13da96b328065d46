"""Converts HTML to text: the title, the visible text, the headings and the links of a page.

Which text of a page is visible is decided in `realm.documents.formats.page_target`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realm.documents.formats.page_marks import tidy, unmarked
from realm.documents.formats.page_target import PageError, collected
from realm.documents.formats.records import Reason, Unreadable
from realm.documents.formats.sections import Heading
from realm.text.fields import NO_FIELDS


class Anchor(NamedTuple):
    """A link in a text: position of the first character of the linked words, and the address as the page has it."""

    start: int
    address: str


class Page(NamedTuple):
    """The title, and the text with blank lines between its blocks."""

    title: str
    """The title element; without one, the only `<h1>` beside a main element that has none."""
    text: str
    headings: tuple[Heading, ...] = ()
    """All headings, in the order of the text."""
    fields: Mapping[str, Any] = NO_FIELDS
    """Values of `<meta name=... content=...>`; a name that occurs several times has a list of values."""
    anchors: tuple[Anchor, ...] = ()
    """The links whose words are in the text, in the order of the text."""
    is_disambiguation: bool = False
    """Whether this is a page of MediaWiki that only lists the meanings of a name."""

    @property
    def main_heading(self) -> str:
        """The only heading of the highest level; "" if there is none. Other headings are about a part of the page."""
        highest = min((one.level for one in self.headings), default=0)
        of_page = [one.words for one in self.headings if one.level == highest]
        return of_page[0] if len(of_page) == 1 else ""


_LONGEST_TITLE = 1_000


def read_page(source: str) -> Page:
    """The visible text of a page, with blank lines between blocks.

    If the page has one main element with text, this text is read. Footers, asides, buttons and hidden elements are left out,
    unless hardly any text would be left of the page, or of the main element that is read. Of a page of MediaWiki, references,
    boxes, formulas, pictures, and sections that list sources are left out.

    In a table that begins with rows of headings, each other row is a sentence (`Table`), and the rows of headings are left out.
    In all other rows, " | " is between the cells.

    Raises:
        PageError: elements are nested deeper than `DEEPEST`.
    """
    taken = collected(source)
    text = tidy("".join(taken.text))
    title = " ".join("".join(taken.title).split())
    if len(title) > _LONGEST_TITLE:  # an unclosed title element contains the whole page
        title, text = "", f"{title}\n\n{text}".strip()
    text, levels, links = unmarked(text)
    anchors = tuple(Anchor(start, taken.addresses[number]) for start, number in links)
    return Page(title, text, _headings(text, levels), taken.fields, anchors, taken.is_disambiguation)


def page_in(path: Path, source: str) -> Page:
    """The visible text of a page in a file.

    Raises:
        Unreadable: elements are nested too deeply.
    """
    try:
        return read_page(source)
    except PageError as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path}: {error}") from None


def _headings(text: str, levels: Sequence[tuple[int, int]]) -> tuple[Heading, ...]:
    """The headings that begin at some positions. The words of a heading end at the next heading or blank line."""
    ends = [*(start for start, _ in levels[1:]), len(text)]
    return tuple(
        Heading(start, level, " ".join(text[start:end].partition("\n\n")[0].split()))
        for (start, level), end in zip(levels, ends, strict=False)
    )
