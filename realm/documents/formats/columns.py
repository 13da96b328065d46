"""Parquet and Arrow files become records, one per row; declared sizes are checked before anything is decoded.

A few bytes can expand to gigabytes, by compression or by a long value that every row repeats. Therefore a part of a file is
refused if its declared size is over `_SMALL` and over a hundred times its stored size. Values become Python strings one at a
time, and the number of rows and the length of the text of a whole file are limited.
"""

import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realm.documents.formats.records import (
    DAMAGED,
    EMPTY,
    FIELDS,
    TOO_LONG,
    Limits,
    Record,
    Unreadable,
    present_names,
)
from realm.documents.formats.records import record as to_record
from realm.errors import first_line, shown

_SMALL = 256 << 20
"""Decoded bytes that a part of a file may have at any stored size."""
_LARGE = 2 << 30
"""Decoded bytes that no part may exceed."""
_FEW_ROWS = 1_000_000
"""Rows that a file of any size may have; a larger file may have a hundred rows per byte."""


class Chunk(NamedTuple):
    """A column chunk: the part of a row group that belongs to one column."""

    column: str
    values: int
    decoded: int
    """Size after decoding, in bytes."""
    stored: int
    """Size in the file, in bytes."""
    place: int
    """Byte at which the first page of the chunk begins."""


def parquet(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each row. Row groups are read in batches, which are small if rows may be long."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with (
            pq.ParquetFile(path) as file,
            path.open("rb") as raw,
            mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as pages,
        ):
            names = _columns(path, file.schema_arrow)
            rows = _Rows(path, limits)
            rows.expect(file.metadata.num_rows)
            for number, chunks in enumerate(chunks_of(pages)):
                size = _checked_row_group(path, chunks, names, pages)
                batches = file.iter_batches(
                    batch_size=max(1, min(256, _SMALL // size)), row_groups=[number], columns=names
                )
                for batch in batches:
                    yield from rows.of(batch.select(names))
            rows.end()
    except pa.ArrowException as error:
        raise Unreadable(path, DAMAGED, f"{path} is not Parquet: {first_line(error)}") from None


def arrow(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each row of a file in Arrow's file format (also called Feather) or stream format (saved by `datasets`).

    The file format is a stream between eight bytes and a table of contents. The table of contents is not needed.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            start = 8 if file.read(6) == b"ARROW1" else 0
            file.seek(start)
            for message in pa.ipc.MessageReader.open_stream(file):
                _check_message(path, message)
            file.seek(start)
            schema = pa.ipc.open_stream(file).schema
            names = _columns(path, schema)
            file.seek(start)
            options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names])
            rows = _Rows(path, limits)
            for batch in pa.ipc.open_stream(file, options=options):
                batch.validate(full=True)
                rows.expect(batch.num_rows)
                yield from rows.of(batch.select(names))
            rows.end()
    except pa.ArrowException as error:
        raise Unreadable(path, DAMAGED, f"{path} is not Arrow: {first_line(error)}") from None


def _columns(path: Path, schema: Any) -> list[str]:
    """The names of the columns to read: title, text, id if the file has one, and the columns that can be fields.

    A field is a text, a number, a truth value, a date or a time. Columns of lists and structs are not read.
    """
    import pyarrow.types as types

    present = present_names(schema.names)
    if missing := [part for part in ("title", "text") if part not in present]:
        raise Unreadable(
            path, FIELDS, f"{path}: no column {' and '.join(missing)} (columns: {', '.join(schema.names)})"
        )
    for part, name in present.items():
        if schema.names.count(name) > 1:
            raise Unreadable(path, FIELDS, f"{path}: {schema.names.count(name)} columns are named {name}")
        kind = schema.field(name).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        words = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
        if not words and not (part == "id" and types.is_integer(value)):
            raise Unreadable(
                path, FIELDS, f"{path}: the column {name} holds {shown(str(kind))}, and must hold strings"
            )
    others = [name for name in schema.names if name not in present.values() and schema.names.count(name) == 1]
    return [*present.values(), *(name for name in others if _can_be_field(schema.field(name).type))]


def _can_be_field(kind: Any) -> bool:
    import pyarrow.types as types

    value = kind.value_type if types.is_dictionary(kind) else kind
    number = types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)
    words = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    return bool(number or words or types.is_date(value) or types.is_timestamp(value))


