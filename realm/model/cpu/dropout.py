"""Fast dropout on CPUs: random bits are drawn 64 at a time, and a seed is stored in place of the mask.

torch draws a number from a Mersenne Twister for one element at a time. `FastDropout` makes four draws of 16 bits from each
64-bit word of SFC64, and clears dropped elements with a bitwise "and"; this is much faster than torch's dropout. The
backward pass draws the same bits again from the seed, so no mask is stored. The seed is drawn from torch's generator, so
training steps can be repeated exactly with the same `torch.manual_seed` and the same number of threads. In a tensor without
negative numbers, the signs can store the mask (`mark`).
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
"""Number of possible values of a draw; dropout probabilities are rounded to multiples of 1 / DRAWS."""

PIECE = 1 << 18
"""Number of elements in a chunk; each chunk is computed by one thread."""

SIGNED = {2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}
"""Integer types of NumPy and torch by size in bytes."""

_OWN = threading.local()


class FastDropout(nn.Dropout):
    """`nn.Dropout` with a faster random generator on CPUs; on other devices the same as `nn.Dropout`."""

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
    """A seed from torch's generator, or, inside `drawing_from`, from the generator of this thread."""
    return int(torch.randint(2**62, (), generator=getattr(_OWN, "generator", None)))


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """A context in which the results of `new_seed` in this thread depend only on `seed`, and not on other threads."""
    before = getattr(_OWN, "generator", None)
    _OWN.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        _OWN.generator = before


def kept(values: Tensor, seed: tuple[int, int], probability: float) -> Tensor:
    """A bit mask for each element: all bits are 1 for a kept element, and 0 for a dropped element.

    The masks are integers with the shape of `values` and the bytes per element of `values`. `seed` consists of the seed of all
    chunks and the number of the chunk.
    """
    stays_n = (_draws(values.numel(), seed) >= round(probability * DRAWS)).view(np.int8)
    bits_n = np.negative(stays_n, dtype=SIGNED[values.element_size()][0])
    return torch.from_numpy(bits_n).view(values.shape)


def clear(values: Tensor, bits: Tensor) -> Tensor:
    """Sets `values` to zero, in place, where `bits` are zero -> `values`."""
    values.view(bits.dtype).bitwise_and_(bits)
    return values


def mark(values: Tensor, seed: tuple[int, int], probability: float) -> Tensor:
    """Makes dropped elements of non-negative `values` negative, in place -> `values`.

    Afterwards, `relu` of `values` is the result of dropout without scaling, and `abs` of `values` is the original tensor.
    """
    dropped_n = (_draws(values.numel(), seed) < round(probability * DRAWS)).view(np.int8)
    signed = SIGNED[values.element_size()]
    sign_n = np.left_shift(dropped_n, 8 * values.element_size() - 1, dtype=signed[0])
    values.view(signed[1]).bitwise_or_(torch.from_numpy(sign_n).view(values.shape))
    return values


def unmarked(marked: Tensor) -> Tensor:
    """The bit masks that `kept` makes, from the signs that `mark` has set."""
    sign = marked.view(SIGNED[marked.element_size()][1])
    return (sign >> 8 * marked.element_size() - 1).bitwise_not_()


def _draws(count: int, seed: tuple[int, int]) -> np.ndarray:
    return np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.uint16)[:count]
