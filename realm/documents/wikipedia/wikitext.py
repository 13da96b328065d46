"""Converts MediaWiki's markup to text: the paragraphs, lists and tables of a page, and the links in this text.

The parser is mwparserfromhell. References, galleries, formulas, and sections that list sources are left out, and so are all
templates except a few that are replaced by words of a sentence (`_template`). A row of a table becomes "Country: France;
Capital: Paris."
"""

import calendar
import html
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, count, takewhile
from typing import Any, NamedTuple

import mwparserfromhell
from mwparserfromhell import nodes

from realm.documents.formats.grid import Cell, cell_of
from realm.documents.formats.mediawiki import SOURCE_SECTIONS
from realm.documents.formats.rows import Table, are_headings
from realm.documents.wikipedia.titles import linked_title
from realm.text.corpus import Link


class WikiPage(NamedTuple):
    """The text of a page, the links in the text, and whether the page only lists the meanings of a name."""

    text: str
    links: tuple[Link, ...]
    disambiguation: bool


def read_wikitext(markup: str, dropped: Iterable[str] = ()) -> WikiPage:
    """Text and links of a page. Links to the namespaces `dropped` (files and categories in the wiki's language) are left out.

    >>> page = read_wikitext("'''Paris''' is the [[capital city|capital]] of [[France]].{{Coord|48|N}}")
    >>> page.text
    'Paris is the capital of France.'
    >>> page.links
    (Link(start=13, title='Capital city'), Link(start=24, title='France'))
    """
    taken = _Taken({*_DROPPED, *(name.lower() for name in dropped)})
    taken.sections(mwparserfromhell.parse(markup, skip_style_tags=True))
    # With the group in the pattern, `split` returns text, number of a link, text, number of a link, ..., text.
    parts = _MARK.split("".join(taken.text))
    text, starts = "".join(parts[::2]), list(accumulate(map(len, parts[:-1:2])))
    for pattern, instead in _DEBRIS:
        text, starts = _replaced(pattern, instead, text, starts)
    titles = [taken.titles[int(number)] for number in parts[1::2]]
    return WikiPage(text, tuple(map(Link, starts, titles)), taken.disambiguation)


def _replaced(
    pattern: re.Pattern[str], instead: str, text: str, starts: Iterable[int]
) -> tuple[str, list[int]]:
    """`pattern.sub(instead, text)`, and the positions after the replacement of the characters at `starts`."""
    parts: list[str] = []
    first, ends, shifts = [], [0], [0]
    for found in pattern.finditer(text):
        parts += [text[ends[-1] : found.start()], found.expand(instead)]
        first.append(found.start())
        ends.append(found.end())
        shifts.append(shifts[-1] + len(parts[-1]) - len(found[0]))
    parts.append(text[ends[-1] :])
    before = ((start, bisect_right(first, start)) for start in starts)
    return "".join(parts), [max(start, ends[count]) + shifts[count] for start, count in before]


