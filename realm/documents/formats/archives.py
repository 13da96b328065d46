"""Reads the parts of ZIP archives safely: the declared sizes are checked before anything is decompressed.

Python's `zipfile` decompresses no more bytes of a part than the archive declares for this part.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lxml import etree

from realm.documents.formats.records import Limits, Reason, Unreadable
from realm.documents.formats.titles import sensible_title
from realm.errors import first_line

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
"""First bytes of older Microsoft files, and of newer Microsoft files that are encrypted."""
_MOST_PARTS = 100_000


@contextmanager
def archive(path: Path, limits: Limits, kind: str, most: int = 0) -> Iterator[zipfile.ZipFile]:
    """An archive whose markup decompresses to at most `limits.file_bytes`, or to `most` bytes if these are more.

    `kind` is the name of the format in messages.

    Pictures and sounds in the archive may be larger, because they are not read.

    Raises:
        Unreadable: the file is not a ZIP archive, is encrypted, or contains too much markup.
    """
    with path.open("rb") as file:
        start = file.read(limits.file_bytes) if file.peek(8).startswith(_OLE) else b""
    if "EncryptedPackage".encode("utf-16-le") in start:
        raise Unreadable(path, Reason.ENCRYPTED, f"{path} is encrypted: save it without a password")
    if start:
        raise Unreadable(path, Reason.DAMAGED, f"{path} has an older Microsoft format: save it as {kind}")
    try:
        with zipfile.ZipFile(path) as parts:
            _check(path, parts, max(limits.file_bytes, most))
            yield parts
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise Unreadable(
            path, Reason.DAMAGED, f"{path} cannot be read as {kind} ({first_line(error)})"
        ) from None


def _check(path: Path, archive: zipfile.ZipFile, most: int) -> None:
    parts = archive.infolist()
    if len(parts) > _MOST_PARTS:
        raise Unreadable(
            path, Reason.TOO_LONG, f"{path}: {len(parts):,} parts, over the limit of {_MOST_PARTS:,}"
        )
    markup = [one for one in parts if one.filename.lower().endswith(MARKUP)]
    for one in markup:
        if one.flag_bits & 1:
            raise Unreadable(path, Reason.ENCRYPTED, f"{path} is encrypted: save it without a password")
        if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Unreadable(
                path, Reason.DAMAGED, f"{path}: a part is compressed by a method other than deflate"
            )
    size = sum(one.file_size for one in markup)
    if size > most:
        raise Unreadable(
            path,
            Reason.TOO_LONG,
            f"{path}: {size:,} bytes of markup, over the limit of {most:,}: split it",
        )


def xml_part(path: Path, parts: zipfile.ZipFile, name: str) -> Any:
    """The root element of a part.

    Raises:
        Unreadable: the part is missing, or is not XML.
    """
    if name not in parts.NameToInfo:
        raise Unreadable(path, Reason.DAMAGED, f"{path} cannot be read: {name} is missing")
    try:
        return etree.fromstring(parts.read(name), _safe_parser())
    except etree.XMLSyntaxError as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path}: {name} is not XML ({error.msg})") from None


def office_title(parts: zipfile.ZipFile) -> str:
    """A sensible title in the metadata of an office document; otherwise ""."""
    for name in ("docProps/core.xml", "meta.xml"):  # of Microsoft, of OpenDocument
        if name in parts.NameToInfo:
            with suppress(etree.XMLSyntaxError):
                return sensible_title(
                    etree.fromstring(parts.read(name), _safe_parser()).findtext(f".//{_TITLE}")
                )
    return ""


def _safe_parser() -> Any:
    return etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)


_TITLE = "{http://purl.org/dc/elements/1.1/}title"
MARKUP = (".xml", ".rels", ".opf", ".xhtml", ".html", ".htm")
