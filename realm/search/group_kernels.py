"""The functions of `group_operations.py` as kernels of Triton.

The upper bounds come from int8 scores that never leave the multiprocessors: with 512 queries and D = 128, they would have
sixteen times as many bytes as the vectors. The other kernels are here because a GPU waits while a CPU starts the many kernels
that torch needs in their place. Triton comes with the builds of torch for NVIDIA GPUs. It needs a C compiler when a kernel runs
for the first time.

Axis letters: B queries, N passages, D embedding, G groups, S sets, M candidates, K hits; inside the kernels, m queries, n
passages, g groups and d numbers of one step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from realm.model.device import current_device
from realm.search import group_operations
from realm.search.int8_prefilter import Int8Queries

LARGEST_DIM = 256
"""A program keeps whole vectors in the fast memory of a multiprocessor, which holds no larger ones."""
QUERIES, PASSAGES, STAGES = 64, 256, 3
"""Queries and passages that are multiplied at a time, and parts of the queries that are read ahead."""
ROWS = 128
"""Rows whose sets of columns a program compares."""
CANDIDATES = 64
"""Candidates of one query that a program scores."""
ROW_WIDTHS, MOST_HITS = (1 << 10, 1 << 13, 1 << 14), 128
"""Columns of a row that a program ranks, which keeps them in registers: the kernel is compiled for each of these numbers. And
most columns that it finds one by one."""


def quantized(rotated_BD: Tensor) -> Int8Queries:
    """Rotated queries in float64, quantized."""
    queries, dim = rotated_BD.shape
    int8_BD = torch.empty(queries, dim, dtype=torch.int8, device=rotated_BD.device)
    scale_B, length_B, lost_B = torch.empty(3, queries, device=rotated_BD.device)
    if queries:
        with current_device(rotated_BD):
            _quantize_kernel[(queries,)](
                rotated_BD, int8_BD, scale_B, length_B, lost_B, D=dim, WIDTH=_width(dim), num_warps=1
            )
    return Int8Queries(int8_BD, scale_B, length_B, lost_B)


def upper_bounds(
    query_BD: Tensor, scale_B: Tensor, length_B: Tensor, vectors_ND: Tensor, scale_G: Tensor, error_G: Tensor
) -> Tensor:
    """Upper bounds of the scores of each group, without the error of the queries -> [B, G] in float32.

    Queries and vectors are in int8, and the vectors fill the groups. `GROUP` must divide `PASSAGES`, and D be at most
    `LARGEST_DIM`.
    """
    (queries, dim), groups, group = query_BD.shape, len(scale_G), group_operations.GROUP
    # Queries are next to each other in memory, so that the kernel writes whole lines.
    bound_GB = scale_G.new_empty(groups, queries)
    if queries and groups:
        sizes = {"D": dim, "WIDTH": _width(dim), "QUERIES": QUERIES, "PASSAGES": PASSAGES, "GROUP": group}
        with current_device(query_BD):
            _bounds_kernel[(triton.cdiv(groups * group, PASSAGES),)](
                query_BD, scale_B, length_B, vectors_ND, scale_G, error_G, bound_GB, queries, groups,
                **sizes, num_warps=4, num_stages=STAGES,
            )  # fmt: skip
    return bound_GB.T


def set_maxima(value_BN: Tensor, sets: int) -> Tensor:
    """The largest value of each of the first `sets` sets of `GROUP` columns -> [B, S].

    Fast if the rows are next to each other in memory, as `upper_bounds` leaves them.
    """
    rows = len(value_BN)
    maxima_BS = value_BN.new_empty(rows, sets)
    if rows and sets:
        with current_device(value_BN):
            _set_kernel[(sets, triton.cdiv(rows, ROWS))](
                value_BN,
                maxima_BS,
                rows,
                sets,
                *value_BN.stride(),
                SIZE=group_operations.GROUP,
                ROWS=ROWS,
                num_warps=4,
            )
    return maxima_BS


def gathered_scores(query_BD: Tensor, vectors_ND: Tensor, number_BM: Tensor) -> Tensor:
    """Scores of every query with the passages of its row, in float32 -> [B, M]; queries are in float32."""
    (queries, dim), width = query_BD.shape, number_BM.shape[1]
    score_BM = query_BD.new_empty(number_BM.shape)
    if queries and width:
        with current_device(query_BD):
            _scores_kernel[(queries, triton.cdiv(width, CANDIDATES))](
                query_BD.contiguous(), vectors_ND.contiguous(), number_BM.contiguous(), score_BM, width,
                D=dim, WIDTH=_width(dim), CANDIDATES=CANDIDATES, num_warps=4,
            )  # fmt: skip
    return score_BM


def best_columns(score_BN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest float32 scores of each row, best first [B, K], and their columns [B, K]; of equal scores, the first
    columns.

    There must be k columns.
    """
    (rows, columns), device = score_BN.shape, score_BN.device
    if columns > ROW_WIDTHS[-1] or k > MOST_HITS:
        return group_operations.best_columns(score_BN, k)
    best_BK, column_BK = score_BN.new_empty(rows, k), torch.empty(rows, k, dtype=torch.int64, device=device)
    if rows and k:
        with current_device(score_BN):
            _best_kernel[(rows,)](
                score_BN.contiguous(),
                best_BK,
                column_BK,
                columns,
                k,
                WIDTH=next(width for width in ROW_WIDTHS if columns <= width),
                num_warps=8,
            )
    return best_BK, column_BK


