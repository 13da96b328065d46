"""Adds documents to a knowledge base. A changed document replaces the earlier document with the same id.

Documents are compared by hashes of id, title and text, and an unchanged document is not tagged again. The passages of all other
documents are written to new files, and one commit removes the old passages and adds the new passages. If only the fields of a
document have changed, its passages are written again with the new fields. If a replaced document was merged with another
document (`realm.store.merged`), the same commit gives the old passages to this other document. If documents have fields for
which the table has no columns, an earlier commit adds these columns.

Documents that differ only in their links are the same document, whose first links stay. A knowledge base of format 1 to 3 has
no column of links, and the links of added documents are left out.

An addition needs about 70 bytes of memory per passage of the knowledge base, and memory for the keys of the added documents.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata

from realm.folders import one_writer
from realm.keys import Lookup, key_of
from realm.progress import progress
from realm.store.ingest import TABLE, NewRows, cut_documents, number_of, one_text_per_id, with_columns_of
from realm.store.merged import Merged, change_merged, handed_over, originals, settle_merged
from realm.store.schema import FIELDS_KEY, fields_key_of, state_of, with_fields
from realm.store.settings import KnowledgeBaseConfig
from realm.store.tables.table import check_newest, reading, replace_rows, take_rows, uncommitted, write_rows
from realm.text.corpus import Document
from realm.text.fields import Fields
from realm.text.salient_spans import Tagger
from realm.tokens.tokenizer import Tokenizer


class AddResult(NamedTuple):
    """Result of adding documents."""

    added: int
    replaced: int
    """Number of replaced documents, and of documents whose fields have changed."""
    unchanged: int
    """Number of documents that were unchanged, or whose passages all belong to other documents."""
    passages_added: int
    passages_removed: int
    """Number of removed passages, without passages that become passages of a merged document or get new fields."""
    merged: Mapping[str, str] = MappingProxyType({})
    """Documents that were merged with another document of the same title and text: id -> id of the other document."""


def add(
    folder: Path,
    table: lance.LanceDataset,
    documents: Iterable[Document],
    config: KnowledgeBaseConfig,
    tokenizer: Tokenizer,
    tagger: Tagger,
) -> tuple[lance.LanceDataset, AddResult]:
    """Adds documents in one commit -> (the table after the commit, the result).

    Raises:
        InputError: two of the documents have the same id and different texts.
        ChangedMeanwhile: another process changed the knowledge base.
    """
    standing = _Standing(table)
    removed_N = np.zeros(len(standing.keys_N), dtype=bool)
    other_fields: dict[int, Fields] = {}  # number of a passage -> the new fields of its document
    arrived: set[int] = set()  # keys of the passages in new rows
    taken: set[int] = set()  # keys of new and changed documents
    rows = NewRows()
    fragments: list[FragmentMetadata] = []
    unchanged = replaced = other_documents = 0
    new_states: set[int] = set()  # states of documents with new rows
    # By id: documents whose passages all belong to other documents.
    elsewhere_too: dict[str, Merged] = {}
    merged_no_longer: dict[str, None] = {}

    def news() -> Iterator[Document]:
        nonlocal unchanged
        for document in one_text_per_id(documents):
            if standing.has(document):
                keep(document)
                bar.update()
            else:
                yield document

    def keep(document: Document) -> None:
        """Keeps the passages of an unchanged document, and gives them the fields of the document."""
        nonlocal unchanged, other_documents
        own = standing.numbers_of(document)
        if len(own) and not standing.has_fields(own, document.fields):
            other_fields.update(dict.fromkeys(own.tolist(), document.fields))
            other_documents += 1
        else:
            unchanged += 1

    def write() -> None:
        nonlocal table, rows
        table = with_columns_of(folder / TABLE, table, rows.fields())
        fragments.extend(write_rows(folder / TABLE, rows.batches(table.schema), table.schema))
        rows = NewRows()

    bar = progress(total=None, description="add", unit="document")
    with bar, uncommitted(folder / TABLE), cut_documents(news(), tagger, config, tokenizer) as cut:
        for document, passages in cut:
            bar.update()
            key, own = key_of(document.id), standing.numbers_of(document)
            fresh = number_of(passages)
            for elsewhere in standing.of_others(fresh, key, removed_N) | (fresh.keys() & arrived):
                del fresh[elsewhere]
            if key in taken:
                unchanged += 1
                continue
            if fresh.keys() == set(standing.keys_N[own].tolist()):
                keep(document)
                if not len(own):
                    elsewhere_too[document.id] = Merged(state_of(document), document.fields)
                continue
            if fresh:
                merged_no_longer[document.id] = None
                new_states.add(state_of(document))
            else:
                elsewhere_too[document.id] = Merged(state_of(document), document.fields)
            taken.add(key)
            arrived.update(fresh)
            removed_N[own] = True
            replaced += len(own) > 0
            rows.add(document, passages, list(fresh.values()))
            if len(rows) >= config.commit_every:
                write()
        if len(rows):
            write()
        # Without the lock, another process could delete a text with which a document is merged here.
        with one_writer(folder):
            check_newest(folder / TABLE, table)
            before = settle_merged(folder, table.version)
            heirs = {
                name: merged
                for name, merged in (before | elsewhere_too).items()
                if name not in merged_no_longer
            }
            removed = np.flatnonzero(removed_N)
            come_back_N = np.isin(standing.keys_N[removed], np.fromiter(arrived, dtype=np.uint64))
            kept, fields = handed_over(table, removed[~come_back_N], heirs)
            moved = np.array(sorted(other_fields), dtype=np.int64)
            if len(kept) or len(moved):
                with reading(table):
                    again = take_rows(table, moved, table.schema.names)
                fields += [other_fields[number] for number in moved.tolist()]
                table = with_columns_of(folder / TABLE, table, fields)
                written = with_fields(pa.concat_tables([kept, again]), fields, table.schema)
                fragments += write_rows(folder / TABLE, written.to_batches(), table.schema)
            changes: dict[str, Merged | None] = dict.fromkeys([*elsewhere_too, *merged_no_longer])
            new_states.update(kept.column("document_state").to_pylist())
            changes |= standing.with_holder(elsewhere_too, removed_N, new_states)
            changes |= dict.fromkeys(kept.column("document_id").to_pylist())
            lines = {name: merged for name, merged in changes.items() if before.get(name) != merged}
            commits = len(removed) > 0 or len(fragments) > 0
            change_merged(folder, lines, table.version + commits)
            if commits:
                gone = np.concatenate([removed, moved])
                table = replace_rows(folder / TABLE, table, gone, fragments)
    return table, AddResult(
        len(taken) - replaced,
        replaced + other_documents,
        unchanged,
        len(arrived),
        len(removed) - len(kept),
        originals(table, elsewhere_too),
    )


class _Standing:
    """The passages and documents of the table before the addition, found by their keys."""

    def __init__(self, table: lance.LanceDataset):
        columns = table.to_table(columns=["id", "document_key", "document_state", "document_passages"])
        self.keys_N, self._documents_N, self._states_N, self._passages_N = (
            column.to_numpy() for column in columns.columns
        )
        self._fields_N = np.zeros(len(self.keys_N), dtype=np.uint64)
        if FIELDS_KEY in table.schema.names:
            keys = table.to_table(columns=[FIELDS_KEY]).column(FIELDS_KEY)
            self._fields_N = keys.fill_null(0).to_numpy()
        self._by_id = Lookup(self.keys_N)
        self._by_document = Lookup(self._documents_N)

    def numbers_of(self, document: Document) -> np.ndarray:
        """Numbers of the passages of a document."""
        return self._by_document.all(key_of(document.id))

    def has(self, document: Document) -> bool:
        """Whether the table has this document, with the same title and text, and with all of the document's passages."""
        own = self.numbers_of(document)
        same_N = self._states_N[own] == np.uint64(state_of(document))
        return len(own) > 0 and bool(same_N.all()) and len(own) == self._passages_N[own[0]]

    def has_fields(self, numbers: np.ndarray, fields: Fields) -> bool:
        """Whether all passages with these numbers have these fields."""
        return bool((self._fields_N[numbers] == np.uint64(fields_key_of(fields) or 0)).all())

    def with_holder(
        self, merged: Mapping[str, Merged], removed_N: np.ndarray, new_states: Iterable[int]
    ) -> dict[str, Merged]:
        """The merged documents whose state occurs in a new row, or in a row that is not removed."""
        held = np.concatenate([self._states_N[~removed_N], np.fromiter(new_states, dtype=np.uint64)])
        states = np.fromiter((one.state for one in merged.values()), dtype=np.uint64)
        held_N = np.isin(states, held).tolist()
        return {name: one for (name, one), is_held in zip(merged.items(), held_N, strict=True) if is_held}

    def of_others(self, keys: Iterable[int], document_key: int, removed_N: np.ndarray) -> set[int]:
        """The keys of passages that are not removed and belong to another document than `document_key`."""
        wanted = np.fromiter(keys, dtype=np.uint64)
        numbers, known = self._by_id.find(wanted)
        wanted, numbers = wanted[known], numbers[known]
        others = ~removed_N[numbers] & (self._documents_N[numbers] != np.uint64(document_key))
        return set(wanted[others].tolist())
