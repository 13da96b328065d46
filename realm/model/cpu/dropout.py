"""Fast dropout on CPUs: random bits are drawn a word at a time, and kept as a seed instead of a mask.

torch draws one element at a time from a Mersenne Twister. Here each word of SFC64 gives four 16-bit draws, and a bitwise "and"
clears dropped elements, which is about ten times as fast. The backward pass draws the same bits again from the seed, so no mask
is stored. The seed comes from torch's generator: equal seeds there give equal steps with the same number of threads. Numbers
that are never negative can carry the mask in their signs instead.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from realm.model.cpu.threads import thread_map

DRAWS = 1 << 16
"""Dropout probabilities are multiples of 1 / DRAWS."""

PIECE = 1 << 18
"""Elements for which one thread draws at a time."""

SIGNED = {2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}
"""Integer types by their size in bytes."""

_OWN = threading.local()


class FastDropout(nn.Dropout):
    """`nn.Dropout` with a faster generator on CPUs; on other devices it is `nn.Dropout`."""

    def forward(self, values: Tensor) -> Tensor:
        if values.device.type != "cpu":
            return super().forward(values)
        if not self.training or self.p == 0:
            return values
        dropped: Tensor = _Dropped.apply(values, self.p, new_seed())
        return dropped


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, probability: float, seed: int) -> Tensor:
        ctx.probability, ctx.seed = probability, seed
        scaled = (values / (1 - probability)).contiguous()

        def drop(piece: tuple[int, Tensor]) -> None:
            number, part_n = piece
            clear(part_n, kept(part_n, (seed, number), probability))

        thread_map(drop, list(enumerate(scaled.view(-1).split(PIECE))))
        return scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Dropped.forward(ctx, gradients[0], ctx.probability, ctx.seed), None, None


def new_seed() -> int:
    """A seed from torch's generator, or inside `drawing_from` from this thread's generator."""
    return int(torch.randint(2**62, (), generator=getattr(_OWN, "generator", None)))


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Inside, the seeds of this thread follow from `seed`, independent of other threads."""
    before = getattr(_OWN, "generator", None)
    _OWN.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        _OWN.generator = before


def kept(values: Tensor, seed: tuple[int, int], probability: float) -> Tensor:
    """All bits set where an element is kept, none where it is dropped -> integers of the shape and width of `values`.

    The seed consists of the seed of all chunks and the number of this chunk.
    """
    stays_n = (_draws(values.numel(), seed) >= round(probability * DRAWS)).view(np.int8)
    bits_n = np.negative(stays_n, dtype=SIGNED[values.element_size()][0])
    return torch.from_numpy(bits_n).view(values.shape)


def clear(values: Tensor, bits: Tensor) -> Tensor:
    """`values`, changed in place: zero where `bits` are zero."""
    values.view(bits.dtype).bitwise_and_(bits)
    return values


def mark(values: Tensor, seed: tuple[int, int], probability: float) -> Tensor:
    """Non-negative `values`, changed in place: negative where an element is dropped.

    Their `relu` is the (unscaled) result of dropout, their `abs` the original values.
    """
    dropped_n = (_draws(values.numel(), seed) < round(probability * DRAWS)).view(np.int8)
    signed = SIGNED[values.element_size()]
    sign_n = np.left_shift(dropped_n, 8 * values.element_size() - 1, dtype=signed[0])
    values.view(signed[1]).bitwise_or_(torch.from_numpy(sign_n).view(values.shape))
    return values


def unmarked(marked: Tensor) -> Tensor:
    """The bits of `kept`, from the signs that `mark` set."""
    sign = marked.view(SIGNED[marked.element_size()][1])
    return (sign >> 8 * marked.element_size() - 1).bitwise_not_()


def _draws(count: int, seed: tuple[int, int]) -> np.ndarray:
    return np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.uint16)[:count]
