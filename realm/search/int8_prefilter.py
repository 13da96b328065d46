"""The int8 prefilter: excludes passages that cannot be among the best, by scores of vectors with 8 bits per number.

On CPUs that have instructions for int8 dot products, an int8 dot product costs a quarter of a float32 dot product, and it reads
half as many bytes as a float16 dot product. On a GPU the difference is larger (`group_prefilter.py`). The length of the
quantization error of each vector is known, so the Cauchy-Schwarz inequality bounds the error of a score. In this inequality, v
is a passage vector, q is a query vector, and v' and q' are the quantized vectors:

    q v - q' v' = q (v - v') + (q - q') v'  <=  |q| |v - v'| + |q - q'| |v'|

If the approximate score of a passage is further below the k-th best score than these bounds allow, the passage cannot be among
the k best, and is excluded. The *survivors* are the passages that are not excluded, a few times k passages. Their exact scores
are computed. Passage vectors and query vectors are rotated before quantization: a rotation does not change inner products, and
spreads each vector evenly over the dimensions, which makes the quantization error small.

Axis letters: B queries, N passages, D embedding, n passages of a block, C survivors of all queries.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.search.threshold import GROUP, above_threshold, scratch_buffer

MULTIPLE = 256
"""The number of quantized passages is rounded up to a multiple of `MULTIPLE`, which is itself a multiple of `GROUP`."""
BLOCK = 1 << 11
"""Passages that are quantized at a time; in float32 their vectors have 1 MB if D is 128."""
SAFETY = 1.02
"""Factor of the bounds, which covers rounding errors."""


class Survivors(NamedTuple):
    """Pairs of a query and a passage that can be among the best of this query, ordered by the row of the query, and then by the
    number of the passage."""

    query_C: np.ndarray
    number_C: np.ndarray


@cache
def is_fast() -> bool:
    """Whether this CPU has int8 dot-product instructions (VNNI). On other CPUs, sums may also saturate at 16 bits."""
    return bool(torch.cpu._is_vnni_supported())


def int8_products(query_BD: Tensor, vector_ND: Tensor, product_BN: Tensor) -> None:
    """Writes the int32 inner products of int8 vectors to `product_BN`. Kernels for other CPUs belong here and in `is_fast`."""
    torch._int_mm(query_BD, vector_ND.T, out=product_BN)


class Int8Vectors:
    """The vectors of all passages, rotated, and quantized to int8 with one scale for all vectors."""

    def __init__(self, vectors_ND: Tensor):
        count, dim = vectors_ND.shape
        rotation_DD = rotation(dim)
        self.rotation_DD = rotation_DD.double()
        self.int8_ND = torch.zeros(round_up(count), dim, dtype=torch.int8)
        sample_ND = vectors_ND[:: max(1, count // BLOCK)].double() @ self.rotation_DD
        self.scale = max(1.1 * float(sample_ND.abs().max()) / 127, 1e-30)
        self.length = self.error = 0.0
        """`length` is the largest |v'|, and `error` the largest |v - v'|."""
        for start in range(0, count, BLOCK):
            with torch.autocast("cpu", enabled=False):
                rotated_nD = vectors_ND[start : start + BLOCK].float() @ rotation_DD
            # A number outside the int8 range is clipped; `error` includes the error of clipping. Lengths are computed in units
            # of the scale, because squares of tiny numbers would be 0.
            int8_nD = rotated_nD.div_(self.scale).round().clamp_(-127, 127)
            self.int8_ND[start : start + len(int8_nD)] = int8_nD.to(torch.int8)
            # np.maximum propagates NaN, so `finite` is False if a vector contains NaN.
            length, error = (rows.norm(dim=1).max().item() for rows in (int8_nD, rotated_nD.sub_(int8_nD)))
            self.length = float(np.maximum(self.length, self.scale * length))
            self.error = float(np.maximum(self.error, self.scale * error))

    @property
    def finite(self) -> bool:
        """Whether `length` and `error` are finite; True if all vectors are finite."""
        return bool(np.isfinite(self.length) and np.isfinite(self.error))


class Int8Queries(NamedTuple):
    """Query vectors, rotated, and quantized to int8 with one scale per query."""

    int8_BD: Tensor
    scale_B: Tensor
    length_B: Tensor
    """|q|."""
    lost_B: Tensor
    """|q - q'|."""

    def error(self, length: float) -> Tensor:
        """The part of the bound that is due to the queries and to rounding -> [B]; `length` is the largest |v'|."""
        # The bound is larger than exact arithmetic needs: by 2 %, and by the float32 error of the rotation.
        return (SAFETY * self.lost_B + 1e-5 * self.length_B) * length


def quantized(rotated_BD: Tensor) -> Int8Queries:
    """Rotated queries in float64, quantized."""
    scale_B = rotated_BD.abs().amax(dim=1).clamp_min(1e-30) / 127
    whole_BD = (rotated_BD / scale_B[:, None]).round_()
    # A new tensor, because _int_mm needs contiguous strides even in axes of size 1 (pytorch issue 195066).
    int8_BD = torch.empty(whole_BD.shape, dtype=torch.int8, device=whole_BD.device).copy_(whole_BD)
    return Int8Queries(
        int8_BD, scale_B, rotated_BD.norm(dim=1), (rotated_BD - whole_BD * scale_B[:, None]).norm(dim=1)
    )


class QuantizedQueries:
    """Queries that are compared with `Int8Vectors`."""

    def __init__(self, vectors: Int8Vectors, query_BD: Tensor):
        queries = quantized(query_BD.double() @ vectors.rotation_DD)  # autocast does not change float64
        error_B = SAFETY * queries.length_B * vectors.error + queries.error(vectors.length)
        self._vectors = vectors
        self.int8_BD = queries.int8_BD
        self.unit_B = (queries.scale_B * vectors.scale).numpy()
        """Inner product that corresponds to an int8 score of 1."""
        self.error_B = error_B.numpy() / self.unit_B + 1  # one unit covers rounding in the comparison
        """Largest difference between an int8 score and the inner product divided by `unit_B`."""

    def survivors(self, start: int, stop: int, floor_B: Tensor | None, k: int) -> Survivors | None:
        """Passages from `start` to before `stop` that can be among the k best of a query.

        `floor_B` has for each query a score that k earlier passages reach, or is None if no such scores are known. The result
        is None if so few passages are excluded that scoring all passages is faster.
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


def rotation(dim: int) -> Tensor:
    """The rotation of all vectors -> [D, D]."""
    noise_DD = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(noise_DD).Q.contiguous()


def round_up(count: int) -> int:
    """The smallest multiple of `MULTIPLE` that is at least `count`."""
    return -(-count // MULTIPLE) * MULTIPLE
