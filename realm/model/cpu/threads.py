"""A map over chunks of work with several threads, each of which computes whole chunks.

A second torch thread does not make a small matrix product faster, because waking the thread takes as long as the product. In
`thread_map` each thread takes the next chunk, and computes the whole chunk with one torch thread.
"""

import atexit
import os
from collections.abc import Callable, Sequence
from functools import cache
from threading import Barrier, Lock
from typing import TypeVar

import torch

from realm.worker_threads import Submitted, WorkerThreads

_pool_is_taken = Lock()

P = TypeVar("P")
R = TypeVar("R")


def thread_map(work: Callable[[P], R], chunks: Sequence[P], autocast: bool = False) -> list[R]:
    """`work(chunk)` for every chunk, with as many threads as torch may use -> the results in the order of the chunks.

    Gradients are off, unless `work` turns gradients on. Autocast is off; with `autocast` it is as in the calling thread. If
    `work` raises an exception, the exception is raised again when all chunks that have begun have ended. All chunks are
    computed in the calling thread if there is only one chunk, if the call comes from within `work`, or if another thread uses
    the pool. So no call waits for the work of another call.
    """
    waiting, inference = iter(range(len(chunks))), torch.is_inference_mode_enabled()
    results: dict[int, R] = {}
    cast, dtype = autocast and torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def take() -> None:
        with (
            torch.inference_mode(inference),
            torch.no_grad(),
            torch.autocast("cpu", dtype, cast, cache_enabled=False),
        ):
            try:
                for number in waiting:  # an iterator that all threads share: each takes the next free chunk
                    results[number] = work(chunks[number])
            finally:
                for _ in waiting:
                    pass

    threads = torch.get_num_threads()
    if threads == 1 or len(chunks) < 2 or not _pool_is_taken.acquire(blocking=False):
        take()
    else:
        begun: list[Submitted[None]] = []
        try:
            for _ in range(min(threads, len(chunks))):
                begun.append(_pool(threads).submit(take))
            for done in begun:
                done.result()
        finally:
            try:
                for _ in waiting:  # after an interrupt of this thread, no other thread takes another chunk
                    pass
                for done in begun:  # afterwards the caller may change the data of the chunks
                    done.wait()
            finally:
                _pool_is_taken.release()
    return [results[number] for number in range(len(chunks))]


@cache
def _pool(threads: int) -> WorkerThreads:
    """Worker threads, each of which uses one torch thread."""
    pool, all_here = WorkerThreads(threads, "torch alone"), Barrier(threads)

    def prepare() -> None:
        torch.get_num_threads()  # initialises torch in the thread with the global number, so it has to come first
        torch.set_num_threads(1)
        all_here.wait()

    try:
        for done in [pool.submit(prepare) for _ in range(threads)]:
            done.result()
    except BaseException:
        all_here.abort()  # else the waiting threads would never end
        pool.close()
        raise
    finally:
        torch.set_num_threads(threads)  # because `set_num_threads` in a thread also changes a global setting
    # A thread that still computes with torch when the process ends would abort the process.
    atexit.register(pool.close)
    return pool


def _forget_pool() -> None:
    global _pool_is_taken
    _pool.cache_clear()
    _pool_is_taken = Lock()


os.register_at_fork(after_in_child=_forget_pool)  # a forked child has no pool threads
