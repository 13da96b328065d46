"""REALM beside another system on the same queries, in pairs.

S seeds, N queries.
"""

from typing import TypedDict

import numpy as np

from realm.qa.significance import mcnemar, paired_bootstrap


class Against(TypedDict):
    """REALM less another system, in points of queries with a hit in the top `k`: 95 % interval, McNemar's counts and p."""

    k: int
    points: float
    low: float
    high: float
    only_realm: int
    only_other: int
    p: float


def against(realm_SN: np.ndarray, other_SN: np.ndarray, k: int = 5) -> Against:
    """From the rank of each query's first hit, 0 for none: which of the two has a hit in the top k.

    The test pools seeds; the interval draws queries again, each with the mean of its seeds, so it does not.
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
