"""The float16 prefilter of a GPU: excludes passages that cannot be among the best, by products of float16 numbers.

A GPU multiplies float16 matrices more than ten times as fast as float32 matrices. Passage vectors are stored in float16, so
only the queries are rounded. If v is a passage vector, q a query vector, and q' the rounded query vector, then

    |q v - q' v|  <=  |q - q'| |v|

Passages are divided into groups, and of each group only the largest approximate score is kept. The *candidates* are the
passages of the groups with the largest of these scores. If the k-th best exact score of the candidates is further above the
approximate scores of all other groups than the inequality allows, no other passage can be among the k best.

Axis letters: B queries, N passages, D embedding, G groups, S sets of groups, C chosen groups, M candidates.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

GROUP = 64
"""Consecutive passages, or columns, of which a GPU first compares only the largest score."""
SCORES = 1 << 28
"""Scores that are in memory at a time without the kernel: 512 MB."""
KERNEL_ROUNDING = 2.0**-14
"""Bound of the rounding error of a score of the kernel, which adds in float32, relative to the lengths of its vectors."""
ROUNDING = 2.0**-10
"""The same for a matrix product, whose result is also rounded to float16."""


def chosen_groups(k: int) -> int:
    """Number of groups whose passages are candidates. It is larger than k, so that the scores of all other groups are clearly
    lower than the k-th best score."""
    return k + k // 2 + 8


def candidate_count(k: int) -> int:
    """Largest number of candidates of a query."""
    return (chosen_groups(k) + 1) * GROUP


def is_fast(device: torch.device) -> bool:
    """Whether the device multiplies float16 matrices faster than float32 matrices."""
    return device.type == "cuda"


def is_worthwhile(passages: int, k: int) -> bool:
    """Whether most passages can be excluded."""
    return k > 0 and passages // GROUP > 4 * chosen_groups(k)


def longest(vectors_ND: Tensor) -> Tensor:
    """Length of the longest vector, a tensor with one number; infinite or NaN if a vector is not finite."""
    return torch.stack([part_nD.float().norm(dim=1).max() for part_nD in vectors_ND.split(1 << 20)]).max()


def candidates(query_BD: Tensor, vectors_ND: Tensor, longest: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Numbers of the candidates of each query, in rising order [B, M], and a bound for the scores of all other passages [B].

    The queries are in float32, the vectors in float16. The bound is not a number, if a query or a vector is not finite.
    """
    # The scales are powers of two, so that they round nothing. With them, no score is larger than 1.
    scale_B1 = _power_of_two(query_BD.norm(dim=1, keepdim=True)) * _power_of_two(longest).clamp_min(2.0**-14)
    scaled_BD = query_BD / scale_B1
    half_BD = scaled_BD.half()
    lost_B, length_B = (scaled_BD - half_BD.float()).norm(dim=1), half_BD.float().norm(dim=1)
    if _kernel_runs(query_BD.device, query_BD.shape[1]):
        from realm.search.group_maxima_kernel import group_maxima

        maxima_BG, rounding = group_maxima(half_BD, vectors_ND, GROUP), KERNEL_ROUNDING
    else:
        maxima_BG, rounding = group_maxima_in_chunks(half_BD, vectors_ND), ROUNDING
    group_BC, next_B = largest(maxima_BG, chosen_groups(k))
    error_B = (lost_B + rounding * length_B) * longest
    bound_B = (next_B + error_B) * scale_B1[:, 0]
    return members(group_BC.sort(dim=1).values, len(vectors_ND)), bound_B


@cache
def _kernel_runs(device: torch.device, dim: int) -> bool:
    """Whether the kernel runs here, and is right: Triton needs a C compiler, and a GPU that it knows and that has enough fast
    memory."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from realm.search.group_maxima_kernel import LARGEST_DIM, group_maxima

    if dim > LARGEST_DIM:
        return False
    draw = torch.Generator(device).manual_seed(0)
    vectors_ND = torch.randn(2 * GROUP, dim, generator=draw, device=device).half()
    plain_BG = group_maxima_in_chunks(vectors_ND, vectors_ND).float()
    try:
        return torch.allclose(group_maxima(vectors_ND, vectors_ND, GROUP), plain_BG, rtol=0.02, atol=0.02)
    except Exception:
        # Each version of Triton raises other exceptions.
        return False


def group_maxima_in_chunks(query_BD: Tensor, vectors_ND: Tensor) -> Tensor:
    """The largest score of each full group, [B, G] in float16, of queries and vectors in float16.

    The scores are computed by matrix products, which write the scores of a chunk to memory.
    """
    # Otherwise parts of a sum may be rounded to float16 too. It stays off, because searches can run in several threads.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    queries, groups = len(query_BD), len(vectors_ND) // GROUP
    maxima_BG = query_BD.new_empty(queries, groups)
    at_a_time = max(1, SCORES // (GROUP * max(1, queries)))
    for first in range(0, groups, at_a_time):
        part_nD = vectors_ND[first * GROUP : min(first + at_a_time, groups) * GROUP]
        score_Bn = query_BD @ part_nD.T
        maxima_BG[:, first : first + at_a_time] = score_Bn.unflatten(1, (-1, GROUP)).amax(dim=2)
    return maxima_BG


def largest(value_BG: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns of the `count` largest values of each row, in any order [B, C], and the largest value of all other columns [B].

    There must be more than `count` columns.
    """
    columns = value_BG.shape[1]
    if columns // GROUP <= 4 * count:
        top = value_BG.float().topk(count + 1, dim=1)
        return top.indices[:, :-1], top.values[:, -1]
    # A GPU ranks long rows slowly: first only the maxima of sets of columns are ranked.
    sets = columns // GROUP
    value_BS = value_BG[:, : sets * GROUP].unflatten(1, (sets, GROUP)).amax(dim=2)
    set_BC, other_sets_B = largest(value_BS, count)
    column_BM = members(set_BC, columns)
    top = value_BG.gather(1, column_BM).float().topk(count + 1, dim=1)
    return column_BM.gather(1, top.indices[:, :-1]), torch.maximum(top.values[:, -1], other_sets_B)


def members(group_BC: Tensor, columns: int) -> Tensor:
    """The columns of each row's groups of `GROUP` columns, and the last of `columns`, which fill no group -> [B, M].

    Groups in rising order give columns in rising order.
    """
    inside_G = torch.arange(GROUP, device=group_BC.device)
    last_N = torch.arange(columns // GROUP * GROUP, columns, device=group_BC.device)
    column_BM = (group_BC[:, :, None] * GROUP + inside_G).flatten(1)
    return torch.cat([column_BM, last_N.expand(len(column_BM), -1)], dim=1)


def _power_of_two(length: Tensor) -> Tensor:
    """The smallest power of two that is not smaller than the length."""
    return length.clamp_min(1e-30).log2().ceil().exp2()
