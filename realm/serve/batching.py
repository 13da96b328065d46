"""Batches the questions of many clients: the questions that wait when a batch ends form the next batch.

If no other question waits, a batch has one question: the batcher never waits for more questions. Networks run in one thread of
the batcher, so that the event loop can accept requests at the same time, and two batches never compete for the cores.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from realm.errors import RealmError


class Busy(Exception):
    """The queue is full. After `seconds`, a client can try again."""

    def __init__(self, seconds: float):
        super().__init__(seconds)
        self.seconds = seconds


class NotReady(TimeoutError):
    """Ranking by words was not ready within the time limit of a request. The preparation has taken `seconds` so far."""

    def __init__(self, seconds: float):
        super().__init__(seconds)
        self.seconds = seconds


class Done(NamedTuple):
    """Result of a question, the milliseconds that the question waited in the queue, and the duration of its batch."""

    value: Any
    waited_ms: float
    batch_seconds: float


@dataclass(eq=False)
class _Job:
    kind: Hashable
    item: str
    future: "asyncio.Future[Done]"
    since: float = field(default_factory=time.perf_counter)


class Batcher:
    """A bounded queue for `run(kind, items)`, which returns one result or RealmError per item."""

    def __init__(
        self,
        run: Callable[[Any, list[str]], Sequence[Any]],
        most: int,
        queue: int,
        watch: Callable[[Any, int, float], None] = lambda kind, count, seconds: None,
    ):
        self._run, self._most, self._queue, self._watch = run, most, queue, watch
        self._waiting: deque[_Job] = deque()
        self._news = asyncio.Event()
        self._seconds_each = 0.1  # a running mean, for Retry-After

    def __len__(self) -> int:
        """Number of waiting questions, without cancelled questions."""
        return sum(not job.future.done() for job in self._waiting)

    def submit(self, kind: Hashable, items: Sequence[str]) -> "list[asyncio.Future[Done]]":
        """Queues all items or none. All items of a batch have the same kind. To remove an item, cancel its future.

        Raises:
            Busy: the queue has no room for all items.
        """
        if len(self) + len(items) > self._queue:
            raise Busy(len(self) * self._seconds_each)
        loop = asyncio.get_running_loop()
        jobs = [_Job(kind, item, loop.create_future()) for item in items]
        self._waiting.extend(jobs)
        self._news.set()
        return [job.future for job in jobs]

    async def work(self) -> None:
        """Runs batches until this task is cancelled, and then cancels all waiting items."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "answers") as thread:
            try:
                while True:
                    await self._news.wait()
                    jobs = self._take()
                    if not jobs:
                        self._news.clear()
                        continue
                    began = time.perf_counter()
                    try:
                        results = await loop.run_in_executor(
                            thread, self._run, jobs[0].kind, [job.item for job in jobs]
                        )
                    except Exception as error:  # only this batch fails
                        results = [error] * len(jobs)
                    seconds = time.perf_counter() - began
                    self._seconds_each += 0.1 * (seconds / len(jobs) - self._seconds_each)
                    self._watch(jobs[0].kind, len(jobs), seconds)
                    for job, result in zip(jobs, results, strict=True):
                        if job.future.done():  # cancelled: the client has disconnected
                            continue
                        if isinstance(result, Exception):
                            job.future.set_exception(result)
                            job.future.exception()  # marks the exception as retrieved, so that asyncio does not log it
                        else:
                            job.future.set_result(Done(result, 1000 * (began - job.since), seconds))
            finally:
                for job in self._waiting:
                    job.future.cancel()

    def _take(self) -> list[_Job]:
        """Removes and returns the oldest job and the next jobs of the same kind, up to the batch size."""
        live = [job for job in self._waiting if not job.future.done()]
        taken: list[_Job] = []
        for job in live:
            if job.kind == live[0].kind and len(taken) < self._most:
                taken.append(job)
        chosen = set(map(id, taken))
        self._waiting = deque(job for job in live if id(job) not in chosen)
        return taken


def each(run: Callable[[str], Any], items: Sequence[str]) -> list[Any]:
    """Results of `run` for all items, one after the other. If `run` raises a RealmError, this error is the result."""
    results: list[Any] = []
    for item in items:
        try:
            results.append(run(item))
        except RealmError as error:
            results.append(error)
    return results
