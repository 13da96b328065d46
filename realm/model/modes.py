"""Modes of a whole network: dropout, evaluation, recomputed activations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from realm.model.cpu.packed import undivided


@runtime_checkable
class _CachesRows(Protocol):
    """A network with gradient-cache rows."""

    cached_rows: int


def set_dropout(module: nn.Module, probability: float) -> None:
    """Sets every dropout of a network; 0 suits runs of a few hundred steps (paper: 0.1)."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = probability


def cache_rows(module: nn.Module, rows: int) -> None:
    """Keeps the activations of `rows` rows at a time and recomputes all other activations in the backward pass; 0: keeps all.

    The gradient is the same except for rounding (gradient cache, Gao et al. 2021). A batch of any size fits, at the cost of one
    more forward pass.
    """
    for part in module.modules():
        if isinstance(part, _CachesRows):
            part.cached_rows = rows


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)` whose intermediate results, random draws included, are recomputed in the backward pass."""
    return cast(
        Tensor,
        checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: (undivided(), undivided())),
    )


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode inside (no dropout); afterwards each network is in its previous mode."""
    before = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.train(training)
