"""Paired comparison of REALM with another system on the same queries.

Axis letters: S seeds, N queries.
"""

from typing import TypedDict

import numpy as np

from realm.qa.significance import mcnemar, paired_bootstrap


class Against(TypedDict):
    """Percent of queries with a hit in the top `k`, REALM minus another system: points, 95 % interval, p.

    `only_realm` and `only_other` count the hits of one of the two, over all seeds.
    """

    k: int
    points: float
    low: float
    high: float
    only_realm: int
    only_other: int
    p: float


def against(realm_SN: np.ndarray, other_SN: np.ndarray, k: int = 5) -> Against:
    """Compares two systems by the rank of each query's first hit (0: no hit): is it in the top k?

    p is that of McNemar's exact test. With several seeds, whose hits depend on the same queries, p is that of the paired
    bootstrap, as the interval: it resamples queries, each with the mean over its seeds.
    """
    hit_SN, other_hit_SN = (
        (ranks >= 1) & (ranks <= k) for ranks in (realm_SN, np.broadcast_to(other_SN, realm_SN.shape))
    )
    pair = mcnemar(hit_SN.ravel(), other_hit_SN.ravel())
    difference = paired_bootstrap(100 * hit_SN.mean(axis=0), 100 * other_hit_SN.mean(axis=0))
    points, low, high = (round(value, 2) for value in difference[:3])
    return {
        "k": k,
        "points": points,
        "low": low,
        "high": high,
        "only_realm": pair.only_a,
        "only_other": pair.only_b,
        "p": pair.p if len(hit_SN) == 1 else difference.p,
    }
