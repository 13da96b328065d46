"""Exact search against numpy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realm.search import exact as mips
from realm.search import group_operations, group_prefilter, int8_prefilter
from realm.search.exact import MipsIndex
from tests.search.test_int8_prefilter import needs_int8


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


@pytest.mark.parametrize("queries", [1, 64, mips.QUERIES])
@pytest.mark.parametrize(("dim", "gigabytes", "most"), [(128, 80, 20), (768, 80, 40), (768, 8, 400)])
def test_a_gpu_scores_few_chunks_that_need_little_of_its_memory(
    queries, dim, gigabytes, most, monkeypatch
) -> None:
    meta, gpu = torch.device("meta"), SimpleNamespace(total_memory=gigabytes << 30)
    index = MipsIndex(torch.empty((13_353_718, dim), device=meta), meta)
    monkeypatch.setattr(MipsIndex, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    chunks = list(index._chunks(queries))
    assert [start for start, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])]
    assert chunks[-1][1] == 13_353_718 and len(chunks) <= most
    assert max(stop - start for start, stop in chunks) * 4 * max(queries, dim) <= gigabytes << 24


KINDS = "gaussian falling repeated alike huge tiny outlier zero ordered".split()


def made(kind: str, count: int, dim: int, draw: np.random.Generator) -> np.ndarray:
    """Vectors [count, dim] float16 of a kind that an inexact search would get wrong."""
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
    """Asserts that the hits are the best by float64 products, up to float32 rounding; equal scores in any order."""
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
    float32_numbers=st.sampled_from([0, mips.FLOAT32_NUMBERS]),
    few_scores=st.sampled_from([0, mips.FEW_SCORES]),
    groups=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_search_is_exact_whatever_the_vectors(
    kind, query_kind, count, dim, queries, k, bits, float32_numbers, few_scores, groups, seed
):
    draw = np.random.default_rng(seed)
    vectors = made(kind, count, dim, draw).astype(f"float{bits}")
    query = made(query_kind, max(queries, 1), dim, draw).astype(np.float32)[:queries]
    index = MipsIndex(vectors.copy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mips, "MIN_PASSAGES", 1)
        patch.setattr(mips, "WARM_UP", 0)
        patch.setattr(mips, "CHUNK", 512)
        patch.setattr(mips, "FLOAT32_NUMBERS", float32_numbers)
        patch.setattr(mips, "FEW_SCORES", few_scores)
        if groups:
            as_on_a_gpu(patch)
        assert_exact(index, vectors, query, k)
        assert_exact(index, vectors, query, k)  # prepared by now


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """The prefilter of a GPU searches, in small groups and chunks."""
    patch.setattr(group_prefilter, "is_fast", lambda device: True)
    patch.setattr(group_operations, "GROUP", 4)
    patch.setattr(group_operations, "SCORES", 10_000)
    patch.setattr(group_prefilter, "AT_ONCE", 0)
    if not int8_prefilter.is_fast():  # this CPU does not multiply 8-bit numbers, or rounds their sums
        patch.setattr(
            group_operations, "int8_products", lambda a, b, out: out.copy_(a.double() @ b.double().T)
        )


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("count", "queries"), [(9_000, 1), (9_000, 300), (40_000, 70)])
def test_search_in_chunks_of_its_own_size_is_exact(count, queries, fast, monkeypatch):
    if not fast:  # a CPU without products of 8-bit numbers
        monkeypatch.setattr(int8_prefilter, "is_fast", lambda: False)
    for name in ("WARM_UP", "FEW_SCORES"):
        monkeypatch.setattr(mips, name, 0)
    draw = np.random.default_rng(3)
    vectors = made("falling", count, 32, draw)
    assert_exact(MipsIndex(vectors), vectors, made("falling", queries, 32, draw).astype(np.float32), 20)


@pytest.mark.parametrize("prepared", [False, True])
def test_equal_scores_in_later_chunks_are_ranked_by_number(prepared, monkeypatch):
    """Later chunks are filtered by the scores of earlier chunks."""
    for name, value in (("CHUNK", 256), ("MIN_PASSAGES", 1), ("FEW_SCORES", 0)):
        monkeypatch.setattr(mips, name, value)
    for seed in range(100):
        draw = np.random.default_rng(seed)
        vectors, query = (draw.integers(-1, 2, (count, 8)).astype(np.float16) for count in (700, 3))
        index = MipsIndex(vectors)
        if prepared:
            index.prepare()
        found = index.search(torch.from_numpy(query).float(), 2).number_BK.tolist()
        score_BN = query.astype(int) @ vectors.astype(int).T
        assert found == np.argsort(-score_BN, axis=1, kind="stable")[:, :2].tolist()


@needs_int8
def test_the_prefilter_leaves_few_passages_to_be_scored(monkeypatch):
    draw = np.random.default_rng(4)
    vectors, query = made("gaussian", 20_000, 64, draw), made("gaussian", 16, 64, draw).astype(np.float32)
    scored = []
    rows = MipsIndex.rows
    monkeypatch.setattr(MipsIndex, "rows", lambda self, n: scored.append(len(n)) or rows(self, n))
    monkeypatch.setattr(mips, "_scored_chunk", None)
    monkeypatch.setattr(mips, "WARM_UP", 0)
    assert_exact(MipsIndex(vectors), vectors, query, 10)
    assert 160 <= sum(scored) < 20_000 * 16 / 50


def test_search_returns_at_most_as_many_hits_as_passages(vectors):
    assert MipsIndex(vectors).search(torch.ones(1, 8), 80).number_BK.shape == (1, 50)


@pytest.mark.parametrize("few_scores", [0, mips.FEW_SCORES])
@pytest.mark.parametrize("queries", [1, 4, 257])
def test_search_stays_in_float32_under_autocast(queries, few_scores, monkeypatch):
    monkeypatch.setattr(mips, "CHUNK", 4096)
    monkeypatch.setattr(mips, "FEW_SCORES", few_scores)
    draw = np.random.default_rng(1)
    index = MipsIndex(made("falling", 10_000, 32, draw))
    index.prepare()
    query = torch.from_numpy(made("falling", queries, 32, draw)).float()
    plain = index.search(query, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(index.search(query, 5).score_BK, plain.score_BK)


@needs_int8
def test_int8_vectors_are_made_after_the_first_few_queries():
    draw = np.random.default_rng(2)
    vectors = made("gaussian", 6_000, 16, draw)
    index, query = MipsIndex(vectors), made("gaussian", 20, 16, draw).astype(np.float32)
    for made_by_now in (False, True):
        assert_exact(index, vectors, query, 5)
        assert (index._int8 is not None) == made_by_now


@pytest.mark.parametrize("without", [[], ["FEW_SCORES"], ["FEW_SCORES", "FLOAT32_NUMBERS"]])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_nan_and_inf_in_a_vector_or_query_change_no_other_score(broken, without, monkeypatch):
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


def test_search_for_zero_hits_returns_empty_rows(vectors):
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
