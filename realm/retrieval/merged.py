"""Documents whose title and text another document already had: the text is kept once, and their ids are remembered here.

`KB/merged.jsonl` has a line for each change, the last one of an id counts: `{"document": id, "state": 16 hex digits}`. The
state is the hash of title and text that the rows of `KB/passages.lance` have too, so it names the text whichever document
holds it. A line without a state says that the id is merged no longer. An id whose text has gone counts for nothing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from realm.config import write_json_lines
from realm.retrieval.passages import SCHEMA, key_of
from realm.retrieval.tables import reading, take_rows

MERGED = "merged.jsonl"


def read_merged(folder: Path) -> dict[str, int]:
    """State by document id; a last line that a full disk cut short is passed over."""
    states: dict[str, int | None] = {}
    if (folder / MERGED).is_file():
        for line in (folder / MERGED).read_text(encoding="utf-8").splitlines():
            try:
                change = json.loads(line)
            except ValueError:
                continue
            states[change["document"]] = None if change["state"] is None else int(change["state"], 16)
    return {document: state for document, state in states.items() if state is not None}


def write_merged(folder: Path, states: Mapping[str, int]) -> None:
    """The file of a new knowledge base; none where nothing was merged."""
    if states:
        write_json_lines(folder / MERGED, map(_line, states, states.values()))


def change_merged(folder: Path, changes: Mapping[str, int | None]) -> None:
    """Adds lines, in one write, so that a kill leaves all of them or a line that is passed over."""
    if changes:
        with (folder / MERGED).open("a", encoding="utf-8") as file:
            file.write("".join(f"\n{json.dumps(_line(*change))}" for change in changes.items()) + "\n")


class MergedLine(TypedDict):
    """A line of merged.jsonl."""

    document: str
    state: str | None


def _line(document: str, state: int | None) -> MergedLine:
    return {"document": document, "state": None if state is None else f"{state:016x}"}


def holders(table: lance.LanceDataset, states: Mapping[str, int]) -> dict[str, str]:
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
