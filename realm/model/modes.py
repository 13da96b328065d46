"""Modes of a whole network: probability of dropout, evaluation mode, recomputation of activations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from realm import distributed
from realm.model.cpu.packed import undivided
from realm.tokens.layouts import Tokens


@runtime_checkable
class _CachesRows(Protocol):
    """A network that can recompute activations in the backward pass, `cached_rows` rows at a time."""

    cached_rows: int


@runtime_checkable
class _KnowsSharding(Protocol):
    """A network that computes in another way if its weights are sharded."""

    sharded: bool


def set_sharded(module: nn.Module) -> None:
    """Notes in every network of `module` that its weights are sharded (`realm.train.sharding`)."""
    for part in module.modules():
        if isinstance(part, _KnowsSharding):
            part.sharded = True


def set_dropout(module: nn.Module, probability: float) -> None:
    """Sets the probability of every dropout layer of a network; 0 is suitable for runs of a few hundred steps (paper: 0.1)."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = probability
        elif isinstance(getattr(part, "dropout", None), float):  # the attention of T5 in transformers
            setattr(part, "dropout", probability)  # noqa: B010


def cache_rows(module: nn.Module, rows: int) -> None:
    """Keeps the activations of `rows` rows at a time, and recomputes all others in the backward pass; 0: keeps all activations.

    Except for rounding, the gradient is the same (gradient cache, Gao et al. 2021). A batch of any size then fits into memory,
    but the step needs one more forward pass.
    """
    for part in module.modules():
        if isinstance(part, _CachesRows):
            part.cached_rows = rows


def chunks(rows_n: Tensor, size: int, sharded: bool) -> list[tuple[Tensor, Tensor]]:
    """Numbers of rows in chunks of at most `size` rows -> for each chunk, the rows to compute, and the rows of which the
    results are used.

    The two are different only if weights are `sharded`: the ranks compute each layer together, so a rank with fewer chunks
    than another rank computes its first row again, and uses no result.
    """
    found = [(rows_c, rows_c) for rows_c in rows_n.split(size)]
    if sharded:
        found += [(rows_n[:1], rows_n[:0])] * (distributed.maximum(len(found)) - len(found))
    return found


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, with intermediate results that are recomputed in the backward pass, from the same random draws."""
    # Torch saves the random states of the devices that it finds among the arguments, and does not look into `Tokens`.
    shown = [one.ids_BT if isinstance(one, Tokens) else one for one in inputs]
    # An early stop would leave a layer before the hook that ends its forward pass; sharded weights need this hook.
    with set_checkpoint_early_stop(False):
        return cast(
            Tensor,
            checkpoint(
                lambda *_: function(*inputs),
                *shown,
                use_reentrant=False,
                context_fn=lambda: (undivided(), undivided()),
            ),
        )


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """A context in which networks are in evaluation mode (no dropout); afterwards each network has its previous mode."""
    before = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.train(training)
