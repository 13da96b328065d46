"""Ranks of a distributed test: processes that are forked from a server that has already imported torch."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch


def run_on_ranks(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Calls `function(rank, *arguments)` in a process for each rank, and raises what a rank raises."""
    # Lance may not be imported before a fork, so the modules of realm are imported by each rank.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch.distributed.fsdp", "hypothesis", "pytest"])
    torch.multiprocessing.start_processes(function, arguments, nprocs=ranks, start_method="forkserver")
