"""Builds a new knowledge base from documents. `realm.store.add` uses the first three steps too.

1. the tagger finds sentences and salient spans of a group of documents
2. `split`          sentences are joined to passages, whose ids are hashes of title and text
3. `passage_batch`  the passages of the group are tokenized (`realm.store.schema`)
4. `commit_rows`    every 512 to 8192 passages, a commit saves the passages and the position in the documents

`cut_documents` does the first three steps in the processes of the tagger, of this machine or of a cluster. The process of the
command leaves out passages that an earlier document has, and writes.

A build works in the folder TARGET.building, which is renamed at the end. After a kill the next build continues from the last
commit. A build needs memory for the passages of one commit, and for the ids of merged documents. The hashes by which equal
passages and equal documents are found are in temporary files (`realm.keys.KeyTable`).
"""

import dataclasses
import hashlib
import json
import logging
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import lance
import pyarrow as pa
from lance import LanceOperation

from realm.errors import ConflictError, InputError, RealmError
from realm.folders import LOCK, TABLE_KEY, is_new, one_writer, replace_folder, restore
from realm.kept_values import PARSED, database_files, remove_database
from realm.keys import KeyTable, key_of
from realm.progress import progress
from realm.store.fields.columns import missing_columns
from realm.store.merged import MERGED, Merged, originals, settle_merged, write_merged
from realm.store.schema import (
    SCHEMA,
    Owner,
    fields_key_of,
    passage_batch,
    row_batches,
    state_of,
)
from realm.store.settings import KnowledgeBaseConfig, Settings
from realm.store.tables.digests import CHECKSUMS
from realm.store.tables.table import (
    PASSAGES,
    add_columns,
    check_newest,
    commit,
    newest_version,
    open_table,
    stream_rows,
    write_rows,
)
from realm.text.corpus import Annotations, Cut, Document, Passage, split_document
from realm.text.fields import NO_FIELDS, Fields
from realm.text.salient_spans import Tagger
from realm.text.tagger_groups import Asked, GroupTagger, Work
from realm.tokens.sentences import SentenceTokenizer
from realm.tokens.tokenizer import Tokenizer

TABLE = PASSAGES
TOKENIZER = "tokenizer"
_READ = "realm.read"
_log = logging.getLogger(__name__)


class DocumentsChanged(ConflictError):
    """An interrupted build cannot continue, because the documents that were already read have changed."""


class NoText(InputError):
    """The documents of a build contain no text."""


class BuildResult(NamedTuple):
    """Result of a build; work before an interruption is included."""

    documents: int
    passages: int
    duplicates: int
    """Number of passages left out because an earlier passage has the same title and text."""
    empty: int
    """Number of documents without passages."""
    merged: Mapping[str, str] = MappingProxyType({})
    """Documents with the title and text of an earlier document: id -> id of the earlier document."""


class ReadSoFar(NamedTuple):
    """How many documents a build has read, saved in each commit."""

    documents: int = 0
    digest: str = ""
    """Digest of all documents that were read."""
    duplicates: int = 0
    empty: int = 0

    def past(self, document: Document, duplicates: int = 0, empty: bool = False) -> "ReadSoFar":
        content = f"{self.digest} {state_of(document)} {fields_key_of(document.fields)} {document.id}"
        digest = hashlib.sha256(content.encode()).hexdigest()
        return ReadSoFar(self.documents + 1, digest, self.duplicates + duplicates, self.empty + empty)


