"""The text of Word documents (.docx). mammoth converts them to HTML with headings, lists, tables, text boxes and footnotes.

Tracked deletions, comments, page headers and page footers are not part of this HTML.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lxml import etree

from realm.documents.formats.archives import archive
from realm.documents.formats.pages import page_record, read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need
from realm.documents.formats.titles import sensible_title


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is a sensible title in the metadata, else the main heading, else the file name."""
    need("mammoth", path)
    import mammoth

    with archive(path, limits, ".docx") as parts, path.open("rb") as file:
        names = set(parts.namelist())
        if "[Content_Types].xml" not in names:
            raise Unreadable(path, Reason.DAMAGED, f"{path} is a ZIP archive, but not a .docx")
        title = ""
        if (core := "docProps/core.xml") in names:
            title = sensible_title(_title(parts.read(core)))
        no_pictures = mammoth.images.img_element(lambda image: {})
        html = mammoth.convert_to_html(
            file, convert_image=no_pictures, style_map="p[style-name='Title'] => h1:fresh"
        ).value
    page = read_page(html)
    headings = page.headings if limits.headings else ()
    yield page_record(path, title or page.main_heading, page.text, headings=headings)


def _title(core: bytes) -> str | None:
    with suppress(etree.XMLSyntaxError):
        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
        return etree.fromstring(core, parser).findtext("{http://purl.org/dc/elements/1.1/}title")
    return None
