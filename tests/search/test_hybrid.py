"""Fusion of dense and BM25 scores."""

from statistics import pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.search.hybrid import DENSE_WEIGHT, Scored, fuse

both_scores = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 30)), min_size=1, max_size=8)


def scored(both: list[tuple[float, float]]) -> Scored:
    dense, bm25 = zip(*both, strict=True)
    return Scored(np.arange(10, 10 + len(both)), np.array(dense, np.float32), np.array(bm25, np.float32))


@given(both_scores)
def test_fusion_equals_the_formula(both: list[tuple[int, int]]) -> None:
    spreads = [pstdev(side) or 1.0 for side in zip(*both, strict=True)]
    constant = [len(set(side)) == 1 for side in zip(*both, strict=True)]

    def total(one: tuple[int, int]) -> float:
        parts = zip((DENSE_WEIGHT, 1.0), one, spreads, constant, strict=True)
        return sum(0.0 if same else weight * value / spread for weight, value, spread, same in parts)

    score_N, number_N = fuse(scored(both))
    assert sorted(number_N.tolist()) == list(range(10, 10 + len(both)))
    assert score_N.tolist() == pytest.approx([total(both[n - 10]) for n in number_N], abs=1e-5)
    assert (np.diff(score_N) <= 0).all()


@given(both_scores, st.sampled_from([0.25, 4.0, 1024.0]), st.integers(-50, 50))
def test_neither_scale_nor_offset_of_the_scores_changes_the_ranking(
    both: list[tuple[int, int]], factor: float, offset: int
) -> None:
    plain = scored(both)
    score_N, number_N = fuse(plain)
    gaps = np.abs(np.diff(score_N))
    if (gaps[gaps > 0] < 1e-6).any():  # rounding may order these either way
        return
    other_N = dict(zip(number_N.tolist(), score_N.tolist(), strict=True))
    moved = fuse(plain._replace(dense_N=factor * (plain.dense_N + offset)))[1]
    ranked = [other_N[number] for number in moved.tolist()]
    assert ranked == pytest.approx(sorted(ranked, reverse=True), abs=1e-6)


def test_equal_scores_of_one_method_leave_the_ranking_of_the_other() -> None:
    for dense, bm25 in (([1.0, 3.0, 2.0], [0.0] * 3), ([0.7] * 3, [1.0, 3.0, 2.0])):
        assert fuse(scored(list(zip(dense, bm25, strict=True))))[1].tolist() == [11, 12, 10]


def test_equal_sums_are_ranked_by_their_dense_scores_then_by_number() -> None:
    assert fuse(scored([(0, 0), (0, 0)]))[1].tolist() == [10, 11]
    big = fuse(Scored(np.array([5, 6, 7, 8]), np.array([0.0, 1.0, 0.0, 1.0]), np.array([2.0, 0.0, 2.0, 0.0])))
    assert big[1].tolist() == [6, 8, 5, 7]
    assert fuse(Scored(*(np.zeros(0) for _ in range(3))))[1].tolist() == []


def test_fusing_methods_that_fail_on_different_queries_beats_either_method() -> None:
    draw, right = np.random.default_rng(0), 0
    found = {"dense": 0, "bm25": 0, "hybrid": 0}
    for query in range(400):
        dense_N, bm25_N = draw.normal(size=(2, 60))
        (dense_N if query % 2 else bm25_N)[right] += 6.0
        together = fuse(Scored(np.arange(60), 0.1 * dense_N, 20 * bm25_N))[1][0]
        for name, first in (("dense", dense_N.argmax()), ("bm25", bm25_N.argmax()), ("hybrid", together)):
            found[name] += int(first == right)
    assert found["dense"] < 220 and found["bm25"] < 220 and found["hybrid"] > 270
