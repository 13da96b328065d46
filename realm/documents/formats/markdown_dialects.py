"""Markup that generators of sites add to Markdown, rewritten as Markdown: the text of notes, tabs and footnotes without signs.

MkDocs indents the body of a note (`!!! note "Title"`) or tab (`=== "Title"`), which CommonMark reads as program code. GitHub
begins a note with `> [!NOTE]`, Docusaurus and VitePress put it between lines `:::`, and Hugo between shortcodes
(`{{< hint >}}`). Fenced program code stays as it is. The time is linear in the length of the text.
"""

import re
from typing import NamedTuple

_INDENT = 4
"""How far MkDocs indents the body of a block."""
_NOTE = re.compile(r'(?:!!!|\?\?\?\+?) ?(?:[\w-]+(?: +[\w-]+)*(?: +"(.*)")?|"(.*)")[ \t]*')
_TAB = re.compile(r'===[+!]{0,2} +"(.*)"[ \t]*')
_ALERT = re.compile(r"([ \t]*(?:>[ \t]?)+)\[![\w-]+\][+-]?(.*)")
_CONTAINER = re.compile(r"([ \t]*):{3,}(?!:)[ \t]*[\w-]*(?:\[([^\]]*)\])?(?:[ \t]*\{[^}]*\})?(.*)")
_SHORTCODE = re.compile(r"\{\{[<%][^{}]*[>%]\}\}")
_FOOTNOTE = re.compile(r"\[\^([^\]\[\s]+)\]")
_DEFINED = re.compile(r"^[ \t]*\[\^([^\]\[\s]+)\]:", re.MULTILINE)
_FENCE = re.compile(r"(?:[ \t]|[-*+>]|\d{1,9}[.)])*(?P<signs>`{3,}(?=[^`]*\Z)|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|\Z)")
_UNDERLINE = re.compile(r" {0,3}(?:(=+)|-+)[ \t]*")


class _Block(NamedTuple):
    """An open block whose body is indented."""

    indent: int
    """Column at which the body begins."""
    level: int
    """Level of the heading above the block."""


def as_commonmark(source: str) -> str:
    """The text in CommonMark. The titles of notes are bold, and those of tabs are headings, one level below the heading above.

    >>> lines = as_commonmark('# Limits\\n=== "Pro"\\n\\n    Ninety seats.').splitlines()
    >>> [line for line in lines if line]
    ['# Limits', '## Pro', 'Ninety seats.']
    """
    return "\n".join(_Rewriter(source).lines())


class _Rewriter:
    """Rewrites a text line by line."""

    def __init__(self, source: str) -> None:
        self._source = source.split("\n")
        self._footnotes = frozenset(_DEFINED.findall(source))
        ends = [n for n, line in enumerate(self._source) if line.strip(" \t:") == "" and ":::" in line]
        self._last_end = ends[-1] if ends else -1
        """Number of the last line that ends a container of Docusaurus."""
        self._blocks: list[_Block] = []
        self._fence = ""
        """Signs of the open fence around program code."""
        self._level = 1
        """Level of the heading above, and of the title of the document if there is none."""
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """The lines of the text in CommonMark."""
        for number, line in enumerate(self._source):
            self._take(number, line)
        return self._lines

    def _take(self, number: int, line: str) -> None:
        words = line.lstrip(" \t")
        column = _column(line, words)
        while words and self._blocks and column < self._blocks[-1].indent:
            self._end_block()
        line = _moved(line, words, column, _INDENT * len(self._blocks)) if self._blocks else line
        if self._fence:
            signs = words.lstrip("> \t").rstrip()
            if signs.startswith(self._fence) and not signs.strip(self._fence[0]):
                self._fence = ""
            self._lines.append(line)
        elif fence := _FENCE.match(line):
            self._fence = fence["signs"]
            self._lines.append(line)
        elif not self._begins_block(number, column, line, words):
            self._lines.append(self._without_signs(number, line))
            self._see_heading(line)

    def _end_block(self) -> None:
        if self._fence:  # a fence in a block ends with the block
            self._lines.append(self._fence)
            self._fence = ""
        self._level = self._blocks.pop().level

    def _begins_block(self, number: int, column: int, line: str, words: str) -> bool:
        """Whether the line begins a block with an indented body, which is then open."""
        before = line[: len(line) - len(words)]
        block = _Block(column + _INDENT, self._level)
        if words.startswith("[^") and _DEFINED.match(words):
            text = self._without_signs(number, words.partition("]:")[2].lstrip())
            self._lines += ["", before + text]
        else:
            is_tab = words.startswith("===")
            found = (_TAB if is_tab else _NOTE).fullmatch(words)
            if not found or not self._has_body(number, block.indent):
                return False
            title = next(filter(None, found.groups()), "").strip()
            self._level = min(self._level + 1, 6) if is_tab else self._level
            self._lines += ["", before + (f"{'#' * self._level} {title}" if is_tab else _bold(title)), ""]
        self._blocks.append(block)
        return True

    def _has_body(self, number: int, indent: int) -> bool:
        """Whether the next line that is not blank is indented so far."""
        for below in range(number + 1, len(self._source)):
            line = self._source[below]
            if words := line.lstrip(" \t"):
                return _column(line, words) >= indent
        return False

    def _without_signs(self, number: int, line: str) -> str:
        """A line of text without the signs that begin or end a note, shortcodes and references to footnotes."""
        if ">" in line and (alert := _ALERT.fullmatch(line)):
            title = _bold(alert[2].strip())
            line = f"{alert[1]}{title}\n{alert[1]}" if title else alert[1]
        elif ":::" in line and number <= self._last_end and (container := _CONTAINER.fullmatch(line)):
            title = container[2] or container[3].strip(" \t:")
            line = f"\n{container[1]}{_bold(title)}\n"
        if "{{" in line:
            line = _SHORTCODE.sub("", line)
        return _FOOTNOTE.sub(self._reference, line) if self._footnotes and "[^" in line else line

    def _reference(self, found: re.Match[str]) -> str:
        return "" if found[1] in self._footnotes else found[0]

    def _see_heading(self, line: str) -> None:
        if heading := _HEADING.match(line):
            self._level = len(heading[1])
        elif (underline := _UNDERLINE.fullmatch(line)) and len(self._lines) > 1 and self._lines[-2].strip():
            self._level = 1 if underline[1] else 2


def _column(line: str, words: str) -> int:
    return len(line[: len(line) - len(words)].expandtabs(4))


def _moved(line: str, words: str, column: int, by: int) -> str:
    """The line without the white space of the first `by` columns."""
    return " " * (column - by) + words if words else ""


def _bold(title: str) -> str:
    return f"**{title}**" if title else ""