def _width(dim: int) -> int:
    return max(32, triton.next_power_of_2(dim))  # a product of int8 numbers needs at least 32


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    rotated, int8, scales, lengths, losses, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Program b quantizes query b."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    value_d = tl.load(rotated + b * D + d, mask=d < D, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(value_d)), 1e-30) / 127
    whole_d = tl.minimum(tl.floor(value_d / scale + 0.5), 127.0)
    lost_d = value_d - whole_d * scale
    tl.store(int8 + b * D + d, whole_d.to(tl.int8), mask=d < D)
    tl.store(scales + b, scale)
    tl.store(lengths + b, tl.sqrt(tl.sum(value_d * value_d)))
    tl.store(losses + b, tl.sqrt(tl.sum(lost_d * lost_d)))


@triton.jit(do_not_specialize=["G"])  # otherwise some sizes of an index would be compiled separately
def _bounds_kernel(  # type: ignore[no-untyped-def]
    query, scales, lengths, vectors, group_scales, group_errors, bounds, B, G, D: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, PASSAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program p compares the passages from p * PASSAGES on with all queries."""
    GROUPS: tl.constexpr = PASSAGES // GROUP
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    n = program * PASSAGES + tl.arange(0, PASSAGES)
    g = program * GROUPS + tl.arange(0, GROUPS)
    inside = (n < G * GROUP)[:, None] & (d < D)[None]
    vector_nd = tl.load(vectors + n[:, None] * D + d[None], mask=inside, other=0)
    scale_g = tl.load(group_scales + g, mask=g < G, other=0.0)
    error_g = tl.load(group_errors + g, mask=g < G, other=0.0)
    for first in range(0, B, QUERIES):
        m = first + tl.arange(0, QUERIES)
        query_md = tl.load(query + m[:, None] * D + d[None], mask=(m < B)[:, None] & (d < D)[None], other=0)
        scale_m = tl.load(scales + m, mask=m < B, other=0.0)
        length_m = tl.load(lengths + m, mask=m < B, other=0.0)
        score_mn = tl.dot(query_md, tl.trans(vector_nd), out_dtype=tl.int32)
        largest_mg = tl.max(tl.reshape(score_mn, (QUERIES, GROUPS, GROUP)), axis=2).to(tl.float32)
        bound_mg = largest_mg * (scale_m[:, None] * scale_g[None]) + length_m[:, None] * error_g[None]
        tl.store(bounds + g[None] * B + m[:, None], bound_mg, mask=(m < B)[:, None] & (g < G)[None])


@triton.jit(do_not_specialize=["S", "COLUMN_STRIDE"])
def _set_kernel(  # type: ignore[no-untyped-def]
    values, maxima, B, S, ROW_STRIDE, COLUMN_STRIDE, SIZE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Program (s, p) finds the largest values of set s in the rows from p * ROWS on."""
    s = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column_n = s * SIZE + tl.arange(0, SIZE)
    place_nb = column_n[:, None] * COLUMN_STRIDE + b[None] * ROW_STRIDE
    value_nb = tl.load(values + place_nb, mask=(b < B)[None], other=0.0)
    tl.store(maxima + b * S + s, tl.max(value_nb, axis=0), mask=b < B)


@triton.jit(do_not_specialize=["M"])
def _scores_kernel(  # type: ignore[no-untyped-def]
    query, vectors, numbers, scores, M, D: tl.constexpr, WIDTH: tl.constexpr, CANDIDATES: tl.constexpr
):  # fmt: skip
    """Program (b, p) scores the candidates of query b from p * CANDIDATES on."""
    b = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * CANDIDATES + tl.arange(0, CANDIDATES)
    d = tl.arange(0, WIDTH)
    number_m = tl.load(numbers + b * M + m, mask=m < M, other=0)
    query_d = tl.load(query + b * D + d, mask=d < D, other=0.0)
    inside = (m < M)[:, None] & (d < D)[None]
    vector_md = tl.load(vectors + number_m[:, None] * D + d[None], mask=inside, other=0.0)
    score_m = tl.sum(vector_md.to(tl.float32) * query_d[None], axis=1)
    tl.store(scores + b * M + m, score_m, mask=m < M)


@triton.jit(do_not_specialize=["M", "K"])
def _best_kernel(scores, best, columns, M, K, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program b ranks row b: it takes the best score that is left, K times."""
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, WIDTH)
    score_m = tl.load(scores + b * M + m, mask=m < M, other=-float("inf"))
    score_m = tl.where(
        score_m != score_m, float("inf"), score_m
    )  # NaN, which is the largest value for torch too
    left_m = tl.where(m < M, m, WIDTH)
    for k in range(K):
        largest = tl.max(score_m)
        column = tl.min(tl.where(score_m == largest, left_m, WIDTH))
        tl.store(best + b * K + k, tl.load(scores + b * M + column))
        tl.store(columns + b * K + k, column.to(tl.int64))
        score_m = tl.where(m == column, -float("inf"), score_m)
        left_m = tl.where(m == column, WIDTH, left_m)
