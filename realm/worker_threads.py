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
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Submitted(Generic[Result]):
    """A function that a thread calls, and its result."""

    def __init__(self, function: Callable[[], Result]):
        self._function = function
        self._outcome: list[tuple[Result] | BaseException] = []
        # From a `SimpleQueue`, a result could be taken and then lost, if Ctrl-C came before it is used.
        self._called = threading.Lock()
        self._called.acquire()

    def call(self) -> None:
        try:
            self._outcome.append((self._function(),))
        except BaseException as error:
            self._outcome.append(error)
        self._called.release()

    def wait(self) -> None:
        """Waits until the function has ended."""
        with self._called:
            pass

    def result(self) -> Result:
        """Waits for the result, and returns it or raises the exception of the function."""
        self.wait()
        outcome = self._outcome[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]


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

    def submit(self, function: Callable[[], Result]) -> Submitted[Result]:
        """Gives a function to the threads."""
        submitted = Submitted(function)
        self._submitted.put(submitted.call)
        return submitted

    def _work(self) -> None:
        while True:
            call = self._submitted.get()
            if call is None:
                return
            call()
            del call  # else the thread holds the data of this function until it gets another one

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
