"""Markup that generators of sites add to Markdown, rewritten as Markdown: the text of notes, tabs and footnotes without signs.

MkDocs indents the body of a note (`!!! note "Title"`) or tab (`=== "Title"`), which CommonMark reads as program code. GitHub
begins a note with `> [!NOTE]`, Docusaurus and VitePress put it between lines `:::`, and Hugo between shortcodes
(`{{< hint >}}`). Fenced program code and code in a line stay as they are. The time is linear in the length of the text.
"""

import re
from typing import NamedTuple

_INDENT = 4
"""How far MkDocs indents the body of a block."""
_NOTE = re.compile(r'(?:!!!|\?\?\?\+?) ?(?:[\w-]+(?: +[\w-]+)*(?: +"(.*)")?|"(.*)")[ \t]*')
_TAB = re.compile(r'===[+!]{0,2} +"(.*)"[ \t]*')
_ALERT = re.compile(r"([ \t]*(?:>[ \t]?)+)\[![\w-]+\][+-]?(.*)")
_CONTAINER = re.compile(r"([ \t]*):{3,}(?!:)[ \t]*+[\w-]*+(?!\.)(?:\[([^\]]*)\])?(?:[ \t]*\{[^}]*\})?(.*)")
_TICKS = re.compile("`+")
_INLINE = re.compile(r"(?P<ticks>`+)|\{\{[<%][^{}]*[>%]\}\}|\[\^(?P<footnote>[^\]\[\s]+)\]")
"""A sign around code, a shortcode or a reference to a footnote."""
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])(?:[ \t]+|\Z)")
_DEFINED = re.compile(r"^[ \t]*\[\^([^\]\[\s]+)\]:", re.MULTILINE)
_FENCE = re.compile(r"(?:[ \t]|[-*+>]|\d{1,9}[.)])*(?P<signs>`{3,}(?=[^`]*\Z)|~{3,})")
_MOST_NAMED = 100
"""Longest titles of tabs that are put in rows, in characters, so that a hostile text cannot become much longer."""


class _Block(NamedTuple):
    """An open block whose body is indented."""

    indent: int
    """Column at which the body begins."""
    tab: str
    """Title of the block, if it is a tab, and of the tabs around it."""


def as_commonmark(source: str) -> str:
    """The text in CommonMark. The titles of notes and tabs are bold.

    The tables in tabs often differ in nothing but the numbers, so the first cell of each row begins with the title of the tab.

    >>> lines = as_commonmark('=== "Pro"\\n\\n    | Seats |\\n    |---|\\n    | 90 |').splitlines()
    >>> [line for line in lines if line]
    ['**Pro**', '| Seats |', '|---|', '| Pro, 90 |']
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
        self._item = 0
        """Column of the text of the open item of a list."""
        self._row_name = ""
        """Name of the rows of the open table in a tab."""
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
            return
        is_code = self._is_indented_code(line)
        if not is_code and (fence := _FENCE.match(line)):
            self._fence = fence["signs"]
            self._row_name = ""
            self._lines.append(line)
        elif not self._begins_block(number, column, line, words):
            line = self._without_signs(number, line)
            self._lines.append(line if is_code else self._with_row_name(line))

    def _is_indented_code(self, line: str) -> bool:
        """Whether a line outside of fences is indented by four columns more than the text of the open item of a list."""
        words = line.lstrip(" \t")
        column = _column(line, words)
        is_code = column >= self._item + _INDENT
        if not is_code and (item := _ITEM.match(words)):
            self._item = column + len(item[0])
        elif words and column < self._item and not (self._lines and self._lines[-1].strip()):
            self._item = column
        return is_code

    def _end_block(self) -> None:
        if self._fence:  # a fence in a block ends with the block
            self._lines.append(self._fence)
            self._fence = ""
        self._blocks.pop()
        self._row_name = ""

    def _begins_block(self, number: int, column: int, line: str, words: str) -> bool:
        """Whether the line begins a block with an indented body, which is then open."""
        before = line[: len(line) - len(words)]
        tab = self._blocks[-1].tab if self._blocks else ""
        if words.startswith("[^") and _DEFINED.match(words):
            text = self._without_signs(number, words.partition("]:")[2].lstrip())
            self._lines += ["", before + text]
        else:
            is_tab = words.startswith("===")
            found = (_TAB if is_tab else _NOTE).fullmatch(words)
            if not found or not self._has_body(number, column + _INDENT):
                return False
            title = next(filter(None, found.groups()), "").strip()
            tab = ", ".join(filter(None, (tab, title))) if is_tab and len(tab + title) < _MOST_NAMED else tab
            self._lines += ["", before + _bold(title), ""]
        self._blocks.append(_Block(column + _INDENT, tab))
        self._row_name = ""
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
        return self._without_inline_signs(line) if "{{" in line or "[^" in line else line

    def _without_inline_signs(self, line: str) -> str:
        """A line without shortcodes and references to footnotes, except for those in code."""
        ends = _ends_of_code(line) if "`" in line else {}
        kept: list[str] = []
        start = code_end = 0
        for sign in _INLINE.finditer(line):
            if sign.start() < code_end:
                continue
            if sign["ticks"]:
                code_end = ends.get(sign.start(), 0)
            elif not sign["footnote"] or sign["footnote"] in self._footnotes:
                kept.append(line[start : sign.start()])
                start = sign.end()
        return "".join(kept) + line[start:]

    def _with_row_name(self, line: str) -> str:
        """A line of text; a row of a table in a tab begins with the title of the tab."""
        if self._row_name and "|" in line:
            return _named(self._row_name, line)
        if not line.strip():
            self._row_name = ""
        elif self._blocks and self._blocks[-1].tab and self._is_below_headings(line):
            self._row_name = self._blocks[-1].tab.replace("|", r"\|")
        return line

    def _is_below_headings(self, line: str) -> bool:
        """Whether the line is the second line of a table."""
        above = self._lines[-1] if self._lines else ""
        is_rule = "|" in line and "-" in line and not line.strip("|:- \t")
        return is_rule and "|" in above and _indent(above) == _indent(line)


def _ends_of_code(line: str) -> dict[int, int]:
    """By position of each group of backticks before code, where the code ends: behind the next group of the same size."""
    ends: dict[int, int] = {}
    next_end: dict[int, int] = {}
    for ticks in reversed(list(_TICKS.finditer(line))):
        length = ticks.end() - ticks.start()
        if length in next_end:
            ends[ticks.start()] = next_end[length]
        next_end[length] = ticks.end()
    return ends


def _column(line: str, words: str) -> int:
    return len(line[: len(line) - len(words)].expandtabs(4))


def _moved(line: str, words: str, column: int, by: int) -> str:
    """The line without the white space of the first `by` columns."""
    return " " * (column - by) + words if words else ""


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _named(name: str, row: str) -> str:
    """A row of a table with a name at the beginning of its first cell."""
    indent = _indent(row)
    first, bar, others = row[len(indent) :].removeprefix("|").partition("|")
    return f"{indent}| {', '.join(filter(None, (name, first.strip())))} {bar}{others}"


def _bold(title: str) -> str:
    return f"**{title}**" if title else ""