_SIGN = "\x02"
"""This character cannot occur in XML, and is removed from texts in which it occurs as an entity."""
_QUOTE = "\x03"
"""Stands for an apostrophe that a template produces, which would look like markup beside the quotes of italic words."""
_MARK = re.compile(f"{_SIGN}([0-9]+){_SIGN}")
"""Marks the place of a link in the collected text, with the number of the link."""
_DEBRIS = (
    (re.compile(r"'{2,}|\{{2,}|\}{2,}"), ""),
    (re.compile(r"\(\s*(?:[,;:]\s*)+"), "("),
    (re.compile(r"\s*[,;:]\s*\)"), ")"),
    (re.compile(r" ?\(\s*\)"), ""),
    (re.compile(r" +([,.;:])"), r"\1"),
    (re.compile(r"[^\S\n]{2,}|[^\S\n ]"), " "),
    (re.compile(r"^ | $", re.MULTILINE), ""),
    (re.compile(r"\A\n+|\n+\Z"), ""),
    (re.compile(r"\n{3,}"), "\n\n"),
    (re.compile(_QUOTE), "'"),
)
"""Patterns of text that is left over from the markup, and what replaces each pattern. The patterns find quotes that mark bold
and italic words, braces of templates that are nested too deep for the parser, superfluous white space, and punctuation that is
left in a sentence without its templates: "Paris (; ) is"."""
_DROPPED = ("file", "image", "category", "media")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z-]+)?|simple")
_LANGUAGE_TEMPLATE = re.compile(r"lang-[a-z]{2,3}(-[a-z-]+)?")
_UNSEEN = frozenset(
    ("ref", "references", "gallery", "timeline", "score", "imagemap", "math", "chem", "ce", "graph", "mapframe",
     "maplink", "templatestyles", "hiero", "inputbox", "section", "categorytree", "style", "script")
)  # fmt: skip
_SWITCHES = re.compile(
    "__(?:(?i:(?:NO|FORCE)?TOC|NOEDITSECTION|NOGALLERY)|(?:NO)?NEWSECTIONLINK|HIDDENCAT|(?:NO)?INDEX|STATICREDIRECT|NOGLOBAL"
    "|NO(?:CONTENT|TITLE)CONVERT|NO[CT]C|DISAMBIG|EXPECTUNUSED(?:CATEGORY|TEMPLATE)|EXPECTED_UNCONNECTED_PAGE)__"
)
"""Switches of MediaWiki, of which a reader sees nothing. Other words between underscores are text, such as `__FILE__`."""
_DISAMBIGUATION = re.compile(
    r"(?:.+ )?(?:disambig(?:uation)?|dab|hndis|geodis)(?: page|-.*)?"
    r"|begriffsklärung|homonymie|desambiguación|desambiguação|disambigua|doorverwijspagina|dp|ujednoznacznienie"
    r"|неоднозначность|曖昧さ回避"
)
"""Templates of disambiguation pages in the Wikipedias in English, German, French, Spanish, Portuguese, Italian, Dutch, Polish,
Russian and Japanese."""
_FIRST_WORDS = frozenset(
    ("nowrap", "small", "smaller", "big", "bigger", "larger", "nobr", "abbr", "tooltip", "quote", "blockquote", "cquote",
     "mono", "sic", "no wrap", "angbr", "vanchor", "visible anchor", "sc", "smallcaps", "flag", "flagcountry", "flagu", "ill",
     "interlanguage link", "nihongo", "math", "mvar", "chem2", "nts", "number table sorting")
)  # fmt: skip
"""Templates whose first parameter is the text that a reader sees. There is also one for each language, such as `lang-fr`."""
_LAST_WORDS = frozenset(
    ("lang", "rtl-lang", "transl", "transliteration", "linktext", "font color", "color", "sort")
)
_LISTS = frozenset(
    ("hlist", "ubl", "unbulleted list", "plainlist", "flatlist", "bulleted list", "plain list")
)
"""Templates whose parameters are the items of a list, or lines of items."""
_SHIPS = frozenset(("hms", "hmas", "hmcs", "uss", "ss", "rms", "sms", "mv", "gs"))
"""Templates that stand before the name of a ship."""
_DATES = frozenset(
    ("start date", "end date", "birth date", "death date", "birth date and age", "death date and age",
     "start date and age", "dts", "date table sorting")
)  # fmt: skip
_SIGNS = {
    "ndash": "–",
    "snd": " – ",
    "spaced ndash": " – ",
    "mdash": "—",
    "mdashb": "—",
    "'": _QUOTE,
    "'s": f"{_QUOTE}s",
    "\"'": f'"{_QUOTE}',
    "' \"": f'{_QUOTE} "',
    "&nbsp": " ",
    "nbsp": " ",
    "thinsp": " ",
    "spaces": " ",
}


def _without_signs(text: str) -> str:
    """A text of a page without the characters that have a meaning here."""
    return text.replace(_SIGN, "").replace(_QUOTE, "")


def _date(parts: list[str], day_first: bool) -> str:
    """A date in words, from the numbers of a year, a month and a day; the last two may be missing or empty.

    >>> _date(["1999", "12", "31"], day_first=False), _date(["1999", "12"], day_first=True)
    ('December 31, 1999', 'December 1999')
    """
    parts = [part for part in parts if part]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) != len(parts) or not all(1 <= month <= 12 for month in numbers[1:2]):
        return " ".join(parts)
    match numbers:
        case [year, month, day]:
            name = calendar.month_name[month]
            return f"{day} {name} {year}" if day_first else f"{name} {day}, {year}"
        case [year, month]:
            return f"{calendar.month_name[month]} {year}"
    return " ".join(parts)


