"""Applies a function to items in several processes of this machine. Results have the order of the items.

As on a cluster (`realm.ray_actors`), the function gives any number of results for an item, and a process that is
`RESULTS_AHEAD` results ahead of the caller waits.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from realm.environment import usable_cores
from realm.errors import RealmError
from realm.orphans import end_when_orphaned
from realm.refusals import OwnWork, Refused
from realm.worker_threads import WorkerThreads

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
    own: OwnWork[Item, Result] | None = None,
) -> Generator[Result, None, None]:
    """The results of a function for all items, in order. The worker processes end with the caller's process, also if this
    process is killed.

    Each process calls `prepare` once and applies the function that `prepare` returns. If `FRESH` is True, the processes are
    spawned: `prepare` must be picklable, and the caller's main program needs `if __name__ == "__main__":`. Otherwise the
    processes are forked and inherit what the caller has loaded.

    If a process is killed, for example because memory is short, another process applies the function to the same item again,
    and skips the results that were received. Therefore the function must give the same results for the same item. If it raises
    `Refused`, `own` gives the rest of the results.

    Raises:
        RealmError: all worker processes were killed, or `MOST_KILLS` of them during the same item.
        Exception: `prepare` or the function raised this exception.
    """
    workers = _start(prepare, processes)
    shared = _Shared([connection for _, connection in workers])

    def received(entry: _Entry[Item, Result]) -> None:
        try:
            _receive(entry, shared)
        except Exception as error:
            entry.found.put(error)

    def results(entry: _Entry[Item, Result]) -> Iterator[Result]:
        used = 0
        if own is None or not own.only(entry.item):
            try:
                for result in shared.results(entry):
                    yield result
                    used += 1
                return
            except Refused:
                if own is None:
                    raise
        yield from islice(own.function(entry.item), used, None)

    broken: list[Exception] = []

    def until_an_error() -> Iterator[Item]:
        try:
            yield from items
        except Exception as error:
            # The work on the items before the error is done first, as in a single process.
            broken.append(error)

    pending: deque[_Entry[Item, Result]] = deque()
    # A thread waits for each process, because a `ProcessPoolExecutor` whose processes were killed can wait forever (CPython
    # issue 94777).
    threads = WorkerThreads(processes, "processes")
    try:
        for number, item in enumerate(until_an_error()):
            pending.append(_Entry(number, item))
            if own is None or not own.only(item):
                threads.submit(partial(received, pending[-1]))
            if len(pending) > 2 * processes:
                yield from results(pending[0])
                pending.popleft()
        while pending:
            yield from results(pending[0])
            pending.popleft()
        if broken:
            raise broken[0]
    finally:
        shared.close()
        for process, _ in workers:
            process.kill()  # the current results of the process are not needed
        threads.close()
        for process, connection in workers:
            process.join()
            connection.close()


class _Entry(Generic[Item, Result]):
    """An item, and the results that a thread has received."""

    def __init__(self, number: int, item: Item):
        self.number, self.item = number, item
        self.found: SimpleQueue[list[Result] | Exception] = SimpleQueue()
        """Lists of one result, after the last result an empty list or an exception."""
        self.unused = 0
        """Number of results that are received and not used."""


def _receive(entry: _Entry[Item, Result], shared: _Shared) -> None:
    """Gives the item to a process, and receives the results. If the process is killed or is needed for the first item, gives
    the item to another process later."""
    received = kills = 0
    while kills < MOST_KILLS:
        connection = shared.take(entry)
        is_alive = True
        try:
            connection.send((entry.item, received))
            while True:
                found, is_last = connection.recv()
                if isinstance(found, Exception):
                    raise _Raised(found)
                if found:
                    received, kills = received + 1, 0
                    shared.receive(entry, found)
                if is_last:
                    entry.found.put([])
                    return
                if not shared.wait_for_room(entry):
                    break
                connection.send(None)
        except (EOFError, OSError):
            is_alive = False
            kills += 1
        except _Raised as raised:
            raise raised.args[0] from None
        finally:
            shared.give_back(connection, is_alive)
    raise RealmError(f"{MOST_KILLS} processes were killed during the same work: {ADVICE}")


class _Raised(Exception):
    """An exception of the function, as opposed to one of the connection."""


class _Shared:
    """What the threads share: the processes without work, and the order in which the items get them."""

    def __init__(self, connections: list[Connection]):
        self._lock = threading.Lock()
        """Taken without the condition, whose lock Ctrl-C could leave taken (`realm.worker_threads`)."""
        self._changed = threading.Condition(self._lock)
        self._idle = connections.copy()
        self._alive = len(connections)
        self._asking: set[int] = set()
        """Numbers of the items that wait for a process."""
        self._first = 0
        """Number of the item whose results are used now."""
        self._closed = False

    def results(self, entry: _Entry[Any, Result]) -> Iterator[Result]:
        """The results of the first item, until its end."""
        with self._lock:
            self._first = entry.number
            self._changed.notify_all()
        while found := entry.found.get():
            if isinstance(found, Exception):
                raise found
            with self._lock:
                entry.unused -= 1
                self._changed.notify_all()
            yield found[0]

    def receive(self, entry: _Entry[Any, Result], found: list[Result]) -> None:
        """Stores a result."""
        with self._lock:
            entry.unused += 1
        entry.found.put(found)

    def take(self, entry: _Entry[Any, Any]) -> Connection:
        """Waits for a process; earlier items are first.

        Raises:
            RealmError: all processes were killed, or the results are no longer needed.
        """
        with self._lock:
            self._asking.add(entry.number)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or not self._alive or (self._idle and entry.number == min(self._asking))
            )
            self._asking.remove(entry.number)
            self._changed.notify_all()
            if self._closed or not self._alive:
                raise RealmError(f"all processes were killed: {ADVICE}")
            return self._idle.pop()

    def give_back(self, connection: Connection, is_alive: bool) -> None:
        """Gives a process back after its work, or after it was killed."""
        with self._lock:
            if is_alive:
                self._idle.append(connection)
            else:
                self._alive -= 1
            self._changed.notify_all()

    def wait_for_room(self, entry: _Entry[Any, Any]) -> bool:
        """Waits until few results of an item are unused -> whether its process can go on.

        The process cannot go on if it is needed for the first item, whose process was killed: without this item, no further
        results would be used.
        """
        with self._lock:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or entry.unused < RESULTS_AHEAD
                    or (self._first in self._asking and not self._idle)
                )
            )
            return not self._closed and entry.unused < RESULTS_AHEAD

    def close(self) -> None:
        """Lets all threads end."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()


