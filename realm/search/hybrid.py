"""Fuses dense and BM25 scores of the same passages into one ranking.

Axis letters: N passages that dense search or BM25 ranks for a query.
"""

from typing import NamedTuple

import numpy as np

DENSE_WEIGHT = 2.0
"""Weight of dense scores; BM25 scores have weight 1. It was chosen on dev questions of four corpora (docs/experiments)."""


class Scored(NamedTuple):
    """Passages that dense search or BM25 ranks for a query, with both scores of each passage."""

    number_N: np.ndarray
    dense_N: np.ndarray
    bm25_N: np.ndarray


def fuse(scored: Scored, pool: Scored | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Fused scores [N] and passage numbers [N], best first.

    The dense scores and the BM25 scores are each divided by their standard deviation over the passages of `pool`, so that the
    scale of the scores does not matter. If `pool` is None, these are the N passages. With a filter, `pool` has the passages
    that the search without the filter ranks, so that the filter does not change the score of a passage.

    Then the scaled scores are added with weights (a convex combination of normalised scores: Bruch, Gai and Ingber 2023). If
    all dense scores of the pool are equal, or all BM25 scores, these scores are replaced by 0. Equal sums are ordered by dense
    score, then by passage number.

    >>> dense, bm25 = np.array([4.0, 1.0, 1.0]), np.array([0.0, 2.0, 2.0])
    >>> fuse(Scored(np.array([3, 7, 9]), dense, bm25))[0].round(2)
    array([5.66, 3.54, 3.54])
    """
    number_N, dense_N, bm25_N = scored
    of_pool = scored if pool is None else pool
    score_N = DENSE_WEIGHT * _scaled(dense_N, of_pool.dense_N) + _scaled(bm25_N, of_pool.bm25_N)
    best_N = np.lexsort((number_N, -dense_N, -score_N))
    return score_N[best_N], number_N[best_N]


def _scaled(score_N: np.ndarray, pool_M: np.ndarray) -> np.ndarray:
    """The scores divided by the standard deviation of the scores of the pool; zeros if all scores of the pool are equal."""
    if not len(pool_M) or pool_M.min() == pool_M.max():
        return np.zeros(len(score_N))
    return score_N / pool_M.std(dtype=np.float64)
