"""A BERT's layers on a CPU without padding: the tokens of all rows in one array, attention a few rows at a time.

The weights and the numbers are those of `Bert`, whose own forward pass runs on every other device. What that costs here is
padding in every layer, scores [B, A, T, T] that go to memory and back for each of the mask, the softmax and the dropout, and
float32 scores wherever a row is padded. Here rows of the same length are multiplied together, as many as have scores that stay
in the cache; nothing is computed for padding, and the backward pass forms the scores again instead of keeping them.

Letters: B rows, T tokens of the longest row, N tokens of all rows, n of one row, M and m those that ask, P wanted ones,
H hidden, A heads, d hidden of a head, G heads of all rows that are multiplied together.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from realm.model.bert import Bert
from realm.model.dropout import clear, kept, new_seed
from realm.model.workers import share_out
from realm.text.inputs import Tokens

SCORES = 1 << 18
"""Attention scores that are formed together, where more than one row has them."""
SHARED = 1 << 8
"""Tokens from which on threads are sooner done with rows of their own."""
EVENLY = 1.15
"""Times an even share that the largest may be, else threads that share products are sooner done."""


def hidden_states(trunk: Bert, tokens: Tokens) -> Tensor:
    """States of the last layer -> [B, T, H]; those of padding mean nothing."""
    if tokens.ids_BT.device.type != "cpu":
        return _padded_states(trunk, tokens)
    rows = _Rows.of(tokens)
    state_NH = _run(trunk, tokens, rows, None)
    padded = state_NH.new_zeros(tokens.ids_BT.numel(), state_NH.shape[1]).index_copy(
        0, rows.place_N, state_NH
    )
    return padded.view(*tokens.ids_BT.shape, -1)


def states_at(trunk: Bert, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
    """States of the last layer at the given (row, position) pairs -> [P, H].

    On a CPU the last layer computes nothing but keys and values for the other tokens: of 6 layers, a seventh is saved.
    """
    if tokens.ids_BT.device.type != "cpu" or not tokens.mask_BT[row_P, position_P].all():
        states_BTH = _padded_states(trunk, tokens)  # on a CPU because padding is asked, which rows leave out
        return states_BTH[row_P, position_P]
    rows = _Rows.of(tokens, row_P)
    number_BT = torch.zeros_like(tokens.ids_BT)
    number_BT.view(-1)[rows.place_N] = torch.arange(len(rows.place_N))
    order_P = rows.rank_B[row_P].argsort(stable=True)
    wanted_P = number_BT[row_P, position_P][order_P]
    return _run(trunk, tokens, rows, wanted_P)[order_P.argsort()]


def _padded_states(trunk: Bert, tokens: Tokens) -> Tensor:
    states_BTH: Tensor = trunk(tokens.ids_BT, tokens.mask_BT, tokens.segments_BT)
    return states_BTH


class _Rows(NamedTuple):
    """Where the rows' tokens stand: rows of the same length, and with as many wanted tokens, follow one another."""

    place_N: Tensor
    """Of each token among the padded rows."""
    rank_B: Tensor
    """Of each row among the sorted ones."""
    lengths: list[int]
    """Tokens of each sorted row."""
    asking: list[int]
    """Its tokens that are wanted of the last layer."""

    @classmethod
    def of(cls, tokens: Tokens, wanted_row_P: Tensor | None = None) -> "_Rows":
        length_B = tokens.mask_BT.sum(dim=1)
        asking_B = length_B if wanted_row_P is None else wanted_row_P.bincount(minlength=len(length_B))
        order_B = (length_B * (asking_B.max() + 1) + asking_B).argsort(stable=True)
        row_N, column_N = tokens.mask_BT[order_B].nonzero(as_tuple=True)
        place_N = order_B[row_N] * tokens.mask_BT.shape[1] + column_N
        return cls(place_N, order_B.argsort(), length_B[order_B].tolist(), asking_B[order_B].tolist())

    def parts(self, count: int, wanted_P: Tensor | None) -> Iterator[tuple["_Rows", Tensor | None]]:
        """At most so many parts of about as many tokens, each with the wanted ones of its own."""
        ends, asked = [0, *accumulate(self.lengths)], [0, *accumulate(self.asking)]
        even = [ends[-1] * part / count for part in range(count + 1)]
        cuts = sorted({min(range(len(ends)), key=lambda row: abs(ends[row] - cut)) for cut in even})
        for start, stop in pairwise(cuts):
            lengths, asking = self.lengths[start:stop], self.asking[start:stop]
            rows = _Rows(self.place_N[ends[start] : ends[stop]], self.rank_B, lengths, asking)
            yield rows, None if wanted_P is None else wanted_P[asked[start] : asked[stop]] - ends[start]


def _run(trunk: Bert, tokens: Tokens, rows: _Rows, wanted_P: Tensor | None) -> Tensor:
    """Last states of all tokens, or of those with the numbers `wanted_P` -> [N or P, H].

    Where nothing is learnt each thread takes some of the rows; where something is, the threads share each product.
    """
    if torch.is_grad_enabled() or trunk.training or len(rows.place_N) < SHARED:
        return _run_rows(trunk, tokens, rows, wanted_P)
    parts = list(rows.parts(torch.get_num_threads(), wanted_P))
    if max(len(part.place_N) for part, _ in parts) * torch.get_num_threads() > EVENLY * len(rows.place_N):
        return _run_rows(trunk, tokens, rows, wanted_P)
    return torch.cat(share_out(lambda part: _run_rows(trunk, tokens, *part), parts, autocast=True))


