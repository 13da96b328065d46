"""The text of an e-mail (.eml), and of the e-mails of a mailbox (.mbox). Attachments are not read.

The parser is the older one of Python (`compat32`), which leaves headers as they are: the newer one raises many exceptions for
addresses that are not valid. It runs in a child process, because long headers can take quadratic time.
"""

import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import suppress
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import BinaryIO

from realm.documents.formats.encodings import Text, decode, known_encoding, whole_bytes
from realm.documents.formats.hyphens import with_whole_words
from realm.documents.formats.pages import page_in
from realm.documents.formats.records import SURROGATE, Limits, Pages, Reason, Record, Unreadable
from realm.documents.formats.titles import file_title
from realm.keys import KeyTable, key_of
from realm.text.fields import time_text

_LONGEST_HEADER = 10_000
"""Most characters of a header that are decoded."""
_LONGEST_LINE = 1 << 20
"""Most bytes of a line of a mailbox that are read at once."""


def read(path: Path, limits: Limits) -> Iterator[Record | Unreadable | Pages]:
    """One record, or one for each message of a mailbox (.mbox): the subject, and the texts of the message and of messages in
    it; sender, recipients and date are fields.

    The id of a message of a mailbox has the Message-ID, so that it stays the same if other messages are added or deleted. If an
    earlier message has the same Message-ID, a hash of the message follows. Of equal messages, only the first is read.

    Raises:
        Unreadable: the file is too long, or the message has no text, or text in an unknown encoding.
    """
    if path.suffix.lower() != ".mbox":
        yield _record(path, path, path.as_posix(), message_from_bytes(whole_bytes(path, limits)))
        return
    with path.open("rb") as file, KeyTable() as used:
        total = path.stat().st_size >> 20
        for number, data in _messages(path, file, limits):
            yield Pages(file.tell() >> 20, total)
            where = Path(f"{path}:{number}")
            if data is None:
                message = f"{where}: a message of over {limits.file_bytes:,} bytes"
                yield Unreadable(where, Reason.TOO_LONG, message)
                continue
            try:
                parsed = message_from_bytes(data)
                name = _new_name(parsed, data, used)
                if name is None:
                    yield Unreadable(where, Reason.NEAR_DUPLICATE, f"{where}: an earlier message is equal")
                else:
                    yield _record(path, where, f"{path.as_posix()}:{name}", parsed)
            except Unreadable as problem:
                yield problem
            except RecursionError:
                yield Unreadable(where, Reason.DAMAGED, f"{where}: the message has too many parts in parts")


_LONGEST_ID = 200
"""Most characters of a Message-ID that are used."""
_LONGEST_SEPARATOR = 400
"""Bytes of a line that are compared with `_SEPARATOR`, because this takes quadratic time."""
_SEPARATOR = re.compile(
    rb"From \S+(?: at \S+)?[ \t]+(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),?[ \t].*\d\d:\d\d.*\d{4}"
)
"""The line above a message, with the sender and the time when it came. An empty line is above it. Mailman writes "ana at
example.org". A line of a text can begin with "From " too."""
_ESCAPED = re.compile(rb">+From ")


def _new_name(message: Message, data: bytes, used: KeyTable) -> str | None:
    """The name of a message in the id of its document, which `used` then has; None if an earlier message is equal."""
    digest = hashlib.sha256(data.strip()).hexdigest()[:16]
    if used.put(key_of(digest)) is not None:
        return None
    own = _header(message, "message-id")[:_LONGEST_ID]
    if not own:
        return digest
    return own if used.put(key_of(own)) is None else f"{own} {digest}"


def _messages(path: Path, file: BinaryIO, limits: Limits) -> Iterator[tuple[int, bytes | None]]:
    """The number of the line above each message of a mailbox, and the message; None if it is too long.

    Raises:
        Unreadable: no message begins at the first line that is not empty.
    """
    lines: list[bytes] = []
    start = size = 0
    is_below_empty = True
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        is_empty = line in (b"\n", b"\r\n")
        if is_below_empty and _SEPARATOR.match(line[:_LONGEST_SEPARATOR]):
            if start:
                yield start, b"".join(lines) if size <= limits.file_bytes else None
            lines, start, size, is_below_empty = [], number, 0, False
            continue
        is_below_empty = is_empty
        if not start:
            if is_empty:
                continue
            break
        size += len(line)
        if size <= limits.file_bytes:
            lines.append(line[1:] if _ESCAPED.match(line) else line)
        else:
            lines.clear()
    if not start:
        raise Unreadable(path, Reason.DAMAGED, f'{path}: a mailbox must begin with a line "From ..."')
    yield start, b"".join(lines) if size <= limits.file_bytes else None


def _record(path: Path, where: Path, name: str, message: Message) -> Record:
    """The record of a message with the id `name`."""
    texts = list(_texts(where, message))
    text = "\n\n".join(one.text for one in texts)
    if not text:
        raise Unreadable(where, Reason.NO_TEXT, f"{where} has no text, only headers or attachments")
    fields = {one: _header(message, one) for one in ("from", "to", "cc")}
    with suppress(TypeError, ValueError, OverflowError):  # no date, or one that is not valid
        fields["date"] = time_text(parsedate_to_datetime(_header(message, "date")))
    fields = {one: value for one, value in fields.items() if value}
    assumed = next((one.assumed for one in texts if one.assumed), None)
    title = _header(message, "subject") or file_title(path)
    return Record(str(where), title, text, name, assumed, fields=fields)


def _texts(where: Path, part: Message) -> Iterator[Text]:
    """The texts of a part that are not empty, in their order. Of alternatives, the first that has a text counts."""
    if part.is_multipart():
        for inner in part.get_payload():
            assert isinstance(inner, Message)  # the payload of a multipart is a list of parts
            found = list(_texts(where, inner))
            yield from found
            if found and part.get_content_type() == "multipart/alternative":
                return
    elif part.get_content_maintype() == "text" and part.get_content_disposition() != "attachment":
        data = part.get_payload(decode=True)
        assert isinstance(data, bytes)
        charset = part.get_content_charset()
        text, assumed = decode(data, where, known_encoding(charset) if charset else None)
        text = text.replace("\r\n", "\n")
        is_page = part.get_content_subtype() == "html"
        text = (page_in(where, text).text if is_page else with_whole_words(text)).strip()
        if text:
            yield Text(text, assumed)


def _header(message: Message, name: str) -> str:
    """The beginning of a header, decoded and on one line; "" without one."""
    raw = str(message.get(name, ""))[:_LONGEST_HEADER]
    with suppress(LookupError, ValueError):  # an encoding is unknown or wrong: the header stays as it is
        raw = str(make_header(decode_header(raw)))
    return SURROGATE.sub("", " ".join(raw.split()))
