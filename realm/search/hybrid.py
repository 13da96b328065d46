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


def fuse(scored: Scored) -> tuple[np.ndarray, np.ndarray]:
    """Fused scores [N] and passage numbers [N], best first.

    The dense scores and the BM25 scores are each divided by their standard deviation over the N passages, so that the scale of
    the scores does not matter. Then the scaled scores are added with weights (a convex combination of normalised scores:
    Bruch, Gai and Ingber 2023). If all dense scores are equal, or all BM25 scores, the equal scores are replaced by 0. Equal
    sums are ordered by dense score, then by passage number.

    >>> dense, bm25 = np.array([4.0, 1.0, 1.0]), np.array([0.0, 2.0, 2.0])
    >>> fuse(Scored(np.array([3, 7, 9]), dense, bm25))[0].round(2)
    array([5.66, 3.54, 3.54])
    """
    number_N, dense_N, bm25_N = scored
    score_N = DENSE_WEIGHT * _scaled(dense_N) + _scaled(bm25_N)
    best_N = np.lexsort((number_N, -dense_N, -score_N))
    return score_N[best_N], number_N[best_N]


def _scaled(score_N: np.ndarray) -> np.ndarray:
    """The scores divided by their standard deviation; zeros if all scores are equal."""
    if not len(score_N) or score_N.min() == score_N.max():
        return np.zeros(len(score_N))
    return score_N / score_N.std(dtype=np.float64)
