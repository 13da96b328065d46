"""Documents in, passages out: a new knowledge base, and the steps that later additions share with it.

1. `annotated`      the tagger finds sentences and salient spans, streaming
2. `split`          sentences are packed into passages, known by the hash of their title and text
3. `row_batches`    passages are tokenized (`realm.store.schema`)
4. commit           every 512 to 8192 passages, together with how far the documents were read

A build works in a folder beside the target that takes the target's name at the end. Killed, it goes on
where its last commit ended. In memory: Python sets of two 64-bit hashes per document and one per passage
(about 2 GB for 13.35 M passages of 6 M documents), and the passages of one commit.
"""

import dataclasses
import hashlib
import json
import logging
import math
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import lance
import pyarrow as pa
from lance import LanceOperation

from realm.errors import ConflictError, InputError, RealmError
from realm.folders import LOCK, one_writer, replace_folder, restore
from realm.progress import progress
from realm.settings import config_from
from realm.store.digests import CHECKSUMS
from realm.store.merged import MERGED, originals, write_merged
from realm.store.schema import SCHEMA, Row, key_of, row_batches, state_of
from realm.store.tables import PASSAGES, commit, newest_version, open_table, write_rows
from realm.text.corpus import Annotations, Document, Passage, split_document
from realm.text.salient_spans import Tagger
from realm.tokens.tokenizer import Tokenizer

TABLE = PASSAGES
TOKENIZER = "tokenizer"
FORMAT = 3
"""Raised when older code can no longer read what newer code writes; all formats from 1 on are read."""
_SETTINGS = b"realm"
_READ = "realm.read"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnowledgeBaseConfig:
    """What a knowledge base is made of and how; saved in it."""

    tokenizer: str = "package:realm-mini"
    """Whose wordpieces: a model or encoder, folder or name; "" where the tokenizer was made from the documents, or its name
    was not kept."""
    passage_tokens: int = 288
    """Longest passage in wordpieces, its title and three special tokens included (paper: 288)."""
    tagger: str = "spacy:en_core_web_sm"
    """What finds sentences and salient spans; "" where nothing looked at the passages, as in converted ones."""
    held_out: float = 0.03
    """Share of passages that no training query is cut from, so that a model can be probed on them."""
    sources: tuple[str, ...] = ()
    """Where the documents came from, as the command was given them."""
    max_document_chars: int = 1_000_000
    """Longest document that is read; a longer one is most often a mistake."""
    commit_every: int = 8192
    """Most passages of a commit, which are held in memory, and which a killed build has to make again."""

    @property
    def later_tagger(self) -> str:
        """What tags documents that are added later."""
        return self.tagger or "rules"

    def __post_init__(self) -> None:
        least = {"passage_tokens": 16, "max_document_chars": 1, "commit_every": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be {bound} or more")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}: it must be 0 or more, and less than 1")


class SettingsJson(TypedDict):
    """What `Settings` are on disk."""

    format: int
    tokenizer: str
    config: dict[str, Any]
    """As in `KnowledgeBaseConfig`."""


class Settings(NamedTuple):
    """What a knowledge base says about itself, in the schema metadata of its passages."""

    config: KnowledgeBaseConfig
    tokenizer: str
    """Its fingerprint."""
    says_held_out: bool = True
    """False: an earlier version built it, when each training stage had a share of its own."""

    def to_json(self) -> str:
        saved: SettingsJson = {
            "format": FORMAT,
            "tokenizer": self.tokenizer,
            "config": dataclasses.asdict(self.config),
        }
        return json.dumps(saved)

    @classmethod
    def of(cls, table: lance.LanceDataset, folder: Path) -> "Settings":
        """Raises InputError when the table is no knowledge base's, or of an unknown format."""
        try:
            saved = json.loads(table.schema.metadata[_SETTINGS])
            known = saved["format"], saved["tokenizer"], saved["config"]
        except (TypeError, KeyError, ValueError):
            raise InputError(
                f"{folder} is no knowledge base: its passages say nothing about themselves"
            ) from None
        if known[0] not in range(1, FORMAT + 1):
            raise InputError(
                f"{folder} has format {known[0]}, this version of realm reads 1 to {FORMAT}: build it anew"
            )
        fields = {field.name for field in dataclasses.fields(KnowledgeBaseConfig)}
        values = {
            name: value for name, value in known[2].items() if name in fields
        }  # earlier versions had more
        values.setdefault("tokenizer", "")  # formats 1 and 2 did not keep the name
        config = config_from(KnowledgeBaseConfig, values, str(folder))
        return cls(config, known[1], "held_out" in known[2])

    def same_result(self, other: "Settings") -> bool:
        """Whether the same documents give the same knowledge base; processes, commits and limits do not matter."""
        mine, others = (
            (s.tokenizer, s.config.passage_tokens, s.config.held_out, s.config.tagger, s.config.sources)
            for s in (self, other)
        )
        return mine == others


