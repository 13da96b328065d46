"""Training of one model by several processes (ranks), which `torchrun` starts. In a single process these functions do nothing.

Every rank has the model and the optimizer, and draws the same batch from (seed, step). A rank computes only its shard of the
rows of the batch. Gradients and metrics are then averaged over the ranks, so a step with the same batch has the same result for
every number of ranks. Only rank 0 writes checkpoints, metrics and index versions.

The index that training searches is divided among the ranks (`realm.search.shards`).
"""

import gc
import ipaddress
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from realm.errors import InputError, RealmError
from realm.heartbeats import Heartbeats

T = TypeVar("T")
Rows = TypeVar("Rows", list[Any], np.ndarray, Tensor)

TIMEOUT = timedelta(hours=25)
"""Longest time that a rank waits for another rank, for example while a process of rank 0 builds an index, which may take a day.
If a rank dies, waiting ends at once; if a rank is silent, `realm.heartbeats` ends this rank."""
JOIN_TIMEOUT = timedelta(minutes=10)
"""Longest time that a rank waits at its start until all other ranks have started; on a slow disk, imports take minutes."""

_heartbeats: Heartbeats | None = None
"""The heartbeats of this process, from `initialize` to `shutdown`."""


def initialize(device: torch.device) -> torch.device:
    """Joins the process group if `torchrun` started this process -> the device of this rank."""
    global _heartbeats
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, number, count = next(rendezvous("env://", timeout=TIMEOUT))
        store = store_of_attempt(store, number, count)
        check_machine_names(store, number, count)
        _heartbeats = Heartbeats(store, number, count)
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=TIMEOUT)
    if device.type == "cuda" and device.index is None and world_size() > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return device


def store_of_attempt(store: Store, number: int, count: int) -> Store:
    """A part of `store` that is empty, and the same for all ranks.

    When `torchrun` starts the processes again, its store still has the addresses of the killed processes. The processes also
    have no common number of the attempt, because each machine counts only its own restarts. So every process has a new id.
    Rank 0 gives its id to the id of every other process, and continues when all processes have answered to this id.

    Raises:
        RealmError: another rank has not started after `JOIN_TIMEOUT`.
    """
    own = uuid.uuid4().hex
    if number:
        store.set(f"realm/process/{number}", own)
        try:
            store.wait([f"realm/first/{own}"], JOIN_TIMEOUT)
        except dist.DistStoreError:
            raise _not_joined(number, [0]) from None
        first = store.get(f"realm/first/{own}").decode()
        store.set(f"realm/joined/{first}/{number}", "")
        return PrefixStore(first, store)
    missing = set(range(1, count))
    end = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while missing:
        if time.monotonic() > end:
            raise _not_joined(number, sorted(missing))
        for other in missing:
            if store.check([f"realm/process/{other}"]):
                store.set(f"realm/first/{store.get(f'realm/process/{other}').decode()}", own)
        missing = {other for other in missing if not store.check([f"realm/joined/{own}/{other}"])}
        time.sleep(0.02)
    return PrefixStore(own, store)


def check_machine_names(store: Store, number: int, count: int) -> None:
    """Checks that ranks on different machines can connect to each other. All ranks must call this function.

    With gloo, a rank is reached at the address to which the name of its machine resolves there. On Debian and Ubuntu, this is
    often 127.0.1.1, which other machines cannot reach.

    Raises:
        InputError: there are several machines, and the name of one of them has no such address.
    """
    machine = socket.gethostname()
    reachable = "GLOO_SOCKET_IFNAME" in os.environ or _has_address(machine)
    store.set(f"realm/machine/{number}", json.dumps([machine, reachable]))
    found = [json.loads(one) for one in store.multi_get([f"realm/machine/{other}" for other in range(count)])]
    alone = sorted({machine for machine, reachable in found if not reachable})
    if alone and len({machine for machine, _ in found}) > 1:
        raise InputError(
            f"other machines cannot reach {', '.join(alone)}, because this name has no address there, or one that begins with "
            "127: set GLOO_SOCKET_IFNAME to the network interface, such as eth0, in the environment of torchrun"
        )


def _has_address(machine: str) -> bool:
    """Whether the name of this machine resolves to an address at which other machines may reach it."""
    try:
        found = socket.getaddrinfo(machine, None)
    except (OSError, UnicodeError):  # no address, or a name that is too long for one
        return False
    return not all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def _not_joined(number: int, missing: Sequence[int]) -> RealmError:
    names = ", ".join(map(str, missing))
    return RealmError(
        f"rank {number} waited {JOIN_TIMEOUT.total_seconds():g} s for rank {names}: find the error of this rank in the output "
        "of torchrun on its machine, and start the command again"
    )


