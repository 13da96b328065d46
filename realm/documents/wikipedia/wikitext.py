"""MediaWiki's markup to text: the paragraphs, lists and tables of a page, and the titles that it links to.

The parser is mwparserfromhell. Left out are templates, except the few that stand for words within a sentence (`_template`);
references, galleries, formulas, and sections that list sources. A row of a table becomes "Country: France; Capital: Paris."
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import mwparserfromhell
from mwparserfromhell import nodes


class WikiPage(NamedTuple):
    """The text of a page, the titles that it links to, in order, and whether it only lists the meanings of a name."""

    text: str
    links: tuple[str, ...]
    disambiguation: bool


def read_wikitext(markup: str, dropped: Iterable[str] = ()) -> WikiPage:
    """Text and links of a page. Links to the namespaces `dropped` (files and categories in the wiki's language) are left out.

    >>> read_wikitext("'''Paris''' is the [[capital city|capital]] of [[France]].{{Coord|48|N}}")
    WikiPage(text='Paris is the capital of France.', links=('Capital city', 'France'), disambiguation=False)
    """
    taken = _Taken({*_DROPPED, *(name.lower() for name in dropped)})
    taken.sections(mwparserfromhell.parse(markup, skip_style_tags=True))
    text = _QUOTES.sub("", "".join(taken.text))
    for pattern, instead in _DEBRIS:
        text = pattern.sub(instead, text)
    lines = (" ".join(line.split()) for line in text.split("\n"))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return WikiPage(text, tuple(taken.links), taken.disambiguation)


_QUOTES = re.compile(r"'{2,}")
_DEBRIS = (
    (re.compile(r"\(\s*(?:[,;:]\s*)+"), "("),
    (re.compile(r"\s*[,;:]\s*\)"), ")"),
    (re.compile(r" ?\(\s*\)"), ""),
    (re.compile(r" +([,.;:])"), r"\1"),
)
"""What a template leaves behind in a sentence: "Paris (; ) is"."""
_DROPPED = ("file", "image", "category", "media")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z-]+)?|simple")
_SOURCES = frozenset(
    ("references", "external links", "see also", "further reading", "notes", "bibliography", "sources", "footnotes",
     "citations", "notes and references", "other websites", "related pages")
)  # fmt: skip
"""Headings of sections that are left out; the last two are Simple English Wikipedia's."""
_UNSEEN = frozenset(
    ("ref", "references", "gallery", "timeline", "score", "imagemap", "math", "chem", "ce", "graph", "mapframe",
     "maplink", "templatestyles", "hiero", "inputbox", "section", "categorytree", "style", "script")
)  # fmt: skip
_DISAMBIGUATION = re.compile(r"(?:.+ )?(?:disambig(?:uation)?|dab|hndis|geodis)(?: page|-.*)?")
_FIRST_WORDS = frozenset(
    ("nowrap", "small", "big", "nobr", "abbr", "quote", "blockquote", "cquote", "mono", "sic", "lang-en", "no wrap")
)  # fmt: skip
"""Templates whose first parameter is the text that a reader sees."""
_LAST_WORDS = frozenset(("lang", "transl", "transliteration", "linktext", "font color", "color"))
_SIGNS = {
    "ndash": "–",
    "snd": " – ",
    "spaced ndash": " – ",
    "mdash": "—",
    "'": "'",
    "\"'": "\"'",
    "&nbsp": " ",
}


class _Taken:
    """Collects text and links, node by node."""

    def __init__(self, dropped: set[str]):
        self.text: list[str] = []
        self.links: dict[str, None] = {}
        self.disambiguation = False
        self._dropped = dropped

    def sections(self, code: Any) -> None:
        """The nodes of a page, without the sections that list sources."""
        left_out = 0  # level of the heading of the section that is left out
        for node in code.nodes:
            if isinstance(node, nodes.Heading):
                if left_out and node.level > left_out:
                    continue
                left_out = node.level if str(node.title).strip().lower() in _SOURCES else 0
            if not left_out:
                self.node(node)
            elif isinstance(node, nodes.Template):
                self._template(node)  # it may mark the page as a disambiguation

    def nodes(self, code: Any) -> None:
        """What stands inside a node."""
        for node in code.nodes if code is not None else ():
            self.node(node)

    def node(self, node: Any) -> None:
        if isinstance(node, nodes.Text):
            self.text.append(node.value)
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
            self.text.append(node.normalize())
        elif isinstance(node, nodes.Argument):
            self.nodes(node.default)

    def inside(self, code: Any) -> str:
        """The text inside a node, on one line."""
        before, self.text = self.text, []
        self.nodes(code)
        found, self.text = " ".join("".join(self.text).split()), before
        return found

    def _link(self, node: Any) -> None:
        title = " ".join(str(node.title).replace("_", " ").split())
        space, colon, _ = title.partition(":")
        if colon and (space.lower() in self._dropped or (node.text is None and _LANGUAGE.fullmatch(space))):
            return
        target = title.removeprefix(":").partition("#")[0].strip()
        if target and "{" not in target:
            self.links[target[0].upper() + target[1:]] = None
        if node.text is None:
            self.text.append(title.removeprefix(":"))
        else:
            self.nodes(node.text)

    def _template(self, node: Any) -> str:
        """The words for which a template stands in a sentence."""
        name = " ".join(str(node.name).replace("_", " ").lower().split())
        self.disambiguation = self.disambiguation or bool(_DISAMBIGUATION.fullmatch(name))
        if name in _SIGNS:
            return _SIGNS[name]
        if name.startswith("formatnum:"):
            return name.removeprefix("formatnum:")
        words = [one.value for one in node.params if not one.showkey]
        if name in _FIRST_WORDS and words:
            return self.inside(words[0])
        if name in _LAST_WORDS and words:
            return self.inside(words[-1])
        if name in ("convert", "cvt") and len(words) > 1:
            between = len(words) > 3 and str(words[1]).strip() in ("-", "–", "to", "and", "x", "by")
            return " ".join(self.inside(word) for word in words[: 4 if between else 2])
        if name == "as of" and words:
            return f"As of {' '.join(self.inside(word) for word in words)}"
        if name in ("frac", "sfrac") and words:
            return "/".join(self.inside(word) for word in words[-2:])
        return ""

    def _tag(self, node: Any) -> None:
        tag = str(node.tag).strip().lower()
        if tag in _UNSEEN:
            return
        if tag == "table":
            self.text += ["\n\n", *(f"{row}\n" for row in self._rows(node.contents)), "\n"]
        elif tag in ("br", "hr", "p", "div", "li", "tr", "blockquote"):
            self.text.append("\n" if node.wiki_markup is None else "")
            self.nodes(node.contents)
        else:
            self.nodes(node.contents)

    def _rows(self, code: Any) -> Iterator[str]:
        """A line for each row of a table: cells after the headings of their columns, or with " | " between."""
        headings: list[str] = []
        for cells in _rows_of(code):
            texts = [self.inside(cell.contents) for cell in cells]
            if texts and texts[0].startswith("+"):  # a caption, for which the parser has no tag
                yield texts.pop(0).removeprefix("+").strip()
                cells.pop(0)
            if not any(texts):
                continue
            if not headings and len(texts) > 1 and all(str(cell.tag) == "th" for cell in cells):
                headings = texts
            elif len(texts) == len(headings):
                pairs = zip(headings, texts, strict=True)
                yield "; ".join(f"{name}: {text}" if name else text for name, text in pairs if text) + "."
            else:
                yield " | ".join(texts)


def _rows_of(code: Any) -> Iterator[list[Any]]:
    """The cells of each row; the first row may stand outside of any `tr`."""
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
