"""Snapshots of a knowledge base that changes while questions are answered.

A snapshot is a knowledge base at one version, a model, and an index at one version. A snapshot never changes, so all steps of
an answer use the same version. A change builds the next snapshot, and a single assignment then replaces the current snapshot.
Changes run one after another (`_changing`), and questions never wait for a change. They wait while a version of another process
is loaded (`_refreshing`), which one thread does for all.

Two commits add a document: the first adds its passages, the second the vectors of these passages. If the process is killed
between these commits, the passages without vectors are embedded at the next start. Two snapshots are in memory while one
replaces the other.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from realm.errors import DamagedError, InputError, RealmError
from realm.index.versions import complete_index, index_folder
from realm.interop.span_readers import take_reader
from realm.keys import key_of
from realm.model.calibration import Method
from realm.model.device import choose_device
from realm.model.folder import load_model
from realm.model.manifest import MANIFEST, model_path
from realm.qa.filling import Filler
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.questions import make_questions
from realm.search.postgres_table import is_address
from realm.store import vectors
from realm.store.fields.filters import example_filter
from realm.store.ingest import TABLE
from realm.store.knowledge_base import AddResult, KnowledgeBase, changed
from realm.store.tables.table import history, newest_version
from realm.text.corpus import Document, Passage
from realm.text.salient_spans import Tagger, load_tagger
from realm.workspace.examples import SHOWN, drawn, right_first
from realm.workspace.report import read_report

T = TypeVar("T")
_log = logging.getLogger(__name__)
_TITLES = 6
"""Number of example titles."""
_DRAWN, _PARTS = 40, 4
"""Limits of example questions: documents that are drawn, and passages per document."""


class Stamp(NamedTuple):
    """Identifies the files from which a snapshot was loaded. If the stamp of the files differs, there is a newer version."""

    model: tuple[int, int]
    """Inode and modification time of the model's manifest, which change when the model is replaced."""
    table: int
    """Inode of the folder of passages. If the knowledge base is replaced, its versions start again from 1."""
    passages_version: int
    index_version: int
    """0 if the vectors are in a database."""


class UnknownDocument(InputError):
    """There is no document with the given id."""


class UnknownPassage(InputError):
    """There is no passage with the given id."""


class Snapshot:
    """A knowledge base, a model and an index, at one version each, ready for questions."""

    def __init__(self, answerer: Answerer, stamp: Stamp):
        self.answerer, self.stamp = answerer, stamp
        # Computed once, because the weights are hashed.
        self.index_folder = index_folder(answerer.kb, answerer.model)
        self.filler = Filler(answerer.kb, answerer.model, answerer.version, answerer.config)

    @property
    def kb(self) -> KnowledgeBase:
        return self.answerer.kb

    @property
    def documents(self) -> int:
        return len(self._first_N)

    def passage(self, id: str) -> Passage:
        """The passage with this id.

        Raises:
            UnknownPassage: there is no such passage.
        """
        try:
            numbers = self.kb.passage_numbers([id])
        except InputError:
            raise UnknownPassage(f"no passage has the id {id!r}") from None
        return self.kb.passages(numbers)[0]

    def passages_of(self, document: str) -> list[Passage]:
        """The passages of the document with this id; an empty list if there is no such document."""
        return self.kb.passages(np.flatnonzero(self.kb.document_keys_N == np.uint64(key_of(document))))

    @cached_property
    def titles(self) -> list[str]:
        """The titles of a few documents, drawn at random but equal for each call; documents without a title are left out."""
        return list(dict.fromkeys(one.title for one in self._drawn if one.title.strip()))[:_TITLES]

    @cached_property
    def examples(self) -> list[str]:
        """A few questions about the documents: those that the last fit has shown, or, without a fit, new ones.

        Rules make the new questions when the list is first used, and those that are answered as expected come first. The list
        is empty if the rules make no question.
        """
        if of_fit := self._examples_of_fit():
            return of_fit
        documents = {one.document_id for one in self._drawn}
        parts = [part for id in documents for part in self.passages_of(id)[:_PARTS]]
        made = make_questions(sorted(parts, key=lambda part: part.document_id), most_per_document=1)
        chosen = drawn(made)
        if chosen and self.answerer.model.span_reader is not None:
            # BM25 may not be ready yet, and vectors always are.
            method: Method | None = None if self.answerer.retriever.bm25_loaded else "dense"
            chosen = [one for one, _ in right_first(self.answerer, chosen, method)]
        return [one.question for one in chosen[:SHOWN]]

    def _examples_of_fit(self) -> list[str]:
        report: Any = None
        with suppress(DamagedError):
            report = read_report(self.kb.folder.parent)
        match report:  # the folder can be another one, with a file of the same name
            case {"examples": [*examples]}:
                return [one["question"] for one in examples if isinstance(one, dict) and "question" in one]
        return []

    @cached_property
    def example_filter(self) -> str | None:
        """A filter that some of the documents match; None if these documents have no suitable fields."""
        return example_filter((one.fields for one in self._drawn), self.kb.kinds)

    @cached_property
    def _drawn(self) -> list[Passage]:
        """The first passages of documents that are drawn at random, with a fixed seed, in the order of the draw."""
        return self.kb.passages(np.random.default_rng(0).permutation(self._first_N)[:_DRAWN])

    @cached_property
    def _first_N(self) -> np.ndarray:
        """The number of the first passage of each document."""
        return np.unique(self.kb.document_keys_N, return_index=True)[1]


