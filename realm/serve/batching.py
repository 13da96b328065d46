"""Questions of many clients, answered together: whatever waits when the last batch ends is the next one.

No question waits for others to come: alone, it is a batch of one. Networks run in one thread, the batcher's own, so that
the event loop goes on taking requests and nothing shares the cores with itself.
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
    """The queue is full; come back after so many seconds."""

    def __init__(self, seconds: float):
        super().__init__(seconds)
        self.seconds = seconds


class NotReady(TimeoutError):
    """Ranking by words is still being prepared after the time that a request may take, for so many seconds so far."""

    def __init__(self, seconds: float):
        super().__init__(seconds)
        self.seconds = seconds


class Done(NamedTuple):
    """What became of a question, and how many milliseconds it waited."""

    value: Any
    waited_ms: float


@dataclass(eq=False)
class _Job:
    kind: Hashable
    item: str
    future: "asyncio.Future[Done]"
    since: float = field(default_factory=time.perf_counter)


class Batcher:
    """A bounded queue in front of `run(kind, items)`, which gives one result or RealmError per item."""

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
        """Questions that wait, and are waited for."""
        return sum(not job.future.done() for job in self._waiting)

    def submit(self, kind: Hashable, items: Sequence[str]) -> "list[asyncio.Future[Done]]":
        """Queues all items, or none; only items of one kind share a batch. Cancelling a future takes its item out.

        Raises:
            Busy: there is no room for all of them.
        """
        if len(self) + len(items) > self._queue:
            raise Busy(len(self) * self._seconds_each)
        loop = asyncio.get_running_loop()
        jobs = [_Job(kind, item, loop.create_future()) for item in items]
        self._waiting.extend(jobs)
        self._news.set()
        return [job.future for job in jobs]

    async def work(self) -> None:
        """Runs batches until it is cancelled; what then waits is cancelled too."""
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
                    except Exception as error:  # the clients of this batch hear of it, the others go on
                        results = [error] * len(jobs)
                    seconds = time.perf_counter() - began
                    self._seconds_each += 0.1 * (seconds / len(jobs) - self._seconds_each)
                    self._watch(jobs[0].kind, len(jobs), seconds)
                    for job, result in zip(jobs, results, strict=True):
                        if job.future.done():  # its client has gone
                            continue
                        if isinstance(result, Exception):
                            job.future.set_exception(result)
                            job.future.exception()  # seen, even if nobody waits for this one any more
                        else:
                            job.future.set_result(Done(result, 1000 * (began - job.since)))
            finally:
                for job in self._waiting:
                    job.future.cancel()

    def _take(self) -> list[_Job]:
        """The oldest job, and the next ones of its kind."""
        live = [job for job in self._waiting if not job.future.done()]
        taken: list[_Job] = []
        for job in live:
            if job.kind == live[0].kind and len(taken) < self._most:
                taken.append(job)
        chosen = set(map(id, taken))
        self._waiting = deque(job for job in live if id(job) not in chosen)
        return taken


def each(run: Callable[[str], Any], items: Sequence[str]) -> list[Any]:
    """`run` on one item after another; an item's RealmError is its result."""
    results: list[Any] = []
    for item in items:
        try:
            results.append(run(item))
        except RealmError as error:
            results.append(error)
    return results
