"""JSON Lines files become records, line by line, and JSON files object by object."""

import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import decode, marked, whole, without_text
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, present_names, record
from realm.errors import first_line, shown


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
                found = _json_line(where, line.strip(), complete)
                yield found if isinstance(found, Unreadable) else found._replace(assumed=assumed)
    if empty:
        raise without_text(path, start)


def json_file(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """The record of a JSON object, or a record for each object of a list. A file with an object per line is JSON Lines.

    A file without any title or text, such as the settings of a program, is left out as a file of another type.

    Raises:
        Unreadable: the file is empty, binary, damaged, too long or not JSON.
    """
    with opened(path) as file:
        lines = (line for line in iter(lambda: file.readline(limits.file_bytes), b"") if line.strip())
        first, second = next(lines, b""), next(lines, b"")
    if second and isinstance(_value(first), dict):
        yield from json_lines(path, limits)
        return
    text, assumed = whole(path, limits)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(path, Reason.NOT_JSON, f"{path}: not JSON ({_why(error)})") from None
    values = value if isinstance(value, list) else [value]
    if not any(isinstance(one, dict) and present_names(one).keys() & {"title", "text"} for one in values):
        raise Unreadable(path, Reason.TYPE, f"{path}: JSON without titles and texts")
    for number, one in enumerate(values, start=1):
        where = f"{path}: value {number}" if isinstance(value, list) else str(path)
        found = _of_value(where, "the value", one)
        yield found if isinstance(found, Unreadable) else found._replace(assumed=assumed)


def _value(line: bytes) -> object:
    """The value of a line; None if the line is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


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


def _json_line(where: str, line: str, complete: bool) -> Record | Unreadable:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "" if complete else "; the file ends in this line, so it may be cut off"
        return Unreadable(where, Reason.NOT_JSON, f"{where}: not JSON ({_why(error)}){cut}")
    return _of_value(where, "the line", value)


def _of_value(where: str, what: str, value: object) -> Record | Unreadable:
    if not isinstance(value, dict):
        expected = f'{what} is {shown(value)}, and must be an object {{"title": ..., "text": ...}}'
        return Unreadable(where, Reason.FIELDS, f"{where}: {expected}")
    return record(where, value)
