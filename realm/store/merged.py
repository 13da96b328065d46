"""Documents whose title and text another document already had: the text is kept once, and their ids are remembered here.

`KB/merged.jsonl` has a line for each change, the last one of an id counts: `{"document": id, "state": 16 hex digits,
"version": number}`. The state is the hash of title and text that the rows of `KB/passages.lance` have too, so it names the
text whichever document holds it. A line without a state says that the id is merged no longer. An id whose text has gone
counts for nothing.

A line counts from a version of the table on; without one, always. A change that commits the table writes its lines first,
for the version that it is about to make: killed before its commit, it leaves lines of a version that is not there, which
nobody counts. The next writer removes them (`settle_merged`) before a commit of its own makes a version of that number.
Whoever writes here holds the knowledge base's lock from reading to writing, and is at the newest version.

The file's digest stands among those of the tables (`realm.store.tables`).
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
    """State by document id, at a version of the table; a last line that a full disk cut short is passed over.

    Raises:
        InputError: the file is damaged.
    """
    states = {document: state for document, state, since in _lines(folder) if since <= version}
    return {document: state for document, state in states.items() if state is not None}


def settle_merged(folder: Path, version: int) -> dict[str, int]:
    """The same at the newest version, for the one writer; lines of changes that were killed before their commit go."""
    states = read_merged(folder, version)
    if any(since > version for _, _, since in _lines(folder)):
        write_merged(folder, states)
    return states


def write_merged(folder: Path, states: Mapping[str, int]) -> None:
    """A new file with a line for each of these; none where nothing is merged."""
    with writing(folder / MERGED):
        if (folder / MERGED).exists():  # a kill before the new digest leaves a file without one, which counts
            forget(folder, {folder / MERGED})
        if states:
            write_json_lines(folder / MERGED, (_line(*one) for one in states.items()))
            record(folder, [folder / MERGED])
        else:
            (folder / MERGED).unlink(missing_ok=True)
        sync_folder(folder)


def change_merged(folder: Path, changes: Mapping[str, int | None], version: int) -> None:
    """Adds lines that count from this version on, and waits until they are on disk."""
    if not changes:
        return
    lines = [json.dumps(_line(*change) | {"version": version}) for change in changes.items()]
    add_lines(folder / MERGED, lines)


class MergedLine(TypedDict):
    """A line of merged.jsonl."""

    document: str
    state: str | None
    version: NotRequired[int]
    """From which version of the table on it counts."""


def _lines(folder: Path) -> Iterator[tuple[str, int | None, int]]:
    """Document, state, and from which version of the table on they count."""
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
    """For each id the document that holds its text; ids whose text no document holds whole are left out."""
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
    """Those of the rows of these numbers whose text one of these merged documents has too, now as rows of that document."""
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
