"""Workbooks (.xlsx, .xls, .ods): the rows of their visible sheets as text. calamine reads the cells.

A sheet with a column "text" is a record per row, as such a CSV file, without a title above the headings. The other sheets are
one record, in which each row is a sentence, or several records if they are long.
"""

from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

from realm.documents.formats.archives import archive, office_title
from realm.documents.formats.records import (
    Limits,
    Reason,
    Record,
    Unreadable,
    check_columns,
    missing_names,
    need,
    present_names,
    record,
    without_columns,
)
from realm.documents.formats.rows import sentence_of
from realm.documents.formats.sections import Heading, page_record
from realm.documents.formats.tables import FIRST_ROWS, column_names, looks_like_a_row, parts_of, resembles
from realm.text.fields import FieldNames, json_value

_MOST_MARKUP = 256 << 20
"""Most bytes of markup. The cells of a workbook need up to four times as many bytes of memory."""


def read(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """The records of a workbook. The title of a record with several rows is that in the metadata, or the file name."""
    need("python_calamine", path)
    import python_calamine as calamine

    title = ""
    if path.suffix.lower() != ".xls":  # the other two are ZIP archives
        with archive(path, limits, path.suffix.lower(), _MOST_MARKUP) as parts:
            title = office_title(parts)
    try:
        with calamine.CalamineWorkbook.from_path(path) as workbook:
            sheets = [
                (one.name, workbook.get_sheet_by_name(one.name).to_python())
                for one in workbook.sheets_metadata
                if one.typ == calamine.SheetTypeEnum.WorkSheet
                and one.visible == calamine.SheetVisibleEnum.Visible
            ]
    except calamine.PasswordError:
        raise Unreadable(path, Reason.ENCRYPTED, f"{path} is encrypted: save it without a password") from None
    others: list[tuple[str, list[tuple[int, str]]]] = []
    some = False
    for name, rows in sheets:
        filled = [(number, row) for number, row in enumerate(rows, 1) if any(cell != "" for cell in row)]
        if not filled:
            continue
        place, columns = _headings([row for _, row in filled], limits.names)
        if not (missing := missing_names(columns, limits.names)):
            check_columns(f"{path}:{name}", columns, limits.names)
            for number, row in filled[place + 1 :]:
                some = True
                yield record(f"{path}:{name}:{number}", _values(columns, row, limits.names), limits.names)
        elif any(limits.names):
            some = True
            yield without_columns(f"{path}:{name}", missing, columns)
        elif lines := list(_lines([[_text(cell) for cell in row] for _, row in filled])):
            others.append((name, [(filled[place][0], line) for place, line in lines]))
    if others:
        yield from _documents(path, title, others, limits)
    elif not some:
        raise Unreadable(path, Reason.NO_TEXT, f"{path} has no row that can be read")


def _headings(rows: Sequence[Sequence[Any]], names: FieldNames) -> tuple[int, list[str]]:
    """The place of the row of headings, and the names of the columns of documents.

    This is the first row, or else the first row with several cells, below rows with a single cell such as the title of a table.
    """
    several = next((place for place, row in enumerate(rows) if sum(cell != "" for cell in row) > 1), 0)
    found = [(place, column_names(map(_text, rows[place]), names)) for place in (0, several)]
    return next((one for one in found if not missing_names(one[1], names)), found[-1])


def _documents(
    path: Path, title: str, sheets: Sequence[tuple[str, list[tuple[int, str]]]], limits: Limits
) -> Iterator[Record]:
    """The records of sheets with numbered lines: one record, or one or several for each sheet if one would be too long."""
    named = len(sheets) > 1
    texts = [(name, "\n".join(line for _, line in lines)) for name, lines in sheets]
    whole = _document(path, title, texts, named, limits)
    if len(whole.text) <= limits.document_chars:
        yield whole
        return
    for name, lines in sheets:
        for part in parts_of(lines, limits.document_chars - (len(name) + 1 if named else 0)):
            place = f":{name}:{part.first}-{part.last}"
            found = _document(path, title, [(name, part.text)], named, limits)
            yield found._replace(where=f"{path}{place}", id=f"{path.as_posix()}{place}")


def _document(
    path: Path, title: str, sheets: Sequence[tuple[str, str]], named: bool, limits: Limits
) -> Record:
    """The record of the texts of sheets. If they are `named`, the name of each sheet is a heading."""
    text, headings = "", []
    for name, lines in sheets:
        text += "\n\n" if text else ""
        if named:
            headings.append(Heading(len(text), 1, name))
            text += f"{name}\n"
        text += lines
    return page_record(path, title, text, headings=headings if limits.headings else ())


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, str]]:
    """The rows of a sheet as sentences, with their places in `rows`; no row is empty.

    Rows with a single cell above the row of headings are text, such as the title of a table. So is every row, if the sheet has
    one column. A row that resembles those below it is data, and ends the search for headings.
    """
    names: Sequence[str] | None = None
    said = False
    for place, cells in enumerate(rows):
        filled = [cell for cell in cells if cell]
        if names is None and len(filled) > 1 and resembles(cells, rows[place + 1 : place + 1 + FIRST_ROWS]):
            names = [""] * len(cells)
        if len(cells) == 1 or (names is None and len(filled) == 1):
            said = True
            yield place, filled[0]
        elif names is None and not looks_like_a_row(cells):
            names = cells
        else:
            said = True
            yield place, sentence_of(names or [""] * len(cells), cells)
    if names is not None and not said:  # a sheet of one row
        yield 0, sentence_of([""] * len(names), names)


def _values(columns: Sequence[str], row: Sequence[Any], names: FieldNames) -> dict[str, Any]:
    """The values of a row. Title and text are texts; an empty cell of another column is no value."""
    parts = present_names(columns, names).values()
    return {
        name: _text(value) if name in parts else value
        for name, value in zip(columns, row, strict=True)
        if name in parts or (name and value != "")
    }


def _text(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.15g}"
        case datetime():
            return value.date().isoformat() if value.time() == time.min else value.isoformat(" ")
        case date() | time() | timedelta():
            return json_value(value)
    return " ".join(str(value).split())
