"""JSON Lines files become records, line by line, and JSON files object by object."""

import io
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import decode, marked, whole, without_text
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, present_names, record
from realm.errors import first_line, shown
from realm.text.fields import FieldNames


def json_lines(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each line, or the problem with the line; blank lines are skipped.

    Raises:
        Unreadable: the file is empty, binary or damaged.
    """
    empty = True
    with opened(path) as file:
        start = file.peek(5)[:5]
        for number, (raw, complete) in enumerate(_raw_lines(path, file, limits), start=1):
            where = f"{path}:{number}"
            if raw is None:
                empty = False
                yield Unreadable(
                    where, Reason.TOO_LONG, f"{where}: a line of over {limits.file_bytes:,} bytes"
                )
                continue
            try:
                line, assumed = decode(raw, where)
            except Unreadable as problem:
                empty = False
                yield problem
                continue
            if line.strip():
                empty = False
                found = _json_line(where, line.strip(), complete, limits.names)
                yield found if isinstance(found, Unreadable) else found._replace(assumed=assumed)
    if empty:
        raise without_text(path, start)


def json_file(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """The record of a JSON object, or a record for each object of a list. A file with an object per line is JSON Lines.

    A file is left out as a whole if no object in it (of JSON Lines: in the first 100 lines) has a text.
    Settings of programs are such files.

    Raises:
        Unreadable: the file is empty, binary, damaged, too long, not JSON, or has no texts.
    """
    names = limits.names
    key = names.text or "text"
    problem = f'no object in this JSON has a text under the key "{key}"{_way_out(names)}'
    another = Unreadable(path, Reason.KEY, f"{path}: {problem}")
    with opened(path) as file:
        texts = filter(None, (_text_of(raw) for raw, _ in _raw_lines(path, file, limits)))
        first, second = next(texts, ""), next(texts, "")
        if _are_lines(first, second):
            if not any(_is_meant(_value(text), names) for text in (first, second, *islice(texts, 98))):
                raise another
            yield from json_lines(path, limits)
            return
    try:
        text, assumed = whole(path, limits)
    except Unreadable as problem:
        if problem.reason is not Reason.TOO_LONG:
            raise
        message = "too long to be read at once: write one object per line"
        raise Unreadable(
            path, Reason.TOO_LONG, f"{path}: over {limits.file_bytes:,} bytes, {message}"
        ) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(path, Reason.NOT_JSON, f"{path}: not JSON ({_why(error)})") from None
    objects = value if isinstance(value, list) else [value]
    if not any(_is_meant(one, names) for one in objects):
        raise another
    for number, one in enumerate(objects, start=1):
        where = f"{path}: value {number}" if isinstance(value, list) else str(path)
        found = _of_value(where, "the value", one, names)
        yield found if isinstance(found, Unreadable) else found._replace(assumed=assumed)


def _text_of(raw: bytes | None) -> str:
    """The text of a line; "?", which is not JSON, if the line is too long or cannot be decoded."""
    with suppress(Unreadable):
        return "?" if raw is None else decode(raw, "").text.strip()
    return "?"


def _value(text: str) -> object:
    """The value of a text; None if the text is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _are_lines(first: str, second: str) -> bool:
    """Whether a file that begins with these two lines has an object per line. One of the lines may be damaged."""
    if not second or isinstance(_value(first), dict):
        return bool(second)
    is_list = first.startswith("[") and _value(first) is None  # the list continues in the next line
    return not is_list and isinstance(_value(second), dict)


def _is_meant(value: object, names: FieldNames) -> bool:
    """Whether a value is meant to be a document: an object with a text or passages."""
    if not isinstance(value, dict):
        return False
    text = value.get(present_names(value, names).get("text", ""))
    return isinstance(text, str) or isinstance(value.get("passages"), list)


def _why(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)


def _raw_lines(path: Path, file: io.BufferedReader, limits: Limits) -> Iterator[tuple[bytes | None, bool]]:
    """The bytes of each line, and whether a line end follows; None instead of the bytes if the line is too long."""
    start = file.peek(1024)[:1024]
    encoding = marked(start)
    if encoding in ("utf-16", "utf-32"):
        try:
            for text in io.TextIOWrapper(file, encoding, newline="\n"):
                yield text.encode(), text.endswith("\n")
        except UnicodeDecodeError as error:
            raise Unreadable(
                path, Reason.DAMAGED, f"{path}: {encoding.upper()} with damage ({error.reason})"
            ) from None
        return
    if b"\0" in start:
        raise Unreadable(path, Reason.BINARY, f"{path}: binary data, or UTF-16 without a byte-order mark")
    while line := file.readline(limits.file_bytes):
        if complete := line.endswith(b"\n") or len(line) < limits.file_bytes:
            yield line, line.endswith(b"\n")
        while not complete:
            rest = file.readline(1 << 20)
            complete = rest.endswith(b"\n") or not rest
            if complete:
                yield None, True


def _json_line(where: str, line: str, complete: bool, names: FieldNames) -> Record | Unreadable:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "" if complete else "; the file ends in this line, so it may be cut off"
        return Unreadable(where, Reason.NOT_JSON, f"{where}: not JSON ({_why(error)}){cut}")
    return _of_value(where, "the line", value, names)


def _of_value(where: str, what: str, value: object, names: FieldNames) -> Record | Unreadable:
    if not isinstance(value, dict):
        expected = f'{what} is {shown(value)}, and must be an object {{"title": ..., "text": ...}}'
        return Unreadable(where, Reason.FIELDS, f"{where}: {expected}")
    return record(where, value, names, _way_out(names))


def _way_out(names: FieldNames) -> str:
    """The end of a message about a missing text, if no setting names its key."""
    return "" if names.text else ": name the key of the text with text_field"
