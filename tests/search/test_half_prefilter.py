"""The float16 prefilter of a GPU, run on a CPU: its bound and its candidates, against exact scores."""

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from realm.search import half_prefilter
from realm.search.exact import MipsIndex
from tests.search.test_exact import KINDS, as_on_a_gpu, made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("query_kind", ["gaussian", "huge", "tiny", "outlier", "zero"])
def test_no_passage_that_is_no_candidate_is_above_the_bound(kind, query_kind, monkeypatch):
    as_on_a_gpu(monkeypatch)
    draw = np.random.default_rng(0)
    vectors, query = made(kind, 1003, 24, draw), made(query_kind, 9, 24, draw).astype(np.float32)
    vectors_ND = torch.from_numpy(vectors)
    longest = half_prefilter.longest(vectors_ND)
    number_BM, bound_B = half_prefilter.candidates(torch.from_numpy(query), vectors_ND, longest, 5)
    truth = query.astype(np.float64) @ vectors.astype(np.float64).T
    for number_M, bound, score_N in zip(number_BM.tolist(), bound_B.tolist(), truth, strict=True):
        assert number_M == sorted(set(number_M))
        assert np.delete(score_N, number_M).max() <= bound


@pytest.mark.parametrize("count", [41, 170, 1003, 20_000])
@pytest.mark.parametrize("groups", [1, 3, 40])
def test_the_largest_values_of_long_rows_are_found_in_sets(count, groups, monkeypatch):
    monkeypatch.setattr(half_prefilter, "GROUP", 4)
    value_BG = torch.from_numpy(np.random.default_rng(0).standard_normal((3, count))).half()
    column_BC, next_B = half_prefilter.largest(value_BG, groups)
    wanted = value_BG.float().topk(groups + 1, dim=1).values
    found = value_BG.float().gather(1, column_BC).sort(dim=1, descending=True).values
    assert torch.equal(found, wanted[:, :-1]) and torch.equal(next_B, wanted[:, -1])


def test_vectors_as_of_texts_are_not_searched_a_second_time(monkeypatch):
    """Otherwise the prefilter only costs time."""
    as_on_a_gpu(monkeypatch)
    draw = np.random.default_rng(0)
    vectors, query = made("falling", 40_000, 64, draw), made("falling", 20, 64, draw).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    monkeypatch.setattr(MipsIndex, "_search", lambda *args: pytest.fail("searched a second time"))
    hits = MipsIndex(vectors).search(torch.from_numpy(query), 10)
    expected = np.argsort(-query @ vectors.astype(np.float32).T, axis=1)[:, :10]
    assert np.array_equal(hits.number_BK, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["query", "vectors"])
def test_numbers_that_are_not_finite_give_the_hits_of_a_search_without_prefilter(bad, where, monkeypatch):
    draw = np.random.default_rng(0)
    vectors, query = made("gaussian", 2000, 8, draw), made("gaussian", 4, 8, draw).astype(np.float32)
    {"query": query, "vectors": vectors}[where][2] = bad
    wanted = MipsIndex(vectors).search(torch.from_numpy(query), 5)
    as_on_a_gpu(monkeypatch)
    found = MipsIndex(vectors).search(torch.from_numpy(query), 5)
    assert torch.equal(found.number_BK, wanted.number_BK)
    assert torch.allclose(found.score_BK, wanted.score_BK, equal_nan=True)


