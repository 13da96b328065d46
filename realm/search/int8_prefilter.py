"""The int8 prefilter: which passages can be among the best, decided with 8 bits per number.

An int8 dot product costs a quarter of a float32 one on CPUs that have instructions for it, and reads half the bytes of
float16. The quantization error of a vector has a known length, so by Cauchy and Schwarz the error of a score is bounded:

    q v - q' v' = q (v - v') + (q - q') v'  <=  |q| |v - v'| + |q - q'| |v'|

A passage whose approximate score lies further than this bound below the k-th best score cannot be among the k best. The
survivors, a few times k passages, are scored exactly. Vectors and queries are rotated before quantization: the rotation keeps
inner products and spreads each vector evenly over the dimensions, which makes the error small.

Axis letters: B queries, N passages, D embedding, n passages of a block, C survivors of all queries.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.search.threshold import GROUP, above_threshold, scratch_buffer

MULTIPLE = 256
"""The number of quantized passages is rounded up to a multiple of this, which `GROUP` divides."""
BLOCK = 1 << 11
"""Passages quantized at a time: 1 MB in float32 at D = 128."""


class Survivors(NamedTuple):
    """Passages that can be among the best of a query, in rising order of the query."""

    query_C: np.ndarray
    number_C: np.ndarray


@cache
def is_fast() -> bool:
    """Whether this CPU has int8 dot-product instructions (VNNI); without them sums may also saturate at 16 bits."""
    return bool(torch.cpu._is_vnni_supported())


def int8_products(query_BD: Tensor, vector_ND: Tensor, product_BN: Tensor) -> None:
    """Writes the int32 inner products of int8 vectors to `product_BN`. Kernels for other CPUs belong here and in `is_fast`."""
    torch._int_mm(query_BD, vector_ND.T, out=product_BN)


class Int8Vectors:
    """All vectors rotated and quantized to int8 with one common scale."""

    def __init__(self, vectors_ND: Tensor):
        count, dim = vectors_ND.shape
        noise_DD = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0))
        rotation_DD = torch.linalg.qr(noise_DD).Q.contiguous()
        self.rotation_DD = rotation_DD.double()
        self.int8_ND = torch.zeros(round_up(count), dim, dtype=torch.int8)
        sample_ND = vectors_ND[:: max(1, count // BLOCK)].double() @ self.rotation_DD
        self.scale = max(1.1 * float(sample_ND.abs().max()) / 127, 1e-30)
        self.length = self.error = 0.0
        """The largest |v'| and |v - v'|."""
        for start in range(0, count, BLOCK):
            with torch.autocast("cpu", enabled=False):
                rotated_nD = vectors_ND[start : start + BLOCK].float() @ rotation_DD
            # A number beyond the scale is clipped, which makes the error larger.
            int8_nD = (rotated_nD / self.scale).round_().clamp_(-127, 127)
            self.int8_ND[start : start + len(int8_nD)] = int8_nD.to(torch.int8)
            # NumPy's maximum keeps NaN, so that `finite` notices it.
            self.length = float(np.maximum(self.length, int8_nD.mul_(self.scale).norm(dim=1).max().item()))
            self.error = float(np.maximum(self.error, rotated_nD.sub_(int8_nD).norm(dim=1).max().item()))

    @property
    def finite(self) -> bool:
        """Whether the bounds are finite, as they are for finite vectors."""
        return bool(np.isfinite(self.length) and np.isfinite(self.error))


class QuantizedQueries:
    """Some queries rotated and quantized to int8, each with its own scale."""

    def __init__(self, vectors: Int8Vectors, query_BD: Tensor):
        rotated_BD = (query_BD.double() @ vectors.rotation_DD).numpy()  # autocast leaves float64 alone
        scale_B = np.maximum(np.abs(rotated_BD).max(1), 1e-30) / 127
        int8_BD = np.rint(rotated_BD / scale_B[:, None])
        lost_BD = rotated_BD - int8_BD * scale_B[:, None]
        length_B, lost_B = (np.sqrt(np.einsum("bd,bd->b", rows, rows)) for rows in (rotated_BD, lost_BD))
        # 2 % and one unit more than exact arithmetic needs, and the float32 error of the rotation.
        error_B = 1.02 * (length_B * vectors.error + lost_B * vectors.length)
        error_B += 1e-5 * length_B * vectors.length
        self._vectors = vectors
        # A new array has the strides of its shape also where the shape is 1, as _int_mm demands (pytorch issue 195066).
        self.int8_BD = torch.from_numpy(np.array(int8_BD, dtype=np.int8, order="C"))
        self.unit_B = scale_B * vectors.scale
        """Factor from an int8 score to an inner product."""
        self.error_B = error_B / self.unit_B + 1
        """Largest difference between the two, in units of the int8 score."""

    def survivors(self, start: int, stop: int, floor_B: Tensor | None, k: int) -> Survivors | None:
        """Passages from `start` up to `stop` that can be among the k best of a query.

        `floor_B` is a score that k earlier passages reach, if known. None where too few passages are ruled out to be worth it.
        """
        queries, width = self.int8_BD.shape[0], round_up(stop - start)
        if k > width // GROUP // 4:  # before anything is computed
            return None
        score_BN = scratch_buffer("scores", queries, width, torch.int32)
        int8_products(self.int8_BD, self._vectors.int8_ND[start : start + width], score_BN)
        if stop - start < width:
            score_BN[:, stop - start :] = -(2**31)
        floor_in_units_B = None if floor_B is None else floor_B.numpy() / self.unit_B
        place_C = above_threshold(score_BN, k, floor_in_units_B, self.error_B)
        if place_C is None:
            return None
        query_C = place_C // width
        return Survivors(query_C, place_C + (start - query_C * width))


def round_up(count: int) -> int:
    """The smallest multiple of `MULTIPLE` that is at least `count`."""
    return -(-count // MULTIPLE) * MULTIPLE