class _Taken:
    """Collects text, node by node. A mark (`_MARK`) is before the words of each link."""

    def __init__(self, dropped: set[str]):
        self.text: list[str] = []
        self.titles: list[str] = []
        """Title of the page to which each link leads, by number of the link."""
        self.disambiguation = False
        self._dropped = dropped

    def sections(self, code: Any) -> None:
        """Collects from the nodes of a page, without the sections that list sources."""
        self.disambiguation = any("__DISAMBIG__" in text for text in code.filter_text(recursive=False))
        left_out = 0  # level of the heading of the section that is left out; 0 outside of such sections
        for node in code.nodes:
            if isinstance(node, nodes.Heading):
                if left_out and node.level > left_out:
                    continue
                left_out = node.level if str(node.title).strip().lower() in SOURCE_SECTIONS else 0
            if not left_out:
                self.node(node)
            elif isinstance(node, nodes.Template):
                self._template(node)  # the template may mark the page as a disambiguation page

    def nodes(self, code: Any) -> None:
        """Collects from the content of a node."""
        for node in code.nodes if code is not None else ():
            self.node(node)

    def node(self, node: Any) -> None:
        if isinstance(node, nodes.Text):
            self.text.append(_without_signs(_SWITCHES.sub("", node.value)))
        elif isinstance(node, nodes.Wikilink):
            self._link(node)
        elif isinstance(node, nodes.Template):
            self.text.append(self._template(node))
        elif isinstance(node, nodes.Tag):
            self._tag(node)
        elif isinstance(node, nodes.Heading):
            self.text.append("\n\n")
            self.nodes(node.title)
            self.text.append("\n")
        elif isinstance(node, nodes.ExternalLink):
            self.nodes(node.title)
        elif isinstance(node, nodes.HTMLEntity):
            self.text.append(_without_signs(node.normalize()))
        elif isinstance(node, nodes.Argument):
            self.nodes(node.default)

    def inside(self, code: Any) -> str:
        """The text inside a node, on one line."""
        before, self.text = self.text, []
        self.nodes(code)
        found, self.text = " ".join("".join(self.text).split()), before
        return found

    def _link(self, node: Any) -> None:
        title = " ".join(_without_signs(html.unescape(str(node.title))).replace("_", " ").split())
        space, colon, _ = title.partition(":")
        if colon and (space.lower() in self._dropped or (node.text is None and _LANGUAGE.fullmatch(space))):
            return
        first = len(self.text)
        if node.text is None:
            self.text.append(title.removeprefix(":"))
        else:
            self.nodes(node.text)
        target = linked_title(title.removeprefix(":"))
        if target and "{" not in target:
            self._mark(first, target)

    def _mark(self, first: int, title: str) -> None:
        """Puts the mark of a link before the first word in `text[first:]`. A link without words has no mark."""
        for place, part in enumerate(self.text[first:], start=first):
            if words := part.lstrip():
                mark = f"{_SIGN}{len(self.titles)}{_SIGN}"
                self.text[place] = part[: len(part) - len(words)] + mark + words
                self.titles.append(title)
                break

    def _template(self, node: Any) -> str:
        """The words by which a template is replaced in a sentence; "" for most templates."""
        name = " ".join(str(node.name).replace("_", " ").lower().split())
        self.disambiguation = self.disambiguation or bool(_DISAMBIGUATION.fullmatch(name))
        if name in _SIGNS:
            return _SIGNS[name]
        if name.startswith("formatnum:"):
            return self.inside(node.name).partition(":")[2]  # the number may be a template
        given = {str(one.name).strip(): one.value for one in node.params}
        words = list(takewhile(lambda word: word is not None, (given.get(str(n)) for n in count(1))))
        if name in _FIRST_WORDS or _LANGUAGE_TEMPLATE.fullmatch(name):
            return (self.inside(words[0]) if words else "") or self.inside(given.get("text"))
        if name in _LAST_WORDS and words:
            return self.inside(words[-1])
        if name == "langx":  # has the transliteration and the meaning after the language and the word
            return self.inside(words[1] if len(words) > 1 else given.get("text"))
        if name in _LISTS:
            return ", ".join(item for word in words for item in self._items(word))
        if name in _DATES:
            day_first = self.inside(given.get("df")).lower() in ("y", "yes", "true", "1")
            return _date([self.inside(word) for word in words[:3]], day_first)
        if name in _SHIPS and words:
            return f"{name.upper()} {self.inside(words[0])}"
        if name == "ship" and len(words) > 1:
            return f"{self.inside(words[0])} {self.inside(words[1])}".strip()
        if name == "sortname" and len(words) > 1:
            return f"{self.inside(words[0])} {self.inside(words[1])}"
        if name in ("circa", "c."):
            return " – ".join(f"c. {self.inside(word)}" for word in words) or "c."
        if name == "chem":
            return "".join(self.inside(word) for word in words)
        if name == "val" and words:
            power, unit = self.inside(given.get("e")), self.inside(given.get("u") or given.get("ul"))
            return self.inside(words[0]) + (f"×10^{power}" if power else "") + (f" {unit}" if unit else "")
        if name in ("convert", "cvt") and len(words) > 1:
            between = len(words) > 3 and str(words[1]).strip() in ("-", "–", "to", "and", "x", "by")
            return " ".join(self.inside(word) for word in words[: 4 if between else 2])
        if name == "as of" and words:
            return f"As of {_date([self.inside(word) for word in words], day_first=True)}"
        if name in ("frac", "sfrac") and words:
            return "/".join(self.inside(word) for word in words[-2:])
        return ""

    def _items(self, code: Any) -> Iterator[str]:
        """The items of a list: the lines of a parameter."""
        before, self.text = self.text, []
        self.nodes(code)
        lines, self.text = "".join(self.text).splitlines(), before
        yield from filter(None, (" ".join(line.split()) for line in lines))

    def _tag(self, node: Any) -> None:
        tag = str(node.tag).strip().lower()
        if tag in _UNSEEN:
            return
        if tag == "table":
            self.text += ["\n\n", *(f"{row}\n\n" for row in self._rows(node.contents))]
        elif tag in ("li", "dt", "dd"):
            self.text.append("\n\n")  # no sentence goes on after a blank line, but it does after a line break
            self.nodes(node.contents)
        elif tag in ("br", "hr", "p", "div", "tr", "blockquote"):
            self.text.append("\n" if node.wiki_markup is None else "")
            self.nodes(node.contents)
        else:
            self.nodes(node.contents)

    def _rows(self, code: Any) -> Iterator[str]:
        """A line for each row of a table: "heading: cell; heading: cell." or, without headings, "cell | cell"."""
        table = Table()
        lines: list[str] = []
        headings: list[int] = []  # lines that are left out if a sentence follows
        for cells in _rows_of(code):
            texts = [self.inside(cell.contents) for cell in cells]
            if cells and _is_caption(cells[0]):
                lines.append(texts.pop(0).removeprefix("+").strip())
                cells.pop(0)
            if not cells:  # MediaWiki makes no row of it, so no cell from above spans it
                continue
            read = [_cell(cell, text) for cell, text in zip(cells, texts, strict=True)]
            if are_headings(read):  # the same links in each sentence would say nothing about its row
                read = [one._replace(text=_MARK.sub("", one.text)) for one in read]
            row = table.row(read)
            if row.is_headings:
                headings.append(len(lines))
            elif row.sentence:
                while headings:
                    lines[headings.pop()] = ""
            if any(texts):
                lines.append(row.sentence or " | ".join(texts))
        yield from filter(None, lines)


def _cell(node: Any, text: str) -> Cell:
    spans = [str(node.get(name).value) if node.has(name) else None for name in ("colspan", "rowspan")]
    return cell_of(text, str(node.tag) == "th", *spans)


def _is_caption(cell: Any) -> bool:
    """Whether a cell is a caption (`|+`), for which the parser has no tag. Its attributes, if any, follow the plus sign."""
    first = cell.attributes[0].name if cell.attributes else next(iter(cell.contents.nodes), "")
    return cell.wiki_markup == "|" and str(first).startswith("+")


def _rows_of(code: Any) -> Iterator[list[Any]]:
    """The cells of each row; the first row may be outside of any `tr`."""
    loose: list[Any] = []
    for node in code.nodes if code is not None else ():
        if isinstance(node, nodes.Tag) and str(node.tag) in ("td", "th"):
            loose.append(node)
        elif isinstance(node, nodes.Tag) and str(node.tag) == "tr":
            yield _cells(loose)
            loose = []
            yield _cells(node.contents.nodes)
    yield _cells(loose)


def _cells(row: Iterable[Any]) -> list[Any]:
    return [node for node in row if isinstance(node, nodes.Tag) and str(node.tag) in ("td", "th")]
