"""The text of Word documents (.docx). mammoth converts them to HTML with headings, lists, tables, text boxes and footnotes.

Tracked deletions, comments, page headers and page footers are not part of this HTML.
"""

from collections.abc import Iterator
from pathlib import Path

from realm.documents.formats.archives import archive, office_title
from realm.documents.formats.pages import page_record, read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need


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
            file, convert_image=no_pictures, style_map="p[style-name='Title'] => h1:fresh"
        ).value
    page = read_page(html)
    headings = page.headings if limits.headings else ()
    yield page_record(path, title or page.main_heading, page.text, headings=headings)
