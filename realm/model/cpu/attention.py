"""Attention on a CPU without padding: the tokens of all rows are in one array, and a few rows are computed at a time.

A plain implementation writes the scores [B, A, T, T] to memory and reads the scores again for the mask, for the softmax and for
the dropout. If a row is padded, the scores are float32. This implementation multiplies rows of the same length together, and
only as many rows at a time as have scores that fit into the cache. For the backward pass, one number per score is kept.

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
"""Largest number of attention scores that are computed together; a single row may have more."""
EVEN = 32
"""Number of bf16 values in a vector register of 512 bits."""


def attend(
    query_MH: Tensor,
    key_NH: Tensor,
    value_NH: Tensor,
    asking: Sequence[int],
    lengths: Sequence[int],
    heads: int,
    dropout: float,
) -> Tensor:
    """Attention within each row, softmax(q k / sqrt(d)) v -> [M, H].

    `lengths` has the number of tokens of each row, `asking` the number of query tokens of each row.
    """
    groups = list(_groups(asking, lengths, heads, query_MH.dtype))
    seed = new_seed() if dropout else 0
    mixed_MH: Tensor = _Attention.apply(
        query_MH, key_NH, value_NH, groups, dropout, seed, torch.is_grad_enabled()
    )
    return mixed_MH


class _Part(NamedTuple):
    """The place of some rows of equal length in an array with the tokens of all rows, and the number of heads."""

    start: int
    rows: int
    length: int
    heads: int
    room: int
    """Padded length."""

    def of(self, all_NH: Tensor) -> Tensor:
        """A copy of the tokens of these rows, separated by heads, with zeros as padding -> [G, n, d]."""
        view = self._view(all_NH)
        if self.room > self.length:
            view = F.pad(view, (0, 0, 0, self.room - self.length))
        return view.reshape(self.rows * self.heads, self.room, view.shape[3])

    def put(self, part_Gnd: Tensor, all_NH: Tensor) -> None:
        """Writes `part_Gnd` without its padding to the place of these rows in `all_NH`."""
        view = self._view(all_NH)
        view.copy_(part_Gnd.view(self.rows, self.heads, self.room, part_Gnd.shape[2])[:, :, : self.length])

    def _view(self, all_NH: Tensor) -> Tensor:
        own_NH = all_NH[self.start : self.start + self.rows * self.length]
        width = all_NH.shape[1] // self.heads
        return own_NH.view(self.rows, self.length, self.heads, width).transpose(1, 2)


def _groups(
    asking: Sequence[int], lengths: Sequence[int], heads: int, dtype: torch.dtype
) -> Iterator[tuple[_Part, _Part]]:
    """The groups of rows that are multiplied together: the places of the query tokens and of the key tokens of each group."""
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
    """The padded length of a row: with bf16, lengths above `EVEN` are rounded up to a multiple of `EVEN`.

    For bf16, oneDNN compiles a kernel for each length of a product, and torch's softmax is slow if the end of a row does not
    fill a register.
    """
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
