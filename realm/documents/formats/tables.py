"""Tables become records: CSV, and tab-separated values such as DPR's `psgs_w100.tsv`.

A table with a column "text" is a record per row; any other table is one record, with a sentence per row. The first line names
the columns, unless it looks like a row.
"""

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import decode, marked, without_text
from realm.documents.formats.records import (
    FIELD_NAMES,
    Limits,
    Reason,
    Record,
    Unreadable,
    check_columns,
    missing_names,
    present_names,
    record,
    without_columns,
)
from realm.documents.formats.rows import sentence_of
from realm.documents.formats.titles import file_title
from realm.errors import first_line
from realm.text.fields import FieldNames, read_value

_BEGINNING = 1 << 20
"""Bytes from which the encoding of a table is known."""
_HEADING_LINES = 20
"""Most lines of the row of headings, whose quoted cells can contain line breaks."""
_LONGEST_NAME = 80
"""Most characters of the name of a column; a first line with a longer cell is a row."""


def _values(columns: Sequence[str], row: Sequence[str], names: FieldNames) -> dict[str, Any]:
    """The values of a row. An empty text is no value, except in the columns of the parts of a document."""
    parts = present_names(columns, names).values()
    return {
        name: value if name in parts else read_value(value)
        for name, value in zip(columns, row, strict=True)
        if value or name in parts
    }


