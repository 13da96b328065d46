"""Tables become records: CSV, and tab-separated values such as DPR's `psgs_w100.tsv`.

A table with a column "text" is a record per row; any other table is one record, with a sentence per row, or several records if
it is long. The first line below text names the columns, unless it looks like a row.
"""

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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

Problem = TypeVar("Problem", bound=Unreadable)

_BEGINNING = 1 << 20
"""Bytes from which the encoding of a table is known."""
FIRST_ROWS = 20
"""Number of lines or rows from which the headings are known; twice as many lines if a quoted cell contains the last of them."""
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

    The beginning of the file shows the encoding, the separator and the headings (`_heading`).

    Raises:
        Unreadable: the file is empty or damaged, is in an unknown encoding, has no first line or no row, lacks a column that is
            named in the settings, or has several columns with the same part of a document.
    """
    csv.field_size_limit(limits.file_bytes)
    with opened(path) as file:
        start = file.read(_BEGINNING)
    if not start.strip():
        raise without_text(path, start[:5])
    encoding, assumed = _encoding(path, start)
    try:
        with opened(path) as file:
            lines = _lines(path, io.TextIOWrapper(file, encoding, newline=""), limits)
            for found in _records(path, lines, limits, separators):
                yield found if isinstance(found, Unreadable) else found._replace(assumed=assumed)
    except UnicodeDecodeError as error:
        raise Unreadable(path, Reason.ENCODING, f"{path} is not {encoding} ({error.reason})") from None
    except csv.Error as error:
        reason = Reason.TOO_LONG if "field larger" in str(error) else Reason.DAMAGED
        raise Unreadable(path, reason, f"{path}: {first_line(error)}") from None


def _records(
    path: Path, lines: Iterator[str], limits: Limits, separators: str
) -> Iterator[Record | Unreadable]:
    """The records of the lines of a table, without their encoding."""
    skipped, held, lines = _first_lines(lines)
    if not held:
        next(lines, None)
        raise Unreadable(path, Reason.FIELDS, f"{path}: there is no heading line")
    heading = _heading(held, separators, limits)
    if (missing := missing_names(heading.names, limits.names)) and any(limits.names):
        raise without_columns(path, missing, heading.names)
    before = skipped + heading.used
    numbered = _rows(chain(held[heading.used :], lines), heading.separator, limits.file_bytes)
    rows = ((before + number, row) for number, row in numbered if row)
    if missing:
        yield from _as_documents(path, heading, rows, limits)
        return
    check_columns(path, heading.names, limits.names)
    for number, row in rows:
        where = f"{path}:{number}"
        if len(row) == len(heading.names):
            yield record(where, _values(heading.names, row, limits.names), limits.names)
        else:
            yield _of_other_width(where, row, heading)


class Part(NamedTuple):
    """The text of some rows of a table, with a line per row."""

    first: int
    """Number of the first row."""
    last: int
    text: str
    is_whole: bool
    """Whether these are all rows of the table."""


def parts_of(rows: Iterable[tuple[int, str] | Problem], most: int) -> Iterator[Part | Problem]:
    """Divides the numbered sentences of a table into parts of at most `most` characters, or of one longer sentence.

    Problems with rows are passed on, in their order.
    """
    held: list[str] = []
    first = last = length = 0
    is_whole = True
    for row in rows:
        if not isinstance(row, tuple):
            yield row
            continue
        number, sentence = row
        if held and length + len(sentence) > most:
            is_whole = False
            yield Part(first, last, "\n".join(held), is_whole)
            held, length = [], 0
        first, last = first if held else number, number
        held.append(sentence)
        length += len(sentence) + 1
    if held:
        yield Part(first, last, "\n".join(held), is_whole)


def _as_documents(
    path: Path, heading: "_Heading", rows: Iterable[tuple[int, list[str]]], limits: Limits
) -> Iterator[Record | Unreadable]:
    """The records of numbered rows that are a sentence each: one record, or several if the sentences are too long for one."""
    some = False
    for part in parts_of(_sentences(path, heading, rows), limits.document_chars):
        if isinstance(part, Unreadable):
            yield part
            continue
        some = True
        place = "" if part.is_whole else f":{part.first}-{part.last}"
        yield Record(f"{path}{place}", file_title(path), part.text, f"{path.as_posix()}{place}")
    if not some:
        raise Unreadable(path, Reason.NO_TEXT, f"{path} has no row that can be read")


def _sentences(
    path: Path, heading: "_Heading", rows: Iterable[tuple[int, list[str]]]
) -> Iterator[tuple[int, str] | Unreadable]:
    """The sentences of numbered rows. The first begins with the lines above the headings."""
    above = list(heading.above)
    for number, row in rows:
        cells = [" ".join(cell.split()) for cell in row]
        if len(row) != len(heading.names):
            yield _of_other_width(f"{path}:{number}", row, heading)
        elif any(cells):
            yield number, "\n".join([*above, sentence_of(heading.columns, cells)])
            above.clear()


def _of_other_width(where: str, row: Sequence[str], heading: "_Heading") -> Unreadable:
    """The problem with a row that has more or fewer columns than the row of headings, or than the first row."""
    message = f"{where}: {len(row)} columns, but the table has {len(heading.names)}"
    return Unreadable(where, Reason.COLUMNS, message)


class _Heading(NamedTuple):
    """The row of headings of a table, and what is above it."""

    separator: str
    names: list[str]
    """The names of the columns of documents."""
    columns: list[str]
    """The names of the columns in sentences; empty names if the first row is data."""
    above: list[str]
    """Lines of text above the headings, such as the title of a report."""
    used: int
    """Number of lines above the first row of data."""


def _first_lines(lines: Iterator[str]) -> tuple[int, list[str], Iterator[str]]:
    """The number of lines that are skipped, the lines after them that show the headings, and the other lines.

    Blank lines and a line with the separator are skipped. The last of the lines that show the headings ends a quoted cell, if
    possible. If a line after the first cannot be read, the iterator over the other lines raises the error.
    """
    skipped, held, marks, size = 0, list[str](), 0, 0
    while len(held) < (FIRST_ROWS if marks % 2 == 0 else 2 * FIRST_ROWS) and size < _BEGINNING:
        try:
            line = next(lines, None)
        except (Unreadable, UnicodeDecodeError) as error:
            return skipped, held, _failing(error)
        if line is None:
            break
        if not held and (not line.strip() or line.startswith("sep=")):
            skipped += 1
            continue
        held.append(line)
        marks += line.count('"')
        size += len(line)
    return skipped, held, lines


def _failing(error: Exception) -> Iterator[str]:
    """An iterator that raises this error."""
    raise error
    yield  # makes this function an iterator


def _heading(lines: Sequence[str], separators: str, limits: Limits) -> _Heading:
    """The headings of a table that begins with `lines`.

    The separator is the first of `separators` with which a row of headings has the column "text"; without this column, the
    separator with which the headings have most columns.
    """
    found = [_heading_with(one, lines, limits) for one in separators]
    return max(found, key=lambda one: (not missing_names(one.names, limits.names), len(one.names)))


def _heading_with(separator: str, lines: Sequence[str], limits: Limits) -> _Heading:
    """The headings of a table with this separator: the first row, or the first row below text, if only this row names the
    columns of documents or none of them does."""
    ends = [(end, row) for end, row in _rows(lines, separator, limits.file_bytes) if any(map(str.strip, row))]
    rows = [row for _, row in ends] or [[""]]
    places = [(place, column_names(rows[place], limits.names)) for place in (0, _below_text(rows))]
    place, names = next((one for one in places if not missing_names(one[1], limits.names)), places[-1])
    columns = [" ".join(cell.split()) for cell in rows[place]]
    used = ends[place][0] if ends else 1
    are_documents = not missing_names(names, limits.names)
    if not are_documents and (looks_like_a_row(columns) or resembles(columns, rows[place + 1 :])):
        columns, used = [""] * len(columns), ends[place - 1][0] if place else 0
    above = [f"{separator} ".join(filter(str.strip, row)) for row in rows[:place]]
    return _Heading(separator, names, columns, [" ".join(line.split()) for line in above], used)


def _below_text(rows: Sequence[Sequence[str]]) -> int:
    """The place of the first row below rows of text: those with a single cell, and comments, which begin with "#".

    It must have as many cells as the row below it, otherwise no row counts as text. So a comment with as many cells as the
    first row of data is the row of headings.
    """
    width = len(next((row for row in rows if not row[0].startswith("#")), ()))
    for place, (row, below) in enumerate(pairwise(rows)):
        is_comment = row[0].startswith("#") and (below[0].startswith("#") or len(row) != width)
        if not is_comment and sum(map(bool, map(str.strip, row))) > 1:
            return place if len(row) == len(below) else 0
    return 0


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


def resembles(columns: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Whether cells of the first line have the form of all cells that are below them in `below`.

    Two such cells are needed, but one is enough if it is a date, an IP address or an e-mail address. One number is enough if it
    is above several numbers of its kind (whole, or with a decimal point) and the line has no empty cell. Numbers that increase
    from cell to cell, and a single year, are no such cells, because they can be names of columns. Instead, a word that is twice
    more in its column is enough. A first line with words above a column of numbers, dates or addresses has the names of the
    columns.

    >>> resembles(["10.0.0.1", "web"], [["10.0.0.23", "db"]]), resembles(["Address", "Role"], [["10.0.0.1", "web"]])
    (True, False)
    >>> resembles(["web", "80", "7"], [["db", "22", "5"]]), resembles(["Country", "80"], [["Spain", "7"]])
    (True, False)
    >>> resembles(["Country", "2", "4"], [["Spain", "7", "8"]]), resembles(["Plan 1", "Plan 2"], [["Plan 3", "Plan 4"]])
    (False, False)
    >>> resembles(["web", "80"], [["db", "22"], ["ci", "9"]]), resembles(["Fan", "Oslo"], [["Lamp", "Oslo"], ["Desk", "Oslo"]])
    (True, True)
    """
    forms = [_form(one) for one in columns]
    rows = [row for row in below if len(row) == len(columns)]
    forms_below = [{_form(row[place]) for row in rows if row[place].strip()} for place in range(len(columns))]
    are_names = any(
        cell.strip() and not form and others and others <= _FORMS.keys()
        for cell, form, others in zip(columns, forms, forms_below, strict=True)
    )
    if are_names:
        return False
    same = [form for form, others in zip(forms, forms_below, strict=True) if form and others == {form}]
    if not _UNMISTAKABLE.isdisjoint(same) or _recurs(columns, forms, rows):
        return True
    if same == ["number"] and all(map(str.strip, columns)):
        place = forms.index("number")
        cells = [row[place] for row in rows if row[place].strip()]
        return len(cells) > 1 and len({"." in cell for cell in [columns[place], *cells]}) == 1
    increasing = _increasing(columns, forms)
    return sum(form not in increasing for form in same) > 1