def build(
    folder: str | Path,
    documents: Iterable[Document],
    config: KnowledgeBaseConfig,
    tokenizer: Tokenizer,
    tagger: Tagger,
    *,
    replace: bool = False,
    total: int | None = None,
) -> BuildResult:
    """Builds a knowledge base; an interrupted build of the same documents continues from its last commit.

    `total` is the number of documents, if known, for the progress bar. If the interrupted build had other settings, the build
    starts from the beginning, and a warning is logged. With `replace`, an existing knowledge base is replaced as soon as the
    new knowledge base is complete.

    Raises:
        InputError: the target exists and `replace` is not set, or two documents have the same id and different texts.
        NoText: the documents contain no text.
        DocumentsChanged: documents that an interrupted build had already read have changed.
    """
    target = Path(folder)
    restore(target)
    check_target(target, replace)
    work = unfinished_folder(target)
    named = dataclasses.replace(config, tagger=tagger.name, tokenizer=tokenizer.name)
    settings = Settings(named, tokenizer.fingerprint)
    table = interrupted(work, settings)
    read = how_far(table)
    again: dict[str, Merged] = {}
    stream = after(read, one_text_per_id(documents, again), work)
    rows = NewRows()
    bar = progress(total=total, description="build", unit="document", done=read.documents)
    with bar, KeyTable() as seen, cut_documents(stream, tagger, config, tokenizer) as cut:
        for batch in stream_rows(work / TABLE, table, columns=["id"]) if table else ():
            for key in batch.column("id").to_pylist():
                seen.put(key)
        for document, passages in cut:
            fresh = [number for key, number in number_of(passages).items() if seen.put(key) is None]
            rows.add(document, passages, fresh)
            read = read.past(document, len(passages) - len(fresh), not len(passages))
            bar.update()
            if len(rows) >= _commit_size(table, config.commit_every):
                table = _commit(work, table, rows, tokenizer, settings, read)
                rows = NewRows()
    if len(rows):
        table = _commit(work, table, rows, tokenizer, settings, read)
    if table is None:
        raise NoText(
            f"there is no text in {', '.join(config.sources) or 'the documents'}: {target} was not built"
        )
    if len(table.get_fragments()) > 1:
        table = _in_few_files(work, table, read)
    table.cleanup_old_versions(older_than=timedelta(0), retain_versions=1, delete_unverified=True)
    merged = originals(table, again)
    write_merged(work, {document: again[document] for document in merged})
    remove_database(work / PARSED)
    put_in_place(work, target)
    return BuildResult(read.documents, table.count_rows(), read.duplicates, read.empty, merged)


def unfinished_folder(target: Path) -> Path:
    """The folder in which the knowledge base `target` is built."""
    return target.with_name(f"{target.name}.building")


@contextmanager
def annotated(
    documents: Iterable[Document], tagger: Tagger
) -> Iterator[Iterator[tuple[Document, Annotations]]]:
    """A context with an iterator over the documents and their sentences and salient spans, in order.

    Documents that the tagger has read in advance are held in memory. The processes of the tagger end with the block.
    """
    waiting: deque[Document] = deque()

    def texts() -> Iterator[str]:
        for document in documents:
            waiting.append(document)
            yield document.text

    def pairs() -> Generator[tuple[Document, Annotations], None, None]:
        for found in tagger.annotate(texts()):
            yield waiting.popleft(), found

    with closing(pairs()) as stream:
        yield stream


@contextmanager
def cut_documents(
    documents: Iterable[Document], tagger: Tagger, config: KnowledgeBaseConfig, tokenizer: Tokenizer
) -> Iterator[Iterator[tuple[Document, pa.RecordBatch]]]:
    """A context with an iterator over the documents and their passages, as batches of `PASSAGE_SCHEMA`, in order.

    The documents are cut where they are tagged, unless the tagger is no `GroupTagger`. Documents that the tagger has read in
    advance are held in memory. The processes of the tagger end with the block.
    """
    prepare = partial(_cutting, config, tokenizer)
    if not isinstance(tagger, GroupTagger):
        work = prepare()
        with annotated(documents, tagger) as found:
            yield ((one, work([one], [annotations])[0]) for one, annotations in found)
        return
    waiting: deque[Document] = deque()

    def asked() -> Iterator[Asked]:
        for document in documents:
            waiting.append(document)
            yield Asked(document._replace(fields=NO_FIELDS))  # passages do not depend on fields

    def pairs() -> Generator[tuple[Document, pa.RecordBatch], None, None]:
        for passages, counts in tagger.apply(asked(), prepare):
            start = 0
            for count in counts:
                yield waiting.popleft(), passages.slice(start, count)
                start += count

    with closing(pairs()) as stream:
        yield stream