class _Rows:
    """Makes records from the rows of one file, and counts the rows and the bytes of their text."""

    def __init__(self, path: Path, limits: Limits):
        self._path = path
        self._limits = limits
        size = path.stat().st_size
        self._most_rows = max(_FEW_ROWS, 100 * size)
        self._most_bytes = max(4 << 30, 1_000 * size)
        self._expected = self._number = self._bytes = 0

    def expect(self, rows: int) -> None:
        """Counts `rows` further rows; raises Unreadable if the file then has too many rows for its size."""
        self._expected += rows
        if self._expected > self._most_rows:
            message = f"{self._path}: {self._expected:,} rows are too many for a file of this size"
            raise Unreadable(self._path, TOO_LONG, message)

    def of(self, batch: Any) -> Iterator[Record | Unreadable]:
        names, columns = batch.schema.names, batch.columns
        for row in range(batch.num_rows):
            self._number += 1
            yield self._record(names, [column[row] for column in columns])

    def end(self) -> None:
        if not self._number:
            raise Unreadable(self._path, EMPTY, f"{self._path} is empty")

    def _record(self, names: Sequence[str], values: Sequence[Any]) -> Record | Unreadable:
        where = f"{self._path} row {self._number}"
        size = sum(map(_size, values))
        self._bytes += size
        if self._bytes > self._most_bytes:
            raise Unreadable(
                self._path, TOO_LONG, f"{where}: the text up to this row is over {self._most_bytes:,} bytes"
            )
        if size > 12 * self._limits.document_chars + 1_000_000:
            return Unreadable(where, TOO_LONG, f"{where}: {size:,} bytes of title and text: split it")
        try:
            fields = {name: value.as_py() for name, value in zip(names, values, strict=True)}
        except UnicodeDecodeError:
            return Unreadable(where, DAMAGED, f"{where}: a text is not UTF-8")
        return to_record(where, fields)


def _size(value: Any) -> int:
    """Bytes of an Arrow string, found without making a Python string; 0 for a number."""
    import pyarrow as pa

    if isinstance(value, pa.DictionaryScalar):
        value = value.value
    buffer = value.as_buffer() if value.is_valid and hasattr(value, "as_buffer") else None
    return 0 if buffer is None else buffer.size


def _checked_row_group(path: Path, chunks: Sequence[Chunk], names: Sequence[str], data: mmap.mmap) -> int:
    """Checks the declared sizes of these columns -> the largest decoded size, in which repeated values count once.

    The metadata of a column and the headers of its pages both declare sizes. Both are checked, because pyarrow allocates the
    sizes in the headers.
    """
    largest = 1
    for chunk in chunks:
        if chunk.column in names:
            for size in (chunk.decoded, _size_by_pages(data, chunk)):
                _check(path, size, chunk.stored)
            largest = max(largest, chunk.decoded)
    return largest


def _check(path: Path, size: int, compressed: int) -> None:
    most = min(_LARGE, max(_SMALL, 100 * compressed))
    if not 0 <= size <= most:
        raise Unreadable(
            path,
            TOO_LONG,
            f"{path}: a part of {compressed:,} bytes expands to {size:,}, over the limit of {most:,}",
        )


# --- sizes in Parquet ----------------------------------------------------------------------------
#
# Parquet's metadata are structs in Thrift's compact protocol (https://github.com/apache/thrift, thrift-compact-protocol.md).
# Numbers and kinds of the fields are those of https://github.com/apache/parquet-format, parquet.thrift. This file parses the
# structs, because pyarrow gives no sizes of pages, and because pyarrow ends the process if the sizes of a column are requested
# whose metadata are damaged.

_I32, _I64, _LIST, _STRUCT = 5, 6, 9, 12
_MOST_ELEMENTS = 1_000_000
"""Most elements of a list; pyarrow has the same limit."""

_Fields = dict[tuple[int, int], Any]
"""Number and kind of a field of a struct -> value. A value of an unexpected kind is ignored, as in pyarrow."""


def chunks_of(data: mmap.mmap) -> list[list[Chunk]]:
    """The column chunks of each row group, from the footer of a file that pyarrow could open."""
    (size,) = struct.unpack_from("<I", data, len(data) - 8)
    footer, _ = _struct(data, len(data) - 8 - size)
    return [[_chunk(column[3, _STRUCT]) for column in group[1, _LIST]] for group in footer[4, _LIST]]


def _chunk(metadata: _Fields) -> Chunk:
    place, dictionary = metadata[9, _I64], metadata.get((11, _I64), 0)
    return Chunk(
        column=b".".join(metadata[3, _LIST]).decode(),
        values=metadata[5, _I64],
        decoded=metadata[6, _I64],
        stored=metadata[7, _I64],
        place=dictionary if 0 < dictionary < place else place,
    )


