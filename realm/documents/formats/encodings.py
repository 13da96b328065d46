"""Decodes bytes: by a byte-order mark, else by a declared encoding, else as UTF-8, else as Windows-1252 if this is plausible.

Windows-1252 (cp1252) has all letters of Latin-1, and nearly every sequence of bytes is valid Windows-1252. Therefore this
encoding is assumed only for bytes that are mostly ASCII, have no control characters, and are not damaged UTF-8.
"""

import codecs
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from realm.documents.formats.compressed import opened
from realm.documents.formats.records import Limits, Reason, Unreadable

_MARKS = (  # UTF-32 is first, because the mark of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Text(NamedTuple):
    """Decoded text, and the assumed encoding; None if no encoding had to be assumed."""

    text: str
    assumed: str | None


def marked(start: bytes) -> str | None:
    """The encoding that a byte-order mark at the start declares, or None."""
    return next((encoding for mark, encoding in _MARKS if start.startswith(mark)), None)


def decode(data: bytes, where: str | Path, declared: str | None = None) -> Text:
    """The text of `data`. `declared` is the encoding that the file itself declares, or None.

    Raises:
        Unreadable: the data are binary, or the encoding is unknown.
    """
    if encoding := marked(data):
        try:
            return Text(data.decode(encoding), None)
        except UnicodeDecodeError as error:
            raise Unreadable(
                where, Reason.ENCODING, f"{where}: {_name(encoding)} with damage ({error.reason})"
            ) from None
    if b"\0" in data:
        raise Unreadable(where, Reason.BINARY, f"{where}: binary data, or UTF-16 without a byte-order mark")
    for encoding in filter(None, (declared, "utf-8")):
        try:
            return Text(data.decode(encoding), None)
        except UnicodeDecodeError as error:
            problem = error
    if _looks_like_cp1252(data):
        return Text(data.decode("cp1252"), "cp1252")
    line = data.count(b"\n", 0, problem.start) + 1
    at = where if line == 1 else f"{where}:{line}"
    byte = data[problem.start]
    raise Unreadable(
        where, Reason.ENCODING, f"{at}: byte 0x{byte:02x} is not UTF-8: convert the file (with iconv)"
    )


def whole(path: Path, limits: Limits, html: bool = False) -> Text:
    """The text of a file, with line feeds as line ends. With `html`, an encoding that the file declares is used.

    Raises:
        Unreadable: the file is empty, too long, binary, or in an unknown encoding.
    """
    data = whole_bytes(path, limits)
    text, assumed = decode(data, path, declared_encoding(data, path) if html else None)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise without_text(path, data)
    return Text(text, assumed)


def whole_bytes(path: Path, limits: Limits) -> bytes:
    """The content of a file that is one document. Raises Unreadable if the file is too long."""
    with opened(path) as file:
        data = file.read(limits.file_bytes + 1)
    if len(data) > limits.file_bytes:
        raise Unreadable(
            path,
            Reason.TOO_LONG,
            f"{path}: over {limits.file_bytes:,} bytes, too long for one document: split it",
        )
    return data


def without_text(path: Path, start: bytes) -> Unreadable:
    """The problem with a file without text. `start` has its first five bytes, which show whether the file is empty."""
    if not start:
        return Unreadable(path, Reason.EMPTY, f"{path} is empty")
    what = "a byte-order mark" if start in dict(_MARKS) else "white space"
    return Unreadable(path, Reason.EMPTY, f"{path} contains only {what}")


def _name(encoding: str) -> str:
    return encoding.removesuffix("-sig").upper()


_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")


def _looks_like_cp1252(data: bytes) -> bool:
    if _CONTROL.search(data):
        return False
    try:
        letters = [c for c in data.decode("cp1252") if ord(c) > 127]
    except UnicodeDecodeError:
        return False
    if len(letters) > 0.3 * len(data):  # probably not Latin letters, but Cyrillic, Chinese or noise
        return False
    lenient = data.decode("utf-8", errors="replace")
    damaged = lenient.count("\N{REPLACEMENT CHARACTER}")
    whole_sequences = sum(ord(c) > 127 for c in lenient) - damaged
    return whole_sequences < damaged


# --- what an HTML file declares ------------------------------------------------------------------

_DECLARED = re.compile(
    rb"""<(?:meta\b[^>]{0,500}?\bcharset|\?xml\b[^>]{0,100}?\bencoding)\s{0,9}=\s{0,9}["']?\s{0,9}([\w.:-]{1,40})""",
    re.IGNORECASE,
)
_ENCODINGS = re.compile(  # encodings of text; Python also has other codecs
    r"utf-?8|us-ascii|ascii|latin-?\d|(?:windows-|cp|x-cp)\d{3,4}|iso-?8859-\d{1,2}|koi8-[rut]|macintosh|mac-roman"
    r"|big5(?:-hkscs)?|gb2312|gbk|gb18030|euc-(?:jp|kr)|shift[_-]jis|sjis|iso-2022-(?:jp|kr)|tis-620|johab"
)
_AS_BROWSERS = {  # browsers decode these encodings as a superset
    "us-ascii": "cp1252",
    "ascii": "cp1252",
    "latin1": "cp1252",
    "latin-1": "cp1252",
    "iso-8859-1": "cp1252",
    "iso8859-1": "cp1252",
    "iso-8859-9": "cp1254",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "shift-jis": "cp932",
    "sjis": "cp932",
    "euc-kr": "cp949",
    "macintosh": "mac-roman",
}


def declared_encoding(data: bytes, path: str | Path) -> str | None:
    """The encoding that an HTML page declares, or None; raises Unreadable if the declared encoding is unknown."""
    match = _DECLARED.search(data, 0, 4096)
    if match is None:
        return None
    name = match[1].decode("ascii", errors="replace").lower()
    if name.startswith(("utf-16", "utf-32")):
        return None  # the declaration is wrong: in a file in UTF-16 or UTF-32, the search would not find it
    if (encoding := known_encoding(name)) is None:
        raise Unreadable(path, Reason.ENCODING, f"{path} declares the encoding {name}, which is not known")
    return encoding


def known_encoding(name: str) -> str | None:
    """Python's name of an encoding of text that a page or a mail names; None if the encoding is not known."""
    name = name.lower()
    encoding = _AS_BROWSERS.get(name, re.sub("^(?:windows-|x-cp)", "cp", name))
    if _ENCODINGS.fullmatch(name):
        with suppress(LookupError):
            codecs.lookup(encoding)
            return encoding
    return None