def _cutting(config: KnowledgeBaseConfig, tokenizer: Tokenizer) -> Work[tuple[pa.RecordBatch, list[int]]]:
    """A function that cuts documents -> (all their passages, the number of passages of each document)."""

    def cut(documents: Sequence[Document], found: Sequence[Annotations]) -> tuple[pa.RecordBatch, list[int]]:
        sentences = SentenceTokenizer(tokenizer)
        passages = [
            split(document, annotations, config, sentences)
            for document, annotations in zip(documents, found, strict=True)
        ]
        whole = passage_batch(list(chain.from_iterable(passages)), tokenizer, sentences)
        return whole, list(map(len, passages))

    return cut


def split(
    document: Document, annotations: Annotations, config: KnowledgeBaseConfig, sentences: SentenceTokenizer
) -> list[Passage]:
    """The passages of a document."""
    cut = Cut(
        config.passage_tokens,
        config.passage_overlap,
        whole=config.cut == "documents",
        rows=config.cut == "rows",
    )
    return split_document(document, annotations, sentences.count, cut)


def number_of(passages: pa.RecordBatch) -> dict[int, int]:
    """Key of each different passage -> number of its row. Of equal passages, the last is kept, in the place of the first."""
    return {key: number for number, key in enumerate(passages.column("id").to_pylist())}


class NewRows:
    """Rows that will be written together."""

    def __init__(self) -> None:
        self._passages: list[pa.RecordBatch] = []
        self._owners: list[Owner] = []

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, document: Document, passages: pa.RecordBatch, kept: Sequence[int]) -> None:
        """Adds the passages with the numbers in `kept`; `passages` are all passages of the document."""
        if not kept:
            return
        self._passages.append(passages if len(kept) == len(passages) else passages.take(pa.array(kept)))
        owner = Owner.of(document, len(number_of(passages)))
        self._owners += [owner] * len(kept)

    def fields(self) -> list[Fields]:
        """The fields of the document of each row."""
        return [owner.fields for owner in self._owners]

    def batches(self, schema: pa.Schema) -> list[pa.RecordBatch]:
        """The rows with the columns of `schema`."""
        return row_batches(self._passages, self._owners, schema=schema)


def one_text_per_id(
    documents: Iterable[Document], again: dict[str, Merged] | None = None
) -> Iterator[Document]:
    """Yields the documents in order.

    If a document has the same title and text as an earlier document with another id, the later document is added to `again`.

    Raises:
        InputError: two documents have the same id and different texts.
    """
    with KeyTable() as state_by_id, KeyTable() as states:
        for document in documents:
            state = state_of(document)
            earlier = state_by_id.put(key_of(document.id), str(state))
            if earlier not in (None, str(state)):
                raise InputError(f"two documents have the id {document.id!r}: give each document its own id")
            if states.put(state) is not None and earlier is None and again is not None:
                again[document.id] = Merged(state, document.fields)
            yield document


def check_target(target: Path, replace: bool) -> None:
    """Checks that the target does not exist, is an empty folder, or is a knowledge base that may be replaced.

    Raises:
        InputError: the target is something else.
    """
    if is_new(target):
        return
    if newest_version(target / TABLE) is None:
        raise InputError(f"{target} exists already and is not a knowledge base: choose another folder")
    if not replace:
        raise InputError(
            f"{target} is already a knowledge base: add documents with `realm kb add`, or choose another folder"
        )


def interrupted(work: Path, settings: Settings) -> lance.LanceDataset | None:
    """The table of an interrupted build, if a build with these settings can continue that build; otherwise None.

    The files of an interrupted build that cannot be continued are removed, except for what the readers of documents keep.
    """
    if not work.exists():
        return None
    parsed = database_files(work / PARSED)
    strange = [
        path.name
        for path in work.iterdir()
        if path.name not in (TABLE, TOKENIZER, CHECKSUMS, MERGED, LOCK) and path not in parsed
    ]
    if strange:
        raise InputError(
            f"the build needs the folder {work}, which contains {strange[0]}: move {strange[0]} to another folder"
        )
    if newest_version(work / TABLE) is not None:
        try:
            table = open_table(work / TABLE)
            if settings.same_result(Settings.of(table, work)):
                return table
            _log.warning("%s: the interrupted build had other settings; starting from the beginning", work)
        except RealmError as error:
            _log.warning("%s; starting from the beginning", error)
    for path in work.iterdir():
        if path not in parsed:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return None


