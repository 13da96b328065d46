"""Typed columns with the values of the documents' fields, by which `realm.store.fields.filters` selects passages.

The values of the field `year` are in the column `year:int`, and in further columns, such as `year:text`, if documents have
values of several kinds. A value is in the column of its own kind; the columns of the other kinds are null in this row. So a
document with a value of another kind adds a column, and no row has to be written again. The fields themselves are in a column
of JSON.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_args

import pyarrow as pa

from realm.text.fields import Fields, Kind, column_value, kind_of

MOST_COLUMNS = 256
"""Largest number of typed columns. The values of further fields are stored, but filters cannot use these fields."""
_TYPES: dict[Kind, pa.DataType] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "date": pa.date32(),
    "time": pa.timestamp("us", "UTC"),
    "text": pa.string(),
}


def kinds_of_fields(schema: pa.Schema) -> dict[str, list[Kind]]:
    """The fields in a table: name -> the kinds of its values."""
    found: dict[str, list[Kind]] = {}
    for column in schema.names:
        name, colon, kind = column.rpartition(":")
        if colon:
            found.setdefault(name, []).append(kind)
    return {name: [kind for kind in get_args(Kind) if kind in kinds] for name, kinds in found.items()}


def column_name(name: str, kind: Kind) -> str:
    """The column with the values of one kind. Names of fields and of other columns contain no colon."""
    return f"{name}:{kind}"


def joined_kind(kinds: Collection[Kind]) -> Kind:
    """The kind of a column with values of several kinds. Whole numbers and numbers are numbers; other mixtures are texts."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return "float" if set(kinds) == {"int", "float"} else "text"


def arrow_type(kind: Kind) -> pa.DataType:
    """The type of a column with values of one kind."""
    return _TYPES[kind]


def missing_columns(documents: Iterable[Fields], schema: pa.Schema) -> list[pa.Field]:
    """The typed columns that a table needs for these documents and does not have; a table has at most `MOST_COLUMNS`."""
    needed = {
        column_name(name, kind_of(value)): _TYPES[kind_of(value)]
        for fields in documents
        for name, value in fields.items()
    }
    new = [pa.field(name, kind) for name, kind in needed.items() if name not in schema.names]
    return new[: max(0, MOST_COLUMNS - sum(":" in name for name in schema.names))]


def typed_columns(documents: Sequence[Fields], schema: pa.Schema) -> dict[str, list[Any]]:
    """Values of the typed columns of `schema`, a row per document."""
    columns: dict[str, list[Any]] = {name: [None] * len(documents) for name in schema.names if ":" in name}
    for row, fields in enumerate(documents):
        for name, value in fields.items():
            column = columns.get(column_name(name, kind_of(value)))
            if column is not None:
                column[row] = column_value(value)
    return columns