MOST_PROCESSES = 8
"""Default limit of processes: each process needs memory for the model, and a container can report cores that are not usable."""


def default_processes() -> int:
    """Default number of processes: the number of usable cores, up to `MOST_PROCESSES`."""
    return min(usable_cores(), MOST_PROCESSES)


def _start(
    prepare: Callable[[], Callable[[Any], Iterable[Any]]], processes: int
) -> list[tuple[BaseProcess, Connection]]:
    """Worker processes, each with the caller's end of the connection to the process."""
    context: Any = multiprocessing.get_context("spawn" if FRESH else "fork")
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
    end_when_orphaned(parent)
    no_tokenizer_threads()
    function = _prepared(prepare)
    rest: Iterator[Any] = iter(())
    following: list[Any] = []
    while True:
        message = connection.recv()
        try:
            if message is not None:  # else the next result of the same item is asked for
                item, received = message
                rest = islice(function(item), received, None)
                following = list(islice(rest, 1))
            found, following = following, list(islice(rest, 1))
            connection.send((found, not following))
        except Exception as error:
            connection.send((_sendable(error), True))


def _prepared(prepare: Callable[[], Callable[[Any], Iterable[Any]]]) -> Callable[[Any], Iterable[Any]]:
    """The function that `prepare` returns. If `prepare` fails, the function raises the same exception for every item."""
    try:
        return prepare()
    except Exception as error:
        failure = error

    def fails(item: Any) -> Iterable[Any]:
        raise failure

    return fails


def _sendable(error: Exception) -> Exception:
    """The exception, or a RuntimeError with its message if the exception does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def no_tokenizer_threads() -> None:
    """Keeps the library of the tokenizer from starting a thread per core in this process, one of several that share the cores.

    The library's threads do not survive a fork either.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
