import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from realm.qa.scoring.significance import (
    bootstrap_interval,
    mcnemar,
    paired_bootstrap,
    paired_difference,
    seeds_difference,
    wilson_interval,
)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_equals_scipys(outcome: tuple[int, int]) -> None:
    successes, n = outcome
    expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson_interval(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=300))
def test_mcnemar_equals_scipys_binomial_test_on_the_disagreements(pairs: list[tuple[bool, bool]]) -> None:
    a, b = zip(*pairs, strict=True)
    result = mcnemar(a, b)
    counts = Counter(pairs)
    assert (result.only_a, result.only_b) == (counts[True, False], counts[False, True])
    n = result.only_a + result.only_b
    assert result.p == pytest.approx(stats.binomtest(result.only_a, n).pvalue if n else 1.0)


def test_mcnemar_is_exact_for_thousands_of_questions() -> None:
    a = np.repeat([True, False], [1900, 1710])
    result = mcnemar(a, ~a)
    assert result.p == pytest.approx(stats.binomtest(1900, 3610).pvalue)
    assert mcnemar([True] * 3610, [False] * 3610).p == 0.0  # 2 ** -3609 is below the smallest float


def test_paired_bootstrap_agrees_with_the_normal_theory_on_many_questions() -> None:
    generator = np.random.default_rng(3)
    a = generator.random(2000)
    b = a + generator.normal(0.02, 0.4, 2000)
    result = paired_bootstrap(a, b, samples=4000)
    difference = a - b
    error = difference.std() / math.sqrt(2000)
    assert result.mean == pytest.approx(difference.mean())
    assert result.low == pytest.approx(difference.mean() - 1.96 * error, abs=0.15 * error)
    assert result.high == pytest.approx(difference.mean() + 1.96 * error, abs=0.15 * error)
    assert result.p == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.03)


def test_paired_bootstrap_repeats_with_its_seed_and_sees_no_difference_in_equals() -> None:
    a = np.arange(7) % 2
    assert paired_bootstrap(a, a[::-1], samples=200, seed=5) == paired_bootstrap(
        a, a[::-1], samples=200, seed=5
    )
    assert paired_bootstrap(a, a, samples=100) == (0, 0, 0, 1)
    assert paired_bootstrap([1] * 9, [0] * 9, samples=999).p == pytest.approx(2 / 1000)


def test_several_seeds_that_agree_are_tested_like_one_and_equal_questions_like_a_number_for_each_seed() -> (
    None
):
    """The two limits in which scipy's t tests are exact."""
    generator = np.random.default_rng(4)
    a_N, b_N, point_S = generator.random(50), generator.random(50), np.array([1.0, 2.0, -0.5, 1.5])
    for value_SN, plain in (
        (np.tile(a_N - b_N, (3, 1)), stats.ttest_rel(a_N, b_N)),
        (np.repeat(point_S[:, None], 50, axis=1), stats.ttest_1samp(point_S, 0)),
    ):
        found = seeds_difference(value_SN, np.zeros_like(value_SN))
        interval = plain.confidence_interval(0.95)
        assert found == pytest.approx((value_SN.mean(), interval.low, interval.high, plain.pvalue))
    nothing = np.ones((3, 5))
    assert (
        seeds_difference(nothing, nothing) == (0, 0, 0, 1) and seeds_difference(nothing, 0 * nothing).p == 0
    )


@pytest.mark.parametrize(
    ("of_seeds", "of_questions", "of_both", "most"),
    [(0.0, 0.1, 0.5, 0.05), (0.0, 0.5, 0.1, 0.08), (0.02, 0.3, 0.3, 0.08), (0.1, 0.3, 0.1, 0.12)],
)
def test_chance_in_seeds_questions_and_single_outcomes_is_rarely_called_a_difference(
    of_seeds, of_questions, of_both, most
) -> None:
    generator, below, error = np.random.default_rng(7), [], []
    for _ in range(400):
        noise = generator.normal(0, of_seeds, (3, 1)) + generator.normal(0, of_questions, (1, 300))
        value_SN = noise + generator.normal(0, of_both, (3, 300))
        found = seeds_difference(value_SN, np.zeros_like(value_SN))
        below.append(found.p < 0.05)
        error.append(found.mean)
    assert np.mean(below) < most  # the shares of the docstring, and three standard errors of 400 tests
    true = math.sqrt(of_seeds**2 / 3 + of_questions**2 / 300 + of_both**2 / 900)
    assert np.std(error) == pytest.approx(true, rel=0.12)  # what the test claims to measure
    assert np.mean(below) > 0.005


def test_one_question_has_the_t_test_of_its_seeds_and_one_seed_has_none() -> None:
    hit_S = np.array([[1], [0], [1], [1]])
    found, plain = (
        paired_difference(hit_S, np.zeros_like(hit_S), 1),
        stats.ttest_1samp(100.0 * hit_S[:, 0], 0),
    )
    assert found["p"] == pytest.approx(plain.pvalue)
    with pytest.raises(ValueError, match="there is one seed"):
        seeds_difference(np.ones((1, 4)), np.ones((1, 4)))


def test_one_seed_with_another_sign_makes_a_difference_insignificant() -> None:
    hit_SN = np.zeros((3, 2000), dtype=int)
    hit_SN[0, :300] = hit_SN[1, :300] = 1
    other_SN = np.zeros_like(hit_SN)
    other_SN[2, :200] = 1
    assert paired_difference(hit_SN[:2], other_SN[:2])["p"] < 0.001
    found = paired_difference(hit_SN, other_SN)
    assert found["points"] == pytest.approx(100 * (300 + 300 - 200) / 6000, abs=0.01)
    assert found["p"] > 0.05


def test_bootstrap_interval_equals_scipys_percentile_interval() -> None:
    score_N = np.random.default_rng(1).beta(0.5, 1.0, size=400)
    found = stats.bootstrap((score_N,), np.mean, n_resamples=4000, method="percentile", rng=2)
    low, high = bootstrap_interval(score_N)
    assert low == pytest.approx(found.confidence_interval.low, abs=0.005)
    assert high == pytest.approx(found.confidence_interval.high, abs=0.005)


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="one outcome per question"):
        mcnemar([True], [True, False])
    with pytest.raises(ValueError, match="one outcome per question"):
        paired_bootstrap([], [])
    with pytest.raises(ValueError, match="one outcome per question"):
        paired_bootstrap([[1, 0]], [[0, 1]])