def shutdown() -> None:
    """Leaves the process group without waiting for other ranks."""
    global _heartbeats
    if _heartbeats is not None:
        _heartbeats.stop()
        _heartbeats = None
    if dist.is_initialized():
        # DistributedDataParallel holds the group in reference cycles. A group that is destroyed at the end of the process, when
        # its threads still run, aborts the process.
        gc.collect()
        dist.destroy_process_group()


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_ranks() -> int:
    """Number of processes that `torchrun` started on this machine; known before `initialize`."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def rank() -> int:
    """Number of this process among the processes that train together; the first number is 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this process is rank 0; only rank 0 writes files."""
    return rank() == 0


def check_batch(size: int) -> None:
    """Checks that the ranks can share a batch evenly.

    Raises:
        InputError: `size` is not a multiple of the number of ranks.
    """
    if size % world_size():
        raise InputError(
            f"batch_size is {size}: it must be a multiple of {world_size()}, the number of processes that share a batch"
        )


def shard(rows: Rows) -> Rows:
    """The rows of a batch that belong to this rank. If there are n ranks, rank r has the rows r, r + n, r + 2n and so on.

    Every rank must pass the whole batch.
    """
    return rows if world_size() == 1 else rows[rank() :: world_size()]


class _Gather(torch.autograd.Function):
    """Forward: the rows of all ranks. Backward: the gradient of this rank's rows, times the number of ranks.

    Each rank computes the loss of all rows, but the gradient of only its own rows. `averaging` then divides the sum of these
    gradients by the number of ranks; the factor makes up for this division.
    """

    @staticmethod
    def forward(context: Any, own_BD: Tensor, total: int) -> Tensor:
        most = -(-total // world_size())
        padded = own_BD.new_zeros(most, own_BD.shape[1])
        padded[: len(own_BD)] = own_BD
        parts = [torch.empty_like(padded) for _ in range(world_size())]
        dist.all_gather(parts, padded)
        return torch.stack(parts, dim=1).flatten(0, 1)[:total]

    @staticmethod
    def backward(context: Any, gradient_BD: Tensor) -> tuple[Tensor, None]:
        return shard(gradient_BD) * world_size(), None


def all_gather(own_BD: Tensor, total: int) -> Tensor:
    """All `total` rows of a batch on every rank, in the order of the batch.

    `own_BD` has the rows that `shard` gives to this rank. Gradients flow to these rows.
    """
    return own_BD if world_size() == 1 else _Gather.apply(own_BD.float(), total)


def bounds(count: int) -> np.ndarray:
    """Divides `count` rows into one range per rank -> [ranks + 1]. Rank r has the rows from bound r up to, but not including,
    bound r + 1."""
    return np.arange(world_size() + 1) * count // world_size()


def exchange(parts: Sequence[Tensor]) -> list[Tensor]:
    """Sends `parts[r]` to rank r -> the parts that this rank received, in the order of the ranks that sent them.

    Parts may have different numbers of rows, but all other dimensions are equal.
    """
    sent = torch.tensor([len(part) for part in parts])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    rows = received.tolist()
    result = parts[0].new_empty(sum(rows), *parts[0].shape[1:])
    dist.all_to_all_single(result, torch.cat(list(parts)), rows, sent.tolist())
    return list(result.split(rows))


def any_rank(value: bool) -> bool:
    """Whether the value is true on one rank or more."""
    if world_size() == 1:
        return value
    total = torch.tensor(int(value))
    dist.all_reduce(total)
    return total.item() > 0


def maximum(value: int) -> int:
    """The largest value of all ranks."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def loss_weight(amount: Tensor) -> Tensor:
    """Factor for a loss that is a mean over `amount` items of this rank, for example over masked tokens -> scalar.

    If every rank multiplies its loss by its factor, the mean over the ranks is the mean over the whole batch.
    """
    if world_size() == 1:
        return torch.ones_like(amount)
    total = amount.detach().double()
    dist.all_reduce(total)
    return (amount * world_size() / total.clamp_min(1e-12)).to(amount.dtype)


def all_reduce_mean(values: list[float]) -> list[float]:
    """The mean of each number over the ranks."""
    if world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / world_size()).tolist()


def averaging(parts: Iterable[nn.Module]) -> Callable[[Tensor], Tensor]:
    """A function that returns the given loss unchanged. The backward pass of the returned loss averages the gradients of the
    parts over the ranks.

    Gradients are sent in buckets, while the backward pass computes further gradients. A parameter that no rank used has no
    gradient after the backward pass.
    """
    if world_size() == 1:
        return lambda loss: loss
    return DistributedDataParallel(_Parts(parts), find_unused_parameters=True, gradient_as_bucket_view=True)


class _Parts(nn.Module):
    """The parts of a model that are trained, as one module. A training step calls several of the parts directly, and then calls
    this module with the loss."""

    def __init__(self, parts: Iterable[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        # DistributedDataParallel warns about `find_unused_parameters` if the first step uses all parameters.
        self.unused = nn.Parameter(torch.zeros(0, device=next(self.parts.parameters()).device))

    def forward(self, loss: Tensor) -> Tensor:
        return loss


def broadcast(value: T) -> T:
    """Sends the value of rank 0 to all ranks -> this value, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Waits until every rank has called `barrier`."""
    if world_size() > 1:
        dist.barrier()
