"""The text of EPUB books: the visible text of the chapters, in reading order.

META-INF/container.xml has the path of the package document, and the spine of the package document lists the chapters
(https://www.w3.org/TR/epub-33/).
"""

import posixpath
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from realm.documents.formats.archives import archive, xml_part
from realm.documents.formats.encodings import declared_encoding, decode
from realm.documents.formats.pages import read_page
from realm.documents.formats.records import Limits, Reason, Record, Unreadable
from realm.documents.formats.sections import Heading, page_record
from realm.documents.formats.titles import sensible_title

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is that of the package document, the first main heading of a chapter, or the file name."""
    with archive(path, limits, "EPUB") as parts:
        package = _attributes(xml_part(path, parts, _CONTAINER), "rootfile", "full-path")
        if not package:
            raise Unreadable(path, Reason.DAMAGED, f"{path}: {_CONTAINER} has no path of a package document")
        book = xml_part(path, parts, package[0])
        chapters = _chapters(book, package[0])
        if set(chapters) & _encrypted(path, parts):
            raise Unreadable(
                path, Reason.ENCRYPTED, f"{path} is encrypted and cannot be read without its key"
            )
        pages = [read_page(_markup(path, parts, name)) for name in chapters if name in parts.NameToInfo]
    title = sensible_title(book.findtext(".//{*}metadata/{*}title"))
    pages = [page for page in pages if page.text]
    text = "\n\n".join(page.text for page in pages)
    headings: list[Heading] = []
    start = 0
    for page in pages if limits.headings else []:
        headings += [one._replace(start=start + one.start) for one in page.headings]
        start += len(page.text) + 2
    title = title or next((page.main_heading for page in pages if page.main_heading), "")
    yield page_record(path, title, text, headings=headings)


def _chapters(book: Any, package: str) -> list[str]:
    """Names of the parts that the spine lists, without the table of contents."""
    items = {item.get("id"): item for item in book.iterfind(".//{*}manifest/{*}item")}
    order = [items.get(name) for name in _attributes(book, "itemref", "idref")]
    return [
        posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(item.get("href", ""))))
        for item in order
        if item is not None and "nav" not in item.get("properties", "").split()
    ]


def _encrypted(path: Path, parts: zipfile.ZipFile) -> set[str]:
    """Names of the encrypted parts. In many books these are only fonts, which are not read."""
    if _ENCRYPTION not in parts.NameToInfo:
        return set()
    return {
        unquote(name) for name in _attributes(xml_part(path, parts, _ENCRYPTION), "CipherReference", "URI")
    }


def _attributes(root: Any, element: str, name: str) -> list[str]:
    return [found.get(name) for found in root.iterfind(f".//{{*}}{element}[@{name}]")]


def _markup(path: Path, parts: zipfile.ZipFile, name: str) -> str:
    data = parts.read(name)
    where = f"{path} {name}"
    # HTML has no self-closing elements: an HTML parser would take all that follows such an element as its content.
    return _EMPTY.sub(r"<\1\2></\1>", decode(data, where, declared_encoding(data, where)).text)


_EMPTY = re.compile(
    r"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr)[\s/])([A-Za-z][\w:.-]*+)([^<>]*)/>"
)