def _recurs(columns: Sequence[str], forms: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether a word of the first line is in its column of two rows below. A row that repeats the whole line does not count."""
    first = [cell.strip() for cell in columns]
    below = [row for row in ([cell.strip() for cell in row] for row in rows) if row != first]
    columns_below = zip(*below, strict=True) if below else [()] * len(first)
    return any(
        word and form not in ("year", "number") and cells.count(word) > 1
        for word, form, cells in zip(first, forms, columns_below, strict=True)
    )


def _increasing(cells: Sequence[str], forms: Sequence[str]) -> set[str]:
    """The forms that several cells have whose numbers increase from cell to cell. Years are numbers."""
    numbers: dict[str, list[list[float]]] = {}
    for cell, form in zip(cells, forms, strict=True):
        if form in ("number", "year"):
            numbers.setdefault("number", []).append([float(cell)])
        elif form:
            numbers.setdefault(form, []).append([int(one) for one in _DIGITS.findall(cell)])
    found = {form for form, of in numbers.items() if len(of) > 1 and all(a < b for a, b in pairwise(of))}
    return found | {"year"} if "number" in found else found


_FORMS = {
    "year": re.compile(r"(?:19|20)\d\d"),
    "number": re.compile(r"[-+]?\d{1,15}(?:\.\d{1,15})?"),
    "date": re.compile(
        r"\d{4}-\d\d?-\d\d?(?:[T ]\d\d:\d\d\S*)?|\d{1,2}([./])\d{1,2}\1\d{4}"
        r"|\d{1,2}\.?[ -][^\W\d_]{3,9}\.?,?[ -]\d{2,4}|[^\W\d_]{3,9}\.? \d{1,2},? \d{4}"
    ),
    "IP address": re.compile(r"\d{1,3}(?:\.\d{1,3}){3}"),
    "e-mail": re.compile(r"[^\s@]+@[^\s@]+\.[^\s@.]+"),
}
"""Forms of cells of data."""
_UNMISTAKABLE = frozenset(("date", "IP address", "e-mail"))
"""Forms that names of columns hardly ever have."""
_DIGITS = re.compile(r"\d+")


def _form(cell: str) -> str:
    """The form of a cell: one of `_FORMS`, or the cell with "0" in place of each number; "" for words."""
    cell = cell.strip()
    if len(cell) > _LONGEST_NAME:
        return ""
    named = next((name for name, form in _FORMS.items() if form.fullmatch(cell)), "")
    return named or (_DIGITS.sub("0", cell) if _DIGITS.search(cell) else "")


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
