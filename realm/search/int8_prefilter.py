"""Which passages can be among the best, told from 8 bits a number: what search on a CPU asks before it reads the vectors.

A product of 8-bit numbers costs a CPU with such instructions a quarter of one in float32, and half of the bytes that 16 bits
are. What rounding loses of a vector has a known length, so by Cauchy and Schwarz a score is off by a known amount at most:

    q v - q' v' = q (v - v') + (q - q') v'  <=  |q| |v - v'| + |q - q'| |v'|

A passage whose rough score lies further than that under what the k best reach is not among them, whatever its vector is. The
others, a few times k, are handed out to be scored. Vectors and queries are rotated before they are rounded, which spreads them
evenly over the dimensions and leaves their products as they are: so rounding loses least.

Letters: B queries, N passages, D embedding, U passages written, C that remain of all queries.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.search.ranking import GROUP, reaching, space

EVEN = 256
"""The codes are filled up to a multiple of this many passages, which groups divide."""
BLOCK = 1 << 11
"""Passages rounded at a time: 1 MB in float32 at D = 128."""


class Remaining(NamedTuple):
    """Passages that can be among the best of a query; queries in rising order."""

    query_C: np.ndarray
    number_C: np.ndarray


@cache
def are_fast() -> bool:
    """Whether this CPU sums products of 8-bit numbers in one instruction; without it sums may also be clipped to 16 bits."""
    return bool(torch.cpu._is_vnni_supported())


class Codes:
    """All vectors in 8 bits a number, rotated, in one scale: a byte for every dimension of every passage."""

    def __init__(self, vectors_ND: Tensor):
        count, dim = vectors_ND.shape
        noise_DD = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0))
        self.turn_DD = torch.linalg.qr(noise_DD).Q.contiguous()
        self.double_DD = self.turn_DD.double()
        self.code_ND = torch.zeros(even(count), dim, dtype=torch.int8)
        sample_ND = vectors_ND[:: max(1, count // BLOCK)].double() @ self.double_DD
        self.scale = max(1.1 * float(sample_ND.abs().max()) / 127, 1e-30)
        self.length = self.error = 0.0
        """The longest |v'| and |v - v'|."""
        for start in range(0, count, BLOCK):
            part = slice(start, min(start + BLOCK, count))
            self.write(part, vectors_ND[part])

    def write(self, place: slice | Tensor, vectors_UD: Tensor) -> None:
        """Rounds vectors and puts them in the place of others; clips what is beyond the scale, which the error then says."""
        if not vectors_UD.numel():
            return
        with torch.autocast("cpu", enabled=False):
            turned_UD = vectors_UD.float() @ self.turn_DD
        code_UD = (turned_UD / self.scale).round_().clamp_(-127, 127)
        self.code_ND[place] = code_UD.to(torch.int8)
        # NumPy's maximum passes on what is no number, so that `sound` sees it.
        self.length = float(np.maximum(self.length, code_UD.mul_(self.scale).norm(dim=1).max().item()))
        self.error = float(np.maximum(self.error, turned_UD.sub_(code_UD).norm(dim=1).max().item()))

    @property
    def sound(self) -> bool:
        """Whether the bounds are numbers: a vector that is not finite has none."""
        return bool(np.isfinite(self.length) and np.isfinite(self.error))

    def ask(self, query_BD: Tensor) -> "RoundedQueries":
        return RoundedQueries(
            self, (query_BD.double() @ self.double_DD).numpy()
        )  # which autocast leaves alone


class RoundedQueries:
    """Some queries, rounded, and what the codes say to them."""

    def __init__(self, codes: Codes, turned_BD: np.ndarray):
        scale_B = np.maximum(np.abs(turned_BD).max(1), 1e-30) / 127
        code_BD = np.rint(turned_BD / scale_B[:, None])
        lost_BD = turned_BD - code_BD * scale_B[:, None]
        length_B, lost_B = (np.sqrt(np.einsum("bd,bd->b", rows, rows)) for rows in (turned_BD, lost_BD))
        # 2 % and a unit more than exact arithmetic needs, and what float32 adds in rotating.
        error_B = 1.02 * (length_B * codes.error + lost_B * codes.length) + 1e-5 * length_B * codes.length
        self._codes = codes
        # A new array has the strides of its shape, also where that is 1: _int_mm needs them (pytorch issue 195066).
        self._code_BD = torch.from_numpy(np.array(code_BD, dtype=np.int8, order="C"))
        self._unit_B = scale_B * codes.scale
        """What a rough score is to be multiplied by to be like the product."""
        self._error_B = error_B / self._unit_B + 1
        """Largest difference between the two, in these units."""

    def remaining(self, start: int, stop: int, floor_B: Tensor | None, k: int) -> Remaining | None:
        """What can be among the k best of the passages from `start` up to `stop`, and, where `floor_B` says what k others
        reach, better than that. None where too little is ruled out to be worth it.
        """
        queries, width = self._code_BD.shape[0], even(stop - start)
        if k > width // GROUP // 4:  # before anything is computed
            return None
        score_BN = space("scores", queries, width, torch.int32)
        torch._int_mm(self._code_BD, self._codes.code_ND[start : start + width].T, out=score_BN)
        if stop - start < width:
            score_BN[:, stop - start :] = -(2**31)
        floor_in_units_B = None if floor_B is None else floor_B.numpy() / self._unit_B
        place_C = reaching(score_BN, k, floor_in_units_B, self._error_B)
        if place_C is None:
            return None
        query_C = place_C // width
        return Remaining(query_C, place_C + (start - query_C * width))


def even(count: int) -> int:
    """The multiple of `EVEN` that holds so many passages."""
    return -(-count // EVEN) * EVEN
