"""The text of an e-mail (.eml). Attachments are not read.

The parser is the older one of Python (`compat32`), which leaves headers as they are: the newer one raises many exceptions for
addresses that are not valid. It runs in a child process, because long headers can take quadratic time.
"""

from collections.abc import Iterator
from contextlib import suppress
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path

from realm.documents.formats.encodings import Text, decode, known_encoding, whole_bytes
from realm.documents.formats.hyphens import with_whole_words
from realm.documents.formats.pages import page_in
from realm.documents.formats.records import SURROGATE, Limits, Reason, Record, Unreadable
from realm.documents.formats.titles import file_title
from realm.text.fields import time_text

_LONGEST_HEADER = 10_000
"""Most characters of a header that are decoded."""


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record: the subject, and the texts of the message and of messages in it; sender, recipients and date are fields.

    Raises:
        Unreadable: the file is too long, or the message has no text, or text in an unknown encoding.
    """
    message = message_from_bytes(whole_bytes(path, limits))
    texts = list(_texts(path, message))
    text = "\n\n".join(one.text for one in texts)
    if not text:
        raise Unreadable(path, Reason.NO_TEXT, f"{path} has no text, only headers or attachments")
    fields = {name: _header(message, name) for name in ("from", "to", "cc")}
    with suppress(TypeError, ValueError, OverflowError):  # no date, or one that is not valid
        fields["date"] = time_text(parsedate_to_datetime(_header(message, "date")))
    fields = {name: value for name, value in fields.items() if value}
    assumed = next((one.assumed for one in texts if one.assumed), None)
    title = _header(message, "subject") or file_title(path)
    yield Record(str(path), title, text, path.as_posix(), assumed, fields=fields)


def _texts(path: Path, part: Message) -> Iterator[Text]:
    """The texts of a part that are not empty, in their order. Of alternatives, the first that has a text counts."""
    if part.is_multipart():
        for inner in part.get_payload():
            assert isinstance(inner, Message)  # the payload of a multipart is a list of parts
            found = list(_texts(path, inner))
            yield from found
            if found and part.get_content_type() == "multipart/alternative":
                return
    elif part.get_content_maintype() == "text" and part.get_content_disposition() != "attachment":
        data = part.get_payload(decode=True)
        assert isinstance(data, bytes)
        charset = part.get_content_charset()
        text, assumed = decode(data, path, known_encoding(charset) if charset else None)
        text = text.replace("\r\n", "\n")
        is_page = part.get_content_subtype() == "html"
        text = (page_in(path, text).text if is_page else with_whole_words(text)).strip()
        if text:
            yield Text(text, assumed)


def _header(message: Message, name: str) -> str:
    """The beginning of a header, decoded and on one line; "" without one."""
    raw = str(message.get(name, ""))[:_LONGEST_HEADER]
    with suppress(LookupError, ValueError):  # an encoding is unknown or wrong: the header stays as it is
        raw = str(make_header(decode_header(raw)))
    return SURROGATE.sub("", " ".join(raw.split()))