class LivingKnowledge:
    """The current snapshot, and the changes that replace it."""

    def __init__(
        self, kb: str, model: str, config: AnswerConfig, tagger: Callable[[str], Tagger] = load_tagger
    ):
        """Raises InputError if knowledge base and model do not fit together, or if the index is missing."""
        self.folder, self.model = Path(kb), model
        self._manifest = model_path(model) / MANIFEST
        self.problem: str | None = None
        """The reason why the newest version on disk is not in use; None if this version is in use."""
        self._config, self._tagger_of = config, tagger
        self._changing, self._refreshing = threading.Lock(), threading.Lock()
        self._process = os.getpid()
        self._failed = -math.inf
        """When a version on disk could not be loaded the last time."""
        self._tagger: tuple[str, Tagger] | None = None
        self.current = self._load(None)

    def refresh(self) -> bool:
        """Loads a newer version from disk, if there is one. Returns whether this call has replaced the snapshot.

        While this process changes the documents or builds the index of words, the old version stays in use: the change, or the
        next call, loads the newest one.
        """
        if self._is_newest():
            return False
        called = time.monotonic()
        with self._refreshing:
            # Meanwhile, another thread may have loaded the version, or have found that it cannot be loaded.
            if self._failed > called or self._is_newest() or not self._changing.acquire(blocking=False):
                return False
            try:
                self._move_on()
            except (RealmError, OSError) as error:
                if str(error) != self.problem:
                    _log.warning(
                        "the new version on disk cannot be loaded, the old version stays in use: %s", error
                    )
                self.problem = str(error)
                self._failed = time.monotonic()
                return False
            finally:
                self._changing.release()
        return True

    def _is_newest(self) -> bool:
        if self._stamp_on_disk() != self.current.stamp:
            return False
        self.problem = None
        return True

    def add(self, documents: Sequence[Document], gone: Collection[str] = ()) -> AddResult:
        """Adds or replaces documents, and deletes the other documents with the ids `gone`, if they exist. On return, the
        documents are embedded, on disk, and can be found.

        Raises:
            InputError: two of the documents have the same id and different texts.
            ChangedMeanwhile: other processes changed the knowledge base during every attempt.
        """
        return self._change(lambda kb: kb.add(documents, self._tagger_for(kb), gone))

    def delete(self, *documents: str) -> int:
        """Deletes documents by id in one commit, and returns the number of removed passages.

        Raises:
            UnknownDocument: one of the ids is unknown; nothing is deleted.
            ChangedMeanwhile: other processes changed the knowledge base during every attempt.
        """

        def delete(kb: KnowledgeBase) -> int:
            there = set(_existing(kb, documents))
            for document in documents:
                if document not in there:
                    raise UnknownDocument(f"no document has the id {document!r}")
            return kb.delete(documents)

        return self._change(delete)

    def get_ready_to_write(self) -> None:
        """Loads the tagger, so that a missing tagger is an InputError at the start and not at the first change.

        Raises:
            InputError: the tagger is missing, or the vectors are in a database.
        """
        self._refuse_database()
        self._tagger_for(self.current.kb)

    @property
    def method(self) -> Method:
        """The default method of ranking passages."""
        return self.current.answerer.method

    def load_bm25(self) -> None:
        """Loads or builds the BM25 index."""
        with self._changing:
            self.current.answerer.retriever.load_bm25()

    def versions(self, most: int = 20) -> dict[str, list[tuple[int, str]]]:
        """The versions of the passages and of the index on disk, with dates, newest first."""
        index = self.current.index_folder / vectors.TABLE
        stored = history(index, most) if newest_version(index) else []
        return {"knowledge": history(self.folder / TABLE, most), "index": stored}

    def _refuse_database(self) -> None:
        if is_address(self._config.search):
            raise InputError(
                f"{self.folder} cannot be changed here, because the vectors are searched in a database: use `realm kb add` or "
                "`realm kb delete`, then `realm kb upload`"
            )

    def _change(self, change: Callable[[KnowledgeBase], T]) -> T:
        self._refuse_database()
        # The threads of Lance do not exist in a forked process, which would wait for them.
        if os.getpid() != self._process:
            raise InputError(
                f"{self.folder} was opened by the process from which this one was forked: open it in this process, and start "
                "processes with the method spawn"
            )
        with self._changing:
            result = changed(self.folder, change)
            self._move_on()
            return result

    def _move_on(self) -> None:
        """Replaces the current snapshot by the next one, which has a BM25 index if the current snapshot has one."""
        snapshot = self._load(self.current)
        if self.current.answerer.retriever.bm25_loaded:
            snapshot.answerer.retriever.load_bm25()
        self.current, self.problem = snapshot, None

    def _load(self, before: Snapshot | None) -> Snapshot:
        model_file, table = _identity(self._manifest), _identity(self.folder / TABLE)[0]
        kb = KnowledgeBase.open(self.folder)
        if before is not None and before.stamp.model == model_file:
            model = before.answerer.model
        else:
            model = load_model(self.model).to(choose_device(self._config.device))
            if self._config.reader is not None:
                take_reader(model, self._config.reader)
        kb.check_tokenizer(model.tokenizer, self.model)
        version = complete_index(kb, model, self.model, self._config.mapped_index, self._config.search)
        version.index.prepare()  # prepared now, while no question waits for the index
        stamp = Stamp(model_file, table, int(kb.table.version), self._on_disk(version.number))
        return Snapshot(Answerer(kb, model, version, self._config), stamp)

    def _stamp_on_disk(self) -> Stamp:
        return Stamp(
            _identity(self._manifest),
            _identity(self.folder / TABLE)[0],
            newest_version(self.folder / TABLE) or 0,
            self._on_disk(newest_version(self.current.index_folder / vectors.TABLE) or 0),
        )

    def _on_disk(self, version: int) -> int:
        """The number of a version of the index; 0 if the vectors are in a database, whose versions are not on disk."""
        return 0 if is_address(self._config.search) else version

    def _tagger_for(self, kb: KnowledgeBase) -> Tagger:
        """The tagger with which the knowledge base was built; it is loaded once."""
        name = kb.config.later_tagger
        if self._tagger is None or self._tagger[0] != name:
            self._tagger = (name, self._tagger_of(name))
        return self._tagger[1]


def _existing(kb: KnowledgeBase, documents: Sequence[str]) -> list[str]:
    """The ids among `documents` that a document or a merged document has."""
    keys = np.array([key_of(id) for id in documents], dtype=np.uint64)
    there_N, merged = np.isin(keys, kb.document_keys_N).tolist(), kb.merged()
    return [id for id, is_there in zip(documents, there_N, strict=True) if is_there or id in merged]


def _identity(path: Path) -> tuple[int, int]:
    """Inode and modification time of a file or folder; zeros if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
