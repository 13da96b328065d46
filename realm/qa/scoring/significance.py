"""Confidence intervals and paired tests on outcomes per question.

Axis letters: N questions, S seeds.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

Z95 = 1.959963984540054
"""Quantile 0.975 of the standard normal distribution."""


def percent(share: float) -> float:
    """A share as a percentage, rounded to three decimals.

    Tables show one decimal; with two, 34.251 would become 34.25, and then 34.2.
    """
    return round(100 * float(share), 3)


def p_value(p: float) -> str:
    """A p value as text.

    >>> p_value(0.0002), p_value(0.0541)
    ('< .001', '0.054')
    """
    return "< .001" if p < 0.001 else f"{p:.3f}"


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a share: Wilson's score interval (1927), which is also valid for shares near 0 and 1.

    >>> [round(x, 4) for x in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    share = successes / n
    centre = share + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


class McNemar(NamedTuple):
    """Numbers of questions that only system a and only system b answers correctly, and the p-value of the difference."""

    only_a: int
    only_b: int
    p: float


def mcnemar(correct_a_N: Sequence[bool] | np.ndarray, correct_b_N: Sequence[bool] | np.ndarray) -> McNemar:
    """Exact two-sided McNemar test of two systems on the same questions.

    This is a binomial test with probability 1/2 on the questions that only one of the systems answers correctly.

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
    """Mean of a minus mean of b, the 95 % interval of this difference, and the two-sided p-value of no difference."""

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
    value_SN = np.asarray(value_N, dtype=float)[None]
    low, high = np.quantile(_resampled_means(value_SN, samples, seed), [0.025, 0.975])
    return float(low), float(high)


def _resampled_means(value_SN: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Means over as many seeds and as many questions, both drawn with replacement, `samples` times."""
    seeds, n = value_SN.shape
    generator = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    chunk = max(1, 2**21 // n)  # samples at a time: 32 MiB
    for start in range(0, samples, chunk):
        size = min(chunk, samples - start)
        question_CN = generator.integers(n, size=(size, n))
        if seeds == 1:
            means.append(value_SN[0, question_CN].mean(axis=1))
        else:
            share_CS = generator.multinomial(seeds, [1 / seeds] * seeds, size=size) / seeds
            means.append(np.take_along_axis(share_CS @ value_SN, question_CN, axis=1).mean(axis=1))
    return np.concatenate(means)


def paired_bootstrap(
    a_SN: Sequence[float] | np.ndarray,
    b_SN: Sequence[float] | np.ndarray,
    *,
    samples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Paired bootstrap of the difference between the mean scores of two systems on the same questions.

    The score of a question can be any number: 0 or 1, F1, or a reciprocal rank. Scores of several seeds are arrays of [S, N];
    then a sample draws seeds too, so that the interval also shows the chance in the training. With a few seeds, this shows
    less than the whole chance. Arrays of [N] have one seed.

    The interval is the percentile interval. p is twice the smaller of two shares of the samples: the share with a mean of at
    most 0, and the share with a mean of at least 0. p is at least 2 / (samples + 1).
    """
    a_SN, b_SN = _pair(a_SN, b_SN)
    difference_SN = np.atleast_2d(a_SN - b_SN)
    means = _resampled_means(difference_SN, samples, seed)
    low, high = np.quantile(means, [0.025, 0.975])
    beyond = min((means <= 0).sum(), (means >= 0).sum())
    p = min(1.0, 2 * (int(beyond) + 1) / (samples + 1))
    return Difference(float(difference_SN.mean()), float(low), float(high), p)


class MeanDifference(TypedDict):
    """Mean of system a minus mean of system b in points, the 95 % interval, and the p-value of no difference."""

    points: float
    low: float
    high: float
    p: float


class PairedDifference(MeanDifference):
    """System a minus system b in percent of queries with a hit in the top `k`."""

    k: int
    only_a: int
    """Hits of system a at queries without a hit of system b, over all seeds."""
    only_b: int


def paired_difference(a_SN: np.ndarray, b_SN: np.ndarray, k: int = 5) -> PairedDifference:
    """Compares two systems by the share of queries with a hit in the top k. The arrays are ranks of first hits; 0: no hit.

    Arrays of [N] have one seed. If only system a has several seeds, each seed of system a is compared with the one seed of
    system b. For one seed, p is computed by McNemar's exact test. The hits of several seeds depend on the same queries, so with
    several seeds p is computed by the paired bootstrap, as is the interval.
    """
    a_SN = np.atleast_2d(a_SN)
    hit_SN, other_SN = ((ranks >= 1) & (ranks <= k) for ranks in (a_SN, np.broadcast_to(b_SN, a_SN.shape)))
    pair = mcnemar(hit_SN.ravel(), other_SN.ravel())
    difference = paired_bootstrap(100.0 * hit_SN, 100.0 * other_SN)
    points, low, high = (round(value, 3) for value in difference[:3])
    return {
        "k": k,
        "points": points,
        "low": low,
        "high": high,
        "only_a": pair.only_a,
        "only_b": pair.only_b,
        "p": pair.p if len(hit_SN) == 1 else difference.p,
    }


def _pair(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scores of two systems as arrays of [N] or [S, N]."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape or a.ndim not in (1, 2) or not a.size:
        raise ValueError(
            f"a paired test needs one outcome per question and system, but the shapes are {a.shape} and {b.shape}"
        )
    return a, b
