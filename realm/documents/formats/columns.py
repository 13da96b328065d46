"""Parquet and Arrow files, and Lance datasets, become records, one per row.

A few bytes can expand to gigabytes, by compression or by a long value that every row repeats. The process that reads a file
has a limit of memory (`realm.documents.child_process`). Values become Python strings one at a time, and the number of rows and
the length of the text of a whole file are limited.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from realm.documents.formats.records import (
    Limits,
    Pages,
    Reason,
    Record,
    Unreadable,
    check_columns,
    missing_names,
    present_names,
    without_columns,
)
from realm.documents.formats.records import record as to_record
from realm.errors import first_line, reason, shortened, shown
from realm.folders import TABLE_KEY
from realm.text.fields import FieldNames

_BATCH, _BATCH_BYTES = 256, 256 << 20
"""Largest number of rows that are decoded at once, and largest size of these rows in bytes, unless a single row is larger."""
_LANCE_BATCH, _LANCE_BUFFER = 16, 64 << 20
"""Rows of a Lance dataset that are decoded at once, and bytes that are read ahead. Lance does not tell how long rows are."""
_FEW_ROWS = 1_000_000
"""Rows that a file of any size may have; a larger file may have a hundred rows per byte."""


def read(path: Path, limits: Limits) -> Iterator[Record | Unreadable | Pages]:
    """A record for each row of a Parquet file, of a Lance dataset, or of an Arrow file in the file format or the stream format.

    Raises:
        Unreadable: the file is damaged, has too many rows or too much text, or lacks the column of the text or a
            column that is named in the settings.
    """
    import pyarrow as pa

    readers = {".parquet": ("Parquet", _parquet), ".lance": ("Lance", _lance)}
    name, batches = readers.get(path.suffix.lower(), ("Arrow", _arrow))
    rows = _Rows(path, limits)
    try:
        for number, (batch, total) in enumerate(batches(path, rows)):
            yield Pages(number, total)
            yield from rows.of(batch)
        rows.end()
    except pa.ArrowMemoryError:
        raise MemoryError from None
    except pa.ArrowException as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path} is not {name}: {first_line(error)}") from None


def _parquet(path: Path, rows: "_Rows") -> Iterator[tuple[Any, int]]:
    """Batches of rows, which are small if rows may be long, and the number of batches of the file."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, pre_buffer=False) as file:
        names = _columns(path, file.schema_arrow, rows.names)
        starts = tuple(f"{name}." for name in names)  # the names of the parts of a nested column
        rows.expect(file.metadata.num_rows)
        total = -(-file.metadata.num_rows // _BATCH)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            columns = [group.column(place) for place in range(group.num_columns)]
            # A value that every row repeats counts once in this size.
            size = max(
                (
                    one.total_uncompressed_size
                    for one in columns
                    if f"{one.path_in_schema}.".startswith(starts)
                ),
                default=1,
            )
            few = max(1, min(_BATCH, _BATCH_BYTES // max(1, size)))
            for batch in file.iter_batches(few, [number], names, use_threads=False):
                yield batch.select(names), total


def _arrow(path: Path, rows: "_Rows") -> Iterator[tuple[Any, int]]:
    """Batches of rows of a file in Arrow's file format (also called Feather) or stream format (saved by `datasets`).

    The file format is a stream between eight bytes and a table of contents. The table of contents is not needed.
    """
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        start = 8 if file.read(6) == b"ARROW1" else 0
        file.seek(start)
        schema = pa.ipc.open_stream(file).schema
        names = _columns(path, schema, rows.names)
        file.seek(start)
        options = pa.ipc.IpcReadOptions(
            included_fields=[schema.get_field_index(name) for name in names], use_threads=False
        )
        for number, batch in enumerate(pa.ipc.open_stream(file, options=options), start=1):
            batch.validate(full=True)
            rows.expect(batch.num_rows)
            yield batch.select(names), number


def _lance(path: Path, rows: "_Rows") -> Iterator[tuple[Any, int]]:
    """Batches of rows of the newest version of a Lance dataset, and the number of batches."""
    import lance

    try:
        dataset = lance.dataset(path.absolute())
        if TABLE_KEY in (dataset.schema.metadata or {}):
            message = f"{path} is a table of a knowledge base: `realm kb export` writes its documents"
            raise Unreadable(path, Reason.TYPE, message)
        if dataset.base_paths():
            raise Unreadable(
                path, Reason.NOT_OPENED, f"{path} has files outside of its folder: copy them into it"
            )
        names = _columns(path, dataset.schema, rows.names)
        count = dataset.count_rows()
        rows.expect(count)
        read = dataset.to_batches(
            columns=names,
            batch_size=_LANCE_BATCH,
            batch_readahead=1,
            fragment_readahead=1,
            io_buffer_size=_LANCE_BUFFER,
        )
        for batch in read:
            yield batch, -(-count // _LANCE_BATCH)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # Lance raises exceptions of many classes
        message = f"{path} is not Lance: {shortened(reason(error))}"
        raise Unreadable(path, Reason.DAMAGED, message) from None


def _columns(path: Path, schema: Any, given: FieldNames) -> list[str]:
    """The names of the columns to read: text, title and id if they exist, the passages, and the columns that can be fields.

    A field is a text, a number, a truth value, a date or a time. The passages are those that `realm kb export` writes. Other
    columns of lists and structs are not read.
    """
    import pyarrow.types as types

    if missing := missing_names(schema.names, given):
        raise without_columns(path, missing, schema.names)
    check_columns(path, schema.names, given)
    present = present_names(schema.names, given)
    for part, name in present.items():
        kind = schema.field(name).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        words = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
        also = {"id": types.is_integer(value) or types.is_null(value), "title": types.is_null(value)}
        if not words and not also.get(part):
            needed = "strings or whole numbers" if part == "id" else "strings"
            raise Unreadable(
                path,
                Reason.FIELDS,
                f"{path}: the column {name} holds {shown(str(kind))}, and must hold {needed}",
            )
    others = [name for name in schema.names if name not in present.values() and schema.names.count(name) == 1]
    read = [
        name for name in others if _can_be_field(schema.field(name).type) or _has_passages(schema.field(name))
    ]
    return [*dict.fromkeys(present.values()), *read]


def _has_passages(field: Any) -> bool:
    import pyarrow.types as types

    kind = field.type
    if field.name != "passages" or not (types.is_list(kind) or types.is_large_list(kind)):
        return False
    parts = list(kind.value_type) if types.is_struct(kind.value_type) else []
    words = all(types.is_string(one.type) or types.is_large_string(one.type) for one in parts)
    return words and {"text"} <= {one.name for one in parts} <= {"title", "text"}


def _can_be_field(kind: Any) -> bool:
    import pyarrow.types as types

    value = kind.value_type if types.is_dictionary(kind) else kind
    number = types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)
    words = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    return bool(number or words or types.is_date(value) or types.is_timestamp(value))


class _Rows:
    """Makes records from the rows of one file, and counts the rows and the bytes of their text."""

    def __init__(self, path: Path, limits: Limits):
        self.names = limits.names
        self._path = path
        self._limits = limits
        size = sum(one.stat().st_size for one in (path.rglob("*") if path.is_dir() else [path]))
        self._most_rows = max(_FEW_ROWS, 100 * size)
        self._most_bytes = max(4 << 30, 1_000 * size)
        self._expected = self._number = self._bytes = 0

    def expect(self, rows: int) -> None:
        """Counts `rows` further rows; raises Unreadable if the file then has too many rows for its size."""
        self._expected += rows
        if self._expected > self._most_rows:
            message = f"{self._path}: {self._expected:,} rows are too many for a file of this size"
            raise Unreadable(self._path, Reason.TOO_LONG, message)

    def of(self, batch: Any) -> Iterator[Record | Unreadable]:
        names, columns = batch.schema.names, [_in_microseconds(column) for column in batch.columns]
        for row in range(batch.num_rows):
            self._number += 1
            yield self._record(names, [column[row] for column in columns])

    def end(self) -> None:
        if not self._number:
            raise Unreadable(self._path, Reason.EMPTY, f"{self._path} is empty")

    def _record(self, names: Sequence[str], values: Sequence[Any]) -> Record | Unreadable:
        where = f"{self._path} row {self._number}"
        size = sum(map(_size, values))
        self._bytes += size
        if self._bytes > self._most_bytes:
            raise Unreadable(
                self._path,
                Reason.TOO_LONG,
                f"{where}: the text up to this row is over {self._most_bytes:,} bytes",
            )
        if size > 12 * self._limits.document_chars + 1_000_000:
            return Unreadable(where, Reason.TOO_LONG, f"{where}: {size:,} bytes of title and text: split it")
        try:
            fields = {name: _value(value) for name, value in zip(names, values, strict=True)}
        except UnicodeDecodeError:
            return Unreadable(where, Reason.DAMAGED, f"{where}: a text is not UTF-8")
        return to_record(where, fields, self.names)


def _in_microseconds(column: Any) -> Any:
    """A column of times without nanoseconds, which Python's times do not have; other columns are unchanged."""
    import pyarrow as pa

    if not pa.types.is_timestamp(column.type) or column.type.unit != "ns":
        return column
    return column.cast(pa.timestamp("us", column.type.tz), safe=False)


def _value(value: Any) -> Any:
    """An Arrow value as a Python value; NaN, which is no field, for dates and times outside the years 1 to 9999."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError):
        return math.nan


def _size(value: Any) -> int:
    """Bytes of an Arrow string or list, found without making a Python object; 0 for a number."""
    import pyarrow as pa

    if isinstance(value, pa.ListScalar):
        return value.values.nbytes if value.is_valid else 0
    if isinstance(value, pa.DictionaryScalar):
        value = value.value
    buffer = value.as_buffer() if value.is_valid and hasattr(value, "as_buffer") else None
    return 0 if buffer is None else buffer.size
