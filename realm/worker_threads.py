"""Threads that work for a thread that Ctrl-C may interrupt at any moment.

A `ThreadPoolExecutor`, its futures and a `queue.Queue` use `threading.Condition`, which takes and releases its lock in
functions written in Python. Ctrl-C can raise KeyboardInterrupt inside these functions. The lock then stays taken, and a thread
that waits for the lock waits forever. This cannot happen in `with` and a `threading.Lock`, nor in the methods of a
`SimpleQueue`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


class WorkerThreads:
    """Threads that call functions, in the order in which the functions are submitted."""

    def __init__(self, count: int, name: str):
        self._submitted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # If Ctrl-C comes while a thread starts, the thread can wait forever. A daemon thread does not stop the process from
        # ending.
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def submit(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """A function that waits for the result, and returns the result or raises the exception; after Ctrl-C, it can be called
        again."""
        outcome: list[tuple[Result] | BaseException] = []
        called = threading.Lock()
        called.acquire()

        def call() -> None:
            try:
                outcome.append((function(),))
            except BaseException as error:
                outcome.append(error)
            called.release()

        def result() -> Result:
            with called:
                found = outcome[0]
            if isinstance(found, BaseException):
                raise found
            return found[0]

        self._submitted.put(call)
        return result

    def _work(self) -> None:
        while call := self._submitted.get():
            call()

    def close(self) -> None:
        """Waits for the functions that are being called. The others are not called, and have no result to wait for."""
        with suppress(Empty):
            while True:
                self._submitted.get_nowait()
        for _ in self._threads:
            self._submitted.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
