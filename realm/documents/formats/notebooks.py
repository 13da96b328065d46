"""The text of Jupyter notebooks (.ipynb): the cells of Markdown and of code. Outputs are not read.

Each cell is rendered alone, so that markup that is not closed ends with its cell. It is read in a child process, because small
JSON can take much memory.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from realm.documents.formats.encodings import whole
from realm.documents.formats.front_matter import FrontMatter, split_front_matter
from realm.documents.formats.markdown_dialects import as_commonmark
from realm.documents.formats.pages import Page, page_in
from realm.documents.formats.records import SURROGATE, Limits, Reason, Record, Unreadable
from realm.documents.formats.sections import Heading, page_record
from realm.errors import first_line
from realm.text.corpus import over_limit


class _Cell(NamedTuple):
    """A cell with text."""

    source: str
    is_code: bool


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is that of the front matter or the main heading, as in Markdown, else the file name.

    Raises:
        Unreadable: the file is too long, is no JSON, or has no cells with text.
    """
    text, assumed = whole(path, limits)
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(path, Reason.NOT_JSON, f"{path}: not JSON ({first_line(error)})") from None
    cells = list(_cells(notebook))
    if not cells:
        raise Unreadable(path, Reason.NO_TEXT, f"{path} has no cells of Markdown or code")
    if (length := sum(len(cell.source) for cell in cells)) > 2 * limits.document_chars:
        problem = over_limit(length, limits.document_chars, "twice the limit")
        raise Unreadable(path, Reason.TOO_LONG, f"{path}: {problem}")
    front = FrontMatter()
    if not cells[0].is_code:
        front, rest = split_front_matter(cells[0].source)
        cells[0] = cells[0]._replace(source=rest)
    page = _page(path, cells)
    fields = {**page.fields, **front.fields}
    headings = page.headings if limits.headings else ()
    yield page_record(path, front.title or page.main_heading, page.text, assumed, fields, headings)


def _page(path: Path, cells: Sequence[_Cell]) -> Page:
    """The texts of all cells, with a blank line between two cells."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    texts: list[str] = []
    headings: list[Heading] = []
    fields: dict[str, Any] = {}
    start = 0
    for source, is_code in cells:
        html = f"<pre>{escape(source)}</pre>" if is_code else parser.render(as_commonmark(source))
        page = page_in(path, f"<article>{html}</article>")
        fields |= page.fields
        if page.text:
            headings += [one._replace(start=start + one.start) for one in page.headings]
            texts.append(page.text)
            start += len(page.text) + 2
    return Page("", "\n\n".join(texts), tuple(headings), fields)


def _cells(notebook: Any) -> Iterator[_Cell]:
    """The cells of Markdown or code that are not empty, in which each half of a character is U+FFFD.

    Notebooks of version 3 have worksheets with cells, and headings that are cells.
    """
    if not isinstance(notebook, dict):
        return
    sheets = [notebook, *_listed(notebook.get("worksheets"))]
    for cell in chain.from_iterable(_listed(sheet.get("cells")) for sheet in sheets):
        kind = cell.get("cell_type")
        lines = cell.get("source", cell.get("input"))
        source = "".join(one for one in lines if isinstance(one, str)) if isinstance(lines, list) else lines
        if not isinstance(source, str) or not source.strip():
            continue
        source = SURROGATE.sub("\ufffd", source)
        if kind == "heading":
            level = cell.get("level")
            signs = "#" * (level if isinstance(level, int) and level in range(1, 7) else 1)
            source = f"{signs} {' '.join(source.split())}"
        if kind in ("markdown", "heading", "code"):
            yield _Cell(source, kind == "code")


def _listed(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; an empty list if the value is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
