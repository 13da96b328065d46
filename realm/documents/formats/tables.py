"""Tables with a heading line become records, one per row: CSV, and tab-separated values such as DPR's `psgs_w100.tsv`."""

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import without_text
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, present_names, record
from realm.errors import first_line
from realm.text.fields import read_value


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
    return _table(path, limits, "\t")


def comma_separated(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each row of CSV. The separator is a comma, or the semicolon or tab of the heading line. See `_table`."""
    return _table(path, limits, ",;\t")


def _table(path: Path, limits: Limits, separators: str) -> Iterator[Record | Unreadable]:
    """A record for each row. Texts may be quoted; a quoted text may contain line breaks and doubled quotation marks.

    The separator is the one of `separators` that is most frequent in the heading line.

    Raises:
        Unreadable: the file is empty or damaged, is not UTF-8, or has a heading line without "title" or "text".
    """
    csv.field_size_limit(limits.file_bytes)
    with opened(path) as file:
        start = file.peek(5)[:5]
        if not start:
            raise without_text(path, start)
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        rows = csv.reader(lines)
        try:
            heading = lines.readline(limits.file_bytes)
            rows = csv.reader(chain([heading], lines), delimiter=max(separators, key=heading.count))
            names = next(rows, [])
            if missing := {"title", "text"} - present_names(names).keys():
                raise Unreadable(
                    path,
                    Reason.FIELDS,
                    f"{path}: the first line has no column {' or '.join(sorted(missing))}",
                )
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if len(row) != len(names):
                    message = f"{where}: {len(row)} columns, but {len(names)} in the heading line"
                    yield Unreadable(where, Reason.FIELDS, message)
                else:
                    yield record(where, _values(names, row))
        except UnicodeDecodeError as error:
            raise Unreadable(path, Reason.ENCODING, f"{path} is not UTF-8 ({error.reason})") from None
        except csv.Error as error:
            reason = Reason.TOO_LONG if "field larger" in str(error) else Reason.DAMAGED
            raise Unreadable(path, reason, f"{path}:{rows.line_num}: {first_line(error)}") from None
