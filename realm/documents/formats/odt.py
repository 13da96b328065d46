"""The text of OpenDocument texts (.odt), as LibreOffice writes them: headings, paragraphs, lists, tables, footnotes, as HTML.

content.xml has the text (OASIS OpenDocument 1.3, part 3). Deleted text, comments and tables of contents are not read.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from realm.documents.formats.archives import archive, office_title, xml_part
from realm.documents.formats.pages import read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable
from realm.documents.formats.sections import page_record

_OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_BLOCKS = {
    f"{_TEXT}p": "p",
    f"{_TEXT}list-item": "li",
    f"{_TABLE}table": "table",
    f"{_TABLE}table-row": "tr",
    f"{_TABLE}table-cell": "td",
}
"""Element -> element of HTML."""
_LEVELS = ("1", "2", "3", "4", "5")
_SPACES = (f"{_TEXT}s", f"{_TEXT}tab")
_LEFT_OUT = (
    f"{_OFFICE}annotation",
    f"{_OFFICE}forms",
    f"{_TEXT}alphabetical-index",
    f"{_TEXT}note-citation",
    f"{_TEXT}ruby-text",
    f"{_TEXT}table-of-content",
    f"{_TEXT}tracked-changes",
)


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is a sensible title in the metadata, else the main heading as in HTML, else the file name."""
    with archive(path, limits, ".odt") as parts:
        title = office_title(parts)
        body = xml_part(path, parts, "content.xml").find(f"{_OFFICE}body/{_OFFICE}text")
    if body is None:
        raise Unreadable(path, Reason.DAMAGED, f"{path} is an archive, but not a .odt")
    page = read_page("".join(_markup(body)))
    headings = page.headings if limits.headings else ()
    yield page_record(path, title or page.main_heading, page.text, headings=headings)


def _markup(element: Any) -> Iterator[str]:
    """The content of an element as HTML."""
    name = _name(element)
    yield f"<{name}>" if name else ""
    yield escape(element.text or "")
    notes = []
    for child in element.iterchildren(tag="*"):
        if child.tag in _SPACES:
            yield " "
        elif child.tag == f"{_TEXT}line-break":
            yield "<br>"
        elif child.tag == f"{_TEXT}note":
            notes.append(child)
        elif child.tag not in _LEFT_OUT:
            yield from _markup(child)
        yield escape(child.tail or "")
    yield f"</{name}>" if name else ""
    for note in notes:  # after the paragraph
        yield from _markup(note)


def _name(element: Any) -> str:
    """The element of HTML that an element becomes; "" if only its content is read.

    The title of the document has a level of its own, above that of the headings.
    """
    if element.tag == f"{_TEXT}h":
        level = element.get(f"{_TEXT}outline-level", "1")
        return f"h{int(level) + 1}" if level in _LEVELS else "h6"
    if element.tag == f"{_TEXT}p" and element.get(f"{_TEXT}style-name") == "Title":
        return "h1"
    if element.tag == f"{_TABLE}table-cell" and any(
        one.tag == f"{_TABLE}table-header-rows" for one in element.iterancestors()
    ):
        return "th"
    return _BLOCKS.get(element.tag, "")