def test_mixed_precision_around_a_search_changes_no_product(monkeypatch):
    as_on_a_gpu(monkeypatch)
    draw, products = np.random.default_rng(0), []
    plain = half_prefilter.group_maxima_in_chunks
    monkeypatch.setattr(
        half_prefilter,
        "group_maxima_in_chunks",
        lambda *given: products.append(plain(*given)) or products[-1],
    )
    index, query = MipsIndex(made("gaussian", 2000, 8, draw)), torch.from_numpy(draw.standard_normal((4, 8)))
    wanted = index.search(query, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = index.search(query, 5)
    assert torch.equal(*products)
    assert torch.equal(found.number_BK, wanted.number_BK) and torch.equal(found.score_BK, wanted.score_BK)


def test_score_as_high_as_the_bound_is_doubtful(monkeypatch):
    """All vectors are equal, so the passages with the smallest numbers are the best, wherever the candidates are."""
    as_on_a_gpu(monkeypatch)
    vectors_ND = torch.zeros(2000, 8, dtype=torch.float16)
    last_groups = torch.arange(1500, 1620).expand(3, -1)
    monkeypatch.setattr(half_prefilter, "candidates", lambda *_: (last_groups, torch.zeros(3)))
    assert MipsIndex(vectors_ND).search(torch.ones(3, 8), 4).number_BK.tolist() == [[0, 1, 2, 3]] * 3


def test_kernel_that_fails_or_is_wrong_is_not_used(monkeypatch):
    """As on a machine whose Triton has no C compiler; `_kernel_runs` itself runs, with a CPU in the place of the GPU."""
    pytest.importorskip("triton")
    from realm.search import group_maxima_kernel

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    class Gpu:
        type = "cuda"

    def probe(device: object, dim: int) -> bool:
        return half_prefilter._kernel_runs.__wrapped__(device, dim)

    plain = half_prefilter.group_maxima_in_chunks
    monkeypatch.setattr(torch, "Generator", lambda device: torch._C.Generator())
    monkeypatch.setattr(torch, "randn", lambda *size, generator, device: torch.ones(size))
    for kernel, runs in (
        (fails, False),
        (lambda query, vectors, group: torch.zeros(len(query), 2), False),
        (lambda query, vectors, group: plain(query, vectors).float(), True),
    ):
        monkeypatch.setattr(group_maxima_kernel, "group_maxima", kernel)
        assert probe(Gpu(), 32) is runs
    assert not probe(Gpu(), 256)
    assert not probe(torch.device("cpu"), 32)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_finds_the_maxima_of_plain_products(tmp_path):
    """Triton runs the kernel on a CPU if the variable was set before Triton was imported, so a new process is needed."""
    draw = torch.Generator().manual_seed(0)
    cases = {}
    for queries, count, dim in ((1, 64, 8), (70, 1030, 96), (64, 512, 128), (130, 600, 33), (3, 63, 128)):
        query_BD, vectors_ND = (torch.randn(n, dim, generator=draw).half() for n in (queries, count))
        cases[f"{queries}.query"], cases[f"{queries}.vectors"] = query_BD, vectors_ND
    save_file(cases, tmp_path / "cases")
    run = subprocess.run(
        [sys.executable, "-c", RUN_KERNEL, tmp_path],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    for name, found_BG in load_file(tmp_path / "found").items():
        query_BD, vectors_ND = cases[f"{name}.query"], cases[f"{name}.vectors"]
        groups = len(vectors_ND) // half_prefilter.GROUP
        score_BN = query_BD.float() @ vectors_ND[: groups * half_prefilter.GROUP].float().T
        wanted_BG = score_BN.unflatten(1, (groups, half_prefilter.GROUP)).amax(dim=2)
        assert found_BG.shape == wanted_BG.shape
        assert torch.allclose(found_BG, wanted_BG, atol=1e-4), name
        plain_BG = half_prefilter.group_maxima_in_chunks(query_BD, vectors_ND)
        assert torch.allclose(plain_BG.float(), wanted_BG, rtol=1e-3, atol=1e-3), name


RUN_KERNEL = """
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from realm.search.group_maxima_kernel import group_maxima
from realm.search.half_prefilter import GROUP
folder = Path(sys.argv[1])
cases = load_file(folder / "cases")
names = {name.split(".")[0] for name in cases}
found = {name: group_maxima(cases[f"{name}.query"], cases[f"{name}.vectors"], GROUP).contiguous() for name in names}
save_file(found, folder / "found")
"""
