"""Adds documents to a knowledge base. A changed document replaces the earlier document with the same id.

Documents are compared by hashes of id, title and text, and an unchanged document is not tagged again. The passages of all other
documents are written to new files, and one commit removes the old passages and adds the new passages. If only the fields of a
document have changed, its passages are written again with the new fields. If documents have fields for which the table has no
columns, an earlier commit adds these columns.

The same commit can delete documents. A passage of a replaced or deleted document can be a passage of another document too: of
a document that was merged with it (`realm.store.merged`), or of another document of the addition. Then the commit gives the
passage to this other document.

Documents that differ only in their links are the same document, whose first links stay.

An addition needs about 70 bytes of memory per passage of the knowledge base, and memory for the keys of the added documents
and of the passages that they share with other documents.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
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
from realm.store.merged import HandedOver, Merged, change_merged, handed_over, originals, settle_merged
from realm.store.schema import FIELDS_KEY, Owner, fields_key_of, state_of, with_fields, with_owners
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
    """Number of removed passages, without passages that become passages of another document or get new fields."""
    merged: Mapping[str, str] = MappingProxyType({})
    """Documents that were merged with another document of the same title and text: id -> id of the other document."""
    deleted: int = 0
    """Number of deleted documents."""


def add(
    folder: Path,
    table: lance.LanceDataset,
    documents: Iterable[Document],
    config: KnowledgeBaseConfig,
    tokenizer: Tokenizer,
    tagger: Tagger,
    gone: Collection[str] = (),
) -> tuple[lance.LanceDataset, AddResult]:
    """Adds documents, and deletes the documents with the ids `gone`, in one commit -> (the table after the commit, the result).

    An id in `gone` that no document has is ignored. No id in `gone` is the id of an added document.

    Raises:
        InputError: two of the documents have the same id and different texts.
        ChangedMeanwhile: another process changed the knowledge base.
    """
    addition = _Addition(folder, table)

    def news() -> Iterator[Document]:
        for document in one_text_per_id(documents):
            if addition.keeps(document):
                bar.update()
            else:
                yield document

    bar = progress(total=None, description="add", unit="document")
    with bar, uncommitted(folder / TABLE), cut_documents(news(), tagger, config, tokenizer) as cut:
        for document, passages in cut:
            bar.update()
            addition.take(document, passages)
            if addition.waiting >= config.commit_every:
                addition.write()
        addition.write()
        return addition.commit(gone)


class _Addition:
    """The changes of one addition: first each document is kept or taken, then all changes are committed."""

    def __init__(self, folder: Path, table: lance.LanceDataset):
        self._folder, self._table = folder, table
        self._standing = _Standing(table)
        self._removed_N = np.zeros(len(self._standing.keys_N), dtype=bool)
        self._other_fields: dict[int, Fields] = {}
        """Number of a passage -> the new fields of its document."""
        self._arrived: set[int] = set()
        """Keys of the passages in new rows."""
        self._taken: set[int] = set()
        """Keys of new and changed documents."""
        self._new_states: set[int] = set()
        """States of documents with new rows."""
        self._elsewhere_too: dict[str, Merged] = {}
        """By id: documents whose passages all belong to other documents."""
        self._sharers: dict[int, Owner] = {}
        """Key of a passage of the table -> the first document of the addition that has this passage of another document."""
        self._merged_no_longer: dict[str, None] = {}
        self._rows = NewRows()
        self._fragments: list[FragmentMetadata] = []
        self._unchanged = self._replaced = self._other_documents = 0

    def keeps(self, document: Document) -> bool:
        """Whether the table has the document already. If so, its passages get the fields of the document."""
        known = self._standing.has(document)
        if known:
            self._keep(document)
        return known

    def _keep(self, document: Document) -> None:
        own = self._standing.numbers_of(document.id)
        if len(own) and not self._standing.has_fields(own, document.fields):
            self._other_fields.update(dict.fromkeys(own.tolist(), document.fields))
            self._other_documents += 1
        else:
            self._unchanged += 1

    def take(self, document: Document, passages: pa.RecordBatch) -> None:
        """Adds the passages of a new or changed document that belong to no other document."""
        key, own = key_of(document.id), self._standing.numbers_of(document.id)
        fresh = number_of(passages)
        of_others = self._standing.of_others(fresh, key, self._removed_N)
        if key in self._taken:
            self._unchanged += 1
            return
        owner = Owner.of(document, len(fresh))
        for passage in of_others:
            self._sharers.setdefault(passage, owner)
        elsewhere = of_others | (fresh.keys() & self._arrived)
        for passage in elsewhere:
            del fresh[passage]
        # Rows that are handed over to the document have its new state, so its own rows may not keep another one.
        same = not elsewhere or self._standing.has_owner(own, owner)
        if same and fresh.keys() == set(self._standing.keys_N[own].tolist()):
            self._keep(document)
            if not len(own):
                self._elsewhere_too[document.id] = Merged(state_of(document), document.fields)
            return
        if fresh:
            self._merged_no_longer[document.id] = None
            self._new_states.add(state_of(document))
        else:
            self._elsewhere_too[document.id] = Merged(state_of(document), document.fields)
        self._taken.add(key)
        self._arrived.update(fresh)
        self._removed_N[own] = True
        self._replaced += len(own) > 0
        self._rows.add(document, passages, list(fresh.values()))

    @property
    def waiting(self) -> int:
        """Number of passages that `write` would write."""
        return len(self._rows)

    def write(self) -> None:
        """Writes the passages that were taken to new files, which no version of the table has before the commit."""
        if len(self._rows):
            self._table = with_columns_of(self._folder / TABLE, self._table, self._rows.fields())
            self._write(self._rows.batches(self._table.schema))
            self._rows = NewRows()

    def _write(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._fragments += write_rows(self._folder / TABLE, batches, self._table.schema)

    def commit(self, gone: Collection[str]) -> tuple[lance.LanceDataset, AddResult]:
        """Replaces the old passages by the new ones, and deletes the documents `gone`, in one commit -> (the table after the
        commit, the result)."""
        # Without the lock, another process could delete a text with which a document is merged here.
        with one_writer(self._folder):
            check_newest(self._folder / TABLE, self._table)
            before = settle_merged(self._folder, self._table.version)
            deleted = {name for name in gone if self._delete(name)}
            deleted |= originals(self._table, {name: before[name] for name in gone if name in before}).keys()
            known = before | self._elsewhere_too
            heirs = {name: one for name, one in known.items() if name not in self._merged_no_longer}
            removed = np.flatnonzero(self._removed_N)
            arrived = np.fromiter(self._arrived, dtype=np.uint64)
            come_back_N = np.isin(self._standing.keys_N[removed], arrived)
            kept, fields = self._handed_over(removed[~come_back_N], heirs)
            moved = np.array(sorted(self._other_fields), dtype=np.int64)
            if len(kept) or len(moved):
                self._write_again(kept, fields, moved)
            lines = {
                name: one for name, one in self._merged_documents(kept).items() if before.get(name) != one
            }
            commits = len(removed) > 0 or len(self._fragments) > 0
            change_merged(self._folder, lines, self._table.version + commits)
            if commits:
                old = np.concatenate([removed, moved])
                self._table = replace_rows(self._folder / TABLE, self._table, old, self._fragments)
        return self._table, AddResult(
            len(self._taken) - self._replaced,
            self._replaced + self._other_documents,
            self._unchanged,
            len(self._arrived),
            len(removed) - len(kept),
            originals(self._table, self._elsewhere_too),
            len(deleted),
        )

    def _delete(self, name: str) -> bool:
        """Removes the passages of the document with this id, if it exists -> whether it has passages."""
        own = self._standing.numbers_of(name)
        self._removed_N[own] = True
        self._merged_no_longer[name] = None
        return len(own) > 0

    def _handed_over(self, removed: np.ndarray, heirs: Mapping[str, Merged]) -> HandedOver:
        """Those of the rows with the numbers `removed` that a merged document or a document of the addition has too, as rows of
        this document."""
        to_heirs, fields = handed_over(self._table, removed, heirs)
        keys_N = self._standing.keys_N[removed]
        wanted = np.fromiter(self._sharers, dtype=np.uint64)
        shared_N = np.isin(keys_N, wanted) & ~np.isin(keys_N, to_heirs.column("id").to_numpy())
        owners = [self._sharers[key] for key in keys_N[shared_N].tolist()]
        with reading(self._table):
            rows = take_rows(self._table, removed[shared_N], self._table.schema.names)
        rows = pa.concat_tables([to_heirs, with_owners(rows, owners)])
        return HandedOver(rows, [*fields, *(owner.fields for owner in owners)])

    def _write_again(self, kept: pa.Table, fields: list[Fields], moved: np.ndarray) -> None:
        """Writes passages again: `kept`, which get the fields of the document that they are handed over to, and those with the
        numbers `moved`, whose document has new fields."""
        with reading(self._table):
            again = take_rows(self._table, moved, self._table.schema.names)
        fields = [*fields, *(self._other_fields[number] for number in moved.tolist())]
        self._table = with_columns_of(self._folder / TABLE, self._table, fields)
        self._write(with_fields(pa.concat_tables([kept, again]), fields, self._table.schema).to_batches())

    def _merged_documents(self, kept: pa.Table) -> dict[str, Merged | None]:
        """By id: the documents that are merged now, and None for each document that is no longer merged. `kept` has the
        passages of removed documents that are handed over to other documents."""
        changes: dict[str, Merged | None] = dict.fromkeys([*self._elsewhere_too, *self._merged_no_longer])
        states = self._new_states | set(kept.column("document_state").to_pylist())
        changes |= self._standing.with_holder(self._elsewhere_too, self._removed_N, states)
        return changes | dict.fromkeys(kept.column("document_id").to_pylist())


class _Standing:
    """The passages and documents of the table before the addition, found by their keys."""

    def __init__(self, table: lance.LanceDataset):
        names = ["id", "document_key", "document_state", "document_passages", FIELDS_KEY]
        with reading(table):
            self.keys_N, self._documents_N, self._states_N, self._passages_N, self._fields_N = (
                column.fill_null(0).to_numpy()  # without fields, `FIELDS_KEY` is null
                for column in table.to_table(columns=names).columns
            )
        self._by_id = Lookup(self.keys_N)
        self._by_document = Lookup(self._documents_N)

    def numbers_of(self, id: str) -> np.ndarray:
        """Numbers of the passages of the document with this id."""
        return self._by_document.all(key_of(id))

    def has(self, document: Document) -> bool:
        """Whether the table has this document, with the same title and text, and with all of the document's passages."""
        own = self.numbers_of(document.id)
        same_N = self._states_N[own] == np.uint64(state_of(document))
        return len(own) > 0 and bool(same_N.all()) and len(own) == self._passages_N[own[0]]

    def has_owner(self, numbers: np.ndarray, owner: Owner) -> bool:
        """Whether all passages with these numbers have the state and the number of passages of their document."""
        same_N = self._states_N[numbers] == np.uint64(owner.state)
        return bool((same_N & (self._passages_N[numbers] == owner.passages)).all())

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
