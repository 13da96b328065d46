"""Runs a tagger in several processes, and keeps the order of the texts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

Group = TypeVar("Group")
Result = TypeVar("Result")

MOST_KILLS = 3
"""Number of processes that may be killed during the work on the same group."""
ADVICE = "if memory is short, use fewer processes"


def map_in_processes(
    prepare: Callable[[], Callable[[Group], Result]], groups: Iterator[Group], processes: int, fresh: bool
) -> Generator[Result, None, None]:
    """The results of a function for all groups, in order. The worker processes end with the caller's process, also if this
    process is killed.

    Each process calls `prepare` once and applies the function that `prepare` returns. With `fresh`, the processes are
    spawned: `prepare` must be picklable, and the caller's main program needs `if __name__ == "__main__":`. Otherwise the
    processes are forked and inherit the model.

    One thread of the caller's process waits for each worker process, because a `ProcessPoolExecutor` whose processes were
    killed can wait forever (CPython issue 94777).

    If a process is killed, for example because memory is short, the other processes do its work.

    Raises:
        ChildProcessError: all worker processes were killed, or `MOST_KILLS` of them during the same group.
    """
    workers = _start(prepare, processes, fresh)
    idle: SimpleQueue[Connection | None] = SimpleQueue()
    for _, connection in workers:
        idle.put(connection)
    killed: list[Connection] = []

    def found(group: Group) -> Result:
        for _ in range(MOST_KILLS):
            connection = idle.get()
            if connection is None:
                idle.put(None)  # for the threads of other groups
                raise ChildProcessError(f"all processes of the tagger were killed: {ADVICE}")
            is_alive = True
            try:
                connection.send(group)
                result: Result | Exception = connection.recv()
            except (EOFError, OSError):
                is_alive = False  # another process does the work
                killed.append(connection)
                if len(killed) == processes:
                    idle.put(None)
                continue
            finally:
                if is_alive:
                    idle.put(connection)
            if isinstance(result, Exception):
                raise result
            return result
        raise ChildProcessError(
            f"{MOST_KILLS} processes of the tagger were killed by the same text: {ADVICE}"
        )

    broken: list[Exception] = []

    def until_an_error() -> Iterator[Group]:
        try:
            yield from groups
        except (
            Exception
        ) as error:  # the work on the groups before the error is done first, as in a single process
            broken.append(error)

    pending: deque[Future[Result]] = deque()
    threads = ThreadPoolExecutor(processes, "tagger")
    try:
        for group in until_an_error():
            pending.append(threads.submit(found, group))
            if len(pending) > 2 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if broken:
            raise broken[0]
    finally:
        for process, _ in workers:
            process.kill()  # the current result of the process is not needed
        threads.shutdown(cancel_futures=True)
        for process, connection in workers:
            process.join()
            connection.close()


MOST_PROCESSES = 8
"""Default limit of processes: each process needs memory for the model, and a container can report cores that are not usable."""


def usable_cores() -> int:
    """Default number of processes: the number of usable cores, up to `MOST_PROCESSES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


def _start(
    prepare: Callable[[], Callable[[Any], Any]], processes: int, fresh: bool
) -> list[tuple[BaseProcess, Connection]]:
    """Worker processes, each with the caller's end of the connection to the process."""
    context: Any = multiprocessing.get_context("spawn" if fresh else "fork")
    workers = []
    for _ in range(processes):
        own_end, worker_end = context.Pipe()
        process = context.Process(target=_work, args=(prepare, worker_end, os.getpid()), daemon=True)
        process.start()
        worker_end.close()  # so that `own_end` reports the end of the process, and later processes do not inherit this end
        workers.append((process, own_end))
    return workers


def _work(prepare: Callable[[], Callable[[Any], Any]], connection: Connection, parent: int) -> None:
    """Does the work on the groups that the caller sends through the connection, until the process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    no_tokenizer_threads()
    work = prepare()
    while True:
        group = connection.recv()
        try:
            connection.send(work(group))
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
