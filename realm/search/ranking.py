"""Which of many scores can be among the best of a query, told by the best of groups of passages.

Ranking a row of scores costs a CPU more than the products that they are; comparing each with one bound does not. Each of the
k best groups holds a passage that scores as much as its best, so what lies under the k-th of them is not among the best.

Letters: B queries, N passages, G groups of passages, C scores that remain of all queries.
"""

import threading

import numpy as np
import torch
from torch import Tensor

GROUP = 16
"""Passages of which the best score is looked at first."""

_KEPT = threading.local()


def space(what: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A thread's own room for one purpose, not cleared: memory that is new costs more than filling it -> [rows, columns]."""
    count = rows * columns
    room: Tensor | None = getattr(_KEPT, what, None)
    if room is None or room.dtype != dtype or len(room) < count:
        with torch.inference_mode(False):  # the thread may write to it outside later
            room = torch.empty(count, dtype=dtype)
        setattr(_KEPT, what, room)
    return room[:count].view(rows, columns)


def reaching(
    score_BN: Tensor, k: int, floor_B: np.ndarray | None, slack_B: np.ndarray | float
) -> np.ndarray | None:
    """Where the scores stand that can be among the k best of their query, queries in rising order -> [C].

    `floor_B` is what k others of each query reach, where that is known, `slack_B` how far a score may be off, both in the
    scores' unit. N is a multiple of `GROUP`. None where too little is ruled out to be worth it, or where floats are not finite.
    """
    queries, width = score_BN.shape
    groups = width // GROUP
    if not queries or not 1 <= k <= groups // 4:
        return None
    # A group's passages stand `groups` apart.
    top_BG = score_BN.view(queries, GROUP, groups).amax(1).numpy()
    if score_BN.is_floating_point() and not np.isfinite(top_BG).all():
        return None
    score = score_BN.view(-1).numpy()
    if floor_B is None:
        least_B1 = _bound(_kth(top_BG, k) - 2 * slack_B, score.dtype)
        above_BN = space("above", queries, width, torch.bool).numpy()
        place_C = np.greater_equal(score_BN.numpy(), least_B1, out=above_BN).ravel().nonzero()[0]
    else:
        least_B1 = _bound(floor_B - slack_B, score.dtype)
        group_C = (top_BG >= least_B1).ravel().nonzero()[0]
        if 2 * len(group_C) > top_BG.size:
            return None
        query_C = group_C // groups
        place_CG = (group_C + query_C * (width - groups))[:, None] + np.arange(0, width, groups)
        place_C = place_CG[score.take(place_CG) >= least_B1[query_C]]
    return place_C if 16 * len(place_C) <= len(score) else None


def _kth(top_BG: np.ndarray, k: int) -> np.ndarray:
    """A score that k passages reach at least, each the best of groups of its own -> [B]."""
    queries, groups = top_BG.shape
    while groups % 2 == 0 and groups >= 8 * k:
        groups //= 2
    return np.partition(top_BG.reshape(queries, -1, groups).max(1), -k, axis=1)[:, -k]


def _bound(least_B: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A bound as a score -> [B, 1]. As an integer it moves by less than one unit."""
    if dtype.kind == "i":
        least_B = np.maximum(least_B, -(2.0**30))
    return least_B.astype(dtype)[:, None]
