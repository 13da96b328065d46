"""Marks in the text that is collected of a page: where headings and links begin, and what is white space of program code.

The marks are characters that HTML does not allow. `realm.documents.formats.page_target` writes them, and
`realm.documents.formats.pages` reads them."""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

_HEADING = "\x02"
"""Character before the level of a heading."""
_LINK = "\x03"
"""Character before and after the number of a link."""
_MARK = re.compile(f"{_HEADING}([1-6])|{_LINK}([0-9]+){_LINK}")
_FIRST_HEADING = re.compile(f"{_HEADING}1(.*?)(?:\\n\\n|\\Z)", re.DOTALL)
_INDENT = "\x1f"
"""White space of program code. Python strips this character."""
_NO_MARKS = str.maketrans({_HEADING: None, _LINK: None, _INDENT: " "})
_INDENTS = str.maketrans({" ": _INDENT, "\xa0": _INDENT, "\t": 4 * _INDENT})
_DEEPEST_INDENT = 40
_SPACES = re.compile(r"[^\S\n]+")


class Unmarked(NamedTuple):
    """A text without its marks, and the places of the marks."""

    text: str
    levels: Sequence[tuple[int, int]]
    """Position of the first character and level of each heading, in the order of the text."""
    links: Sequence[tuple[int, int]]
    """Position of the first character and number of each link, in the order of the text."""


def heading_mark(level: str) -> str:
    """The mark before the words of a heading."""
    return f"{_HEADING}{level}"


def link_mark(number: int) -> str:
    """The mark before the words of a link."""
    return f"{_LINK}{number}{_LINK}"


def without_marks(text: str) -> str:
    """Text of a page without the characters of marks, which a page can have although HTML does not allow them."""
    return text.translate(_NO_MARKS)


def as_code(text: str) -> str:
    """Text whose white space is marked as that of program code."""
    return text.translate(_INDENTS)


def first_headings(text: str) -> list[str]:
    """The words of the headings of level 1, up to the end of their block."""
    return [plain(words) for words in _FIRST_HEADING.findall(text)]


def plain(text: str) -> str:
    """The text as one line without marks."""
    return " ".join(_MARK.sub("", text).split())


def unmarked(text: str) -> Unmarked:
    """The text without its marks, and their places."""
    # With two groups in the pattern, `split` returns text, level or None, number or None, text, ..., text.
    parts = _MARK.split(text)
    starts = list(accumulate(map(len, parts[:-1:3])))
    levels = [(start, int(level)) for start, level in zip(starts, parts[1::3], strict=True) if level]
    links = [(start, int(number)) for start, number in zip(starts, parts[2::3], strict=True) if number]
    return Unmarked("".join(parts[::3]), levels, links)


def tidy(text: str) -> str:
    """The text without superfluous white space, and with one blank line between its blocks.

    Program code keeps its indentation, up to 40 columns.
    """
    return re.sub(r"\n{3,}", "\n\n", "\n".join(map(_line, text.split("\n")))).strip("\n")


def _line(line: str) -> str:
    words = line.lstrip()
    indent = line[: len(line) - len(words)].count(_INDENT) if words else 0
    return " " * min(indent, _DEEPEST_INDENT) + _SPACES.sub(" ", words).rstrip()