class DocumentsChanged(ConflictError):
    """An interrupted build cannot go on: the documents that it had read are no longer the same."""


class BuildResult(NamedTuple):
    """What a build read and kept, including what it did before it was interrupted."""

    documents: int
    passages: int
    duplicates: int
    """Passages left out because an earlier one has the same title and text."""
    empty: int
    """Documents without a passage."""
    merged: Mapping[str, str] = MappingProxyType({})
    """Documents whose title and text an earlier one has: the id of each, and of the one that holds its text."""


class ReadSoFar(NamedTuple):
    """How far a build has read; saved in each commit, so that the two never differ."""

    documents: int = 0
    digest: str = ""
    """Of all documents so far, to know them again."""
    duplicates: int = 0
    empty: int = 0

    def past(self, document: Document, duplicates: int = 0, empty: bool = False) -> "ReadSoFar":
        digest = hashlib.sha256(f"{self.digest} {state_of(document)} {document.id}".encode()).hexdigest()
        return ReadSoFar(self.documents + 1, digest, self.duplicates + duplicates, self.empty + empty)


def build(
    folder: str | Path,
    documents: Iterable[Document],
    config: KnowledgeBaseConfig,
    tokenizer: Tokenizer,
    tagger: Tagger,
    replace: bool = False,
    total: int | None = None,
) -> BuildResult:
    """Makes a knowledge base; an interrupted build of the same documents goes on where its last commit ended.

    `total` is the number of documents where it is known, and progress shows the time left.

    With other settings than the interrupted one it starts over, and says so. With `replace`, a knowledge base
    that is there already stays until the new one is complete.

    Raises:
        InputError: something is there already; two documents have one id; there is no text at all; or the
            documents that an interrupted build had read are no longer the same.
    """
    target = Path(folder)
    restore(target)
    check_target(target, replace)
    work = target.with_name(f"{target.name}.building")
    named = dataclasses.replace(config, tagger=tagger.name, tokenizer=tokenizer.name)
    settings = Settings(named, tokenizer.fingerprint)
    table = interrupted(work, settings)
    read = how_far(table)
    seen = set(table.to_table(columns=["id"]).column("id").to_pylist()) if table else set()
    again: dict[str, int] = {}
    stream = after(read, one_text_per_id(documents, again), work)
    rows: list[Row] = []
    bar = progress(total=total, description="build", unit="document", done=read.documents)
    with bar, annotated(stream, tagger) as found:
        for document, annotations in found:
            passages = split(document, annotations, config.passage_tokens, tokenizer)
            fresh = {int(p.id, 16): p for p in passages if int(p.id, 16) not in seen}
            seen.update(fresh)
            rows += rows_of(document, passages, fresh.values())
            read = read.past(document, len(passages) - len(fresh), not passages)
            bar.update()
            if len(rows) >= _commit_size(table, config.commit_every):
                table = _commit(work, table, rows, tokenizer, settings, read)
                rows.clear()
    if rows:
        table = _commit(work, table, rows, tokenizer, settings, read)
    if table is None:
        raise InputError(
            f"no text in {', '.join(config.sources) or 'the documents'}: nothing to build {target} from"
        )
    if len(table.get_fragments()) > 1:
        table = _in_few_files(work, table, read)
    table.cleanup_old_versions(older_than=timedelta(0), retain_versions=1, delete_unverified=True)
    merged = originals(table, again)
    write_merged(work, {document: again[document] for document in merged})
    put_in_place(work, target)
    return BuildResult(read.documents, table.count_rows(), read.duplicates, read.empty, merged)


@contextmanager
def annotated(
    documents: Iterable[Document], tagger: Tagger
) -> Iterator[Iterator[tuple[Document, Annotations]]]:
    """Documents with their sentences and salient spans, in order; holds those that the tagger read ahead.

    A tagger may have processes of its own, which end with the block.
    """
    waiting: deque[Document] = deque()

    def texts() -> Iterator[str]:
        for document in documents:
            waiting.append(document)
            yield document.text

    def pairs() -> Generator[tuple[Document, Annotations], None, None]:
        for found in tagger.annotate(texts()):
            yield waiting.popleft(), found

    with warnings.catch_warnings(), closing(pairs()) as stream:
        # Lance warns of every fork. This one is safe: Lance is idle now, and the children never call it.
        warnings.filterwarnings("ignore", message="lance is not fork-safe")
        yield stream


def split(
    document: Document, annotations: Annotations, max_tokens: int, tokenizer: Tokenizer
) -> list[Passage]:
    """A document's passages of at most `max_tokens` wordpieces."""

    def count_tokens(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in tokenizer.encode(texts)]

    return split_document(document, annotations, count_tokens, max_tokens)


def rows_of(document: Document, passages: Sequence[Passage], kept: Iterable[Passage]) -> list[Row]:
    """Rows for those of a document's passages that are kept."""
    distinct = len({passage.id for passage in passages})
    state = state_of(document)  # once: it reads the whole text, and a long document has thousands of passages
    return [Row(passage, state, distinct) for passage in kept]


