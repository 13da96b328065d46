"""Confidence intervals and paired tests on outcomes per question.

Axis letters: N questions.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Z95 = 1.959963984540054
"""Quantile 0.975 of the standard normal distribution."""


def percent(share: float) -> float:
    """A share as a percentage, rounded to two decimals."""
    return round(100 * float(share), 2)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a share: Wilson's score interval (1927), which is valid near 0 and 1, too.

    >>> [round(x, 4) for x in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    share = successes / n
    centre = share + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


class McNemar(NamedTuple):
    """Questions that only system a, or only system b, answers right; p of a split at least as uneven by chance."""

    only_a: int
    only_b: int
    p: float


def mcnemar(correct_a_N: Sequence[bool] | np.ndarray, correct_b_N: Sequence[bool] | np.ndarray) -> McNemar:
    """Exact two-sided McNemar test of two systems on the same questions: a binomial test, p = 1/2, on the disagreements.

    >>> mcnemar([True] * 6 + [False], [False] * 6 + [True])
    McNemar(only_a=6, only_b=1, p=0.125)
    """
    a_N, b_N = _pair(correct_a_N, correct_b_N)
    only_a, only_b = int((a_N > b_N).sum()), int((a_N < b_N).sum())
    n = only_a + only_b
    ways = total = 1
    for i in range(min(only_a, only_b)):  # integers, so nothing is rounded before the last division
        ways = ways * (n - i) // (i + 1)
        total += ways
    return McNemar(only_a, only_b, min(1.0, 2 * total / 2**n))


class Difference(NamedTuple):
    """Mean of a minus mean of b, the 95 % interval of this difference, and the two-sided p of no difference."""

    mean: float
    low: float
    high: float
    p: float


def bootstrap_interval(
    value_N: Sequence[float] | np.ndarray, *, samples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of the mean of a score per question.

    >>> bootstrap_interval([0.5, 0.5, 0.5])
    (0.5, 0.5)
    """
    low, high = np.quantile(_resampled_means(np.asarray(value_N, dtype=float), samples, seed), [0.025, 0.975])
    return float(low), float(high)


def _resampled_means(value_N: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Means of as many questions drawn with replacement, `samples` times."""
    n = len(value_N)
    generator = np.random.default_rng(seed)
    chunk = max(1, 2**22 // n)  # samples at a time: 32 MiB
    return np.concatenate(
        [
            value_N[generator.integers(n, size=(min(chunk, samples - start), n))].mean(axis=1)
            for start in range(0, samples, chunk)
        ]
    )


def paired_bootstrap(
    a_N: Sequence[float] | np.ndarray,
    b_N: Sequence[float] | np.ndarray,
    *,
    samples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Paired bootstrap of the difference of two systems' mean scores on the same questions.

    Works for any score per question: 0/1, F1, a reciprocal rank, or a mean over seeds. The interval is the percentile interval.
    p is twice the smaller share of samples on either side of 0, and at least 2 / (samples + 1).
    """
    a_N, b_N = _pair(a_N, b_N)
    difference_N = a_N - b_N
    means = _resampled_means(difference_N, samples, seed)
    low, high = np.quantile(means, [0.025, 0.975])
    beyond = min((means <= 0).sum(), (means >= 0).sum())
    p = min(1.0, 2 * (int(beyond) + 1) / (samples + 1))
    return Difference(float(difference_N.mean()), float(low), float(high), p)


def _pair(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    a_N, b_N = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a_N.shape != b_N.shape or a_N.ndim != 1 or not len(a_N):
        raise ValueError(
            f"a paired test needs one outcome per question and system, got {a_N.shape} and {b_N.shape}"
        )
    return a_N, b_N
