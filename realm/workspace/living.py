"""Knowledge that lives: one snapshot answers while documents come and go, and while new versions appear on disk.

A snapshot is a knowledge base at one version, a model, and an index at one version. It never changes, so whoever began
with one may end with it. A change makes the next snapshot aside and puts it in the first one's place by one assignment.
Changes wait for each other (`_changing`); questions wait for none.

An added document is there for good in two commits: its passages, then their vectors. Killed between the two, the next
start embeds what has no vector. In memory: two snapshots while one takes the place of the other.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from realm.errors import InputError, RealmError
from realm.index.versions import index_folder, load_index
from realm.interop.span_readers import take_reader
from realm.model.calibration import Method
from realm.model.device import choose_device
from realm.model.folder import MANIFEST, load_model, model_path
from realm.qa.filling import Filler
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.questions import make_questions
from realm.store import vectors
from realm.store.ingest import TABLE
from realm.store.knowledge_base import AddResult, KnowledgeBase, changed
from realm.store.schema import Lookup, key_of
from realm.store.tables import history, newest_version
from realm.text.corpus import Document, Passage
from realm.text.salient_spans import Tagger, load_tagger

T = TypeVar("T")
_log = logging.getLogger(__name__)
_EXAMPLES = 4
"""Example questions."""
_DRAWN, _PARTS, _SHORT = 40, 4, 80
"""Documents that they are made from, passages of each that are looked at, and most characters of a question."""


class Stamp(NamedTuple):
    """What a snapshot was made from; a different one on disk means that there is news."""

    model: tuple[int, int]
    """Inode and time of the model's manifest: a model that is replaced is another file."""
    table: int
    """Inode of the passages' folder: a knowledge base that is replaced begins its versions anew."""
    passages_version: int
    index_version: int


class UnknownDocument(InputError):
    """No document of that id."""


class Snapshot:
    """A knowledge base, a model and an index, at one version each, ready for questions."""

    def __init__(self, answerer: Answerer, stamp: Stamp):
        self.answerer, self.stamp = answerer, stamp
        self.index_folder = index_folder(answerer.kb, answerer.model)  # here once: it hashes the weights
        self.filler = Filler(answerer.kb, answerer.model, answerer.version, answerer.config)

    @property
    def kb(self) -> KnowledgeBase:
        return self.answerer.kb

    @cached_property
    def documents(self) -> int:
        return len(np.unique(self.kb.document_keys_N))

    def number_of(self, passage: str) -> int | None:
        """The number of the passage with this id."""
        try:
            key = np.array([int(passage, 16)], dtype=np.uint64)
        except (ValueError, OverflowError):
            return None
        numbers, known = self._by_id.find(key)
        return int(numbers[0]) if known[0] else None

    def passages_of(self, document: str) -> list[Passage]:
        """The passages of the document with this id; none where there is no such document."""
        return self.kb.passages(np.flatnonzero(self.kb.document_keys_N == np.uint64(key_of(document))))

    @cached_property
    def examples(self) -> list[str]:
        """A few questions that the documents answer, made by rules from some of them; none where the rules find none."""
        draw = np.random.default_rng(0)
        drawn = self.kb.passages(np.unique(draw.integers(len(self.kb), size=_DRAWN))) if len(self.kb) else []
        parts = [part for id in {one.document_id for one in drawn} for part in self.passages_of(id)[:_PARTS]]
        made = make_questions(sorted(parts, key=lambda part: part.document_id), most_per_document=1)
        short = [one.question for one in made if len(one.question) <= _SHORT]
        return [short[n] for n in sorted(draw.permutation(len(short))[:_EXAMPLES])]

    @cached_property
    def _by_id(self) -> Lookup:
        return Lookup(self.kb.keys_N)


