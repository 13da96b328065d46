"""The largest score of each group of passages, by a kernel of Triton that never writes the scores to the memory of the GPU.

With 512 queries, scores in float16 would have four times as many bytes as the vectors. Triton comes with the builds of torch
for NVIDIA GPUs. It needs a C compiler when the kernel runs for the first time.

Axis letters: B queries, N passages, D embedding, G groups; inside the kernel, m queries, n passages, g groups and d numbers of
one step.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_DIM = 128
"""A program of the kernel keeps whole vectors in the fast memory of a multiprocessor, which holds no larger ones."""
QUERIES, PASSAGES = 64, 256
"""Queries and passages that are multiplied at a time; of the sizes tried on an H100, the fastest for 512 queries."""
WARPS, STAGES = 8, 2


def group_maxima(query_BD: Tensor, vectors_ND: Tensor, group: int) -> Tensor:
    """The largest score of each full group of `group` consecutive passages, [B, G] in float32, of vectors in float16.

    `group` must divide `PASSAGES`, and D be at most `LARGEST_DIM`.
    """
    (queries, dim), groups = query_BD.shape, len(vectors_ND) // group
    # Queries are next to each other in memory, so that the kernel writes whole lines.
    maxima_GB = query_BD.new_empty(groups, queries, dtype=torch.float32)
    if queries and groups:
        sizes = {"D": dim, "WIDTH": max(16, triton.next_power_of_2(dim)), "QUERIES": QUERIES}
        sizes |= {"PASSAGES": PASSAGES, "GROUP": group}
        programs = triton.cdiv(groups * group, PASSAGES)
        # Triton runs a kernel on the current device, which need not be the device of its arguments.
        with torch.cuda.device(query_BD.device) if query_BD.is_cuda else nullcontext():
            _kernel[(programs,)](
                query_BD.contiguous(), vectors_ND.contiguous(), maxima_GB, queries, len(vectors_ND), groups,
                **sizes, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
    return maxima_GB.T


@triton.jit(do_not_specialize=["N", "G"])  # otherwise some sizes of an index would be compiled separately
def _kernel(  # type: ignore[no-untyped-def]
    query, vectors, maxima, B, N, G, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    PASSAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program p compares the passages from p * PASSAGES on with all queries."""
    GROUPS: tl.constexpr = PASSAGES // GROUP
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    n = program * PASSAGES + tl.arange(0, PASSAGES)
    g = program * GROUPS + tl.arange(0, GROUPS)
    inside = (n < N)[:, None] & (d < D)[None]
    vector_nd = tl.load(vectors + n[:, None] * D + d[None], mask=inside, other=0.0)
    for first in range(0, B, QUERIES):
        m = first + tl.arange(0, QUERIES)
        query_md = tl.load(query + m[:, None] * D + d[None], mask=(m < B)[:, None] & (d < D)[None], other=0.0)
        score_mn = tl.dot(query_md, tl.trans(vector_nd))
        largest_mg = tl.max(tl.reshape(score_mn, (QUERIES, GROUPS, GROUP)), axis=2)
        tl.store(maxima + g[None] * B + m[:, None], largest_mg, mask=(m < B)[:, None] & (g < G)[None])
