"""Exact search against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realm.search import exact as mips
from realm.search import int8_prefilter as codes
from realm.search.exact import MipsIndex
from tests.search.test_int8_prefilter import needs_codes


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


KINDS = "gaussian falling repeated alike huge tiny outlier zero ordered".split()


def made(kind: str, count: int, dim: int, draw: np.random.Generator) -> np.ndarray:
    """Vectors [count, dim] float16 of a kind that could mislead a search."""
    vectors = draw.standard_normal((count, dim))
    if kind == "falling":
        vectors *= np.arange(1, dim + 1) ** -1.0
    elif kind == "repeated":
        vectors = vectors[draw.integers(max(1, count // 50), size=count)]
    elif kind == "alike":  # a retriever that has collapsed
        vectors = 1 + 0.001 * vectors
    elif kind == "huge":  # products are far beyond what 16 bits hold
        vectors = np.clip(vectors * 30_000, -65_000, 65_000)
    elif kind == "tiny":  # numbers with one or two bits
        vectors *= 1e-7
    elif kind == "outlier":
        vectors[draw.integers(count)] *= 1000
    elif kind == "zero":
        vectors *= 0
    elif kind == "ordered":  # what is found last is best
        vectors = np.sort(vectors, axis=0)
    return vectors.astype(np.float16)


def assert_exact(index: MipsIndex, vectors: np.ndarray, query: np.ndarray, k: int) -> None:
    """The best by products in 64 bits, up to what float32 rounds; equal scores in any order."""
    hits = index.search(torch.from_numpy(query), k)
    truth = query.astype(np.float64) @ vectors.astype(np.float64).T
    k = min(k, len(vectors))
    assert hits.score_BK.shape == hits.number_BK.shape == (len(query), k)
    lengths = (
        np.linalg.norm(query.astype(np.float64), axis=1),
        np.linalg.norm(vectors.astype(np.float64), axis=1),
    )
    near = 1e-6 * lengths[0][:, None] * lengths[1].max() + 1e-37
    numbers = hits.number_BK.numpy()
    assert all(len(set(row)) == k for row in numbers.tolist())
    best = -np.sort(-truth, axis=1)[:, :k]
    assert (np.abs(np.take_along_axis(truth, numbers, 1) - best) <= near).all()
    assert (np.abs(hits.score_BK.numpy() - best) <= near).all()


@given(
    kind=st.sampled_from(KINDS),
    query_kind=st.sampled_from(KINDS),
    count=st.integers(1, 1500),
    dim=st.sampled_from([1, 7, 8, 9, 33]),
    queries=st.integers(0, 9),
    k=st.integers(1, 40),
    bits=st.sampled_from([16, 32]),
    wide=st.sampled_from([0, mips.WIDE]),
    cheap=st.sampled_from([0, mips.CHEAP]),
    seed=st.integers(0, 1000),
)
def test_search_is_exact_whatever_the_vectors(
    kind, query_kind, count, dim, queries, k, bits, wide, cheap, seed
):
    draw = np.random.default_rng(seed)
    vectors = made(kind, count, dim, draw).astype(f"float{bits}")
    query = made(query_kind, max(queries, 1), dim, draw).astype(np.float32)[:queries]
    index = MipsIndex(vectors.copy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mips, "SMALL", 1)
        patch.setattr(mips, "FEW", 0)
        patch.setattr(mips, "CHUNK", 512)
        patch.setattr(mips, "WIDE", wide)
        patch.setattr(mips, "CHEAP", cheap)
        assert_exact(index, vectors, query, k)
        changed = draw.permutation(count)[: count // 3]
        vectors[changed] = made(query_kind, count, dim, draw)[: len(changed)]
        index.write(changed, torch.from_numpy(vectors[changed]))
        assert_exact(index, vectors, query, k)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("count", "queries"), [(9_000, 1), (9_000, 300), (40_000, 70)])
def test_search_in_chunks_of_its_own_size_is_exact(count, queries, fast, monkeypatch):
    if not fast:  # a CPU without products of 8-bit numbers
        monkeypatch.setattr(codes, "are_fast", lambda: False)
    for name in ("FEW", "CHEAP"):
        monkeypatch.setattr(mips, name, 0)
    draw = np.random.default_rng(3)
    vectors = made("falling", count, 32, draw)
    assert_exact(MipsIndex(vectors), vectors, made("falling", queries, 32, draw).astype(np.float32), 20)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("count", [1, 700, 9_001, 20_000])
@pytest.mark.parametrize("queries", [1, 40, 300])
def test_search_by_threads_that_share_the_passages_is_exact(count, queries, fast, two_threads, monkeypatch):
    if not fast:
        monkeypatch.setattr(codes, "are_fast", lambda: False)
    for name in ("FEW", "WIDE", "CACHED", "SHARED"):
        monkeypatch.setattr(mips, name, 0)
    shares, search = [], MipsIndex._search
    monkeypatch.setattr(MipsIndex, "_search", lambda self, *a: shares.append(a[1]) or search(self, *a))
    draw = np.random.default_rng(6)
    vectors = made("ordered", count, 32, draw)
    assert_exact(MipsIndex(vectors), vectors, made("gaussian", queries, 32, draw).astype(np.float32), 20)
    coded = fast and codes.are_fast() and count >= mips.SMALL
    assert len(set(shares)) == (2 if count > codes.EVEN and not coded else 1)


@needs_codes
@pytest.mark.parametrize(
    ("queries", "parts"), [(255, [255]), (256, [128, 128]), (301, [151, 150]), (513, [129, 128, 128, 128])]
)
def test_threads_get_equal_numbers_of_queries(queries, parts, two_threads, monkeypatch):
    asked, search = [], MipsIndex._search
    monkeypatch.setattr(MipsIndex, "_search", lambda self, *a: asked.append(len(a[0])) or search(self, *a))
    draw = np.random.default_rng(9)
    vectors, query = made("falling", 6_000, 16, draw), made("falling", queries, 16, draw)
    assert_exact(MipsIndex(vectors), vectors, query.astype(np.float32), 20)
    assert sorted(asked, reverse=True) == parts


@needs_codes
def test_threads_share_the_passages_where_codes_say_nothing(two_threads, monkeypatch):
    for name in ("CHEAP", "WIDE", "CACHED", "SHARED"):
        monkeypatch.setattr(mips, name, 0)
    shares, search = [], MipsIndex._search
    monkeypatch.setattr(MipsIndex, "_search", lambda self, *a: shares.append(a[1]) or search(self, *a))
    vectors = made("gaussian", 6_000, 16, np.random.default_rng(8))
    vectors[4_999] = np.nan
    index = MipsIndex(vectors)
    index.prepare()
    index.search(torch.ones(3, 16), 5)
    assert len(set(shares)) == 2


@pytest.mark.parametrize("cheap", [0, mips.CHEAP])
def test_an_index_that_was_prepared_in_inference_mode_can_be_written(cheap, monkeypatch):
    monkeypatch.setattr(mips, "CHEAP", cheap)
    draw = np.random.default_rng(7)
    vectors, query = made("gaussian", 6_000, 16, draw), made("gaussian", 40, 16, draw).astype(np.float32)
    index = MipsIndex(vectors.copy())
    with torch.inference_mode():
        index.search(torch.from_numpy(query), 5)
    vectors[7] = 3 * query[0]
    index.write(np.array([7]), torch.from_numpy(vectors[7:8]))
    assert_exact(index, vectors, query, 5)


@needs_codes
def test_codes_leave_few_passages_to_be_scored(monkeypatch):
    draw = np.random.default_rng(4)
    vectors, query = made("gaussian", 20_000, 64, draw), made("gaussian", 16, 64, draw).astype(np.float32)
    scored = []
    rows = MipsIndex.rows
    monkeypatch.setattr(MipsIndex, "rows", lambda self, n: scored.append(len(n)) or rows(self, n))
    monkeypatch.setattr(mips, "_ranked", None)
    monkeypatch.setattr(mips, "FEW", 0)
    assert_exact(MipsIndex(vectors), vectors, query, 10)
    assert 160 <= sum(scored) < 20_000 * 16 / 50


def test_search_gives_no_more_than_the_index_has(vectors):
    assert MipsIndex(vectors).search(torch.ones(1, 8), 80).number_BK.shape == (1, 50)


@pytest.mark.parametrize("cheap", [0, mips.CHEAP])
@pytest.mark.parametrize("queries", [1, 4, 257])
def test_search_stays_in_float32_under_autocast(queries, cheap, monkeypatch):
    monkeypatch.setattr(mips, "CHUNK", 4096)
    monkeypatch.setattr(mips, "CHEAP", cheap)
    draw = np.random.default_rng(1)
    index = MipsIndex(made("falling", 10_000, 32, draw))
    index.prepare()
    query = torch.from_numpy(made("falling", queries, 32, draw)).float()
    plain = index.search(query, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(index.search(query, 5).score_BK, plain.score_BK)


@needs_codes
def test_codes_are_made_when_more_than_a_few_queries_came_and_anew_when_they_no_longer_fit():
    draw = np.random.default_rng(2)
    vectors = made("gaussian", 6_000, 16, draw)
    index, query = MipsIndex(vectors), made("gaussian", 20, 16, draw).astype(np.float32)
    for made_by_now in (False, True):
        assert_exact(index, vectors, query, 5)
        assert (index._codes is not None) == made_by_now
    vectors[3] *= 30
    index.write(np.array([3]), torch.from_numpy(vectors[3:4]))
    assert index._codes is None
    for _ in range(2):
        assert_exact(index, vectors, query, 5)
    assert index._codes is not None


@pytest.mark.parametrize("without", [[], ["CHEAP"], ["CHEAP", "WIDE"]])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_vectors_and_queries_that_are_no_numbers_spoil_nothing_but_themselves(broken, without, monkeypatch):
    for name in without:
        monkeypatch.setattr(mips, name, 0)
    draw = np.random.default_rng(5)
    vectors, query = made("gaussian", 6_000, 16, draw), made("gaussian", 40, 16, draw).astype(np.float32)
    index = MipsIndex(vectors)
    index.prepare()
    sound = index.search(torch.from_numpy(query), 5)
    query[7] = broken
    found = index.search(torch.from_numpy(query), 5)
    others = [row for row in range(40) if row != 7]
    assert torch.equal(found.number_BK[others], sound.number_BK[others])
    vectors = vectors.copy()
    vectors[4_999] = broken
    index = MipsIndex(vectors)
    index.prepare()
    best = index.search(torch.from_numpy(query[:7]), 5)
    expected = [[n for n in row if n != 4_999] for row in sound.number_BK[:7].tolist()]
    for row, numbers in zip(best.number_BK.tolist(), expected, strict=True):
        assert [n for n in row if n != 4_999][:4] == numbers[:4]


def test_nothing_is_found_where_nothing_is_asked_for(vectors):
    assert MipsIndex(vectors).search(torch.ones(2, 8), 0).number_BK.shape == (2, 0)


def test_rest_is_the_logsumexp_of_everything_not_left_out(vectors):
    query = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)).requires_grad_()
    left_out = [np.array([3, 9]), np.array([], dtype=np.int64)]
    rest = MipsIndex(vectors).rest_logsumexp(query, left_out)
    scores = query.detach().numpy() @ vectors.astype(np.float32).T
    expected = [np.log(np.exp(np.delete(scores[row], left_out[row])).sum()) for row in range(2)]
    np.testing.assert_allclose(rest.detach(), expected, rtol=1e-5)
    rest.sum().backward()
    assert query.grad is not None and query.grad.abs().sum() > 0
