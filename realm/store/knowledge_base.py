"""The knowledge base on disk: passages, which are added and deleted with their documents.

    KB/passages.lance    a row per passage (`realm.store.schema`); settings in the schema metadata
    KB/tokenizer/        the tokenizer of the passages
    KB/SHA256SUMS        digests of the files of the table (`realm.store.tables.digests`)
    KB/indexes/          vectors of the passages, a folder per model (`realm.store.vectors`)
    KB/words/            the BM25 index, after its first use (`realm.search.stored_bm25`)
    KB/mapped/           wordpieces and spans, after a training with several ranks (`realm.store.mapped_arrays`)

The id of a passage is the hash of its title and text, so equal passages are stored once. A passage belongs to the first
document that contained it, and is deleted with that document. If another document contains the passage too, the passage is
stored again when the other document is added again, in the same call or later. Documents with equal title and text are merged:
their ids are recorded (`KB/merged.jsonl`, `realm.store.merged`), and the text is deleted with the last of these documents. The
number of a passage is its row among the rows that are not deleted: numbers change when earlier rows are deleted, ids do not
change.

An open knowledge base stays at the version that was opened. Data about passages are loaded when they are first needed, and then
stay in memory. Per passage, `fingerprint` needs 8 bytes, `numbers_of` 16 bytes (and the titles, if a title is looked up), `ids`
and `titles` a Python string each, and `tokens` 4 bytes per wordpiece, which is about 1 kB.
"""

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict, TypeVar

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import FragmentMetadata

from realm import distributed
from realm.errors import DamagedError, InputError, reason, shortened
from realm.folders import one_writer, restore, what_it_is
from realm.keys import Lookup, hex_id, key_of
from realm.store import unfinished, vectors
from realm.store.add import AddResult, add
from realm.store.fields.columns import column_name, kinds_of_fields
from realm.store.fields.filters import CANNOT_CAST, explained, filter_sql, names_of_fields, refused
from realm.store.ingest import TABLE, TOKENIZER, BuildResult, build, with_columns_of
from realm.store.mapped_arrays import MAPPED
from realm.store.merged import change_merged, handed_over, originals, read_merged, settle_merged, write_merged
from realm.store.schema import (
    FIELDS,
    LINKS,
    PASSAGE_COLUMNS,
    PassageTokens,
    fingerprint_of,
    links_digest,
    load_tokens,
    mapped_tokens,
    to_passages,
    to_tokens,
    with_fields,
)
from realm.store.settings import KnowledgeBaseConfig, Settings
from realm.store.tables.table import (
    check_newest,
    keeps_removed_rows,
    made_anew,
    newest_version,
    open_table,
    reading,
    replace_rows,
    take_rows,
    uncommitted,
    write_rows,
)
from realm.store.upkeep import compacted, remove_versions, tidy
from realm.store.verify import lagging, problems
from realm.text.corpus import Document, HeldOut, Passage
from realm.text.fields import Kind, from_json
from realm.text.salient_spans import Tagger
from realm.tokens.layouts import Ragged
from realm.tokens.tokenizer import Tokenizer

__all__ = [
    "AddResult",
    "BuildResult",
    "CompactResult",
    "DocumentEntry",
    "KnowledgeBase",
    "KnowledgeBaseConfig",
    "PassageTokens",
    "Ragged",
    "TrainingRecord",
    "build",
    "changed",
]

T = TypeVar("T")
IN_MEMORY = 2_000_000
"""Most passages whose wordpieces a process without other ranks loads into memory (about 3 GB)."""


class DocumentEntry(NamedTuple):
    """A document in the list of documents."""

    id: str
    title: str
    passages: int
    """Number of passages that belong to the document; a passage belongs to the first document that contained it."""
    fields: dict[str, Any]


class CompactResult(NamedTuple):
    """Result of compaction."""

    bytes_before: int
    bytes_after: int
    versions_removed: int
    versions_in_use: int
    """Number of older versions that stay, together with deleted passages, because another process has these versions open."""


class TrainingRecord(TypedDict):
    """The data about a knowledge base that a training stage saves with its model."""

    kb: str
    """Fingerprint of the knowledge base."""
    held_out: float
    passage_tokens: int


