"""An e-mail in a file becomes a record. Attachments are not read."""

import email.policy
from collections.abc import Iterator
from contextlib import suppress
from email.message import EmailMessage, MIMEPart
from email.parser import BytesParser
from pathlib import Path

from realm.documents.formats.compressed import opened, uncompressed
from realm.documents.formats.encodings import Text, decode
from realm.documents.formats.pages import page_in
from realm.documents.formats.records import SURROGATE, Limits, Reason, Record, Unreadable
from realm.text.fields import time_text


def mail(path: Path, limits: Limits) -> Iterator[Record]:
    """One record: the subject, and the text of the message, else its HTML; sender, recipients and date are fields.

    Raises:
        Unreadable: the file is too long, or the message has no text, or text in an unknown encoding.
    """
    with opened(path) as file:
        data = file.read(limits.file_bytes + 1)
    if len(data) > limits.file_bytes:
        over = f"over {limits.file_bytes:,} bytes"
        raise Unreadable(path, Reason.TOO_LONG, f"{path}: {over}, too long for one document")
    message = BytesParser(EmailMessage, policy=email.policy.default).parsebytes(data)
    body = message.get_body(("plain", "html"))
    text, assumed = Text("", None) if body is None else _text(path, body)
    if body is not None and body.get_content_subtype() == "html":
        text = page_in(path, text).text
    text = text.replace("\r\n", "\n").strip()
    if not text:
        raise Unreadable(path, Reason.NO_TEXT, f"{path} has no text, only headers or attachments")
    fields = {name: _header(message, name) for name in ("from", "to", "cc")}
    with suppress(AttributeError, ValueError, TypeError):  # no date, or one that is not valid
        fields["date"] = time_text(message["date"].datetime)
    fields = {name: value for name, value in fields.items() if value}
    title = _header(message, "subject") or uncompressed(path).stem
    yield Record(str(path), title, text, path.as_posix(), assumed, fields=fields)


def _text(path: Path, body: MIMEPart) -> Text:
    data = body.get_payload(decode=True)
    assert isinstance(data, bytes)  # a body is not a multipart
    with suppress(LookupError, UnicodeDecodeError):
        return Text(data.decode(body.get_content_charset("utf-8")), None)
    return decode(data, path)  # the charset is unknown or wrong


def _header(message: EmailMessage, name: str) -> str:
    """A header on one line, without the halves of characters that stand for bytes in an unknown encoding; "" without one."""
    return SURROGATE.sub("", " ".join(str(message.get(name, "")).split()))
