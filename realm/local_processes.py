"""Applies a function to items in several processes of this machine. Results have the order of the items.

As on a cluster (`realm.ray_actors`), the function gives any number of results for an item, and a process that is
`RESULTS_AHEAD` results ahead of the caller waits.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_KILLS = 3
"""Number of processes that may be killed during the same item, without a result between the kills."""
RESULTS_AHEAD = 4
"""Number of unused results of an item at which the process of this item waits."""
ADVICE = "if memory is short, use fewer processes"
FRESH = sys.platform == "darwin"
"""Whether processes are spawned and not forked. System libraries of macOS that torch and Lance have used do not survive a
fork."""


def map_in_processes(
    prepare: Callable[[], Callable[[Item], Iterable[Result]]],
    items: Iterator[Item],
    processes: int,
    fresh: bool,
) -> Generator[Result, None, None]:
    """The results of a function for all items, in order. The worker processes end with the caller's process, also if this
    process is killed.

    Each process calls `prepare` once and applies the function that `prepare` returns. With `fresh`, the processes are
    spawned: `prepare` must be picklable, and the caller's main program needs `if __name__ == "__main__":`. Otherwise the
    processes are forked and inherit what the caller has loaded.

    If a process is killed, for example because memory is short, another process applies the function to the same item again,
    and skips the results that were received. Therefore the function must give the same results for the same item.

    Raises:
        ChildProcessError: all worker processes were killed, or `MOST_KILLS` of them during the same item.
        Exception: the function raised this exception.
    """
    workers = _start(prepare, processes, fresh)
    idle: SimpleQueue[Connection | None] = SimpleQueue()
    for _, connection in workers:
        idle.put(connection)
    killed: list[Connection] = []

    def receive(entry: _Entry[Item, Result]) -> None:
        """Gives the item to a process, and receives the results. If the process is killed, gives the item to another one."""
        received = kills = 0
        while kills < MOST_KILLS:
            connection = idle.get()
            if connection is None:
                idle.put(None)  # for the threads of other items
                raise ChildProcessError(f"all processes were killed: {ADVICE}")
            is_alive = True
            try:
                connection.send((entry.item, received))
                while True:
                    found: list[Result] | Exception = connection.recv()
                    entry.found.put(found)
                    if not found or isinstance(found, Exception):
                        return
                    received, kills = received + 1, 0
                    entry.room.acquire()
            except (EOFError, OSError):
                is_alive = False
                kills += 1
                killed.append(connection)
                if len(killed) == processes:
                    idle.put(None)
            finally:
                if is_alive:
                    idle.put(connection)
        raise ChildProcessError(f"{MOST_KILLS} processes were killed during the same work: {ADVICE}")

    def received(entry: _Entry[Item, Result]) -> None:
        try:
            receive(entry)
        except Exception as error:
            entry.found.put(error)

    broken: list[Exception] = []

    def until_an_error() -> Iterator[Item]:
        try:
            yield from items
        except Exception as error:
            broken.append(
                error
            )  # the work on the items before the error is done first, as in a single process

    pending: deque[_Entry[Item, Result]] = deque()
    # A thread waits for each process, because a `ProcessPoolExecutor` whose processes were killed can wait forever (CPython
    # issue 94777).
    threads = ThreadPoolExecutor(processes, "processes")
    try:
        for item in until_an_error():
            pending.append(_Entry(item))
            threads.submit(received, pending[-1])
            if len(pending) > 2 * processes:
                yield from pending[0].results()
                pending.popleft()
        while pending:
            yield from pending[0].results()
            pending.popleft()
        if broken:
            raise broken[0]
    finally:
        for process, _ in workers:
            process.kill()  # the current results of the process are not needed
        for entry in pending:
            entry.room.release()  # its thread sees that the process was killed
        threads.shutdown(cancel_futures=True)
        for process, connection in workers:
            process.join()
            connection.close()


class _Entry(Generic[Item, Result]):
    """An item, and the results that a thread has received."""

    def __init__(self, item: Item):
        self.item = item
        self.found: SimpleQueue[list[Result] | Exception] = SimpleQueue()
        """Lists of one result, after the last result an empty list or an exception."""
        self.room = threading.Semaphore(RESULTS_AHEAD - 1)
        """Number of results that the thread may receive besides those that are received and not used."""

    def results(self) -> Iterator[Result]:
        while found := self.found.get():
            if isinstance(found, Exception):
                raise found
            self.room.release()
            yield found[0]


MOST_PROCESSES = 8
"""Default limit of processes: each process needs memory for the model, and a container can report cores that are not usable."""


def usable_cores() -> int:
    """Default number of processes: the number of usable cores, up to `MOST_PROCESSES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


def _start(
    prepare: Callable[[], Callable[[Any], Iterable[Any]]], processes: int, fresh: bool
) -> list[tuple[BaseProcess, Connection]]:
    """Worker processes, each with the caller's end of the connection to the process."""
    context: Any = multiprocessing.get_context("spawn" if fresh else "fork")
    workers = []
    for _ in range(processes):
        own_end, worker_end = context.Pipe()
        process = context.Process(target=_work, args=(prepare, worker_end, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Lance warns about every fork. These forks are safe: Lance is idle, and no child process calls Lance.
            warnings.filterwarnings("ignore", message="lance is not fork-safe")
            process.start()
        worker_end.close()  # so that `own_end` reports the end of the process, and later processes do not inherit this end
        workers.append((process, own_end))
    return workers


def _work(prepare: Callable[[], Callable[[Any], Iterable[Any]]], connection: Connection, parent: int) -> None:
    """Sends the results for the items that the caller sends through the connection, until the process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    no_tokenizer_threads()
    function = prepare()
    while True:
        item, received = connection.recv()
        try:
            for result in islice(function(item), received, None):
                connection.send([result])
            connection.send([])
        except Exception as error:
            try:
                connection.send(error)
            except Exception:  # some exceptions cannot be pickled
                connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


def no_tokenizer_threads() -> None:
    """Keeps the library of the tokenizer from starting a thread per core in this process, one of several that share the cores.

    The library's threads do not survive a fork either.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_with(parent: int) -> None:
    """Ends this process when the parent process has ended, because a killed parent cannot end its workers."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
