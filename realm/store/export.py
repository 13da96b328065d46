"""Writes a knowledge base back as documents: one JSON object per document, or a row of a Parquet file or a Lance dataset."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lance import LanceOperation

from realm.errors import InputError
from realm.files import new_file, write_json_lines
from realm.folders import remove
from realm.store.fields.columns import arrow_type, joined_kind
from realm.store.knowledge_base import KnowledgeBase
from realm.store.merged import read_merged
from realm.store.tables.table import commit, write_rows
from realm.text.corpus import Passage
from realm.text.fields import Fields, Kind, column_value, kind_of

_AT_ONCE = 1024
"""Passages that are read at a time."""


class ExportedPassageJson(TypedDict):
    """A passage of a document."""

    title: str
    text: str


class ExportedJson(TypedDict):
    """A line of the file that `realm kb export` writes."""

    id: str
    title: str
    text: str
    """Texts of all passages, with blank lines between them."""
    passages: NotRequired[list[ExportedPassageJson]]
    """The passages, if there are several; a build from this record makes the same passages."""
    metadata: NotRequired[dict[str, Any]]
    """Fields of the document, if it has fields."""


_PASSAGES = pa.list_(pa.struct([("title", pa.string()), ("text", pa.string())]))


def write_documents(path: Path, kb: KnowledgeBase, records: Iterable[ExportedJson]) -> None:
    """Writes documents of `kb` to a file in the format of its name, which `check_format` accepts.

    After a kill, the old file or the complete new file exists.

    Raises:
        InputError: a field is named `passages`, as a column of a Parquet file or a Lance dataset.
        WriteFailed: a Lance dataset cannot be written.
    """
    _WRITERS[path.suffix.lower()](path, kb, records)


def check_format(path: Path) -> None:
    """Checks the name of a file to which documents are to be written.

    Raises:
        InputError: its extension is of no format in which documents are written.
    """
    if path.suffix.lower() not in _WRITERS:
        *others, last = _WRITERS
        raise InputError(
            f"{path.name}: documents are not written in this format: give a name that ends in {', '.join(others)} or {last}"
        )


def _write_json_lines(path: Path, kb: KnowledgeBase, records: Iterable[ExportedJson]) -> None:
    write_json_lines(path, records)


def _write_parquet(path: Path, kb: KnowledgeBase, records: Iterable[ExportedJson]) -> None:
    schema, batches = _table(kb, records)
    with new_file(path) as aside, pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


def _write_lance(path: Path, kb: KnowledgeBase, records: Iterable[ExportedJson]) -> None:
    schema, batches = _table(kb, records)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        made = aside / path.name  # the list of digests is beside the table
        made.mkdir(parents=True)
        commit(made, LanceOperation.Overwrite(schema, write_rows(made, batches, schema)))
        made.rename(path)
    finally:
        remove(aside)


def _table(kb: KnowledgeBase, records: Iterable[ExportedJson]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The schema and the rows of a table with the columns `id`, `title`, `text` and `passages`, and a column for each field.

    A column of whole numbers and other numbers has numbers; a column of values of other kinds has texts. Lists and objects are
    JSON texts. Fields by which filters cannot select, because there are too many, are left out.
    """
    kinds = {name: set(several) for name, several in kb.kinds.items()}
    for one in read_merged(kb.folder, kb.table.version).values():  # the table has no column of their fields
        for name, value in one.fields.items():
            kinds.setdefault(name, set()).add(kind_of(value))
    if "passages" in kinds:
        raise InputError("a field is named passages, as a column of the table: export to a .jsonl file")
    schema = pa.schema(
        [
            *((name, pa.string()) for name in ("id", "title", "text")),
            ("passages", _PASSAGES),
            *((name, arrow_type(joined_kind(several))) for name, several in kinds.items()),
        ]
    )

    def batches() -> Iterator[pa.RecordBatch]:
        remaining = iter(records)
        while part := list(islice(remaining, _AT_ONCE)):
            rows = [{**_cells(one.get("metadata", {}), kinds), **_whole(one)} for one in part]
            yield pa.RecordBatch.from_pylist(rows, schema=schema)

    return schema, batches()


_WRITERS: dict[str, Callable[[Path, KnowledgeBase, Iterable[ExportedJson]], None]] = {
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
    ".lance": _write_lance,
}
"""Extension -> writer of the format."""


def _whole(record: ExportedJson) -> dict[str, Any]:
    """The columns that every document has."""
    return {name: record.get(name) for name in ("id", "title", "text", "passages")}


def _cells(fields: Fields, kinds: Mapping[str, Collection[Kind]]) -> dict[str, Any]:
    """The values of a document's fields, each in the type of its column."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if kind_of(value) in kinds.get(name, ()):
            kind = joined_kind(kinds[name])
            if kind == "text":
                found[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            else:
                found[name] = float(value) if kind == "float" else column_value(value)
    return found


def exported(kb: KnowledgeBase, where: str | None = None) -> Iterator[ExportedJson]:
    """The documents in the order of their first passages, or only those whose first passage matches the filter `where`.

    A merged document follows the document that has its text.

    Raises:
        InputError: the filter cannot be used.
    """
    chosen_N = np.ones(len(kb), dtype=bool) if where is None else kb.matching(where)
    _, first_D, document_N = np.unique(kb.document_keys_N, return_index=True, return_inverse=True)
    first_N = first_D[document_N]
    number_n = np.lexsort((np.arange(len(kb)), first_N))
    return _records(kb, number_n[chosen_N[first_N[number_n]]])


def _records(kb: KnowledgeBase, number_n: np.ndarray) -> Iterator[ExportedJson]:
    merged = read_merged(kb.folder, kb.table.version)
    copies: dict[str, list[str]] = {}
    for name, original in kb.merged().items():
        copies.setdefault(original, []).append(name)
    for document, group in groupby(_passages(kb, number_n), key=lambda one: one.document_id):
        passages = list(group)
        yield _record(document, passages, passages[0].fields)
        for name in copies.get(document, []):
            yield _record(name, passages, merged[name].fields)


def _passages(kb: KnowledgeBase, number_n: np.ndarray) -> Iterator[Passage]:
    for start in range(0, len(number_n), _AT_ONCE):
        yield from kb.passages(number_n[start : start + _AT_ONCE])


def _record(name: str, passages: list[Passage], fields: Fields) -> ExportedJson:
    text = "\n\n".join(one.text for one in passages)
    record: ExportedJson = {"id": name, "title": passages[0].title, "text": text}
    if len(passages) > 1:
        record["passages"] = [{"title": one.title, "text": one.text} for one in passages]
    if fields:
        record["metadata"] = dict(fields)
    return record
