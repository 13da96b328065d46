"""Paired comparison of REALM with another system on the same queries.

Axis letters: S seeds, N queries.
"""

from typing import TypedDict

import numpy as np

from realm.qa.significance import mcnemar, paired_bootstrap


class Against(TypedDict):
    """REALM minus another system in percent of queries with a hit in the top `k`: points, 95 % interval, McNemar's test."""

    k: int
    points: float
    low: float
    high: float
    only_realm: int
    only_other: int
    p: float


def against(realm_SN: np.ndarray, other_SN: np.ndarray, k: int = 5) -> Against:
    """Compares two systems by the share of queries with a hit in the top k. The arguments are ranks of first hits; 0: no hit.

    McNemar's test pools the seeds. The interval does not: for it, queries are resampled, each with its mean over the seeds.
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
        "p": pair.p,
    }