def _run_rows(trunk: Bert, tokens: Tokens, rows: _Rows, wanted_P: Tensor | None) -> Tensor:
    state_NH = trunk.embeddings(
        tokens.ids_BT.flatten()[rows.place_N],
        tokens.segments_BT.flatten()[rows.place_N],
        rows.place_N % tokens.ids_BT.shape[1],
    )
    last = len(trunk.encoder.layer) - 1
    for number, layer in enumerate(trunk.encoder.layer):
        attention = layer.attention.self
        # Cast once for the three products that read it; what is added up between layers stays float32.
        read_NH = (
            state_NH.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else state_NH
        )
        asking_NH, asking = read_NH, rows.lengths
        if wanted_P is not None and number == last:
            asking_NH, state_NH, asking = read_NH[wanted_P], state_NH[wanted_P], rows.asking
        dropout = attention.dropout.p if attention.training else 0.0
        mixed_NH = _Attention.apply(
            attention.query(asking_NH),
            attention.key(read_NH),
            attention.value(read_NH),
            list(_groups(asking, rows.lengths, attention.num_attention_heads)),
            dropout,
            new_seed() if dropout else 0,
        )
        state_NH = layer.attention.output(mixed_NH, state_NH)
        state_NH = layer.output(layer.intermediate(state_NH), state_NH)
    return state_NH


class _Part(NamedTuple):
    """Tokens of some rows of one length, by heads, among the tokens of all rows [N, H]."""

    start: int
    rows: int
    length: int
    heads: int

    def of(self, all_NH: Tensor) -> Tensor:
        """A copy of theirs -> [G, n, d]."""
        return self._view(all_NH).reshape(self.rows * self.heads, self.length, all_NH.shape[1] // self.heads)

    def put(self, part_Gnd: Tensor, all_NH: Tensor) -> None:
        """Writes theirs."""
        view = self._view(all_NH)
        view.copy_(part_Gnd.view(view.shape))

    def _view(self, all_NH: Tensor) -> Tensor:
        own_NH = all_NH[self.start : self.start + self.rows * self.length]
        width = all_NH.shape[1] // self.heads
        return own_NH.view(self.rows, self.length, self.heads, width).transpose(1, 2)


def _groups(asking: Sequence[int], lengths: Sequence[int], heads: int) -> Iterator[tuple[_Part, _Part]]:
    """Rows that are multiplied together: the tokens that ask, the tokens that are asked."""
    asking_start = start = 0
    for (wanted, length), alike in groupby(zip(asking, lengths, strict=True)):
        left = len(list(alike))
        while left:
            rows = min(left, max(1, SCORES // max(1, heads * wanted * length)))
            yield _Part(asking_start, rows, wanted, heads), _Part(start, rows, length, heads)
            asking_start, start, left = asking_start + rows * wanted, start + rows * length, left - rows


class _Attention(torch.autograd.Function):
    """Queries [M, H], keys and values [N, H] of all rows -> softmax(q k / sqrt(d)) v [M, H], each row for itself."""

    @staticmethod
    def forward(
        ctx: Any,
        query_MH: Tensor,
        key_NH: Tensor,
        value_NH: Tensor,
        groups: list[tuple[_Part, _Part]],
        dropout: float,
        seed: int,
    ) -> Tensor:
        ctx.save_for_backward(query_MH, key_NH, value_NH)
        ctx.groups, ctx.dropout, ctx.seed = groups, dropout, seed
        mixed_MH = torch.empty_like(query_MH)

        def mix(numbered: tuple[int, tuple[_Part, _Part]]) -> None:
            number, (asking, asked) = numbered
            share_Gmn = _shares(asking.of(query_MH), asked.of(key_NH))
            if dropout:
                clear(share_Gmn, kept(share_Gmn, (seed, number), dropout))
            asking.put(torch.bmm(share_Gmn, asked.of(value_NH)), mixed_MH)

        share_out(mix, list(enumerate(groups)))
        return mixed_MH.div_(1 - dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query_MH, key_NH, value_NH = ctx.saved_tensors
        to_mixed_MH = gradients[0] / (1 - ctx.dropout)
        to_query_MH, to_key_NH, to_value_NH = map(torch.empty_like, (query_MH, key_NH, value_NH))

        def unmix(numbered: tuple[int, tuple[_Part, _Part]]) -> None:
            number, (asking, asked) = numbered
            query_Gmd, to_mixed_Gmd = asking.of(query_MH), asking.of(to_mixed_MH)
            key_Gnd = asked.of(key_NH)
            share_Gmn = _shares(query_Gmd, key_Gnd)
            to_share_Gmn = torch.bmm(to_mixed_Gmd, asked.of(value_NH).transpose(1, 2))
            used_Gmn = share_Gmn
            if ctx.dropout:
                kept_Gmn = kept(share_Gmn, (ctx.seed, number), ctx.dropout)
                clear(to_share_Gmn, kept_Gmn)
                used_Gmn = clear(share_Gmn.clone(), kept_Gmn)
            asked.put(torch.bmm(used_Gmn.transpose(1, 2), to_mixed_Gmd), to_value_NH)
            to_score_Gmn = torch._softmax_backward_data(to_share_Gmn, share_Gmn, -1, share_Gmn.dtype)
            scale = query_Gmd.shape[2] ** -0.5
            asking.put(torch.bmm(to_score_Gmn, key_Gnd).mul_(scale), to_query_MH)
            asked.put(torch.bmm(to_score_Gmn.transpose(1, 2), query_Gmd).mul_(scale), to_key_NH)

        share_out(unmix, list(enumerate(ctx.groups)))
        return to_query_MH, to_key_NH, to_value_NH, None, None, None


def _shares(query_Gmd: Tensor, key_Gnd: Tensor) -> Tensor:
    """How much each asking token takes of each other -> [G, m, n]."""
    return torch.bmm(query_Gmd * query_Gmd.shape[2] ** -0.5, key_Gnd.transpose(1, 2)).softmax(dim=-1)
