"""Threads that each do whole pieces of work by themselves.

A small product gains nothing from a second thread of torch's: waking it takes as long as the product. Here each thread takes
the next of many pieces, and computes it alone.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from threading import Barrier, Lock
from typing import TypeVar

import torch

_pool_is_taken = Lock()

P = TypeVar("P")
R = TypeVar("R")


def thread_map(work: Callable[[P], R], pieces: Sequence[P], autocast: bool = False) -> list[R]:
    """`work(piece)` for every piece, in its order, by as many threads as torch may use here; without gradients.

    Autocast is off, or with `autocast` as it is here. Raises what a piece raises; those that nobody has begun are left then.
    While another thread has its pieces computed, or within a piece, the caller computes its own: nobody waits for others' work.
    So it does where there is only one.
    """
    waiting, inference = iter(range(len(pieces))), torch.is_inference_mode_enabled()
    results: dict[int, R] = {}
    cast, dtype = autocast and torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def take() -> None:
        with (
            torch.inference_mode(inference),
            torch.no_grad(),
            torch.autocast("cpu", dtype, cast, cache_enabled=False),
        ):
            try:
                for number in waiting:  # one iterator for all threads: each takes the next when it is done
                    results[number] = work(pieces[number])
            finally:
                for _ in waiting:
                    pass

    threads = torch.get_num_threads()
    if threads == 1 or len(pieces) < 2 or not _pool_is_taken.acquire(blocking=False):
        take()
    else:
        begun: list[Future[None]] = []
        try:
            for _ in range(min(threads, len(pieces))):
                begun.append(_pool(threads).submit(take))
            for done in begun:
                done.result()
        finally:
            try:
                for _ in waiting:  # who interrupts this thread means the others too
                    pass
                wait(begun)  # for what they have begun: what it reads may change after this
            finally:
                _pool_is_taken.release()
    return [results[number] for number in range(len(pieces))]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads whose own torch is single-threaded."""
    pool, all_here = ThreadPoolExecutor(threads, "torch alone"), Barrier(threads)

    def prepare() -> None:
        torch.get_num_threads()  # first, for it is then that torch sets a thread up, with everybody's number
        torch.set_num_threads(1)
        all_here.wait()

    try:
        for done in [pool.submit(prepare) for _ in range(threads)]:
            done.result()
    except BaseException:
        all_here.abort()  # else those that are here would wait for ever
        raise
    finally:
        torch.set_num_threads(threads)  # a part of what each of them has set is everybody's
    return pool


def _forget_pool() -> None:
    global _pool_is_taken
    _pool.cache_clear()
    _pool_is_taken = Lock()


os.register_at_fork(after_in_child=_forget_pool)  # where its threads are not
