"""Several rankings of the same passages into one: where dense and BM25 results meet.

B queries, K passages per query.
"""

from collections.abc import Sequence

import numpy as np

from realm.retrieval.bm25 import Ranking
from realm.text.inputs import NULL_PASSAGE


def reciprocal_rank_fusion(rankings: Sequence[np.ndarray], k: int = 60) -> Ranking:
    """Passages by the sum of 1 / (k + rank) over the rankings that hold them (Cormack, Clarke and Buettcher 2009).

    Only ranks count, so scores of different kinds need no scaling. Each ranking is passage numbers [B, K_i], best
    first; `NULL_PASSAGE` is padding. The result is as wide as the longest fused row; ties go to the earlier ranking.

    >>> dense, bm25 = np.array([[3, 7, 5]]), np.array([[7, 3, 9]])
    >>> fused = reciprocal_rank_fusion([dense, bm25])
    >>> fused.number_BK  # 3 and 7 were first and second: 1/61 + 1/62; 5 and 9 were third once: 1/63
    array([[3, 7, 5, 9]])
    >>> fused.score_BK.round(4)
    array([[0.0325, 0.0325, 0.0159, 0.0159]], dtype=float32)
    """
    rows = [_fuse(ranked, k) for ranked in zip(*rankings, strict=True)]
    longest = max(map(len, rows), default=0)
    score_BK = np.zeros((len(rows), longest), dtype=np.float32)
    number_BK = np.full((len(rows), longest), NULL_PASSAGE, dtype=np.int64)
    for row, fused in enumerate(rows):
        number_BK[row, : len(fused)] = list(fused)
        score_BK[row, : len(fused)] = list(fused.values())
    return Ranking(score_BK, number_BK)


def _fuse(rankings: Sequence[np.ndarray], k: int) -> dict[int, float]:
    """Score by passage number, best first, of one query's rankings."""
    scores: dict[int, float] = {}
    for numbers in rankings:
        for rank, number in enumerate(numbers.tolist(), start=1):
            if number != NULL_PASSAGE:
                scores[number] = scores.get(number, 0.0) + 1 / (k + rank)
    return dict(sorted(scores.items(), key=lambda item: -item[1]))
