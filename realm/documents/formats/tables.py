"""Tables with a heading line become records, one per row: CSV, and tab-separated values such as DPR's `psgs_w100.tsv`."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import decode, marked, without_text
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, present_names, record
from realm.errors import first_line
from realm.text.fields import read_value

_PARTS = frozenset(("title", "text"))
"""Columns that every table has."""
_BEGINNING = 1 << 20
"""Bytes from which the encoding of a table is known."""


def _values(names: Sequence[str], row: Sequence[str]) -> dict[str, Any]:
    """The values of a row. An empty text is no value, except in the columns that every row has."""
    parts = present_names(names).values()
    return {
        name: value if name in parts else read_value(value)
        for name, value in zip(names, row, strict=True)
        if value or name in parts
    }


def tsv(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each row of tab-separated values. See `_table`."""
    return _table(path, limits, "\t", Reason.FIELDS)


def comma_separated(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each row of CSV, whose values are separated by commas, semicolons or tabs. See `_table`.

    A table without the columns "title" and "text" is left out as a file of another type.
    """
    return _table(path, limits, ",;\t", Reason.TYPE)


def _table(path: Path, limits: Limits, separators: str, without: Reason) -> Iterator[Record | Unreadable]:
    """A record for each row. Texts may be quoted; a quoted text may contain line breaks and doubled quotation marks.

    The separator is the first of `separators` with which the heading line has the columns "title" and "text". The beginning of
    the file shows the encoding.

    Raises:
        Unreadable: the file is empty or damaged, is in an unknown encoding, or has a heading line without "title" or "text",
            for which the reason is `without`.
    """
    csv.field_size_limit(limits.file_bytes)
    with opened(path) as file:
        start = file.read(_BEGINNING)
    if not start.strip():
        raise without_text(path, start[:5])
    encoding, assumed = _encoding(path, start)
    with opened(path) as file:
        lines = _lines(path, io.TextIOWrapper(file, encoding, newline=""), limits)
        heading, number = "", 0
        try:
            while not heading.strip() or heading.startswith("sep="):
                if (line := next(lines, None)) is None:
                    raise Unreadable(path, without, f"{path}: there is no heading line")
                heading, number = line, number + 1
            before = number
            headings = {one: next(csv.reader([heading], delimiter=one)) for one in separators}
            separator, names = next(
                ((one, names) for one, names in headings.items() if present_names(names).keys() >= _PARTS),
                (separators[0], headings[separators[0]]),
            )
            if missing := _PARTS - present_names(names).keys():
                columns = " or ".join(sorted(missing))
                raise Unreadable(path, without, f"{path}: the first line has no column {columns}")
            rows = csv.reader(lines, delimiter=separator)
            for row in filter(None, rows):
                number = before + rows.line_num
                where = f"{path}:{number}"
                if len(row) != len(names):
                    message = f"{where}: {len(row)} columns, but {len(names)} in the heading line"
                    yield Unreadable(where, Reason.FIELDS, message)
                else:
                    found = record(where, _values(names, row))
                    yield found if isinstance(found, Unreadable) else found._replace(assumed=assumed)
        except UnicodeDecodeError as error:
            raise Unreadable(path, Reason.ENCODING, f"{path} is not {encoding} ({error.reason})") from None
        except csv.Error as error:
            reason = Reason.TOO_LONG if "field larger" in str(error) else Reason.DAMAGED
            raise Unreadable(path, reason, f"{path}:{number}: {first_line(error)}") from None


def _encoding(path: Path, start: bytes) -> tuple[str, str | None]:
    """The encoding of a file that begins with `start`, and the assumed encoding, if it had to be assumed."""
    whole_lines = start[: max(start.rfind(b"\n"), start.rfind(b"\r")) + 1] or start
    assumed = None if marked(start) else decode(whole_lines, path).assumed
    return marked(start) or assumed or "utf-8", assumed


def _lines(path: Path, file: io.TextIOWrapper, limits: Limits) -> Iterator[str]:
    """The lines of a file.

    Raises:
        Unreadable: a line is too long.
    """
    while line := file.readline(limits.file_bytes):
        if len(line) == limits.file_bytes and not line.endswith("\n"):
            raise Unreadable(
                path, Reason.TOO_LONG, f"{path}: a line of over {limits.file_bytes:,} characters"
            )
        yield line
