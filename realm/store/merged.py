"""Merged documents: documents with the title and text of an earlier document, whose text is stored once.

`KB/merged.jsonl` has one line per change, and the last line of an id counts: `{"document": id, "state": 16 hex digits,
"version": number}`. The state is the hash of title and text, which the rows of `KB/passages.lance` also have. A line without a
state ends the merge of an id. Lines whose text was deleted are ignored.

A line is valid from a version of the table on, or always if it has no version. A change writes its lines before its commit,
for the version that it is about to make. After a kill before the commit these lines belong to a version that does not exist,
and are ignored; the next writer removes them (`settle_merged`) before it makes a version of that number. Writers hold the lock
of the knowledge base from reading to writing, and are at the newest version.

The digest of the file is recorded with those of the tables (`realm.store.digests`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from realm.errors import writing
from realm.files import sync_folder, write_json_lines
from realm.store.digests import add_lines, forget, lines_of, record
from realm.store.schema import SCHEMA, key_of
from realm.store.tables import reading, take_rows

MERGED = "merged.jsonl"


def read_merged(folder: Path, version: int) -> dict[str, int]:
    """State by document id at a version of the table; a last line that a full disk cut short is ignored.

    Raises:
        InputError: the file is damaged.
    """
    states = {document: state for document, state, since in _lines(folder) if since <= version}
    return {document: state for document, state in states.items() if state is not None}


def settle_merged(folder: Path, version: int) -> dict[str, int]:
    """State by document id at the newest version, for the writer; removes lines of changes that were killed before their
    commit."""
    states = read_merged(folder, version)
    if any(since > version for _, _, since in _lines(folder)):
        write_merged(folder, states)
    return states


def write_merged(folder: Path, states: Mapping[str, int]) -> None:
    """Writes a new file with a line per merged document, or removes the file if there is none."""
    with writing(folder / MERGED):
        if (
            folder / MERGED
        ).exists():  # a kill before the new digest leaves a file without a digest, which is valid
            forget(folder, {folder / MERGED})
        if states:
            write_json_lines(folder / MERGED, (_line(*one) for one in states.items()))
            record(folder, [folder / MERGED])
        else:
            (folder / MERGED).unlink(missing_ok=True)
        sync_folder(folder)


def change_merged(folder: Path, changes: Mapping[str, int | None], version: int) -> None:
    """Appends lines that are valid from this version on, and syncs them to disk."""
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


def _lines(folder: Path) -> Iterator[tuple[str, int | None, int]]:
    """Document, state and first valid version of each line."""
    for line in lines_of(folder / MERGED):
        try:
            found = json.loads(line)
            document, state, since = found["document"], found["state"], found.get("version", 0)
            change = str(document), None if state is None else int(state, 16), int(since)
        except (ValueError, TypeError, KeyError):
            continue
        yield change


def _line(document: str, state: int | None) -> MergedLine:
    return {"document": document, "state": None if state is None else f"{state:016x}"}


def originals(table: lance.LanceDataset, states: Mapping[str, int]) -> dict[str, str]:
    """For each merged id the document that has its text; ids whose text no document has completely are left out."""
    if not states:
        return {}
    rows = table.to_table(columns=["document_state", "document_id"])
    wanted = pa.array(sorted(set(states.values())), pa.uint64())
    rows = rows.filter(pc.is_in(rows.column("document_state"), value_set=wanted))
    found = dict(zip(*(rows.column(name).to_pylist() for name in rows.column_names), strict=True))
    return {
        document: found[state] for document, state in states.items() if found.get(state, document) != document
    }


def handed_over(table: lance.LanceDataset, numbers: np.ndarray, states: Mapping[str, int]) -> pa.Table:
    """The rows of these numbers whose text a merged document has, changed into rows of that document."""
    heirs = {state: document for document, state in sorted(states.items(), reverse=True)}
    with reading(table):
        states_N = take_rows(table, numbers, ["document_state"]).column("document_state").to_numpy()
        kept_N = np.isin(states_N, np.fromiter(heirs, dtype=np.uint64))
        rows = take_rows(table, numbers[kept_N], SCHEMA.names)
    owners = [heirs[state] for state in rows.column("document_state").to_pylist()]
    for name, values in (("document_id", owners), ("document_key", [key_of(owner) for owner in owners])):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(name), pa.array(values, rows.schema.field(name).type))
    return rows
