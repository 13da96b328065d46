"""The threshold for the best scores, compared with sorting all scores."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realm.search.threshold import GROUP, above_threshold, scratch_buffer


@given(
    queries=st.integers(1, 5),
    groups=st.integers(4, 70),
    k=st.integers(1, 10),
    kind=st.sampled_from(["float", "whole", "few values"]),
    slack=st.sampled_from([0.0, 30.0]),
    with_floor=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_score_among_the_best_is_left_out(queries, groups, k, kind, slack, with_floor, seed):
    """Also with scores that are off by up to `slack`, and with a known lower bound per query."""
    draw = np.random.default_rng(seed)
    true = draw.normal(size=(queries, GROUP * groups)) * 1000
    if kind == "few values":
        true = np.round(true / 500)
    seen = true + draw.uniform(-slack, slack, true.shape)
    scores = torch.from_numpy(seen.astype(np.float32) if kind == "float" else np.rint(seen).astype(np.int32))
    off = slack + 1  # what rounding to whole numbers or to 32 bits adds
    floor = np.sort(true)[:, -3 * k] if with_floor else None
    found = above_threshold(scores, k, floor, np.full(queries, off))
    if found is None:
        return
    assert (np.diff(found) > 0).all()
    for row in range(queries):
        mine = set((found[found // true.shape[1] == row] - row * true.shape[1]).tolist())
        kth = np.sort(true[row])[-k]
        better = np.flatnonzero(true[row] > kth)
        least = kth if floor is None else max(kth, floor[row])
        assert set(better.tolist()) <= mine
        assert all(true[row][one] < least for one in range(true.shape[1]) if one not in mine)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_scores_that_are_not_finite_give_none(broken):
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 40 * GROUP)).astype(np.float32))
    assert above_threshold(scores, 5, None, 0.0) is not None
    scores[1, 7] = broken
    assert above_threshold(scores, 5, None, 0.0) is None


def test_equal_scores_give_none():
    assert above_threshold(torch.ones(2, 40 * GROUP, dtype=torch.int32), 5, None, 0.0) is None


def test_scratch_buffer_is_reused_and_grows():
    small = scratch_buffer("test", 3, 4, torch.float32)
    assert scratch_buffer("test", 2, 6, torch.float32).data_ptr() == small.data_ptr()
    assert scratch_buffer("test", 5, 4, torch.float32).shape == (5, 4)
    assert scratch_buffer("test", 2, 2, torch.int32).dtype == torch.int32
    with torch.inference_mode():
        made = scratch_buffer("test", 100, 100, torch.int32)
    made.zero_()  # a tensor of inference mode could not be written to here
