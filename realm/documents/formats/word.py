"""The text of Word documents (.docx). mammoth converts them to HTML with headings, lists, tables, text boxes and footnotes.

Word marks a row as headings of columns only if it is repeated on each page, which few authors choose. So the first row of other
tables is taken as headings if it looks like names of columns.

Tracked deletions, comments, page headers and page footers are not part of this HTML.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realm.documents.formats.archives import archive, office_title
from realm.documents.formats.pages import read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need
from realm.documents.formats.rows import names_columns
from realm.documents.formats.sections import page_record

_STYLES = "\n".join(
    [
        "p[style-name='Title'] => h1:fresh",
        *(
            f"{style} => h{min(n + 1, 6)}:fresh"
            for n in range(1, 7)
            for style in (f"p[style-name='Heading {n}']", f"p.Heading{n}")
        ),
    ]
)
"""The title of the document has a level of its own, above that of the headings."""


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is a sensible title in the metadata, else the main heading, else the file name."""
    need("mammoth", path)
    import mammoth

    with archive(path, limits, ".docx") as parts, path.open("rb") as file:
        if "[Content_Types].xml" not in parts.NameToInfo:
            raise Unreadable(path, Reason.DAMAGED, f"{path} is a ZIP archive, but not a .docx")
        title = office_title(parts)
        no_pictures = mammoth.images.img_element(lambda image: {})
        html = mammoth.convert_to_html(
            file,
            convert_image=no_pictures,
            style_map=_STYLES,
            transform_document=mammoth.transforms.element_of_type(mammoth.documents.Table, _with_headings),
        ).value
    page = read_page(html)
    headings = page.headings if limits.headings else ()
    yield page_record(path, title or page.main_heading, page.text, headings=headings)


def _with_headings(table: Any) -> Any:
    """A table of mammoth, whose first row is marked as headings if it looks like names of columns and no row is marked."""
    rows = table.children
    cells_R = [getattr(row, "children", []) for row in rows]
    if not rows or any(getattr(row, "is_header", True) for row in rows):
        return table
    is_bold = [all(_found(cell, "is_bold")) for cell in cells_R[0]]
    if not names_columns(
        [["".join(_found(cell, "value")) for cell in cells] for cells in cells_R], all(is_bold)
    ):
        return table
    return table.copy(children=[rows[0].copy(is_header=True), *rows[1:]])


def _found(element: Any, name: str) -> list[Any]:
    """The values of an attribute in an element of mammoth and everything in it, in order."""
    inside = [value for child in getattr(element, "children", []) for value in _found(child, name)]
    return [getattr(element, name), *inside] if hasattr(element, name) else inside
