"""A BERT's layers on a CPU without padding: the tokens of all rows in one array, attention a row at a time.

The weights and the numbers are those of transformers' `BertModel`, which runs on every other device. What it costs there is
padding in every layer, scores [B, A, T, T] that go to memory and back for each of the mask, the softmax and the dropout, and
float32 scores wherever a row is padded. Here a row's scores stay in the cache, nothing is computed for padding, and the
backward pass forms the scores again instead of keeping them.

Letters: B rows, T tokens of the longest row, N tokens of all rows, n of one row, M and m those that ask, P wanted ones,
H hidden, A heads, d hidden of a head.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import BertModel

from realm.model.dropout import clear, kept, new_seed
from realm.text.inputs import Tokens


def hidden_states(trunk: BertModel, tokens: Tokens) -> Tensor:
    """States of the last layer -> [B, T, H]; those of padding mean nothing."""
    if tokens.ids_BT.device.type != "cpu":
        states = trunk(tokens.ids_BT, attention_mask=tokens.mask_BT, token_type_ids=tokens.segments_BT)
        return states.last_hidden_state
    place_N = tokens.mask_BT.flatten().nonzero().squeeze(1)
    state_NH = _run(trunk, tokens, place_N, None)
    rows, length = tokens.ids_BT.shape
    padded = state_NH.new_zeros(rows * length, state_NH.shape[1]).index_copy(0, place_N, state_NH)
    return padded.view(rows, length, -1)


def states_at(trunk: BertModel, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
    """States of the last layer at the given (row, position) pairs -> [P, H].

    On a CPU the last layer computes nothing but keys and values for the other tokens: of 6 layers, a seventh is saved.
    """
    if tokens.ids_BT.device.type != "cpu":
        return hidden_states(trunk, tokens)[row_P, position_P]
    place_N = tokens.mask_BT.flatten().nonzero().squeeze(1)
    order_P = row_P.argsort(stable=True)
    number_P = torch.searchsorted(place_N, row_P * tokens.ids_BT.shape[1] + position_P)
    wanted = _Wanted(number_P[order_P], row_P.bincount(minlength=len(tokens.ids_BT)).tolist())
    return _run(trunk, tokens, place_N, wanted)[order_P.argsort()]


class _Wanted(NamedTuple):
    """Tokens whose last state is asked for: their numbers among all tokens, row by row, and how many each row has."""

    number_P: Tensor
    lengths: list[int]


def _run(trunk: BertModel, tokens: Tokens, place_N: Tensor, wanted: _Wanted | None) -> Tensor:
    """Last states of the tokens at `place_N` of the padded rows, or of those that are wanted -> [N or P, H]."""
    state_NH = _embeddings(trunk, tokens, place_N)
    lengths = tokens.mask_BT.sum(dim=1).tolist()
    last = len(trunk.encoder.layer) - 1
    for number, layer in enumerate(trunk.encoder.layer):
        attention = layer.attention.self
        # Cast once for the three products that read it; what is added up between layers stays float32.
        read_NH = (
            state_NH.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else state_NH
        )
        asking_NH, asking = read_NH, lengths
        if wanted is not None and number == last:
            asking_NH, state_NH, asking = read_NH[wanted.number_P], state_NH[wanted.number_P], wanted.lengths
        dropout = attention.dropout.p if attention.training else 0.0
        mixed_NH = _Attention.apply(
            attention.query(asking_NH),
            attention.key(read_NH),
            attention.value(read_NH),
            asking,
            lengths,
            attention.num_attention_heads,
            dropout,
            new_seed() if dropout else 0,
        )
        state_NH = layer.attention.output(mixed_NH, state_NH)
        state_NH = layer.output(layer.intermediate(state_NH), state_NH)
    return state_NH


def _embeddings(trunk: BertModel, tokens: Tokens, place_N: Tensor) -> Tensor:
    """What the first layer reads of the tokens at `place_N` -> [N, H]."""
    parts = trunk.embeddings
    state_NH = (
        parts.word_embeddings(tokens.ids_BT.flatten()[place_N])
        + parts.token_type_embeddings(tokens.segments_BT.flatten()[place_N])
        + parts.position_embeddings(place_N % tokens.ids_BT.shape[1])
    )
    return parts.dropout(parts.LayerNorm(state_NH))


class _Attention(torch.autograd.Function):
    """Queries [M, H], keys and values [N, H] of all rows -> softmax(q k / sqrt(d)) v [M, H], each row for itself."""

    @staticmethod
    def forward(
        ctx: Any,
        query_MH: Tensor,
        key_NH: Tensor,
        value_NH: Tensor,
        asking: Sequence[int],
        lengths: Sequence[int],
        heads: int,
        dropout: float,
        seed: int,
    ) -> Tensor:
        """`asking` and `lengths` are each row's share of the queries and of the keys."""
        scaled_MH = query_MH * (query_MH.shape[1] // heads) ** -0.5
        ctx.save_for_backward(scaled_MH, key_NH, value_NH)
        ctx.asking, ctx.lengths, ctx.heads, ctx.dropout, ctx.seed = asking, lengths, heads, dropout, seed
        mixed_MH = torch.empty_like(query_MH)
        draws = np.random.SFC64(seed)
        with torch.autocast("cpu", enabled=False):
            for (query_Amd, mixed_Amd), (key_And, value_And) in zip(
                _rows(asking, heads, scaled_MH, mixed_MH),
                _rows(lengths, heads, key_NH, value_NH),
                strict=True,
            ):
                share_Amn = torch.bmm(query_Amd, key_And.transpose(1, 2)).softmax(dim=-1)
                if dropout:
                    clear(share_Amn, kept(share_Amn, draws, dropout))
                mixed_Amd.copy_(torch.bmm(share_Amn, value_And))
        return mixed_MH.div_(1 - dropout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled_MH, key_NH, value_NH = ctx.saved_tensors
        to_mixed_MH = gradients[0] / (1 - ctx.dropout)
        to_query_MH, to_key_NH, to_value_NH = (
            torch.empty_like(part) for part in (scaled_MH, key_NH, value_NH)
        )
        draws = np.random.SFC64(ctx.seed)
        asking = _rows(ctx.asking, ctx.heads, scaled_MH, to_mixed_MH, to_query_MH)
        asked = _rows(ctx.lengths, ctx.heads, key_NH, value_NH, to_key_NH, to_value_NH)
        with torch.autocast("cpu", enabled=False):
            for (query_Amd, to_mixed_Amd, to_query_Amd), (
                key_And,
                value_And,
                to_key_And,
                to_value_And,
            ) in zip(asking, asked, strict=True):
                share_Amn = torch.bmm(query_Amd, key_And.transpose(1, 2)).softmax(dim=-1)
                to_share_Amn = torch.bmm(to_mixed_Amd, value_And.transpose(1, 2))
                used_Amn = share_Amn
                if ctx.dropout:
                    kept_Amn = kept(share_Amn, draws, ctx.dropout)
                    clear(to_share_Amn, kept_Amn)
                    used_Amn = clear(share_Amn.clone(), kept_Amn)
                to_value_And.copy_(torch.bmm(used_Amn.transpose(1, 2), to_mixed_Amd))
                to_score_Amn = torch._softmax_backward_data(to_share_Amn, share_Amn, -1, share_Amn.dtype)
                to_query_Amd.copy_(torch.bmm(to_score_Amn, key_And))
                to_key_And.copy_(torch.bmm(to_score_Amn.transpose(1, 2), query_Amd))
        to_query_MH *= (scaled_MH.shape[1] // ctx.heads) ** -0.5
        return to_query_MH, to_key_NH, to_value_NH, None, None, None, None, None


def _rows(lengths: Sequence[int], heads: int, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each row's share of every part [N, H], by heads -> views [A, n, d]."""
    width = parts[0].shape[1] // heads
    split = [part.view(len(part), heads, width).transpose(0, 1).split(lengths, dim=1) for part in parts]
    return zip(*split, strict=True)
