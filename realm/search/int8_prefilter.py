"""The int8 prefilter: excludes passages that cannot be among the best, by scores of vectors with 8 bits per number.

On CPUs that have instructions for int8 dot products, an int8 dot product costs a quarter of a float32 dot product, and it reads
half as many bytes as a float16 dot product. The length of the quantization error of each vector is known, so the Cauchy-Schwarz
inequality bounds the error of a score. In this inequality, v is a passage vector, q is a query vector, and v' and q' are the
quantized vectors:

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
        noise_DD = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0))
        rotation_DD = torch.linalg.qr(noise_DD).Q.contiguous()
        self.rotation_DD = rotation_DD.double()
        self.int8_ND = torch.zeros(round_up(count), dim, dtype=torch.int8)
        sample_ND = vectors_ND[:: max(1, count // BLOCK)].double() @ self.rotation_DD
        self.scale = max(1.1 * float(sample_ND.abs().max()) / 127, 1e-30)
        self.length = self.error = 0.0
        """`length` is the largest |v'|, and `error` the largest |v - v'|."""
        for start in range(0, count, BLOCK):
            with torch.autocast("cpu", enabled=False):
                rotated_nD = vectors_ND[start : start + BLOCK].float() @ rotation_DD
            # A number outside the int8 range is clipped; `error` includes the error of clipping.
            int8_nD = (rotated_nD / self.scale).round_().clamp_(-127, 127)
            self.int8_ND[start : start + len(int8_nD)] = int8_nD.to(torch.int8)
            # np.maximum propagates NaN, so `finite` is False if a vector contains NaN.
            self.length = float(np.maximum(self.length, int8_nD.mul_(self.scale).norm(dim=1).max().item()))
            self.error = float(np.maximum(self.error, rotated_nD.sub_(int8_nD).norm(dim=1).max().item()))

    @property
    def finite(self) -> bool:
        """Whether `length` and `error` are finite; True if all vectors are finite."""
        return bool(np.isfinite(self.length) and np.isfinite(self.error))


class QuantizedQueries:
    """Query vectors, rotated, and quantized to int8 with one scale per query."""

    def __init__(self, vectors: Int8Vectors, query_BD: Tensor):
        rotated_BD = (query_BD.double() @ vectors.rotation_DD).numpy()  # autocast does not change float64
        scale_B = np.maximum(np.abs(rotated_BD).max(1), 1e-30) / 127
        int8_BD = np.rint(rotated_BD / scale_B[:, None])
        lost_BD = rotated_BD - int8_BD * scale_B[:, None]
        length_B, lost_B = (np.sqrt(np.einsum("bd,bd->b", rows, rows)) for rows in (rotated_BD, lost_BD))
        # The bound is larger than exact arithmetic needs, to cover rounding errors: by 2 % here, by the float32 error of the
        # rotation in the next line, and by one unit in `self.error_B`.
        error_B = 1.02 * (length_B * vectors.error + lost_B * vectors.length)
        error_B += 1e-5 * length_B * vectors.length
        self._vectors = vectors
        # np.array makes a new array, because _int_mm needs contiguous strides even in axes of size 1 (pytorch issue 195066).
        self.int8_BD = torch.from_numpy(np.array(int8_BD, dtype=np.int8, order="C"))
        self.unit_B = scale_B * vectors.scale
        """Inner product that corresponds to an int8 score of 1."""
        self.error_B = error_B / self.unit_B + 1
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


def round_up(count: int) -> int:
    """The smallest multiple of `MULTIPLE` that is at least `count`."""
    return -(-count // MULTIPLE) * MULTIPLE
