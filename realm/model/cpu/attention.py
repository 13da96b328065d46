"""Attention on a CPU without padding: the tokens of all rows in one array, a few rows at a time.

A plain implementation moves the scores [B, A, T, T] to memory and back for the mask, the softmax and the dropout, and computes
them in float32 if any row is padded. Here rows of the same length are multiplied together, as many as have scores that fit into
the cache, and one number per score is kept for the backward pass.

Axis letters: B rows, T tokens of the longest row, N tokens of all rows, n tokens of one row, M query tokens of all rows, m
query tokens of one row, H hidden, A heads, d hidden of a head, G heads of all rows that are multiplied together."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from realm.model.cpu.dropout import clear, mark, new_seed, unmarked
from realm.model.cpu.threads import thread_map

SCORES = 1 << 18
"""Attention scores that are computed together, if that is more than one row."""
EVEN = 32
"""bf16 numbers in a vector register."""


def attend(
    query_MH: Tensor,
    key_NH: Tensor,
    value_NH: Tensor,
    asking: Sequence[int],
    lengths: Sequence[int],
    heads: int,
    dropout: float,
) -> Tensor:
    """Attention within each row, softmax(q k / sqrt(d)) v -> [M, H]; `lengths` counts the tokens of a row, `asking` its
    queries."""
    groups = list(_groups(asking, lengths, heads, query_MH.dtype))
    seed = new_seed() if dropout else 0
    mixed_MH: Tensor = _Attention.apply(
        query_MH, key_NH, value_NH, groups, dropout, seed, torch.is_grad_enabled()
    )
    return mixed_MH


class _Part(NamedTuple):
    """Tokens of some rows of one length, by heads, among the tokens of all rows [N, H]."""

    start: int
    rows: int
    length: int
    heads: int
    room: int
    """Padded length."""

    def of(self, all_NH: Tensor) -> Tensor:
        """A copy of these tokens by heads, with zeros in the padding -> [G, n, d]."""
        view = self._view(all_NH)
        if self.room > self.length:
            view = F.pad(view, (0, 0, 0, self.room - self.length))
        return view.reshape(self.rows * self.heads, self.room, view.shape[3])

    def put(self, part_Gnd: Tensor, all_NH: Tensor) -> None:
        """Writes the values of these tokens."""
        view = self._view(all_NH)
        view.copy_(part_Gnd.view(self.rows, self.heads, self.room, part_Gnd.shape[2])[:, :, : self.length])

    def _view(self, all_NH: Tensor) -> Tensor:
        own_NH = all_NH[self.start : self.start + self.rows * self.length]
        width = all_NH.shape[1] // self.heads
        return own_NH.view(self.rows, self.length, self.heads, width).transpose(1, 2)


def _groups(
    asking: Sequence[int], lengths: Sequence[int], heads: int, dtype: torch.dtype
) -> Iterator[tuple[_Part, _Part]]:
    """Groups of rows that are multiplied together: their query tokens and their key tokens."""
    asking_start = start = 0
    for (wanted, length), alike in groupby(zip(asking, lengths, strict=True)):
        left, room, wanted_room = len(list(alike)), _room(length, dtype), _room(wanted, dtype)
        while left:
            rows = min(left, max(1, SCORES // max(1, heads * wanted_room * room)))
            yield (
                _Part(asking_start, rows, wanted, heads, wanted_room),
                _Part(start, rows, length, heads, room),
            )
            asking_start, start, left = asking_start + rows * wanted, start + rows * length, left - rows


def _room(length: int, dtype: torch.dtype) -> int:
    """The padded length. oneDNN compiles a kernel for each length of bf16 products, and torch's bf16 softmax is slow for the
    rest of a row that fills no register; float32 needs no padding."""
    return -(-length // EVEN) * EVEN if dtype == torch.bfloat16 and length > EVEN else length


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_MH: Tensor,
        key_NH: Tensor,
        value_NH: Tensor,
        groups: list[tuple[_Part, _Part]],
        dropout: float,
        seed: int,
        learns: bool,
    ) -> Tensor:
        mixed_MH = torch.empty_like(query_MH)

        def mix(numbered: tuple[int, tuple[_Part, _Part]]) -> Tensor | None:
            number, (asking, asked) = numbered
            query_Gmd = asking.of(query_MH)
            query_Gmd = query_Gmd * query_Gmd.shape[2] ** -0.5
            score_Gmn = torch.bmm(query_Gmd, asked.of(key_NH).transpose(1, 2))
            score_Gmn[:, :, asked.length :] = -torch.inf
            share_Gmn = score_Gmn.softmax(dim=-1)
            used_Gmn = mark(share_Gmn, (seed, number), dropout).relu() if dropout else share_Gmn
            asking.put(torch.bmm(used_Gmn, asked.of(value_NH)), mixed_MH)
            return share_Gmn if learns else None

        shares = thread_map(mix, list(enumerate(groups)))
        ctx.groups, ctx.dropout = groups, dropout
        if learns:
            ctx.save_for_backward(query_MH, key_NH, value_NH, *shares)
        return mixed_MH.div_(1 - dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query_MH, key_NH, value_NH, *shares = ctx.saved_tensors
        to_mixed_MH = gradients[0] / (1 - ctx.dropout)
        to_query_MH, to_key_NH, to_value_NH = map(torch.empty_like, (query_MH, key_NH, value_NH))

        def unmix(group: tuple[Tensor, tuple[_Part, _Part]]) -> None:
            share_Gmn, (asking, asked) = group
            query_Gmd, to_mixed_Gmd = asking.of(query_MH), asking.of(to_mixed_MH)
            to_share_Gmn = torch.bmm(to_mixed_Gmd, asked.of(value_NH).transpose(1, 2))
            used_Gmn = share_Gmn
            if ctx.dropout:
                clear(to_share_Gmn, unmarked(share_Gmn))
                used_Gmn, share_Gmn = share_Gmn.relu(), share_Gmn.abs()
            asked.put(torch.bmm(used_Gmn.transpose(1, 2), to_mixed_Gmd), to_value_NH)
            to_score_Gmn = torch._softmax_backward_data(to_share_Gmn, share_Gmn, -1, share_Gmn.dtype)
            scale = query_Gmd.shape[2] ** -0.5
            asking.put(torch.bmm(to_score_Gmn, asked.of(key_NH)).mul_(scale), to_query_MH)
            asked.put(torch.bmm(to_score_Gmn.transpose(1, 2), query_Gmd).mul_(scale), to_key_NH)

        thread_map(unmix, list(zip(shares, ctx.groups, strict=True)))
        return to_query_MH, to_key_NH, to_value_NH, None, None, None, None
