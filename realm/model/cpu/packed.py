"""Computes the layers of a BERT on a CPU without padding: the tokens of all rows are in one array.

It uses the weights of a `Bert`, and computes the same states as `Bert.forward`.
If there are enough rows, each thread computes all layers of its own rows, forward and backward: if threads shared each matrix
product, they would wait for each other after every product.

Axis letters: B rows, T tokens of the longest row, N tokens of all rows, n tokens of one thread's rows, P requested tokens,
H hidden.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from realm.model.cpu.attention import attend
from realm.model.cpu.dropout import drawing_from, new_seed
from realm.model.cpu.threads import thread_map
from realm.tokens.layouts import Tokens

if TYPE_CHECKING:
    from realm.model.bert import Bert  # imported only for types, because realm.model.bert imports this folder

SHARED = 1 << 8
"""Smallest number of tokens that are divided among threads; with fewer tokens, division makes a pass slower."""
EVENLY = 1.15
"""Rows are divided among threads if the largest share has at most this many times the tokens of an even share."""
MOST = 8
"""With more threads than this, rows are not divided: in training each thread would have a copy of all gradients."""


def hidden_states(bert: Bert, tokens: Tokens) -> Tensor:
    """States of the last layer -> [B, T, H]; states of padding are undefined."""
    rows = _Rows.of(tokens)
    state_NH = _run(bert, tokens, rows, None)
    padded = state_NH.new_zeros(tokens.ids_BT.numel(), state_NH.shape[1]).index_copy(
        0, rows.place_N, state_NH
    )
    return padded.view(*tokens.ids_BT.shape, -1)


def states_at(bert: Bert, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
    """States of the last layer at the given (row, position) pairs, each a token and not padding -> [P, H].

    The last layer computes only keys and values for the tokens that are not requested.
    """
    assert bool(tokens.mask_BT[row_P, position_P].all())
    rows = _Rows.of(tokens, row_P)
    number_BT = torch.zeros_like(tokens.ids_BT)
    number_BT.view(-1)[rows.place_N] = torch.arange(len(rows.place_N))
    order_P = rows.rank_B[row_P].argsort(stable=True)
    wanted_P = number_BT[row_P, position_P][order_P]
    return _run(bert, tokens, rows, wanted_P)[order_P.argsort()]


class _Rows(NamedTuple):
    """The packed order of the rows, in which rows of equal length and with equally many requested tokens are neighbours."""

    place_N: Tensor
    """Position of each packed token among the padded rows."""
    rank_B: Tensor
    """Position of each row in the packed order."""
    lengths: list[int]
    """Number of tokens of each row, in packed order."""
    asking: list[int]
    """Number of requested tokens of each row, in packed order."""

    @classmethod
    def of(cls, tokens: Tokens, wanted_row_P: Tensor | None = None) -> _Rows:
        length_B = tokens.mask_BT.sum(dim=1)
        asking_B = length_B if wanted_row_P is None else wanted_row_P.bincount(minlength=len(length_B))
        order_B = (length_B * (asking_B.max() + 1) + asking_B).argsort(stable=True)
        row_N, column_N = tokens.mask_BT[order_B].nonzero(as_tuple=True)
        place_N = order_B[row_N] * tokens.mask_BT.shape[1] + column_N
        return cls(place_N, order_B.argsort(), length_B[order_B].tolist(), asking_B[order_B].tolist())

    def shares(self, count: int, wanted_P: Tensor | None) -> Iterator[_Share]:
        """Divides the rows into at most `count` shares with about equally many tokens."""
        ends, asked = [0, *accumulate(self.lengths)], [0, *accumulate(self.asking)]
        even = [ends[-1] * part / count for part in range(count + 1)]
        cuts = sorted({min(range(len(ends)), key=lambda row: abs(ends[row] - cut)) for cut in even})
        for start, stop in pairwise(cuts):
            wanted_p = None if wanted_P is None else wanted_P[asked[start] : asked[stop]] - ends[start]
            own = slice(ends[start], ends[stop])
            yield _Share(own, self.lengths[start:stop], self.asking[start:stop], wanted_p)


class _Share(NamedTuple):
    """Consecutive packed rows that one thread computes."""

    own: slice
    """Place of the tokens of these rows among all packed tokens."""
    lengths: list[int]
    """Number of tokens of each row."""
    asking: list[int]
    """Number of requested tokens of each row."""
    wanted_P: Tensor | None
    """Positions of the requested tokens among the tokens of the share; None if all tokens are requested."""


_UNDIVIDED = threading.local()


@contextmanager
def undivided() -> Iterator[None]:
    """A context in which rows are not divided among threads.

    `realm.model.modes.recomputed` uses saved-tensor hooks, which have no effect on computations in other threads.
    """
    before = getattr(_UNDIVIDED, "here", False)
    _UNDIVIDED.here = True
    try:
        yield
    finally:
        _UNDIVIDED.here = before


def _run(bert: Bert, tokens: Tokens, rows: _Rows, wanted_P: Tensor | None) -> Tensor:
    """States of the last layer for all tokens, or for the tokens `wanted_P` -> [N or P, H]."""
    state_NH = bert.embeddings(
        tokens.ids_BT.flatten()[rows.place_N],
        tokens.segments_BT.flatten()[rows.place_N],
        rows.place_N % tokens.ids_BT.shape[1],
    )
    threads = torch.get_num_threads()
    shares = list(rows.shares(threads, wanted_P))
    largest = max((share.own.stop - share.own.start for share in shares), default=0)
    few = len(state_NH) < SHARED or largest * threads > EVENLY * len(state_NH)
    weights = [weight for weight in bert.encoder.parameters() if weight.requires_grad]
    watched = any(weight._backward_hooks for weight in weights)  # a hook would be called once per share
    if not 1 < threads <= MOST or few or watched or getattr(_UNDIVIDED, "here", False):
        return _layers(bert, state_NH, _Share(slice(None), rows.lengths, rows.asking, wanted_P))
    drops = any(p.training and p.p for p in bert.encoder.modules() if isinstance(p, nn.Dropout))
    seeds = {share.own.start: new_seed() if drops else 0 for share in shares}

    def read(share: _Share, state_NH: Tensor) -> Tensor:
        with drawing_from(seeds[share.own.start]):
            return _layers(bert, state_NH, share)

    learns = torch.is_grad_enabled() and bool(weights or state_NH.requires_grad)
    states: Tensor = _Divided.apply(read, shares, learns, state_NH, *weights)
    return states


class _Divided(torch.autograd.Function):
    """Computes the layers, forward and backward, with a share of the rows in each thread.

    Each thread has a copy of the gradients of the weights; the copies are added up at the end of the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        read: Callable[[_Share, Tensor], Tensor],
        shares: list[_Share],
        learns: bool,
        state_NH: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        def one(share: _Share) -> tuple[Tensor, Tensor]:
            with torch.set_grad_enabled(learns):
                given_nH = state_NH[share.own].detach().requires_grad_(learns)
                return given_nH, read(share, given_nH)

        found = thread_map(one, shares, autocast=True)
        if learns:
            ctx.found, ctx.weights = found, weights
        return torch.cat([states_nH.detach() for _, states_nH in found])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_states = gradients[0].split([len(states_nH) for _, states_nH in ctx.found])
        # The value of `retain_graph` in this backward pass.
        again = torch._C._autograd._get_current_graph_task_keep_graph()

        def one(part: tuple[tuple[Tensor, Tensor], Tensor]) -> tuple[Tensor | None, ...]:
            (given_nH, states_nH), to_states_nH = part
            inputs = [given_nH, *ctx.weights]
            return torch.autograd.grad(states_nH, inputs, to_states_nH, retain_graph=again, allow_unused=True)

        to_given, *to_weights = zip(
            *thread_map(one, list(zip(ctx.found, to_states, strict=True))), strict=True
        )
        for total, *more in to_weights:
            for gradient in more if total is not None else ():  # `total` is None if no layer uses the weight
                total += gradient
        return None, None, None, torch.cat(to_given), *(total for total, *_ in to_weights)


def _layers(bert: Bert, state_NH: Tensor, share: _Share) -> Tensor:
    last = len(bert.encoder.layer) - 1
    for number, layer in enumerate(bert.encoder.layer):
        attention = layer.attention.self
        # The states are cast once for the products with three weights; the residual stream stays float32.
        read_NH = (
            state_NH.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else state_NH
        )
        asking_NH, asking = read_NH, share.lengths
        if share.wanted_P is not None and number == last:
            asking_NH, state_NH, asking = read_NH[share.wanted_P], state_NH[share.wanted_P], share.asking
        mixed_NH = attend(
            attention.query(asking_NH), attention.key(read_NH), attention.value(read_NH),
            asking, share.lengths, attention.num_attention_heads,
            attention.dropout.p if attention.training else 0.0,
        )  # fmt: skip
        state_NH = layer.attention.output(mixed_NH, state_NH)
        state_NH = layer.output(layer.intermediate(state_NH), state_NH)
    return state_NH