def tsv(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """The records of tab-separated values. See `_table`."""
    return _table(path, limits, "\t")


def comma_separated(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """The records of CSV, whose values are separated by commas, semicolons or tabs. See `_table`."""
    return _table(path, limits, ",;\t")


def _table(path: Path, limits: Limits, separators: str) -> Iterator[Record | Unreadable]:
    """The records of a table. Texts may be quoted; a quoted text may contain line breaks and doubled quotation marks (`_rows`).

    The separator is the first of `separators` with which the heading line has the column "text"; without this column, the
    separator with which it has most columns. The beginning of the file shows the encoding.

    Raises:
        Unreadable: the file is empty or damaged, is in an unknown encoding, has no first line or no row, lacks a column that is
            named in the settings, has several columns with the same part of a document, or is one record that is too long.
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
                    raise Unreadable(path, Reason.FIELDS, f"{path}: there is no heading line")
                heading, number = line, number + 1
            held = _heading_lines(heading, lines)
            headings = {one: next(_rows(held, one, limits.file_bytes)) for one in separators}
            columns_of = {one: column_names(cells, limits.names) for one, (_, cells) in headings.items()}
            missing_of = {one: missing_names(names, limits.names) for one, names in columns_of.items()}
            separator = max(separators, key=lambda one: (not missing_of[one], len(columns_of[one])))
            names = columns_of[separator]
            missing = missing_of[separator]
            if missing and any(limits.names):
                raise without_columns(path, missing, names)
            if per_row := not missing:
                check_columns(path, names, limits.names)
            used, cells = headings[separator]
            columns = [" ".join(cell.split()) for cell in cells]
            if not per_row and looks_like_a_row(columns):
                used, columns = 0, [""] * len(names)
            lines, before = chain(held[used:], lines), number - 1 + used
            sentences, length = [], 0
            for line_number, row in _rows(lines, separator, limits.file_bytes):
                number = before + line_number
                if not row:
                    continue
                where = f"{path}:{number}"
                if len(row) != len(names):
                    message = f"{where}: {len(row)} columns, but {len(names)} in the first line"
                    yield Unreadable(where, Reason.FIELDS, message)
                elif per_row:
                    found = record(where, _values(names, row, limits.names), limits.names)
                    yield found if isinstance(found, Unreadable) else found._replace(assumed=assumed)
                elif any(cells := [" ".join(cell.split()) for cell in row]):
                    sentences.append(sentence_of(columns, cells))
                    length += len(sentences[-1]) + 1
                    if length > limits.document_chars:
                        raise too_long(path, limits)
            if sentences:
                text = "\n".join(sentences)
                yield Record(str(path), file_title(path), text, path.as_posix(), assumed)
            elif not per_row:
                raise Unreadable(path, Reason.NO_TEXT, f"{path} has no row that can be read")
        except UnicodeDecodeError as error:
            raise Unreadable(path, Reason.ENCODING, f"{path} is not {encoding} ({error.reason})") from None
        except csv.Error as error:
            reason = Reason.TOO_LONG if "field larger" in str(error) else Reason.DAMAGED
            raise Unreadable(path, reason, f"{path}:{number}: {first_line(error)}") from None


def _heading_lines(first: str, lines: Iterator[str]) -> list[str]:
    """The first line of the row of headings, and the lines up to the end of its last quoted cell."""
    held, marks = [first], first.count('"')
    while marks % 2 and len(held) < _HEADING_LINES and (line := next(lines, None)) is not None:
        held.append(line)
        marks += line.count('"')
    return held


class _LinesOfRow:
    """An iterator over lines. It holds the lines of the current row, so that they can be parsed in another way."""

    def __init__(self, lines: Iterable[str], most_bytes: int):
        self._lines, self._most_bytes = iter(lines), most_bytes
        self.next_row()

    def next_row(self, again: Sequence[str] = ()) -> None:
        """Begins a row, with the lines `again` if there are any."""
        self.held: list[str] = []
        self._bytes = 0
        self._again = list(again)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._bytes > self._most_bytes:
            raise csv.Error("a quotation mark is not closed")
        line = self._again.pop(0) if self._again else next(self._lines)
        self.held.append(line)
        self._bytes += sys.getsizeof(line)
        return line


def _rows(lines: Iterable[str], separator: str, most_bytes: int) -> Iterator[tuple[int, list[str]]]:
    """The number of the last line of each row, and the cells of the row.

    If a quotation mark is not closed within `most_bytes`, or not at the end of a cell, it belongs to the text of its line, and
    the lines up to this place are rows of their own. Blanks may follow a closing mark. No line is parsed more than six times.
    """
    of_row, number = _LinesOfRow(lines, most_bytes), 0
    reader = csv.reader(of_row, delimiter=separator, strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error:
            if row := _with_blanks(of_row.held, separator):
                number += len(of_row.held)
                of_row.next_row()
                yield number, row
                continue
            alone = of_row.held[:-1] or of_row.held
            of_row.next_row(of_row.held[len(alone) :])
            for line in alone:
                number += 1
                yield number, _row(line, separator)
            continue
        if row is None:
            return
        number += len(of_row.held)
        of_row.next_row()
        yield number, row


def _with_blanks(lines: Sequence[str], separator: str) -> list[str]:
    """The cells of a row in which blanks follow closing quotation marks; no cells if the lines are not such a row."""
    blanks = re.compile(rf'" +(?={re.escape(separator)}|\r?\n?$)')
    if not blanks.search(lines[-1]):
        return []
    try:
        rows = list(csv.reader([blanks.sub('"', line) for line in lines], delimiter=separator, strict=True))
    except csv.Error:
        return []
    return rows[0] if len(rows) == 1 else []


def _row(line: str, separator: str) -> list[str]:
    """The cells of a line with misplaced quotation marks; if the last cell is not closed, or the number of marks is odd, the
    marks are text."""
    row = next(csv.reader([line.rstrip("\r\n") + "\n"], delimiter=separator))
    if line.count('"') % 2 == 0 and not (row and row[-1].endswith("\n")):
        return row
    return next(csv.reader([line], delimiter=separator, quoting=csv.QUOTE_NONE))


def column_names(heading: Iterable[str], names: FieldNames) -> list[str]:
    """The names of the columns. "Title", "Text" and "ID" are written in small letters, as the columns of documents are, unless
    they are given in `names`."""
    known = {name for several in FIELD_NAMES.values() for name in several}
    columns = [name.strip() for name in heading]
    return [name.lower() if name.lower() in known and name not in names else name for name in columns]


def looks_like_a_row(columns: Sequence[str]) -> bool:
    """Whether the first line has a long cell, or begins with a number."""
    return any(len(one) > _LONGEST_NAME for one in columns) or not isinstance(read_value(columns[0]), str)


def too_long(path: Path, limits: Limits) -> Unreadable:
    """The problem with a table that is one document, and too long."""
    over = f"over {limits.document_chars:,} characters"
    return Unreadable(
        path,
        Reason.TOO_LONG,
        f"{path}: without a column text, a table is one document, and this one has {over}: name the column of the text with "
        "text_field, split the table, or raise max_document_chars",
    )


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
