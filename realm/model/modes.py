"""What holds for a whole network for a while: dropout, evaluation, activations that are computed twice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from realm.model.cpu.packed import undivided


@runtime_checkable
class _CachesRows(Protocol):
    """A network whose activations of so many rows at a time may be kept."""

    cached_rows: int


def set_dropout(module: nn.Module, probability: float) -> None:
    """Sets every dropout of a network; 0 suits runs of a few hundred steps (paper: 0.1)."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = probability


def cache_rows(module: nn.Module, rows: int) -> None:
    """Keeps the activations of so many rows at a time and computes them again for the backward pass; 0: keeps all.

    The gradient is the same but for rounding (gradient caching, Gao et al. 2021), so a batch of any size fits, for a forward
    pass more.
    """
    for part in module.modules():
        if isinstance(part, _CachesRows):
            part.cached_rows = rows


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, whose intermediate results are not kept for the backward pass but made again, draws included."""
    return cast(
        Tensor,
        checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: (undivided(), undivided())),
    )


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Dropout off inside; afterwards each network is in the mode in which it came."""
    before = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.train(training)
