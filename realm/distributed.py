"""Several processes that train one model, as `torchrun` starts them; everything here is free of effect for a single one.

Every rank holds the model, the optimizer and the index, and draws the same batch from (seed, step). It works on its share of
the rows; gradients and metrics are averaged, so that the same global batch gives the same step at every world size. Rank 0
alone writes: checkpoints, metrics, index versions.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from realm.errors import InputError

T = TypeVar("T")
Rows = TypeVar("Rows", list[Any], np.ndarray, Tensor)

PATIENCE = timedelta(hours=12)
"""How long a rank waits for the others: rank 0 may be building an index. A rank that died is noticed at once."""


def start(device: torch.device) -> torch.device:
    """Joins the other ranks where `torchrun` started this process -> the device of this rank."""
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    if device.type == "cuda" and device.index is None and count() > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return device


def leave() -> None:
    """Ends what `start` began; waits for nobody."""
    if dist.is_initialized():
        dist.destroy_process_group()


def count() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return rank() == 0


def check_batch(size: int) -> None:
    """Refuses a batch that cannot be shared evenly.

    Raises:
        InputError: `size` is no multiple of the number of ranks.
    """
    if size % count():
        raise InputError(
            f"batch_size is {size}: {count()} processes share it evenly, so make it a multiple of {count()}"
        )


def share(rows: Rows) -> Rows:
    """This rank's rows of a batch that every rank has."""
    return rows if count() == 1 else rows[rank() :: count()]


def weight(amount: Tensor) -> Tensor:
    """What a loss divided by this rank's `amount` is to be multiplied with, so that the mean over ranks is the loss divided
    by the whole batch's -> scalar."""
    if count() == 1:
        return torch.ones_like(amount)
    total = amount.detach().double().cpu()
    dist.all_reduce(total)
    return (amount * count() / total.to(amount.device).clamp_min(1e-12)).to(amount.dtype)


def mean(values: list[float]) -> list[float]:
    """The means of numbers over the ranks."""
    if count() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / count()).tolist()


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces gradients by their means over the ranks; a parameter without one on any rank stays without."""
    if count() == 1:
        return
    trained = list(parameters)
    has = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
    dist.all_reduce(has, dist.ReduceOp.MAX)
    used = [p for p, one in zip(trained, has.tolist(), strict=True) if one]
    if not used:
        return
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    flat /= count()
    for parameter, part in zip(used, flat.split([p.numel() for p in used]), strict=True):
        parameter.grad = part.view_as(parameter)


def from_first(value: T) -> T:
    """Rank 0's value, on every rank: decisions are taken once."""
    if count() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gathered(value: T) -> list[T]:
    """Every rank's value, on every rank, in their order."""
    if count() == 1:
        return [value]
    box: list[Any] = [None] * count()
    dist.all_gather_object(box, value)
    return box


def wait_for_all() -> None:
    """Returns when every rank has come here."""
    if count() > 1:
        dist.barrier()
