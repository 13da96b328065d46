"""The prefilter of a GPU: compares groups of passages by int8 scores, and computes exact scores for the best groups only.

A GPU multiplies int8 matrices far faster than float32 matrices, but it would take longer to store the scores than to compute
them. So passages are divided into groups of consecutive numbers, with one scale per group, and of each group only the largest
int8 score is kept. With the bound of its error (`int8_prefilter.py`) it becomes an *upper bound* of the scores of the group.
The passages of the groups with the largest upper bounds are the *candidates*. If the k-th best exact score of the candidates is
above the upper bounds of all other groups, no other passage can be among the k best.

Axis letters: B queries, N passages, D embedding, G groups, S sets of groups, C chosen groups, M candidates, K hits; n passages
of a group, g some of the groups.
"""

import logging
import math
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from realm.errors import first_line
from realm.model.device import compiles_kernels
from realm.search import group_operations
from realm.search.group_operations import members
from realm.search.int8_prefilter import SAFETY, Int8Queries, rotation

_log = logging.getLogger(__name__)

BLOCK = 1 << 18
"""Passages that are quantized at a time; in float32 their vectors have 128 MB if D is 128."""
AT_ONCE = 1 << 20
"""Bounds that a GPU ranks as fast as the maxima of sets of them."""


class Int8Groups:
    """The vectors of all full groups, rotated, and quantized to int8 with one scale per group, on the device of the vectors."""

    def __init__(self, vectors_ND: Tensor):
        group = group_operations.GROUP
        dim, groups = vectors_ND.shape[1], len(vectors_ND) // group
        rotation_DD = rotation(dim).to(vectors_ND.device)
        self.rotation_DD = rotation_DD.double()
        self.int8_ND = vectors_ND.new_empty(groups * group, dim, dtype=torch.int8)
        self.scale_G, self.error_G = vectors_ND.new_empty(2, groups, dtype=torch.float32)
        """`scale_G` is the number that an int8 number of 1 stands for, and `error_G` is `SAFETY` times the largest |v - v'|."""
        length_G = torch.empty_like(self.scale_G)
        for first in range(0, groups, max(1, BLOCK // group)):
            part = slice(first, min(first + max(1, BLOCK // group), groups))
            rows = slice(part.start * group, part.stop * group)
            with torch.autocast(vectors_ND.device.type, enabled=False):
                rotated_gnD = (vectors_ND[rows].float() @ rotation_DD).unflatten(0, (-1, group))
            scale_g = rotated_gnD.abs().amax(dim=(1, 2)).clamp_min(1e-30) / 127
            # Lengths are computed in units of the scale, because squares of tiny numbers would be 0.
            int8_gnD = rotated_gnD.div_(scale_g[:, None, None]).round()
            self.int8_ND[rows] = int8_gnD.flatten(0, 1)
            length_G[part] = scale_g * int8_gnD.norm(dim=2).amax(dim=1)
            self.error_G[part] = SAFETY * scale_g * rotated_gnD.sub_(int8_gnD).norm(dim=2).amax(dim=1)
            self.scale_G[part] = scale_g
        self.length = float(length_G.max())
        """The largest |v'|."""

    @property
    def finite(self) -> bool:
        """Whether all vectors are finite."""
        return math.isfinite(self.length)


def chosen_groups(k: int) -> int:
    """Number of groups whose passages are candidates. It is far larger than k, so that the upper bounds of all other groups are
    lower than the k-th best score."""
    return 6 * k + 7  # with k = 20, there are 8,191 candidates at most


def is_fast(device: torch.device) -> bool:
    """Whether the device multiplies int8 matrices far faster than float32 matrices."""
    return device.type == "cuda"


def is_worthwhile(passages: int, chosen: int) -> bool:
    """Whether most passages can be excluded, if `chosen` groups are candidates."""
    return passages // group_operations.GROUP > 4 * chosen


def is_possible(device: torch.device, dim: int) -> bool:
    """Whether the device computes upper bounds for vectors with `dim` numbers."""
    return kernels_run(device, dim) or _products_run(device, dim)


def memory_of_query(passages: int, dim: int, chosen: int, device: torch.device) -> int:
    """Bytes that a query needs at a time, for the bounds of groups and for the candidates."""
    # Without kernels, the vectors of the candidates are gathered, and multiplied in float32.
    candidate = 16 if kernels_run(device, dim) else 16 + 8 * dim
    return 5 * (passages // group_operations.GROUP) + (chosen + 1) * group_operations.GROUP * candidate


def candidates(query_BD: Tensor, groups: Int8Groups, passages: int, chosen: int) -> tuple[Tensor, Tensor]:
    """Numbers of the candidates of each query, in rising order [B, M], and a bound for the scores of all other passages [B].

    The candidates are the passages of `chosen` groups, and the last passages, which fill no group. The bound is not a number,
    if a query is not finite. `is_possible` and `is_worthwhile` must be true.
    """
    using = operations(query_BD.device, query_BD.shape[1])
    queries = Int8Queries(
        *using.quantized(query_BD.double() @ groups.rotation_DD)
    )  # autocast leaves float64 as it is
    bound_BG = using.upper_bounds(*queries[:3], groups.int8_ND, groups.scale_G, groups.error_G)
    group_BC, least_B = largest(bound_BG, chosen)
    return members(group_BC.sort(dim=1).values, passages), least_B + queries.error(groups.length)


def largest(value_BG: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns of the `count` largest values of each row, in any order [B, C], and the smallest of these values [B].

    There must be `count` columns.
    """
    columns = value_BG.shape[1]
    sets = columns // group_operations.GROUP
    if sets <= 4 * count or value_BG.numel() <= AT_ONCE:
        top = value_BG.topk(count, dim=1, sorted=False)
        return top.indices, top.values.amin(dim=1)
    # A GPU ranks long rows slowly: first only the maxima of sets of columns are ranked. The largest values are in the sets with
    # the largest maxima.
    set_BC, _ = largest(operations(value_BG.device).set_maxima(value_BG, sets), count)
    column_BM = members(set_BC, columns)
    place_BC, least_B = largest(value_BG.gather(1, column_BM), count)
    return column_BM.gather(1, place_BC), least_B


def operations(device: torch.device, dim: int = 8) -> ModuleType:
    """The module with the fastest operations for this device and vectors with `dim` numbers."""
    if not kernels_run(device, dim):
        return group_operations
    from realm.search import group_kernels

    return group_kernels


@cache
def kernels_run(device: torch.device, dim: int) -> bool:
    """Whether the kernels run here, and are right: Triton needs a C compiler, and a GPU that it knows and that has enough fast
    memory."""
    if not compiles_kernels(device):
        return False
    from realm.search import group_kernels

    return dim <= group_kernels.LARGEST_DIM and _is_right(group_kernels, device, dim)


@cache
def _products_run(device: torch.device, dim: int) -> bool:
    """Whether torch multiplies int8 matrices of this width here: not on each GPU, nor with each width."""
    return _is_right(group_operations, device, dim)


def _is_right(using: ModuleType, device: torch.device, dim: int) -> bool:
    """Whether a module's operations on this device have the same results as those of torch on a CPU."""
    vectors_ND = torch.randn(4 * group_operations.GROUP, dim, generator=torch.Generator().manual_seed(0))

    def results(using: ModuleType, device: torch.device) -> list[Tensor]:
        groups, query_BD = Int8Groups(vectors_ND.to(device)), vectors_ND[:9].to(device)
        queries = Int8Queries(*using.quantized(query_BD.double() @ groups.rotation_DD))
        bound_BG = using.upper_bounds(*queries[:3], groups.int8_ND, groups.scale_G, groups.error_G)
        number_BN = torch.arange(len(vectors_ND), device=device).expand(9, -1)
        score_BN = using.gathered_scores(query_BD, vectors_ND.to(device), number_BN)
        return [*queries[1:], bound_BG, using.set_maxima(score_BN, 4), *using.best_columns(score_BN, 5)]

    try:
        found = results(using, device)
    except Exception as error:  # each version of Triton raises other exceptions
        _log.warning("searches on %s are slower without %s: %s", device, using.__name__, first_line(error))
        return False
    pairs = zip(found, results(group_operations, torch.device("cpu")), strict=True)
    # One unit of an int8 number changes a bound by up to a thousandth.
    right = all(torch.allclose(one.cpu().double(), other.double(), rtol=1e-2) for one, other in pairs)
    if not right:
        _log.warning(
            "searches on %s are slower without %s, which gives wrong numbers", device, using.__name__
        )
    return right
