"""What is no part of an article in the pages of MediaWiki, such as those of Wikipedia: boxes, references and lists of sources.

MediaWiki, its extensions, and mwoffliner, with which Kiwix makes ZIM archives, give elements the ids and classes below. Some of
these, such as "metadata", have another meaning elsewhere, so the rules are for the pages of MediaWiki only.
"""

import re
from collections.abc import Mapping

SOURCE_SECTIONS = frozenset(
    ("references", "external links", "see also", "further reading", "notes", "bibliography", "sources", "footnotes",
     "citations", "notes and references", "other websites", "related pages")
)  # fmt: skip
"""Headings of sections that are left out; the last two headings are those of the Simple English Wikipedia."""
_PAGE = frozenset(("firstHeading", "mw-body", "mw-body-content", "mw-content-text", "mw-parser-output"))
"""Ids and classes by which a page of MediaWiki is known, besides the class "mediawiki" of its body, which is also the class of
listings on other pages; at least one of them is before the text of the page."""
_DISAMBIGUATION = frozenset(("disambigbox", "dmbox-disambig", "mw:PageProp/disambiguation"))
_HEADING = frozenset("h1 h2 h3 h4 h5 h6".split())
_LEFT_OUT_TAGS = frozenset(("figure", "math"))
_LEFT_OUT = re.compile(
    r"(info|nav|vertical-nav|sistersite|portal|side-|[acdfiot]m)box.*|mbox-small|sidebar|portal-bar|metadata|noprint"  # boxes
    r"|hatnote|dablink|rellink|shortdescription"  # notes about other pages
    r"|(mw-)?references.*|reflist|reference|mw-ref|mw-cite-backlink"
    r"|gallery|thumb|mw-kartographer-container|timeline-wrapper"  # pictures
    r"|mwe-math-element|mw-ext-score"
    r"|mw-editsection|mw-jump-link|mw-indicators|toc|catlinks|printfooter|mw-footer|siteSub|contentSub|coordinates"
    r"|zim-footer"
)
"""Ids and classes of elements that are left out, as the templates and extensions that make them are left out of dumps."""


def is_page(tag: str, attributes: Mapping[str, str]) -> bool:
    """Whether an element with these attributes shows that MediaWiki made the page."""
    names = _names(attributes)
    return (
        not _PAGE.isdisjoint(names)
        or (tag == "body" and "mediawiki" in names)
        or (attributes.get("name") == "generator" and attributes.get("content", "").startswith("MediaWiki "))
    )


def is_disambiguation(attributes: Mapping[str, str]) -> bool:
    """Whether an element with these attributes is on the pages that only list the meanings of a name."""
    return not _DISAMBIGUATION.isdisjoint((*_names(attributes), attributes.get("property")))


def is_left_out(tag: str, attributes: Mapping[str, str]) -> bool:
    """Whether an element is no part of the text of the article. The id of a heading is made of its words, and says nothing.

    >>> is_left_out("sup", {"class": "mw-ref reference"}), is_left_out("sup", {})
    (True, False)
    """
    names = _names(attributes)
    of_heading = tag in _HEADING or "mw-headline" in names
    return tag in _LEFT_OUT_TAGS or (not of_heading and any(map(_LEFT_OUT.fullmatch, names)))


def _names(attributes: Mapping[str, str]) -> list[str]:
    return f"{attributes.get('id', '')} {attributes.get('class', '')}".split()