def _size_by_pages(data: mmap.mmap, chunk: Chunk) -> int:
    """The sum of the sizes that the headers of a column's pages declare; negative if one of these sizes is negative."""
    if not chunk.values:  # pyarrow reads no page of such a chunk
        return 0
    place, end, total = chunk.place, chunk.place + chunk.stored, 0
    while place < end:
        header, place = _struct(data, place)
        size, stored = header.get((2, _I32), -1), header.get((3, _I32), -1)
        if size < 0 or stored < 0:
            return -1
        total += size
        place += stored
    return total


def _struct(data: mmap.mmap, place: int) -> tuple[_Fields, int]:
    """The struct at a byte, and the byte after the struct."""
    fields: _Fields = {}
    number = 0
    while head := data[place]:
        place += 1
        if step := head >> 4:
            number += step
        else:
            number, place = _signed(data, place)
        fields[number, head & 15], place = _value(data, place, head & 15)
    return fields, place + 1


def _value(data: mmap.mmap, place: int, kind: int) -> tuple[Any, int]:
    """The value of this kind at a byte, and the byte after the value."""
    match kind:
        case 1 | 2:  # true and false: the kind is the value
            return kind == 1, place
        case 3:
            return data[place], place + 1
        case 4 | 5 | 6:  # integers of 16, 32 (_I32) and 64 (_I64) bits
            return _signed(data, place)
        case 7:  # a floating-point number: not needed, because sizes are integers
            return None, place + 8
        case 8:  # bytes
            size, place = _varint(data, place)
            return data[place : place + size], place + size
        case 9 | 10:  # _LIST, and a set
            inner, count, place = data[place] & 15, data[place] >> 4, place + 1
            if count == 15:
                count, place = _varint(data, place)
            if count > _MOST_ELEMENTS:
                raise ValueError(f"Parquet's metadata have a list of {count:,} elements")
            values = []
            for _ in range(count):
                value, place = _value(data, place, 3 if inner in (1, 2) else inner)
                values.append(value)
            return values, place
        case 12:  # _STRUCT
            return _struct(data, place)
    raise ValueError(f"Parquet's metadata have a field of kind {kind}")


def _signed(data: mmap.mmap, place: int) -> tuple[int, int]:
    """A number in zigzag encoding, in which the lowest bit is the sign, and the byte after the number."""
    value, place = _varint(data, place)
    return (value >> 1) ^ -(value & 1), place


def _varint(data: mmap.mmap, place: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest group first, and the byte after the number."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("Parquet's metadata have a number of over ten bytes")


# --- sizes in Arrow's messages -------------------------------------------------------------------


def _check_message(path: Path, message: Any) -> None:
    """Refuses a batch whose compressed buffers declare too large a size. pyarrow gives the size only after decompression.

    The message is a flatbuffer (https://arrow.apache.org/docs/format/Columnar.html, and Message.fbs in Arrow's sources).
    """
    metadata, body = memoryview(message.metadata), memoryview(message.body)
    (root,) = struct.unpack_from("<I", metadata)
    header, kind = _field(metadata, root, 2), _field(metadata, root, 1)
    if header is None or kind is None or metadata[kind] not in (2, 3):
        return
    batch = _follow(metadata, header)
    if metadata[kind] == 2:  # the batch of a dictionary is the second field of the dictionary
        inner = _field(metadata, batch, 1)
        if inner is None:
            return
        batch = _follow(metadata, inner)
    buffers = _field(metadata, batch, 2)
    if buffers is None or _field(metadata, batch, 3) is None:  # not compressed
        return
    start = _follow(metadata, buffers)
    (count,) = struct.unpack_from("<I", metadata, start)
    size = 0
    for number in range(count):
        offset, length = struct.unpack_from("<qq", metadata, start + 4 + 16 * number)
        if length:
            (declared,) = struct.unpack_from("<q", body, offset)
            size += length if declared == -1 else declared  # -1: this buffer is not compressed
    _check(path, size, len(body))


def _follow(data: memoryview, place: int) -> int:
    return place + int(struct.unpack_from("<I", data, place)[0])


def _field(data: memoryview, table: int, number: int) -> int | None:
    """The byte at which a field of a table begins; None if the table lacks the field."""
    entries = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, entries)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, entries + 4 + 2 * number)
    return table + offset if offset else None