def how_far(table: lance.LanceDataset | None) -> ReadSoFar:
    """How many documents the build had read at its newest commit."""
    transaction = table and table.read_transaction(table.version)
    properties = (transaction and transaction.transaction_properties) or {}
    return ReadSoFar(**json.loads(properties.get(_READ, "{}")))


def after(read: ReadSoFar, documents: Iterator[Document], work: Path) -> Iterator[Document]:
    """The documents that an interrupted build has not read.

    Raises:
        DocumentsChanged: earlier documents have changed.
    """
    again = ReadSoFar()
    for document in progress(
        islice(documents, read.documents), total=read.documents, description="resume", unit="document"
    ):
        again = again.past(document)
    if (again.documents, again.digest) != (read.documents, read.digest):
        raise DocumentsChanged(
            f"{work} is an interrupted build whose documents have changed since: remove this folder to start again"
        )
    if read.documents:
        _log.info("%s: the build continues after %d documents", work, read.documents)
    return documents


def _commit_size(table: lance.LanceDataset | None, most: int) -> int:
    """Number of passages of the next commit: a sixteenth of the present passages, within limits.

    A larger number would need more memory, and a smaller number more commits, each of which writes a list of all files.
    """
    return min(most, max(most // 16, table.count_rows() // 16 if table else 0, 1))


def commit_rows(
    work: Path,
    table: lance.LanceDataset | None,
    rows: Iterable[pa.RecordBatch],
    tokenizer: Tokenizer,
    settings: Settings,
    read: Callable[[], ReadSoFar],
    schema: pa.Schema = SCHEMA,
) -> lance.LanceDataset:
    """Writes rows with the columns of `schema`, and commits these rows and the position in the documents."""
    if table is None:
        tokenizer.save(work / TOKENIZER)
    schema = schema.with_metadata({TABLE_KEY: settings.to_json()})
    fragments = write_rows(work / TABLE, rows, schema)
    operation = LanceOperation.Append(fragments) if table else LanceOperation.Overwrite(schema, fragments)
    return commit(work / TABLE, operation, table, {_READ: json.dumps(read()._asdict())})


def _commit(
    work: Path,
    table: lance.LanceDataset | None,
    rows: NewRows,
    tokenizer: Tokenizer,
    settings: Settings,
    read: ReadSoFar,
) -> lance.LanceDataset:
    fields = rows.fields()
    if table is None:
        schema = pa.schema([*SCHEMA, *missing_columns(fields, SCHEMA)])
    else:
        read_before = {_READ: json.dumps(how_far(table)._asdict())}
        table = with_columns_of(work / TABLE, table, fields, read_before)
        schema = table.schema
    return commit_rows(work, table, rows.batches(schema), tokenizer, settings, lambda: read, schema)


def with_columns_of(
    path: Path,
    table: lance.LanceDataset,
    documents: Iterable[Fields],
    properties: Mapping[str, str] | None = None,
) -> lance.LanceDataset:
    """The table with all columns that documents with these fields need; missing columns are added in one commit.

    The commit makes a version, so the lines of `merged.jsonl` that a killed change wrote for this version are removed first.

    Raises:
        ChangedMeanwhile: columns are missing, and there is a newer version than `table`.
    """
    if not (columns := missing_columns(documents, table.schema)):
        return table
    with one_writer(path.parent):
        check_newest(path, table)
        settle_merged(path.parent, int(table.version))
        return add_columns(path, table, columns, properties)


def _in_few_files(work: Path, table: lance.LanceDataset, read: ReadSoFar) -> lance.LanceDataset:
    """Rewrites the table in files of a million rows, because the time of random access grows with the number of files."""
    bar = progress(total=table.count_rows(), description="pack", unit="passage")

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in stream_rows(work / TABLE, table):
            yield batch
            bar.update(len(batch))

    with bar:
        fragments = write_rows(work / TABLE, batches(), table.schema, new=True)
    operation = LanceOperation.Overwrite(table.schema, fragments)
    return commit(work / TABLE, operation, table, {_READ: json.dumps(read._asdict())})


def put_in_place(work: Path, target: Path) -> None:
    """Renames the finished knowledge base `work` to `target`; if `target` exists, waits until no process writes to `target`."""
    with one_writer(target) if target.exists() else nullcontext():
        replace_folder(work, target)
