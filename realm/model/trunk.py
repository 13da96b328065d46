"""A BERT's layers on a CPU without padding: the tokens of all rows in one array, attention a row at a time.

The weights and the numbers are those of transformers' `BertModel`, which runs on every other device. What it costs there is
padding in every layer, scores [B, A, T, T] that go to memory and back for each of the mask, the softmax and the dropout, and
float32 scores wherever a row is padded. Here a row's scores stay in the cache, nothing is computed for padding, and the
backward pass forms the scores again instead of keeping them.

Letters: B rows, T tokens of the longest row, N tokens of all rows, n of one row, H hidden, A heads, d hidden of a head.
"""

from collections.abc import Iterator, Sequence
from typing import Any

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
    state_NH = _embeddings(trunk, tokens, place_N)
    lengths = tokens.mask_BT.sum(dim=1).tolist()
    for layer in trunk.encoder.layer:
        attention = layer.attention.self
        # Cast once for the three products that read it; what is added up between layers stays float32.
        read_NH = (
            state_NH.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else state_NH
        )
        dropout = attention.dropout.p if attention.training else 0.0
        mixed_NH = _Attention.apply(
            attention.query(read_NH),
            attention.key(read_NH),
            attention.value(read_NH),
            lengths,
            attention.num_attention_heads,
            dropout,
            new_seed() if dropout else 0,
        )
        state_NH = layer.attention.output(mixed_NH, state_NH)
        state_NH = layer.output(layer.intermediate(state_NH), state_NH)
    rows, length = tokens.ids_BT.shape
    padded = state_NH.new_zeros(rows * length, state_NH.shape[1]).index_copy(0, place_N, state_NH)
    return padded.view(rows, length, -1)


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
    """Queries, keys and values of all rows [N, H] -> softmax(q k / sqrt(d)) v [N, H], each row for itself."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NH: Tensor,
        key_NH: Tensor,
        value_NH: Tensor,
        lengths: Sequence[int],
        heads: int,
        dropout: float,
        seed: int,
    ) -> Tensor:
        scaled_NH = query_NH * (query_NH.shape[1] // heads) ** -0.5
        ctx.save_for_backward(scaled_NH, key_NH, value_NH)
        ctx.lengths, ctx.heads, ctx.dropout, ctx.seed = lengths, heads, dropout, seed
        mixed_NH = torch.empty_like(query_NH)
        draws = np.random.SFC64(seed)
        with torch.autocast("cpu", enabled=False):
            for query_And, key_And, value_And, mixed_And in _rows(
                lengths, heads, scaled_NH, key_NH, value_NH, mixed_NH
            ):
                share_Ann = torch.bmm(query_And, key_And.transpose(1, 2)).softmax(dim=-1)
                if dropout:
                    clear(share_Ann, kept(share_Ann, draws, dropout))
                mixed_And.copy_(torch.bmm(share_Ann, value_And))
        return mixed_NH.div_(1 - dropout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled_NH, key_NH, value_NH = ctx.saved_tensors
        to_mixed_NH = gradients[0] / (1 - ctx.dropout)
        to_query_NH, to_key_NH, to_value_NH = (torch.empty_like(scaled_NH) for _ in range(3))
        draws = np.random.SFC64(ctx.seed)
        with torch.autocast("cpu", enabled=False):
            for query_And, key_And, value_And, to_mixed_And, to_query_And, to_key_And, to_value_And in _rows(
                ctx.lengths, ctx.heads,
                scaled_NH, key_NH, value_NH, to_mixed_NH, to_query_NH, to_key_NH, to_value_NH,
            ):  # fmt: skip
                share_Ann = torch.bmm(query_And, key_And.transpose(1, 2)).softmax(dim=-1)
                to_share_Ann = torch.bmm(to_mixed_And, value_And.transpose(1, 2))
                used_Ann = share_Ann
                if ctx.dropout:
                    kept_Ann = kept(share_Ann, draws, ctx.dropout)
                    clear(to_share_Ann, kept_Ann)
                    used_Ann = clear(share_Ann.clone(), kept_Ann)
                to_value_And.copy_(torch.bmm(used_Ann.transpose(1, 2), to_mixed_And))
                to_score_Ann = torch._softmax_backward_data(to_share_Ann, share_Ann, -1, share_Ann.dtype)
                to_query_And.copy_(torch.bmm(to_score_Ann, key_And))
                to_key_And.copy_(torch.bmm(to_score_Ann.transpose(1, 2), query_And))
        to_query_NH *= (scaled_NH.shape[1] // ctx.heads) ** -0.5
        return to_query_NH, to_key_NH, to_value_NH, None, None, None, None


def _rows(lengths: Sequence[int], heads: int, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each row's share of every part [N, H], by heads -> views [A, n, d]."""
    split = [part.view(len(part), heads, -1).transpose(0, 1).split(lengths, dim=1) for part in parts]
    return zip(*split, strict=True)
