"""Threads that each do whole pieces of work by themselves.

A small product gains nothing from a second thread of torch's: waking it takes as long as the product. Here each thread takes
the next of many pieces, and computes it alone.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import Any

import torch


def share_out(work: Callable[..., None], pieces: Sequence[tuple[Any, ...]]) -> None:
    """`work(*piece)` for every piece, in any order, by as many threads as torch may use here; without gradients or autocast.

    Raises whatever a piece raises first.
    """
    waiting, inference = iter(pieces), torch.is_inference_mode_enabled()

    def take() -> None:
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for piece in waiting:  # one iterator for all threads: each takes the next when it is done
                work(*piece)

    threads = torch.get_num_threads()
    if threads == 1 or len(pieces) == 1:
        take()
    else:
        for done in [_pool(threads).submit(take) for _ in range(threads)]:
            done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads whose own torch is single-threaded."""
    pool, all_here = ThreadPoolExecutor(threads, "torch alone"), Barrier(threads)

    def prepare() -> None:
        torch.get_num_threads()  # first, for it is then that torch sets a thread up, with everybody's number
        torch.set_num_threads(1)
        all_here.wait()

    for done in [pool.submit(prepare) for _ in range(threads)]:
        done.result()
    torch.set_num_threads(threads)  # a part of what each of them has set is everybody's
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # whose threads are not there
