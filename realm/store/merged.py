"""Merged documents: a document with the same title and text as an earlier document is merged with the earlier document.

The text of merged documents is stored once, with the fields of the earlier document. The ids and fields of the later documents
are in `KB/merged.jsonl`. This file has one line per change, `{"document": id, "state": 16 hex digits, "version": number,
"fields": object}`, and for each id the last line counts. The state is the hash of title and text, which each row of
`KB/passages.lance` has too. If the state is null, the document is no longer merged. If no row has the state, the text was
deleted, and the line is ignored.

A line is valid from its version of the table on; a line without a version is always valid. A change writes its lines before the
commit, with the number of the version that the commit will make. If the process is killed before the commit, this version does
not exist, and the lines are ignored. The next writer removes these lines (`settle_merged`) before a commit makes a version with
this number. A writer works on the newest version, and holds the lock of the knowledge base from reading to writing the file.

The digest of the file is recorded in the same list as the digests of the tables (`realm.store.tables.digests`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from realm.errors import writing
from realm.files import sync, write_json_lines
from realm.keys import hex_id, key_of
from realm.store.tables.digests import add_lines, forget, lines_of, record
from realm.store.tables.table import reading, take_rows
from realm.text.fields import NO_FIELDS, Fields

MERGED = "merged.jsonl"


class Merged(NamedTuple):
    """A merged document."""

    state: int
    """Hash of title and text."""
    fields: Fields = NO_FIELDS
    """The document's own fields, which become the fields of the text if the text becomes that of this document."""


def read_merged(folder: Path, version: int) -> dict[str, Merged]:
    """The merged documents at a version of the table, by id. Lines that are not valid JSON are ignored.

    Raises:
        DamagedError: the file is damaged.
    """
    states = {document: merged for document, merged, since in _lines(folder) if since <= version}
    return {document: merged for document, merged in states.items() if merged is not None}


def settle_merged(folder: Path, version: int) -> dict[str, Merged]:
    """Removes the lines of changes that were killed before their commit -> merged documents at the newest version, by id.

    Only a writer that holds the lock may call this function.
    """
    states = read_merged(folder, version)
    if any(since > version for _, _, since in _lines(folder)):
        write_merged(folder, states)
    return states


def write_merged(folder: Path, states: Mapping[str, Merged]) -> None:
    """Writes a new file with a line per merged document; removes the file if there are no merged documents."""
    with writing(folder / MERGED):
        if (folder / MERGED).exists():
            # If the process is killed before the new digest is recorded, the file has no digest, which is valid.
            forget(folder, {folder / MERGED})
        if states:
            write_json_lines(folder / MERGED, (_line(*one) for one in states.items()))
            record(folder, [folder / MERGED])
        else:
            (folder / MERGED).unlink(missing_ok=True)
        sync(folder)


def change_merged(folder: Path, changes: Mapping[str, Merged | None], version: int) -> None:
    """Appends lines that are valid from this version on, and syncs the file to disk."""
    if not changes:
        return
    lines = [json.dumps(_line(*change) | {"version": version}) for change in changes.items()]
    add_lines(folder / MERGED, lines)


class MergedLine(TypedDict):
    """A line of merged.jsonl."""

    document: str
    state: str | None
    version: NotRequired[int]
    """First version of the table for which the line is valid."""
    fields: NotRequired[dict[str, Any]]
    """Fields of the document, if it has fields."""


def _lines(folder: Path) -> Iterator[tuple[str, Merged | None, int]]:
    """Document, its merged document and first valid version of each line."""
    for line in lines_of(folder / MERGED):
        try:
            found = json.loads(line)
            document, state, since = found["document"], found["state"], found.get("version", 0)
            merged = None if state is None else Merged(int(state, 16), dict(found.get("fields", {})))
            change = str(document), merged, int(since)
        except (ValueError, TypeError, KeyError):
            continue
        yield change


def _line(document: str, merged: Merged | None) -> MergedLine:
    line: MergedLine = {"document": document, "state": None if merged is None else hex_id(merged.state)}
    if merged is not None and merged.fields:
        line["fields"] = dict(merged.fields)
    return line


def originals(table: lance.LanceDataset, states: Mapping[str, Merged]) -> dict[str, str]:
    """Id of each merged document -> id of the document that has the same text.

    A merged document is left out if no document in the table has the complete text.

    Raises:
        DamagedError: the table cannot be read.
    """
    if not states:
        return {}
    wanted = pa.array(sorted({merged.state for merged in states.values()}), pa.uint64())
    found: dict[int, str] = {}
    with reading(table):
        for batch in table.to_batches(columns=["document_state", "document_id"]):
            rows = batch.filter(pc.is_in(batch.column("document_state"), value_set=wanted))
            found.update(zip(*(column.to_pylist() for column in rows.columns), strict=True))
    return {
        document: found[merged.state]
        for document, merged in states.items()
        if found.get(merged.state, document) != document
    }


class HandedOver(NamedTuple):
    """Rows that become rows of other documents, and the fields of these documents, one item per row."""

    rows: pa.Table
    fields: list[Fields]


def handed_over(table: lance.LanceDataset, numbers: np.ndarray, states: Mapping[str, Merged]) -> HandedOver:
    """The rows with these numbers whose text is also the text of a merged document, as rows of the merged document.

    The rows still have the fields of the earlier document.
    """
    by_name = sorted(states.items(), key=lambda one: one[0], reverse=True)
    heirs = {merged.state: document for document, merged in by_name}
    with reading(table):
        states_N = take_rows(table, numbers, ["document_state"]).column("document_state").to_numpy()
        kept_N = np.isin(states_N, np.fromiter(heirs, dtype=np.uint64))
        rows = take_rows(table, numbers[kept_N], table.schema.names)
    owners = [heirs[state] for state in rows.column("document_state").to_pylist()]
    for name, values in (("document_id", owners), ("document_key", [key_of(owner) for owner in owners])):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(name), pa.array(values, rows.schema.field(name).type))
    return HandedOver(rows, [states[owner].fields for owner in owners])