class LivingKnowledge:
    """The newest snapshot, and the changes that make the next one."""

    def __init__(
        self,
        kb: str,
        model: str,
        config: AnswerConfig,
        tagger: Callable[[str], Tagger] = load_tagger,
    ):
        """Raises InputError where the parts do not belong together, or the index is missing."""
        self.folder, self.model = Path(kb), model
        self._manifest = model_path(model) / MANIFEST
        self.problem: str | None = None
        """Why the newest version on disk is not the one in use."""
        self._config, self._tagger_of = config, tagger
        self._changing = threading.Lock()
        self._tagger: tuple[str, Tagger] | None = None
        self.current = self._load(None)

    def refresh(self) -> bool:
        """Takes up what is new on disk -> whether anything was; what cannot be used leaves the old snapshot in place."""
        if self._stamp_on_disk() == self.current.stamp:
            self.problem = None
            return False
        try:
            with self._changing:
                self._move_on()
        except (RealmError, OSError) as error:
            if str(error) != self.problem:
                _log.warning("the old version stays in use: %s", error)
            self.problem = str(error)
            return False
        return True

    def add(self, documents: Sequence[Document]) -> AddResult:
        """Adds or replaces documents; when this returns, they are embedded, searchable, and on disk.

        Raises:
            InputError: two of the documents have one id and different texts.
            ChangedMeanwhile: other processes did not stop changing the knowledge base.
        """
        return self._change(lambda kb: kb.add(documents, self._tagger_for(kb)))

    def delete(self, *documents: str) -> int:
        """Deletes documents by id, all in one commit -> how many passages went with them.

        Raises:
            UnknownDocument: there is none of one of these ids; then all stay.
            ChangedMeanwhile: as in `add`.
        """

        def delete(kb: KnowledgeBase) -> int:
            for document in documents:
                known = np.any(kb.document_keys_N == np.uint64(key_of(document)))
                if not known and document not in kb.merged():
                    raise UnknownDocument(f"no document has the id {document!r}")
            return kb.delete(documents)

        return self._change(delete)

    def get_ready_to_write(self) -> None:
        """Loads the tagger. Raises InputError where it is not here, which the first writer would hear of otherwise."""
        self._tagger_for(self.current.kb)

    @property
    def method(self) -> Method:
        """What ranks passages where nobody names a method."""
        return self.current.answerer.method

    def read_words(self) -> None:
        """Sees to it that passages can be ranked by words."""
        with self._changing:
            _ = self.current.answerer.retriever.words

    def versions(self, most: int = 20) -> dict[str, list[tuple[int, str]]]:
        """Versions of the passages and of the index that are on disk, with their dates, newest first."""
        index = self.current.index_folder / vectors.TABLE
        return {"knowledge": history(self.folder / TABLE, most), "index": history(index, most)}

    def _change(self, change: Callable[[KnowledgeBase], T]) -> T:
        with self._changing:
            result = changed(self.folder, change)
            self._move_on()
            return result

    def _move_on(self) -> None:
        """The next snapshot takes the place of the current one; it can rank by words if that one could."""
        snapshot = self._load(self.current)
        if self.current.answerer.retriever.has_words:
            _ = snapshot.answerer.retriever.words
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
        version = load_index(kb, model, self.model, self._config.mapped_index)
        version.index.prepare()  # here, where no question waits
        stamp = Stamp(model_file, table, int(kb.table.version), version.number)
        return Snapshot(Answerer(kb, model, version, self._config), stamp)

    def _stamp_on_disk(self) -> Stamp:
        return Stamp(
            _identity(self._manifest),
            _identity(self.folder / TABLE)[0],
            newest_version(self.folder / TABLE) or 0,
            newest_version(self.current.index_folder / vectors.TABLE) or 0,
        )

    def _tagger_for(self, kb: KnowledgeBase) -> Tagger:
        """The one that the knowledge base was built with, loaded once."""
        name = kb.config.later_tagger
        if self._tagger is None or self._tagger[0] != name:
            self._tagger = (name, self._tagger_of(name))
        return self._tagger[1]


def _identity(path: Path) -> tuple[int, int]:
    """Inode and time of a file or folder; zeros while there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
