"""Operations of the search with `group_prefilter.py`, by torch, on any device; `group_kernels.py` has the same as kernels.

Axis letters: B queries, N passages, D embedding, G groups, S sets of columns, M candidates, K hits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from realm.model.scores import own_scores
from realm.search.int8_prefilter import int8_products, quantized

__all__ = ["best_columns", "gathered_scores", "members", "quantized", "set_maxima", "upper_bounds"]

GROUP = 64
"""Consecutive passages, or columns, of which a GPU first compares only the largest score."""
SCORES = 1 << 27
"""Int8 scores that are in memory at a time: 512 MB."""
FEWEST_QUERIES = 32
"""Number of rows up to which queries are filled, because torch multiplies no fewer than 17 rows on a GPU."""


def upper_bounds(
    query_BD: Tensor, scale_B: Tensor, length_B: Tensor, vectors_ND: Tensor, scale_G: Tensor, error_G: Tensor
) -> Tensor:
    """Upper bounds of the scores of each group, without the error of the queries -> [B, G] in float32.

    Queries and vectors are in int8, and the vectors fill the groups. The scores are computed by matrix products, which write
    the scores of a chunk to memory.
    """
    queries, groups = len(query_BD), len(scale_G)
    if queries < FEWEST_QUERIES:
        query_BD = F.pad(query_BD, (0, 0, 0, FEWEST_QUERIES - queries))
    bound_BG = scale_G.new_empty(queries, groups)
    at_a_time = max(1, SCORES // (GROUP * len(query_BD)))
    for first in range(0, groups, at_a_time):
        part = slice(first, min(first + at_a_time, groups))
        part_nD = vectors_ND[part.start * GROUP : part.stop * GROUP]
        score_Bn = torch.empty(len(query_BD), len(part_nD), dtype=torch.int32, device=query_BD.device)
        int8_products(query_BD, part_nD, score_Bn)
        largest_Bg = score_Bn[:queries].unflatten(1, (-1, GROUP)).amax(dim=2)
        bound_BG[:, part] = largest_Bg * scale_B[:, None] * scale_G[part] + length_B[:, None] * error_G[part]
    return bound_BG


def set_maxima(value_BN: Tensor, sets: int) -> Tensor:
    """The largest value of each of the first `sets` sets of `GROUP` columns -> [B, S]."""
    return value_BN[:, : sets * GROUP].unflatten(1, (sets, GROUP)).amax(dim=2)


def gathered_scores(query_BD: Tensor, vectors_ND: Tensor, number_BM: Tensor) -> Tensor:
    """Scores of every query with the passages of its row, in float32 -> [B, M]."""
    return own_scores(query_BD, vectors_ND[number_BM])


def best_columns(score_BN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest float32 scores of each row, best first [B, K], and their columns [B, K]; of equal scores, the first
    columns.

    There must be k columns. No values are read, for which the CPU would have to wait for a GPU. The k best scores of a row are
    in the k groups of columns with the largest maxima (of groups with equal maxima, the first), so only the scores of these
    groups are sorted.
    """
    groups = score_BN.shape[1] // GROUP
    if groups <= 4 * k:
        number_BK = _largest(score_BN, k)
        return score_BN.gather(1, number_BK), number_BK
    # The groups in rising order, as `_largest` needs the columns.
    column_BM = members(_largest(set_maxima(score_BN, groups), k).sort(dim=1).values, score_BN.shape[1])
    score_BM = score_BN.gather(1, column_BM)
    place_BK = _largest(score_BM, k)
    return score_BM.gather(1, place_BK), column_BM.gather(1, place_BK)


def _largest(score_BN: Tensor, k: int) -> Tensor:
    """Columns of the k largest float32 scores, best first; of equal scores, the first columns.

    Score and column are joined to one whole number, so that no two columns are equal.
    """
    assert score_BN.dtype == torch.float32
    bits_BN = (score_BN + 0.0).view(torch.int32)  # + 0.0 makes 0.0 of -0.0
    bits_BN.bitwise_xor_((bits_BN >> 31) & 0x7FFFFFFF)  # whole numbers in the order of the scores
    last = score_BN.shape[1] - 1
    column_N = torch.arange(last, -1, -1, device=score_BN.device)
    best_BK = bits_BN.long().bitwise_left_shift_(32).add_(column_N).topk(k, dim=1).values
    return last - (best_BK & 0xFFFFFFFF)


def members(group_BC: Tensor, columns: int) -> Tensor:
    """The columns of each row's groups of `GROUP` columns, and the last of `columns`, which fill no group -> [B, M].

    Groups in rising order give columns in rising order.
    """
    inside_G = torch.arange(GROUP, device=group_BC.device)
    last_N = torch.arange(columns // GROUP * GROUP, columns, device=group_BC.device)
    column_BM = (group_BC[:, :, None] * GROUP + inside_G).flatten(1)
    return torch.cat([column_BM, last_N.expand(len(column_BM), -1)], dim=1)
