"""Exact search against numpy."""

import numpy as np
import pytest
import torch

from realm.retrieval import mips
from realm.retrieval.mips import MipsIndex


@pytest.fixture
def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(50, 8)).astype(np.float16)


@pytest.mark.parametrize(("chunk", "block"), [(7, 3), (50, 7), (50, 50), (1000, 16)])
@pytest.mark.parametrize("bits", [16, 32])
def test_search_finds_what_sorting_all_scores_finds(vectors, chunk, block, bits, monkeypatch):
    monkeypatch.setattr(mips, "CHUNK", chunk)
    monkeypatch.setattr(mips, "BLOCK", block)
    vectors = vectors.astype(f"float{bits}")
    query = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    hits = MipsIndex(vectors).search(torch.from_numpy(query), 6)
    scores = query @ vectors.astype(np.float32).T
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :6]
    assert np.array_equal(hits.number_BK, expected)
    np.testing.assert_allclose(hits.score_BK, np.take_along_axis(scores, expected, 1), rtol=1e-5)


def test_search_gives_no_more_than_the_index_has(vectors):
    assert MipsIndex(vectors).search(torch.ones(1, 8), 80).number_BK.shape == (1, 50)


def test_search_stays_in_float32_under_autocast(vectors):
    query = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32))
    index = MipsIndex(vectors)
    plain = index.search(query, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(index.search(query, 5).score_BK, plain.score_BK)


def test_rest_is_the_logsumexp_of_everything_not_left_out(vectors):
    query = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)).requires_grad_()
    left_out = [np.array([3, 9]), np.array([], dtype=np.int64)]
    rest = MipsIndex(vectors).rest_logsumexp(query, left_out)
    scores = query.detach().numpy() @ vectors.astype(np.float32).T
    expected = [np.log(np.exp(np.delete(scores[row], left_out[row])).sum()) for row in range(2)]
    np.testing.assert_allclose(rest.detach(), expected, rtol=1e-5)
    rest.sum().backward()
    assert query.grad is not None and query.grad.abs().sum() > 0