def one_text_per_id(documents: Iterable[Document], again: dict[str, int] | None = None) -> Iterator[Document]:
    """The documents as they come; into `again` go the ids and states of those that are an earlier one under another id.

    Raises:
        InputError: an id comes back with another text.
    """
    states: dict[int, int] = {}
    known: set[int] = set()
    for document in documents:
        state, key = state_of(document), key_of(document.id)
        if again is not None and key not in states and state in known:
            again[document.id] = state
        known.add(state)
        if states.setdefault(key, state) != state:
            raise InputError(f"two documents have the id {document.id!r}: give each its own")
        yield document


def check_target(target: Path, replace: bool) -> None:
    """Raises InputError when something else is there, or a knowledge base that is not to be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if newest_version(target / TABLE) is None:
        raise InputError(f"{target} is there already, and no knowledge base: give another folder")
    if not replace:
        raise InputError(
            f"{target} is a knowledge base already: add to it with `realm kb add`, or give another folder"
        )


def interrupted(work: Path, settings: Settings) -> lance.LanceDataset | None:
    """What an earlier build committed, if this one can go on from it; else that is removed."""
    if not work.exists():
        return None
    strange = [
        path.name for path in work.iterdir() if path.name not in (TABLE, TOKENIZER, CHECKSUMS, MERGED, LOCK)
    ]
    if strange:
        raise InputError(f"{work} is where the build works, and holds {strange[0]}: move that away")
    if newest_version(work / TABLE) is not None:
        try:
            table = open_table(work / TABLE)
            if settings.same_result(Settings.of(table, work)):
                return table
            _log.warning("%s: an interrupted build with other settings; starting over", work)
        except RealmError as error:
            _log.warning("%s; starting over", error)
    shutil.rmtree(work)
    return None


def how_far(table: lance.LanceDataset | None) -> ReadSoFar:
    """What the newest commit says."""
    transaction = table and table.read_transaction(table.version)
    properties = (transaction and transaction.transaction_properties) or {}
    return ReadSoFar(**json.loads(properties.get(_READ, "{}")))


def after(read: ReadSoFar, documents: Iterator[Document], work: Path) -> Iterator[Document]:
    """The documents that an interrupted build has not read; those before them must be the ones it read."""
    again = ReadSoFar()
    for document in progress(
        islice(documents, read.documents), total=read.documents, description="resume", unit="document"
    ):
        again = again.past(document)
    if (again.documents, again.digest) != (read.documents, read.digest):
        raise DocumentsChanged(
            f"{work} was interrupted, and its documents have changed since: remove it to start over"
        )
    if read.documents:
        _log.info("%s: going on after %d documents", work, read.documents)
    return documents


def _commit_size(table: lance.LanceDataset | None, most: int) -> int:
    """A sixteenth of what is there: a kill costs little, and commits stay few, for each lists all files before."""
    return min(most, max(most // 16, table.count_rows() // 16 if table else 0, 1))


def commit_rows(
    work: Path,
    table: lance.LanceDataset | None,
    rows: Iterable[pa.RecordBatch],
    tokenizer: Tokenizer,
    settings: Settings,
    read: Callable[[], ReadSoFar],
) -> lance.LanceDataset:
    """Writes rows as they come, and a version with them and with how far the documents were read when they ended."""
    if table is None:
        tokenizer.save(work / TOKENIZER)
    schema = SCHEMA.with_metadata({_SETTINGS: settings.to_json()})
    fragments = write_rows(work / TABLE, rows, schema)
    operation = LanceOperation.Append(fragments) if table else LanceOperation.Overwrite(schema, fragments)
    return commit(work / TABLE, operation, table, {_READ: json.dumps(read()._asdict())})


def _commit(
    work: Path,
    table: lance.LanceDataset | None,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    settings: Settings,
    read: ReadSoFar,
) -> lance.LanceDataset:
    return commit_rows(work, table, row_batches(rows, tokenizer), tokenizer, settings, lambda: read)


def _in_few_files(work: Path, table: lance.LanceDataset, read: ReadSoFar) -> lance.LanceDataset:
    """The same rows in files of a million: random access costs about a millisecond for each file that it meets."""
    size = 8192
    batches = progress(
        table.to_batches(batch_size=size),
        total=math.ceil(table.count_rows() / size),
        description="pack",
        unit="batch",
    )
    fragments = write_rows(work / TABLE, batches, table.schema, new=True)
    operation = LanceOperation.Overwrite(table.schema, fragments)
    return commit(work / TABLE, operation, table, {_READ: json.dumps(read._asdict())})


def put_in_place(work: Path, target: Path) -> None:
    """Gives a finished knowledge base its name; a writer of the one that it replaces ends first."""
    with one_writer(target) if target.exists() else nullcontext():
        replace_folder(work, target)
