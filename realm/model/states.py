"""States of the last layer of a BERT, computed without padding where this is possible.

    on a CPU                        `realm.model.cpu.packed`
    on a GPU                        `jagged_states`: the tokens of all rows are in one array, and torch's attention for jagged
                                    tensors knows where each row begins
    sharded weights, other devices  `Bert.forward`, which also computes padding

Axis letters: B rows, T tokens of the longest row, N tokens of all rows, P requested tokens, H hidden, A heads, d hidden of a
head.
"""

import warnings
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from realm.model.bert import Bert
from realm.model.cpu import packed
from realm.tokens.layouts import Tokens


def hidden_states(bert: Bert, tokens: Tokens) -> Tensor:
    """States of the last layer -> [B, T, H]; states of padding are undefined."""
    way = _way(bert, tokens)
    if way == "padded":
        return _padded_states(bert, tokens)
    if way == "packed":
        return packed.hidden_states(bert, tokens)
    place_N = _places(tokens)
    state_NH = jagged_states(bert, tokens, place_N)
    padded = state_NH.new_zeros(tokens.ids_BT.numel(), state_NH.shape[1]).index_copy(0, place_N, state_NH)
    return padded.view(*tokens.ids_BT.shape, -1)


def states_at(bert: Bert, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
    """States of the last layer at the given (row, position) pairs, each a token and not padding -> [P, H]."""
    way = _way(bert, tokens)
    if way == "padded":
        return _padded_states(bert, tokens)[row_P, position_P]
    if way == "packed":
        return packed.states_at(bert, tokens, row_P, position_P)
    ends_B = tokens.length_B.cumsum(0)
    starts_B = (ends_B - tokens.length_B).to(row_P.device, non_blocking=True)
    return jagged_states(bert, tokens, _places(tokens))[starts_B[row_P] + position_P]


def jagged_states(bert: Bert, tokens: Tokens, place_N: Tensor) -> Tensor:
    """States of all tokens -> [N, H]; `place_N` has their places among the padded rows.

    All sizes are known on the CPU, so no result of the device is needed to start the work.
    """
    _quiet()
    device, length_B = place_N.device, tokens.length_B
    state_NH = bert.embeddings(
        tokens.ids_BT.flatten()[place_N],
        tokens.segments_BT.flatten()[place_N],
        place_N % tokens.ids_BT.shape[1],
    )
    offsets = F.pad(length_B.cumsum(0), (1, 0)).to(device, non_blocking=True)
    shortest, longest = int(length_B.min()), int(length_B.max())
    for layer in bert.encoder.layer:
        attention = layer.attention.self
        heads = attention.num_attention_heads
        query_BATd, key_BATd, value_BATd = (
            torch.nested.nested_tensor_from_jagged(
                weights(state_NH).unflatten(1, (heads, -1)), offsets, min_seqlen=shortest, max_seqlen=longest
            ).transpose(1, 2)
            for weights in (attention.query, attention.key, attention.value)
        )
        dropout = attention.dropout.p if attention.training else 0.0
        mixed_BATd = F.scaled_dot_product_attention(query_BATd, key_BATd, value_BATd, dropout_p=dropout)
        mixed_NH = mixed_BATd.transpose(1, 2).values().flatten(1)
        state_NH = layer.attention.output(mixed_NH, state_NH)
        state_NH = layer.output(layer.intermediate(state_NH), state_NH)
    return state_NH


@cache
def _quiet() -> None:
    """Hides torch's warning that nested tensors may change; the version of torch is pinned."""
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)


def _places(tokens: Tokens) -> Tensor:
    """Place of each token among the padded rows -> [N]."""
    length_B, width = tokens.length_B, tokens.ids_BT.shape[1]
    first_B = torch.arange(len(length_B)) * width - length_B.cumsum(0) + length_B
    place_N = torch.arange(int(length_B.sum())) + first_B.repeat_interleave(length_B)
    return place_N.to(tokens.ids_BT.device, non_blocking=True)


def _padded_states(bert: Bert, tokens: Tokens) -> Tensor:
    states_BTH: Tensor = bert(tokens.ids_BT, tokens.mask_BT, tokens.segments_BT)
    return states_BTH


def _way(bert: Bert, tokens: Tokens) -> Literal["packed", "jagged", "padded"]:
    device = tokens.ids_BT.device.type
    if device == "cpu" and not bert.sharded:
        return "packed"
    has_padding = bool((tokens.length_B < tokens.ids_BT.shape[1]).any())
    return "jagged" if device == "cuda" and has_padding and not bert.sharded else "padded"
