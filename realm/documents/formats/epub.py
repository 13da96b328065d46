"""EPUB books become text: the visible text of the chapters, in reading order.

https://www.w3.org/TR/epub-33/: META-INF/container.xml names the package document, whose spine lists the chapters.
"""

import posixpath
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lxml import etree

from realm.documents.formats.archives import archive
from realm.documents.formats.encodings import declared_encoding, decode
from realm.documents.formats.pages import page_record, read_page
from realm.documents.formats.records import DAMAGED, ENCRYPTED, Limits, Record, Unreadable, sensible_title

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record; its title is the title of the book, else the first heading, else the file name."""
    with archive(path, limits, "EPUB") as parts:
        package = _attributes(_xml(path, parts, _CONTAINER), "rootfile", "full-path")
        if not package:
            raise Unreadable(path, DAMAGED, f"{path}: {_CONTAINER} names no package document")
        book = _xml(path, parts, package[0])
        chapters = _chapters(book, package[0])
        if set(chapters) & _encrypted(path, parts):
            raise Unreadable(path, ENCRYPTED, f"{path} is encrypted: it cannot be read without its key")
        pages = [read_page(_markup(path, parts, name)) for name in chapters if name in parts.NameToInfo]
    title = sensible_title(book.findtext(".//{*}metadata/{*}title"))
    text = "\n\n".join(page.text for page in pages if page.text)
    yield page_record(path, title or next((page.heading for page in pages if page.heading), ""), text)


def _chapters(book: Any, package: str) -> list[str]:
    """The parts that the spine lists, without the table of contents."""
    items = {item.get("id"): item for item in book.iterfind(".//{*}manifest/{*}item")}
    order = [items.get(name) for name in _attributes(book, "itemref", "idref")]
    return [
        posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(item.get("href", ""))))
        for item in order
        if item is not None and "nav" not in item.get("properties", "").split()
    ]


def _encrypted(path: Path, parts: zipfile.ZipFile) -> set[str]:
    """The encrypted parts; often only fonts are encrypted, and these are not read."""
    if _ENCRYPTION not in parts.NameToInfo:
        return set()
    return {unquote(name) for name in _attributes(_xml(path, parts, _ENCRYPTION), "CipherReference", "URI")}


def _attributes(root: Any, element: str, name: str) -> list[str]:
    return [found.get(name) for found in root.iterfind(f".//{{*}}{element}[@{name}]")]


def _xml(path: Path, parts: zipfile.ZipFile, name: str) -> Any:
    if name not in parts.NameToInfo:
        raise Unreadable(path, DAMAGED, f"{path} is no EPUB: it has no {name}")
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    try:
        return etree.fromstring(parts.read(name), parser)
    except etree.XMLSyntaxError as error:
        raise Unreadable(path, DAMAGED, f"{path}: {name} is not XML ({error.msg})") from None


def _markup(path: Path, parts: zipfile.ZipFile, name: str) -> str:
    data = parts.read(name)
    where = f"{path} {name}"
    # XML has self-closing elements; HTML does not, and would take all that follows as their content.
    return _EMPTY.sub(r"<\1\2></\1>", decode(data, where, declared_encoding(data, where)).text)


_EMPTY = re.compile(
    r"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr)[\s/])([A-Za-z][\w:.-]*+)([^<>]*)/>"
)
