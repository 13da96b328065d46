"""Threshold selection: finds the scores that can be among the k best of a query.

On a CPU, it takes longer to rank a row of scores than to compute these scores, but comparing each score with a threshold is
fast. For the threshold, the passages are divided into groups, and the largest score of each group is computed. At least k
passages reach the k-th largest of these group maxima, so a score below this threshold is not among the k best.

Axis letters: B queries, N passages, G groups of passages, C survivors of all queries.
"""

import threading

import numpy as np
import torch
from torch import Tensor

GROUP = 16
"""Passages per group."""

_BUFFERS = threading.local()


def scratch_buffer(name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A buffer that this thread reuses, with arbitrary content -> [rows, columns].

    The buffer is reused because allocating memory takes longer than filling the buffer.
    """
    count = rows * columns
    buffer: Tensor | None = getattr(_BUFFERS, name, None)
    if buffer is None or buffer.dtype != dtype or len(buffer) < count:
        with torch.inference_mode(False):  # the thread may write to the buffer outside inference mode later
            buffer = torch.empty(count, dtype=dtype)
        setattr(_BUFFERS, name, buffer)
    return buffer[:count].view(rows, columns)


def above_threshold(
    score_BN: Tensor, k: int, floor_B: np.ndarray | None, slack_B: np.ndarray | float
) -> np.ndarray | None:
    """Positions, in the flattened `score_BN`, of the scores that can be among the k best of a query, in rising order -> [C].

    `floor_B` has for each query a score that k other passages reach, or is None if no such scores are known. `slack_B` is a
    bound of the error of each score, in the unit of the scores. N must be a multiple of `GROUP`. The result is None if so few
    scores are excluded that ranking all scores is faster, or if floating-point scores are not finite.
    """
    queries, width = score_BN.shape
    groups = width // GROUP
    if not queries or not 1 <= k <= groups // 4:
        return None
    # The positions of the passages of a group differ by multiples of `groups`.
    top_BG = score_BN.view(queries, GROUP, groups).amax(1).numpy()
    if score_BN.is_floating_point() and not np.isfinite(top_BG).all():
        return None
    score = score_BN.view(-1).numpy()
    if floor_B is None:
        least_B1 = _threshold(_kth_best(top_BG, k) - 2 * slack_B, score.dtype)
        above_BN = scratch_buffer("above", queries, width, torch.bool).numpy()
        place_C = np.greater_equal(score_BN.numpy(), least_B1, out=above_BN).ravel().nonzero()[0]
    else:
        least_B1 = _threshold(floor_B - slack_B, score.dtype)
        group_C = (top_BG >= least_B1).ravel().nonzero()[0]
        if 2 * len(group_C) > top_BG.size:
            return None
        query_C = group_C // groups
        place_CG = (group_C + query_C * (width - groups))[:, None] + np.arange(0, width, groups)
        place_C = np.sort(place_CG[score.take(place_CG) >= least_B1[query_C]])
    return place_C if 16 * len(place_C) <= len(score) else None


def _kth_best(top_BG: np.ndarray, k: int) -> np.ndarray:
    """For each query, a score that at least k passages reach: the k-th largest group maximum -> [B].

    If there are many groups, groups are first united, because fewer maxima are ranked faster.
    """
    queries, groups = top_BG.shape
    while groups % 2 == 0 and groups >= 8 * k:
        groups //= 2
    return np.partition(top_BG.reshape(queries, -1, groups).max(1), -k, axis=1)[:, -k]


def _threshold(least_B: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The thresholds in the data type of the scores -> [B, 1]. Rounding to an integer changes a threshold by less than 1."""
    if dtype.kind == "i":
        least_B = np.maximum(least_B, -(2.0**30))
    return least_B.astype(dtype)[:, None]
