"""The service between the routes and the knowledge base: batches questions, applies changes, loads new versions from disk."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from realm.errors import InputError, RealmError
from realm.model.calibration import Method
from realm.serve import responses, schemas
from realm.serve.batching import Batcher, Busy, Done, NotReady, each
from realm.serve.http.metrics import Metrics
from realm.serve.http.tracing import NAME, trace_question
from realm.serve.settings import MOST_CHANGES, POLL_SECONDS, WRITE_SECONDS, ServeConfig
from realm.text.corpus import Document, over_limit
from realm.workspace.living import LivingKnowledge, Snapshot

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

T = TypeVar("T")


class Kind(NamedTuple):
    """Kind of a question; only questions of equal kinds share a batch."""

    name: Literal["answer", "retrieve", "fill", "examples"]
    """"examples" is for the example questions of the corpus: its items are ignored."""
    method: Method = "dense"
    passages: int = 0
    target: str | None = None
    """For "fill": the word whose probability is computed; None: the best words are predicted."""
    where: str | None = None
    """Filter of passages; None: all passages are used."""


_log = logging.getLogger(__name__)
FLUSH_MILLISECONDS = 10_000
"""Largest time in milliseconds in which the last traces are sent when the server stops."""
WORDS_AT_START = 200_000
"""Largest number of passages for which a read-only server prepares ranking by words at its start."""


class Service:
    """The objects that all routes share: the knowledge base, the batcher, the limits and the metrics."""

    def __init__(
        self, knowledge: LivingKnowledge, config: ServeConfig, traces: "TracerProvider | None" = None
    ):
        """If `traces` is not None, each question adds the spans of its stages to the current span."""
        self.knowledge, self.config, self.metrics = knowledge, config, Metrics()
        self._traces = traces
        self._tracer = None if traces is None else traces.get_tracer(NAME)
        self.batcher = Batcher(self._run, config.batch, config.queue, self.metrics.batch)
        self._one_at_a_time = ThreadPoolExecutor(1, "changes")
        self._changes = 0
        self._for_words = 0
        """Number of questions that wait for ranking by words and are not in the queue yet."""
        self._words: asyncio.Future[None] | None = None
        self._words_since = 0.0

    @asynccontextmanager
    async def running(self, writable: bool) -> AsyncIterator[None]:
        """Answers questions and watches for new versions until the block ends."""
        # A writable server has to rebuild the BM25 index after every change. Therefore, unless the default method needs BM25, a
        # writable server builds the BM25 index only when a request needs it.
        ready = not writable and len(self.knowledge.current.kb) <= WORDS_AT_START
        if ready or self.knowledge.method != "dense":
            self.prepare_bm25()
        tasks = [asyncio.create_task(work()) for work in (self.batcher.work, self.watch)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # The traces are sent here, because SIGTERM ends the process right after the last response.
            if self._traces is not None:
                await asyncio.to_thread(self._traces.force_flush, FLUSH_MILLISECONDS)

    @property
    def waiting(self) -> int:
        """Number of waiting questions."""
        return len(self.batcher) + self._for_words

    async def ask(self, kind: Kind, items: Sequence[str]) -> "list[asyncio.Future[Done]]":
        """Queues questions. Questions that need ranking by words first wait until the ranking is ready.

        Raises:
            Busy: the queue has no room for all questions.
            NotReady: ranking by words was not ready within the time limit. The preparation continues.
        """
        return await self._ask(kind, items, self._deadline())

    async def all_of(self, kind: Kind, items: Sequence[str]) -> list[Done]:
        """Queues questions and waits for all answers, up to the time limit of a request."""
        until = self._deadline()
        futures = await self._ask(kind, items, until)
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.gather(*futures)
        finally:
            for future in futures:  # after an error or the time limit, the other answers are not needed
                future.cancel()

    def prepare_bm25(self) -> "asyncio.Future[None]":
        """Prepares ranking by words in the background; all callers share one preparation."""
        if self._words is None or self._words.done():
            self._words, self._words_since = asyncio.ensure_future(self._load_bm25()), time.monotonic()
            # The exception was already logged.
            self._words.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._words

    async def _load_bm25(self) -> None:
        try:
            await self._in_change_thread(self.knowledge.load_bm25)
        except Exception:  # the next request that needs the ranking starts a new preparation
            _log.exception("ranking by words could not be prepared")
            raise

    async def _ask(self, kind: Kind, items: Sequence[str], until: float) -> "list[asyncio.Future[Done]]":
        ranked_by_bm25 = kind.method != "dense"
        if ranked_by_bm25 and not self.knowledge.current.answerer.retriever.bm25_loaded:
            if self._for_words + len(items) > self.config.queue:
                raise Busy(self.config.seconds)
            self._for_words += len(items)
            try:
                async with asyncio.timeout_at(until):
                    await asyncio.shield(self.prepare_bm25())
            except TimeoutError:
                raise NotReady(time.monotonic() - self._words_since) from None
            finally:
                self._for_words -= len(items)
        futures = self.batcher.submit(kind, items)
        if self._tracer is not None:
            attributes = {"realm.method": kind.method, "realm.passages": kind.passages}
            # A callback runs in the context of this call, whose current span is that of the request.
            for future in futures:
                future.add_done_callback(partial(trace_question, self._tracer, kind.name, attributes))
        return futures

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.config.seconds

    async def add(self, documents: Sequence[schemas.DocumentIn]) -> dict[str, Any]:
        """Adds or replaces documents -> the numbers of changed documents and passages, and the ids, as JSON.

        Raises:
            InputError: a document has neither an id nor a title, or is longer than the setting `max_document_chars` of the
                knowledge base.
            Busy: too many changes wait.
        """
        most = self.knowledge.current.kb.config.max_document_chars
        for one in documents:
            if len(one.text) > most:
                raise InputError(f"the document {_id_of(one)!r} has {over_limit(len(one.text), most)}")
        new = [Document(one.title, one.text, _id_of(one), fields=one.fields) for one in documents]
        result = await self.change(lambda: self.knowledge.add(new))
        self.metrics.documents.labels("added").inc(result.added)
        self.metrics.documents.labels("replaced").inc(result.replaced)
        ids = [one.id for one in new]
        counts = {name: value for name, value in result._asdict().items() if name != "deleted"}
        return counts | {"ids": ids, "index": responses.index_json(self.knowledge.current)}

    async def change(self, change: Callable[[], T]) -> T:
        """Runs a change of the knowledge base after all earlier changes. The change completes even if the client disconnects.

        Raises:
            Busy: too many changes wait.
        """
        if self._changes >= MOST_CHANGES:
            raise Busy(float(self._changes))
        self._changes += 1
        running = asyncio.ensure_future(self._in_change_thread(change))
        running.add_done_callback(self._changed)
        return await asyncio.wait_for(asyncio.shield(running), WRITE_SECONDS)

    def _changed(self, running: "asyncio.Future[Any]") -> None:
        self._changes -= 1
        if not running.cancelled() and running.exception() is None:
            self._count_swap()

    async def watch(self) -> None:
        """Loads new versions from disk until this task is cancelled. Checks are rarer if the newest version cannot be used."""
        self._update_gauges()
        pause = POLL_SECONDS
        while True:
            await asyncio.sleep(pause)
            unusable = self.knowledge.problem is not None
            pause = min(2 * pause, 30 * POLL_SECONDS) if unusable else POLL_SECONDS
            try:
                if await self._in_change_thread(self.knowledge.refresh):
                    self._count_swap()
                    _log.info("serving index version %d", self.knowledge.current.stamp.index_version)
            except Exception:  # the next check may succeed; the old version stays in use
                _log.exception("the check for a new version failed")

    async def _in_change_thread(self, run: Callable[[], T]) -> T:
        """Runs work in the thread of changes. Changes wait for each other there, so that they block no other thread."""
        return await asyncio.get_running_loop().run_in_executor(self._one_at_a_time, run)

    def _count_swap(self) -> None:
        self.metrics.swaps.inc()
        self._update_gauges()

    def _update_gauges(self) -> None:
        version, metrics = self.knowledge.current.answerer.version, self.metrics
        metrics.passages.set(len(self.knowledge.current.kb))
        metrics.index.set(version.number)
        metrics.step.set(version.step)
        if version.created:
            metrics.created.set(datetime.fromisoformat(version.created).timestamp())

    def _run(self, kind: Kind, items: list[str]) -> list[Any]:
        """Runs a batch on the newest snapshot, in the batcher's thread. After an error, retries on a newer snapshot, if any."""
        snapshot = self.knowledge.current
        try:
            return self._run_on(snapshot, kind, items)
        except RealmError:
            if not self.knowledge.refresh():
                raise
            return self._run_on(self.knowledge.current, kind, items)

    def _run_on(self, snapshot: Snapshot, kind: Kind, items: list[str]) -> list[Any]:
        answerer = snapshot.answerer
        match kind:
            case Kind("answer", method, read):
                answers = answerer.answer_batch(items, method, read, kind.where)
                return [(snapshot, one) for one in answers]
            case Kind("retrieve", method, k):
                began = time.perf_counter()
                rows = [
                    [hit._asdict() for hit in hits] for hits in answerer.hits(items, k, method, kind.where)
                ]
                ms = 1000 * (time.perf_counter() - began) / len(items)
                return [(snapshot, row, ms) for row in rows]
            case Kind("examples"):
                return [snapshot.examples] * len(items)
            case _:  # "fill"
                return each(lambda sentence: _timed(snapshot, sentence, kind.target), items)


def _timed(snapshot: Snapshot, sentence: str, target: str | None) -> tuple[Snapshot, dict[str, Any], float]:
    began = time.perf_counter()
    filled = snapshot.filler.fill(sentence, target).to_json()
    return snapshot, filled, 1000 * (time.perf_counter() - began)


def answers_of(question: str, done: Done) -> dict[str, Any]:
    """The result of a question of the kind "answer" as JSON."""
    snapshot, answers = done.value
    return responses.answers_json(answers, snapshot, done.waited_ms)


def hits_of(question: str, done: Done) -> dict[str, Any]:
    """The result of a question of the kind "retrieve" as JSON."""
    snapshot, passages, ms = done.value
    times = {"queue": round(done.waited_ms, 2), "search": round(ms, 2)}
    return {"question": question, "passages": passages, "index": responses.index_json(snapshot), "ms": times}


def _id_of(document: schemas.DocumentIn) -> str:
    name = document.id or document.title
    if not name.strip():
        raise InputError("a document has neither an id nor a title: add one of these")
    return name