class KnowledgeBase:
    """A knowledge base, open at one version. A method that changes the knowledge base moves this object to the new version."""

    def __init__(self, folder: Path, table: lance.LanceDataset, settings: Settings, tokenizer: Tokenizer):
        self.folder = folder
        self.config = settings.config
        self.tokenizer = tokenizer
        self.table = table

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Opens the folder of a knowledge base.

        Raises:
            RealmError: the folder is not a knowledge base, has an unknown format, is damaged, or has another tokenizer than the
                tokenizer that made the passages.
        """
        folder = Path(folder)
        restore(folder)
        if newest_version(folder / TABLE) is None:
            if known := what_it_is(folder):
                raise InputError(f"{folder} is {known}, not a knowledge base")
            raise InputError(
                f"{folder} is not a knowledge base: make one with `realm kb build SOURCE... --out {folder}`"
            )
        table = open_table(folder / TABLE)
        settings = Settings.of(table, folder)
        tokenizer = Tokenizer.load(folder / TOKENIZER)
        if tokenizer.fingerprint != settings.tokenizer:
            raise InputError(
                f"{folder / TOKENIZER} has fingerprint {tokenizer.fingerprint}, but the passages were made with tokenizer "
                f"{settings.tokenizer}: restore tokenizer {settings.tokenizer}, or build the knowledge base again"
            )
        return cls(folder, table, settings, tokenizer)

    def __len__(self) -> int:
        return int(self.table.count_rows())

    def __iter__(self) -> Iterator[Passage]:
        """All passages in the order of their numbers, read from disk as they are needed."""
        with reading(self.table):
            for batch in self.table.to_batches(columns=list(PASSAGE_COLUMNS), batch_size=1024):
                yield from to_passages(batch)

    def passages(self, numbers: Iterable[int]) -> list[Passage]:
        """The passages with these numbers, in the order of the numbers."""
        numbers = np.asarray(numbers if isinstance(numbers, np.ndarray) else list(numbers), dtype=np.int64)
        if not len(numbers):
            return []
        if not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(
                f"passage numbers are {numbers.min()} to {numbers.max()}, not 0 to {len(self) - 1}"
            )
        with reading(self.table):
            return to_passages(take_rows(self.table, numbers, list(PASSAGE_COLUMNS)))

    @cached_property
    def keys_N(self) -> np.ndarray:
        """Passage ids by passage number, as unsigned 64-bit numbers."""
        return self._column("id").to_numpy()

    @cached_property
    def document_keys_N(self) -> np.ndarray:
        """Document keys by passage number: 64 bits, equal for the passages of a document."""
        return self._column("document_key").to_numpy()

    @property
    def document_count(self) -> int:
        """Number of documents with passages, without merged documents."""
        return len(np.unique(self.document_keys_N))

    @cached_property
    def ids(self) -> list[str]:
        """Passage ids by passage number: the first 16 hex digits of the SHA-1 of title and text."""
        return list(map(hex_id, self.keys_N.tolist()))

    def passage_numbers(self, ids: Sequence[str]) -> np.ndarray:
        """Numbers of the passages with these ids, in the order of the ids -> int64.

        Raises:
            InputError: a text is not a passage id, or the knowledge base has no passage with this id.
        """
        try:
            keys = np.array([int(one, 16) for one in ids], dtype=np.uint64)
        except (ValueError, OverflowError):
            raise InputError(f"passage ids are 16 hex digits, not {shortened(', '.join(ids))}") from None
        number_N, there_N = self._by_key.find(keys)
        if not there_N.all():
            missing = ids[int(np.argmin(there_N))]
            raise InputError(
                f"{self.folder} has no passage {missing}: the passage was deleted, or belongs to another knowledge base"
            )
        return number_N

    @cached_property
    def _by_key(self) -> Lookup:
        return Lookup(self.keys_N)

    @cached_property
    def titles(self) -> list[str]:
        """Titles by passage number."""
        titles: list[str] = self._column("title").to_pylist()
        return titles

    def texts(self) -> list[str]:
        """All texts by passage number, for a BM25 index."""
        texts: list[str] = self._column("text").to_pylist()
        return texts

    @cached_property
    def tokens(self) -> PassageTokens:
        """Wordpieces of all passages, for training.

        The wordpieces are loaded into memory. If there are several ranks, or if the knowledge base is large, all processes of a
        machine map one copy, because each rank and each background build needs the wordpieces.
        """
        with reading(self.table):
            if distributed.local_ranks() == 1 and len(self) <= IN_MEMORY:
                return load_tokens(self.table, self.tokenizer)
            folder = self.folder / MAPPED / f"{self.table.version}-{self.fingerprint}"
            return mapped_tokens(folder, self.table, self.tokenizer)

    def tokens_of(self, numbers: np.ndarray) -> PassageTokens:
        """Wordpieces of these passages: row n belongs to the n-th number. Each call reads from disk."""
        with reading(self.table):
            rows = take_rows(self.table, numbers, self.table.schema.names)
            return to_tokens(rows.to_batches(max_chunksize=1024), self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the passages, their order and the tokenizer."""
        return fingerprint_of(self.keys_N, self.tokenizer)

    @cached_property
    def documents_digest(self) -> str:
        """Digest of the documents to which the passages belong, which `fingerprint` does not cover."""
        return hashlib.sha256(self.document_keys_N.astype(">u8").tobytes()).hexdigest()[:16]

    @cached_property
    def links_digest(self) -> str:
        """Digest of the links of all passages, which `fingerprint` does not cover; "" if no passage has links."""
        with reading(self.table):
            return links_digest(self.table.to_batches(columns=[LINKS]))

    def check_tokenizer(self, tokenizer: Tokenizer, name: str) -> None:
        """Raises InputError if `tokenizer`, the tokenizer of the model `name`, is not that of this knowledge base."""
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise InputError(
                f"{name} has tokenizer {tokenizer.fingerprint}, but knowledge base {self.folder} has tokenizer "
                f"{self.tokenizer.fingerprint}: build the knowledge base with `realm kb build ... --tokenizer {name}`"
            )

    @property
    def held_out(self) -> HeldOut:
        """The rule by which passages are held out."""
        return HeldOut(self.config.held_out, self.config.passage_tokens)

    @property
    def training_record(self) -> TrainingRecord:
        """The data about this knowledge base that a training stage saves with its model."""
        share, longest = self.held_out
        return {"kb": self.fingerprint, "held_out": share, "passage_tokens": longest}

    def agree_on_held_out(self, other: HeldOut | None, name: str) -> None:
        """Checks that the training of the model `name` held out the held-out passages of this knowledge base.

        `other` is the rule by which the training held out passages; None if it held out no passages of these documents.

        Raises:
            InputError: the training held out other passages.
        """
        if other not in (None, self.held_out):
            raise InputError(
                f"{name} has {other}, but knowledge base {self.folder} has {self.held_out}: {name} may have been trained on "
                f"held-out passages; build a knowledge base with `--set held_out={other.held_out:g} --set "
                f"passage_tokens={other.passage_tokens}`, or use a model that was trained on this knowledge base"
            )

    def documents(
        self, start: int = 0, count: int | None = None, prefix: str = "", where: str | None = None
    ) -> list[DocumentEntry]:
        """At most `count` documents from number `start` on; documents are numbered in the order of their first passages.

        With a `prefix`, only documents whose id or title begins with the prefix are numbered; for this, the ids and titles of
        all documents are read from disk. With a filter `where`, only documents whose first passage matches the filter are
        numbered.
        """
        _, first_N, counts_N = np.unique(self.document_keys_N, return_index=True, return_counts=True)
        order = np.argsort(first_N)
        if where is not None:
            order = order[self.matching(where)[first_N[order]]]
        first_N, counts_N = first_N[order], counts_N[order]
        end = None if count is None else start + count
        if not prefix:
            first_N, counts_N = first_N[start:end], counts_N[start:end]
        with reading(self.table):
            rows = take_rows(self.table, first_N, ["document_id", "title", FIELDS])
        names = zip(
            rows.column("document_id").to_pylist(),
            rows.column("title").to_pylist(),
            counts_N.tolist(),
            map(from_json, rows.column(FIELDS).to_pylist()),
            strict=True,
        )
        if not prefix:
            return [DocumentEntry(*one) for one in names]
        return [
            DocumentEntry(*one) for one in names if one[0].startswith(prefix) or one[1].startswith(prefix)
        ][start:end]

    def document_ids(self) -> set[str]:
        """Ids of all documents, including merged documents."""
        return {entry.id for entry in self.documents()} | set(self.merged())

    def incomplete(self, documents: Iterable[str]) -> set[str]:
        """Those of the ids whose documents have passages that are stored only as passages of other documents."""
        keys_N, first_N, counts_N = np.unique(self.document_keys_N, return_index=True, return_counts=True)
        needed_N = self._column("document_passages").to_numpy()[first_N]
        complete = set(keys_N[counts_N == needed_N].tolist())
        holders = self.merged()
        return {id for id in documents if key_of(holders.get(id, id)) not in complete}

    def numbers_of(self, documents: Sequence[str]) -> np.ndarray:
        """Numbers of the passages of some documents, in ascending order.

        A document is given by its id, or by the title of the document or of one of its passages if no document has such an id.

        Raises:
            InputError: a name is neither an id nor a title.
        """
        keys = {name: key_of(name) for name in documents}
        found_N = np.isin(self.document_keys_N, np.fromiter(keys.values(), dtype=np.uint64))
        known = set(np.unique(self.document_keys_N[found_N]).tolist())
        titles = {name for name, key in keys.items() if key not in known}
        if titles:
            column = self._column("title")
            here_N = pc.is_in(column, value_set=pa.array(sorted(titles), pa.string())).to_numpy()
            titles.difference_update(column.filter(here_N).to_pylist())
            found_N |= np.isin(self.document_keys_N, self.document_keys_N[here_N])
        if titles:
            some = ", ".join(map(repr, sorted(titles)[:3])) + (", ..." if len(titles) > 3 else "")
            raise InputError(f"{self.folder} has no document with id or title {some}")
        return np.flatnonzero(found_N)

    def add(self, documents: Iterable[Document], tagger: Tagger, gone: Collection[str] = ()) -> AddResult:
        """Adds documents, and deletes the other documents with the ids `gone`, in one commit; a document with an existing id
        replaces the old document.

        A document with unchanged title and text, or unchanged passages, is skipped. If another document was merged with a
        replaced or deleted document, the old text stays as the text of the other document. If a removed passage is also a
        passage of one of `documents`, it becomes a passage of this document. Ids in `gone` that no document has are ignored.

        Raises:
            InputError: two of the documents have the same id and different texts.
        """
        table, result = add(self.folder, self.table, documents, self.config, self.tokenizer, tagger, gone)
        self._move_to(table)
        return result

    def merged(self) -> dict[str, str]:
        """Merged documents: id -> id of the document that has the same title and text."""
        return originals(self.table, read_merged(self.folder, self.table.version))

    def delete(self, documents: Sequence[str]) -> int:
        """Deletes documents, given by id or title, in one commit -> the number of deleted passages.

        If another document was merged with a document that is given by id, the text stays as the text of the other document.
        All documents with a given title are deleted, including merged documents.

        Raises:
            InputError: there is no such document; nothing is deleted.
            ChangedMeanwhile: another process changed the knowledge base.
        """
        path, table = self.folder / TABLE, self.table
        # Without the lock, another process could merge a document with a text that is deleted here.
        with one_writer(self.folder):
            check_newest(path, table)
            merged = settle_merged(self.folder, table.version)
            names = originals(table, {name: merged[name] for name in documents if name in merged})
            others = [name for name in documents if name not in names]
            numbers, states = self.numbers_of(others), self._states_by_title(others)
            of_titles = {name: one for name, one in merged.items() if one.state in states}
            names |= originals(table, of_titles)
            heirs = {
                name: one for name, one in merged.items() if name not in documents and name not in of_titles
            }
            kept, fields = handed_over(table, numbers, heirs)
            table = with_columns_of(path, table, fields)
            changes = dict.fromkeys([*names, *kept.column("document_id").to_pylist()])
            change_merged(self.folder, changes, table.version + (len(numbers) > 0))
            if len(numbers):
                fragments: list[FragmentMetadata] = []
                with uncommitted(path):
                    if len(kept):
                        rows = with_fields(kept, fields, table.schema)
                        fragments += write_rows(path, rows.to_batches(), table.schema)
                    table = replace_rows(path, table, numbers, fragments)
        if table is not self.table:
            self._move_to(table)
        return len(numbers) - len(kept)

    def _states_by_title(self, documents: Sequence[str]) -> set[int]:
        """The states of the documents that `documents` gives by title."""
        keys_N = np.array([key_of(name) for name in documents], dtype=np.uint64)
        by_id_N = np.isin(keys_N, self.document_keys_N).tolist()
        numbers = self.numbers_of([name for name, by_id in zip(documents, by_id_N, strict=True) if not by_id])
        with reading(self.table):
            return set(take_rows(self.table, numbers, ["document_state"]).column(0).to_pylist())

    def compact(self) -> CompactResult:
        """Rewrites passages and vectors without deleted rows, and removes all older versions.

        A version that another process has open is not removed; a later call can remove this version.

        Raises:
            ChangedMeanwhile: another process changed the knowledge base.
        """
        before = _size(self.folder)
        path = self.folder / TABLE
        first = remove_versions(path, 1)  # makes room for the rewritten rows, because the disk can be full
        with one_writer(self.folder):
            check_newest(path, self.table)
            states = settle_merged(self.folder, self.table.version)
            write_merged(self.folder, {name: states[name] for name in originals(self.table, states)})
            self._move_to(compacted(path, self.table))
        removed = [remove_versions(path, 1)]
        removed += [vectors.compact(index, self.keys_N) for index in vectors.folders(self.folder)]
        for index in self.folder.glob("indexes/*"):
            unfinished.forget(index)
        shutil.rmtree(self.folder / MAPPED, ignore_errors=True)
        versions, in_use = (sum(counts) for counts in zip(*removed, strict=True))
        return CompactResult(before, _size(self.folder), first.versions + versions, in_use)

    def keeps_removed_texts(self) -> bool:
        """Whether files can still have the texts of passages that were deleted or replaced; `compact` removes these texts."""
        return keeps_removed_rows(self.folder / TABLE, self.table)

    def verify(self) -> list[str]:
        """Reads the whole knowledge base -> a line for each problem."""
        return problems(self.folder, self.table, self.tokenizer)

    def lagging(self) -> list[str]:
        """A line for each index that lacks the vectors of passages that were added later, which is not a problem."""
        return lagging(self.folder, self.keys_N, self.fingerprint)

    @property
    def fields(self) -> dict[str, str]:
        """The names that filters can use -> what their values are: text, whole number, date ..."""
        return names_of_fields(self.kinds)

    @cached_property
    def kinds(self) -> dict[str, list[Kind]]:
        """The fields -> the kinds of their values, without kinds of which all values were deleted or replaced."""
        kinds = kinds_of_fields(self.table.schema)
        for name, several in kinds.items():
            if len(several) > 1:
                with reading(self.table):
                    there = [
                        kind
                        for kind in several
                        if self.table.count_rows(filter=f"`{column_name(name, kind)}` is not null")
                    ]
                kinds[name] = there or several[:1]
        return kinds

    def matching(self, where: str) -> np.ndarray:
        """Whether each passage matches a filter over the fields of its document, by passage number -> [N] bool.

        As in SQL, a comparison with a field that the document does not have is not true.

        Raises:
            FilterError: the filter cannot be used (`realm.store.fields.filters`).
        """
        sql = filter_sql(where, self.kinds)
        try:
            with reading(self.table), _casts():
                match_N = self.table.scanner(columns={"matches": sql}).to_table().column("matches")
        except ValueError as error:  # the filter is not valid SQL, or compares values of different types
            if isinstance(error, DamagedError):
                raise
            why = explained(reason(error).removeprefix("Invalid user input: "))
            raise refused(where, shortened(why), self.kinds) from error
        if not pa.types.is_boolean(match_N.type):
            raise refused(where, "it is not a condition, such as year >= 2020", self.kinds)
        return match_N.fill_null(False).to_numpy()

    def _column(self, name: str) -> pa.ChunkedArray:
        with reading(self.table):
            return self.table.to_table(columns=[name]).column(name)

    def _move_to(self, table: lance.LanceDataset) -> None:
        self.table = table  # this object no longer uses the earlier version
        self.table = tidy(self.folder / TABLE, table)
        for name in [name for name in vars(self) if isinstance(vars(type(self)).get(name), cached_property)]:
            del self.__dict__[name]


@contextmanager
def _casts() -> Iterator[None]:
    """Turns the exception of a failed cast of values into a plain ValueError, which is not an exception of damaged data."""
    try:
        yield
    except pa.ArrowInvalid as error:
        if not CANNOT_CAST.search(str(error)):
            raise
        raise ValueError(*error.args) from error


def changed(folder: Path, change: Callable[[KnowledgeBase], T]) -> T:
    """Runs `change` on the newest version of a knowledge base; if another process changes it meanwhile, runs `change` again."""
    return made_anew(folder, lambda: change(KnowledgeBase.open(folder)))


def _size(folder: Path) -> int:
    """Size of all files in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
