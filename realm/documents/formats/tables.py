"""Tab-separated tables with a heading, such as DPR's `psgs_w100.tsv` (id, text, title), become a record per row."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import without_text
from realm.documents.formats.records import (
    DAMAGED,
    ENCODING,
    FIELDS,
    TOO_LONG,
    Limits,
    Record,
    Unreadable,
    present_names,
    record,
)
from realm.errors import first_line


def tsv(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each row; texts may be quoted, with line breaks and doubled quotation marks within.

    Raises:
        Unreadable: the file is empty or damaged, is not UTF-8, or its heading lacks "title" or "text".
    """
    csv.field_size_limit(limits.file_bytes)
    with opened(path) as file:
        start = file.peek(5)[:5]
        if not start:
            raise without_text(path, start)
        rows = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter="\t")
        try:
            names = next(rows, [])
            if missing := {"title", "text"} - present_names(names).keys():
                raise Unreadable(
                    path, FIELDS, f"{path}: the first line names no column {' or '.join(sorted(missing))}"
                )
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if len(row) != len(names):
                    message = f"{where}: {len(row)} columns, {len(names)} in the heading"
                    yield Unreadable(where, FIELDS, message)
                else:
                    yield record(where, dict(zip(names, row, strict=True)))
        except UnicodeDecodeError as error:
            raise Unreadable(path, ENCODING, f"{path} is not UTF-8 ({error.reason})") from None
        except csv.Error as error:
            reason = TOO_LONG if "field larger" in str(error) else DAMAGED
            raise Unreadable(path, reason, f"{path}:{rows.line_num}: {first_line(error)}") from None
