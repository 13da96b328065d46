"""The layers of a BERT on a GPU without padding, by torch's flash attention and the kernels of `realm.model.fused`.

The tokens of all rows are in one array, and flash attention knows where each row begins. The CPU knows all sizes, so it does
not wait for results of the GPU.

Torch has two other ways to the same kernel: nested tensors, which take several milliseconds per layer on the CPU, and
`torch.nn.attention.varlen`, which has no dropout.

Axis letters: B rows, T tokens of the longest row, N tokens of all rows, P requested tokens, H hidden, A heads, d hidden of a
head.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.model.bert import AddedLayer, Bert, BertLayer
from realm.model.device import compiles_kernels
from realm.tokens.layouts import Tokens

LARGEST_HEAD, HEAD_STEP = 192, 8
"""Flash attention trains heads of up to 192 numbers on every GPU that has the kernel, in multiples of 8."""
WIDEST = 8192
"""Largest hidden size for the kernels of `realm.model.fused`, which keep a whole state in registers."""


class Rows(NamedTuple):
    """Where each row begins in the array of all tokens."""

    offset_B: Tensor
    """Start of each row, and the end of the last one -> [B + 1] int32."""
    longest: int
    """Tokens of the longest row, or more."""


def is_possible(bert: Bert, device: torch.device) -> bool:
    """Whether flash attention can compute this network here: on NVIDIA GPUs since Ampere, if matrix products have 16 bits."""
    if device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return False
    size = bert.config.hidden_size // bert.config.num_attention_heads
    return _has_kernel(device) and size <= LARGEST_HEAD and size % HEAD_STEP == 0


@cache
def _has_kernel(device: torch.device) -> bool:
    built = torch.backends.cuda.is_flash_attention_available() and torch.version.hip is None
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def _is_fused(bert: Bert, device: torch.device) -> bool:
    """Whether the kernels of `realm.model.fused` compute these layers here."""
    fits = bert.config.hidden_size <= WIDEST
    gelu = isinstance(bert.encoder.layer[0].intermediate.activation, nn.GELU)
    return fits and gelu and _fused_kernels_run(device)


@cache
def _fused_kernels_run(device: torch.device) -> bool:
    """Whether the kernels run here, and are right: Triton needs a C compiler."""
    if not compiles_kernels(device):
        return False
    from realm.model import fused

    return fused.are_right(fused.added, fused.activated, device)


def hidden_states(bert: Bert, tokens: Tokens) -> Tensor:
    """States of the last layer -> [B, T, H]; states of padding are 0."""
    place_N, rows, state_NH = _embedded(bert, tokens)
    for layer in bert.encoder.layer:
        state_NH = _next_states(layer, state_NH, rows)
    padded = state_NH.new_zeros(tokens.ids_BT.numel(), state_NH.shape[1]).index_copy(0, place_N, state_NH)
    return _in_full(padded.view(*tokens.ids_BT.shape, -1))


def states_at(bert: Bert, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
    """States of the last layer at the given (row, position) pairs, each a token and not padding -> [P, H].

    The last layer is computed for these tokens only.
    """
    _, rows, state_NH = _embedded(bert, tokens)
    *before, last = bert.encoder.layer
    for layer in before:
        state_NH = _next_states(layer, state_NH, rows)
    if not len(row_P):
        # So that the gradient of every weight is 0, and not None.
        return _in_full(_next_states(last, state_NH, rows)[:0])
    row_P, order_P = row_P.sort(stable=True)
    asked_P = rows.offset_B[row_P] + position_P[order_P]
    row_B = torch.arange(len(rows.offset_B), device=row_P.device)
    asked = Rows(torch.searchsorted(row_P, row_B, out_int32=True), len(row_P))
    state_PH = _last_states(last, state_NH, rows, asked_P, asked)
    return _in_full(torch.empty_like(state_PH).index_copy(0, order_P, state_PH))


def _in_full(state: Tensor) -> Tensor:
    """States in float32, as all other ways give them."""
    return state.float() if state.dtype == torch.bfloat16 else state


def _embedded(bert: Bert, tokens: Tokens) -> tuple[Tensor, Rows, Tensor]:
    """Places of all tokens among the padded rows [N], starts of the rows, and the input of the first layer [N, H]."""
    device, length_B, width = tokens.ids_BT.device, tokens.length_B, tokens.ids_BT.shape[1]
    end_B = length_B.cumsum(0)
    first_B = torch.arange(len(length_B)) * width - end_B + length_B
    # Only a few numbers are copied: for large copies the CPU would wait until the GPU has computed all before.
    count, (first_B, there_B) = int(end_B[-1]), torch.stack([first_B, length_B]).to(device, non_blocking=True)
    place_N = torch.arange(count, device=device) + first_B.repeat_interleave(there_B, output_size=count)
    offset_B = F.pad(end_B, (1, 0)).int().to(device, non_blocking=True)
    state_NH = bert.embeddings(
        tokens.ids_BT.flatten()[place_N], tokens.segments_BT.flatten()[place_N], place_N % width
    )
    if _is_fused(bert, device):
        state_NH = state_NH.bfloat16()  # which all layers keep, and `_after_attention` recognises
    return place_N, Rows(offset_B, int(length_B.max())), state_NH


def _next_states(layer: BertLayer, state_NH: Tensor, rows: Rows) -> Tensor:
    own = layer.attention.self
    query_NAd, key_NAd, value_NAd = _products(
        state_NH, own.num_attention_heads, own.query, own.key, own.value
    )
    mixed_NAd = attend(query_NAd, key_NAd, value_NAd, rows, rows, own.dropout.p if own.training else 0.0)
    return _after_attention(layer, mixed_NAd.flatten(1), state_NH)


def _last_states(layer: BertLayer, state_NH: Tensor, rows: Rows, asked_P: Tensor, asked: Rows) -> Tensor:
    """States after a layer at the tokens `asked_P`; `asked` has the part of each row among these tokens."""
    own, asked_PH = layer.attention.self, state_NH[asked_P]
    (query_PAd,) = _products(asked_PH, own.num_attention_heads, own.query)
    key_NAd, value_NAd = _products(state_NH, own.num_attention_heads, own.key, own.value)
    mixed_PAd = attend(query_PAd, key_NAd, value_NAd, asked, rows, own.dropout.p if own.training else 0.0)
    return _after_attention(layer, mixed_PAd.flatten(1), asked_PH)


def _after_attention(layer: BertLayer, mixed_NH: Tensor, state_NH: Tensor) -> Tensor:
    if state_NH.dtype != torch.bfloat16:  # without the fused kernels
        return layer.after_attention(mixed_NH, state_NH)
    from realm.model.fused import activated

    state_NH = _added(layer.attention.output, mixed_NH, state_NH)
    dense = layer.intermediate.dense
    tanh = cast(nn.GELU, layer.intermediate.activation).approximate == "tanh"
    hidden_NF = activated(F.linear(state_NH, dense.weight), dense.bias, tanh)
    return _added(layer.output, hidden_NF, state_NH)


def _added(part: AddedLayer, found: Tensor, given: Tensor) -> Tensor:
    from realm.model.fused import added

    dense, norm = part.dense, part.LayerNorm
    dropout = part.dropout.p if part.training else 0.0
    return added(F.linear(found, dense.weight), dense.bias, given, norm.weight, norm.bias, norm.eps, dropout)


def _products(state_NH: Tensor, heads: int, *layers: nn.Linear) -> Sequence[Tensor]:
    """The results of several linear layers -> [N, A, d] for each, by one matrix product, which reads the states once."""
    weight, bias = (torch.cat([getattr(one, name) for one in layers]) for name in ("weight", "bias"))
    return F.linear(state_NH, weight, bias).unflatten(1, (len(layers), heads, -1)).unbind(1)


def attend(
    query_PAd: Tensor, key_NAd: Tensor, value_NAd: Tensor, asked: Rows, rows: Rows, dropout: float
) -> Tensor:
    """Attention inside each row -> [P, A, d]; `asked` and `rows` say where each row begins among queries and among keys."""
    found: Tensor = torch.ops.aten._flash_attention_forward(
        query_PAd, key_NAd, value_NAd, asked.offset_B, rows.offset_B, asked.longest, rows.longest, dropout,
        is_causal=False, return_debug_mask=False,
    )[0]  # fmt: skip
    return found
