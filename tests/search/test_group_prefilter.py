"""The prefilter of a GPU, run on a CPU: its bound and its candidates, against exact scores."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from realm.search import exact, group_operations, group_prefilter
from realm.search.exact import MipsIndex
from realm.search.group_prefilter import Int8Groups
from realm.search.int8_prefilter import rotation
from tests.search.test_exact import KINDS, as_on_a_gpu, made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("query_kind", ["gaussian", "huge", "tiny", "outlier", "zero"])
def test_no_passage_that_is_no_candidate_is_above_the_bound(kind, query_kind, monkeypatch):
    as_on_a_gpu(monkeypatch)
    draw = np.random.default_rng(0)
    vectors, query = made(kind, 1003, 24, draw), made(query_kind, 9, 24, draw).astype(np.float32)
    groups = Int8Groups(torch.from_numpy(vectors))
    number_BM, bound_B = group_prefilter.candidates(torch.from_numpy(query), groups, 1003, 38)
    truth = query.astype(np.float64) @ vectors.astype(np.float64).T
    for number_M, bound, score_N in zip(number_BM.tolist(), bound_B.tolist(), truth, strict=True):
        assert number_M == sorted(set(number_M))
        assert np.delete(score_N, number_M).max() <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_upper_bounds_hold_for_queries_in_the_direction_of_an_error(kind, monkeypatch):
    """The inner product with the error of a vector is largest there, and without its part of the bound the bound would fail."""
    as_on_a_gpu(monkeypatch)
    vectors_ND = torch.from_numpy(made(kind, 1000, 24, np.random.default_rng(0)))
    groups = Int8Groups(vectors_ND)
    scale_N1 = groups.scale_G.double().repeat_interleave(4)[:, None]
    error_ND = vectors_ND.double() @ groups.rotation_DD - groups.int8_ND.double() * scale_N1
    query_BD = (1000 * error_ND[::37] @ groups.rotation_DD.T).float()
    bound_BG, error_B, truth_BG = bounds_and_truth(query_BD, vectors_ND, groups)
    assert (truth_BG <= bound_BG + error_B[:, None]).all()
    if kind == "alike":
        groups.error_G.zero_()
        bound_BG, error_B, truth_BG = bounds_and_truth(query_BD, vectors_ND, groups)
        assert (truth_BG > bound_BG + error_B[:, None]).any()


def test_upper_bounds_hold_for_vectors_in_the_direction_of_the_error_of_a_query(monkeypatch):
    as_on_a_gpu(monkeypatch)
    draw, rotation_DD = torch.Generator().manual_seed(0), rotation(24).double()
    query_BD = torch.randn(9, 24, generator=draw)
    queries = group_operations.quantized(query_BD.double() @ rotation_DD)
    error_BD = query_BD.double() @ rotation_DD - queries.int8_BD.double() * queries.scale_B[:, None]
    vectors_ND = F.normalize(error_BD @ rotation_DD.T).repeat_interleave(4, dim=0).float()
    bound_BG, error_B, truth_BG = bounds_and_truth(query_BD, vectors_ND, Int8Groups(vectors_ND))
    assert (truth_BG <= bound_BG + error_B[:, None]).all()
    assert (truth_BG > bound_BG).any()  # so the bound needs the part of the queries


def bounds_and_truth(
    query_BD: torch.Tensor, vectors_ND: torch.Tensor, groups: Int8Groups
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bounds of all groups [B, G], errors of the queries [B], and the largest exact score of each group [B, G]."""
    queries = group_operations.quantized(query_BD.double() @ groups.rotation_DD)
    bound_BG = group_operations.upper_bounds(*queries[:3], groups.int8_ND, groups.scale_G, groups.error_G)
    score_BN = query_BD.double() @ vectors_ND.double().T
    return bound_BG.double(), queries.error(groups.length), score_BN.unflatten(1, (-1, 4)).amax(dim=2)


@pytest.mark.parametrize("size", [1e-18, 1e-24, 1e-32, 1e-35])
@pytest.mark.parametrize("gpu", [False, True])
def test_tiny_numbers_in_float32_are_searched_exactly(size, gpu, monkeypatch):
    """Their squares are 0."""
    for name in ("FLOAT32_NUMBERS", "FEW_SCORES"):
        monkeypatch.setattr(exact, name, 0)
    if gpu:
        as_on_a_gpu(monkeypatch)
    draw = np.random.default_rng(0)
    vectors = ((1 + 0.01 * draw.standard_normal((20_000, 32))) * size).astype(np.float32)
    index = MipsIndex(vectors)
    index.prepare()
    query = draw.standard_normal((20, 32)).astype(np.float32)
    score_BN = query.astype(np.float64) @ vectors.astype(np.float64).T / size
    found = np.take_along_axis(score_BN, index.search(torch.from_numpy(query), 10).number_BK.numpy(), 1)
    assert np.allclose(found, -np.sort(-score_BN, axis=1)[:, :10], rtol=0, atol=1e-4)


def test_queries_that_few_candidates_do_not_decide_get_their_own_hits(monkeypatch):
    as_on_a_gpu(monkeypatch)
    draw = np.random.default_rng(0)
    vectors, query = made("alike", 2000, 8, draw), draw.standard_normal((6, 8)).astype(np.float32)
    query[::2] = -np.abs(query[::2])
    wanted = np.argsort(-query.astype(np.float64) @ vectors.astype(np.float64).T, axis=1, kind="stable")[
        :, :4
    ]
    for at_a_time in (6, 4, 1):
        monkeypatch.setattr(MipsIndex, "_queries_at_a_time", lambda *_, size=at_a_time: size)
        assert np.array_equal(MipsIndex(vectors).search(torch.from_numpy(query), 4).number_BK, wanted)


def test_kernels_are_compiled_once_for_usual_searches(monkeypatch):
    as_on_a_gpu(monkeypatch)
    searched, search = [], MipsIndex._search_groups
    monkeypatch.setattr(
        MipsIndex,
        "_search_groups",
        lambda *given: searched.append((len(given[1]), given[2])) or search(*given),
    )
    index = MipsIndex(made("gaussian", 3000, 8, np.random.default_rng(0)))
    index.search(torch.ones(3, 8), 1)
    index.prepare()
    index.prepare()
    assert searched == [(3, 1), (1, 20), (17, 20), (16, 20)]


@pytest.mark.parametrize("count", [41, 170, 1003, 20_000])
@pytest.mark.parametrize("groups", [1, 3, 40])
def test_the_largest_values_of_long_rows_are_found_in_sets(count, groups, monkeypatch):
    monkeypatch.setattr(group_operations, "GROUP", 4)
    monkeypatch.setattr(group_prefilter, "AT_ONCE", 0)
    value_BG = torch.from_numpy(np.random.default_rng(0).integers(-99, 99, (3, count), dtype=np.int32))
    column_BC, least_B = group_prefilter.largest(value_BG, groups)
    wanted = value_BG.topk(groups, dim=1).values
    found = value_BG.gather(1, column_BC).sort(dim=1, descending=True).values
    assert all(len(set(row)) == groups for row in column_BC.tolist())
    assert torch.equal(found, wanted) and torch.equal(least_B, wanted[:, -1])


def test_vectors_as_of_texts_are_not_searched_without_the_prefilter(monkeypatch):
    """Otherwise the prefilter only costs time."""
    as_on_a_gpu(monkeypatch)
    draw = np.random.default_rng(0)
    vectors, query = made("falling", 40_000, 64, draw), made("falling", 20, 64, draw).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    monkeypatch.setattr(MipsIndex, "_search_all", lambda *args: pytest.fail("searched without the prefilter"))
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


def test_mixed_precision_around_a_search_changes_no_score(monkeypatch):
    as_on_a_gpu(monkeypatch)
    draw = np.random.default_rng(0)
    vectors, query = made("gaussian", 2000, 8, draw), torch.from_numpy(draw.standard_normal((4, 8)))
    wanted = MipsIndex(vectors).search(query, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = MipsIndex(vectors).search(query, 5)
    assert torch.equal(found.number_BK, wanted.number_BK) and torch.equal(found.score_BK, wanted.score_BK)


def test_score_as_high_as_the_bound_is_doubtful(monkeypatch):
    """All vectors are equal, so the passages with the smallest numbers are the best, wherever the candidates are."""
    as_on_a_gpu(monkeypatch)
    vectors_ND = torch.zeros(2000, 8, dtype=torch.float16)
    last_groups = torch.arange(1500, 1620).expand(3, -1)
    monkeypatch.setattr(group_prefilter, "candidates", lambda *_: (last_groups, torch.zeros(3)))
    assert MipsIndex(vectors_ND).search(torch.ones(3, 8), 4).number_BK.tolist() == [[0, 1, 2, 3]] * 3


def test_kernels_that_fail_or_are_wrong_are_not_used_and_a_warning_says_so(monkeypatch, caplog):
    """As on a machine whose Triton has no C compiler."""

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    def spoiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def almost(*given: Any) -> Any:
            found = function(*given)
            return 1.05 * found if isinstance(found, torch.Tensor) else [1.05 * part for part in found]

        return almost

    def right() -> bool:
        return group_prefilter._is_right(
            SimpleNamespace(**usual, __name__="kernels"), torch.device("cpu"), 32
        )

    usual = {name: getattr(group_operations, name) for name in group_operations.__all__}
    assert right()
    for name in group_operations.__all__:
        if name != "members":
            for wrong in (fails, spoiled(usual[name])):
                with monkeypatch.context() as patch:
                    patch.setitem(usual, name, wrong)
                    caplog.clear()
                    assert not right()
                    (line,) = caplog.messages
                    assert line.startswith("searches on cpu are slower without kernels")
                    assert wrong is not fails or line.endswith("Failed to find C compiler")
    assert not group_prefilter.kernels_run(torch.device("cpu"), 32)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_give_the_results_of_plain_products(tmp_path):
    """Triton runs a kernel on a CPU if the variable was set before Triton was imported, so a new process is needed."""
    draw, group = torch.Generator().manual_seed(0), group_operations.GROUP
    cases = {}
    for queries, groups, dim in ((1, 1, 8), (17, 9, 96), (64, 5, 128), (66, 3, 33), (3, 2, 256)):
        case = {
            "rotated": torch.randn(queries, dim, generator=draw, dtype=torch.float64),
            "vectors": torch.randint(-127, 128, (groups * group, dim), generator=draw, dtype=torch.int8),
            "scale": torch.rand(groups, generator=draw),
            "error": torch.rand(groups, generator=draw),
            "numbers": torch.randint(groups * group, (queries, 70), generator=draw),
            "ranked": torch.randint(5, (3, 300), generator=draw).float(),  # many are equal
        }
        case["ranked"][0, 7:] = -torch.inf
        case["ranked"][-1, 11] = torch.nan
        cases |= {f"{dim}.{name}": part for name, part in case.items()}
    save_file(cases, tmp_path / "cases")
    run = subprocess.run(
        [sys.executable, "-c", RUN_KERNELS, tmp_path],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = load_file(tmp_path / "found")
    for dim in (8, 96, 128, 33, 256):
        case = {name.split(".")[1]: part for name, part in cases.items() if name.startswith(f"{dim}.")}
        got = {name.split(".")[1]: part for name, part in found.items() if name.startswith(f"{dim}.")}
        query_BD, rotated_BD, vectors_ND = got["query"].double(), case["rotated"], case["vectors"].double()
        assert torch.equal(query_BD.abs().amax(dim=1), torch.full((len(query_BD),), 127.0).double())
        lost_BD = rotated_BD - query_BD * got["scale"].double()[:, None]
        assert torch.allclose(got["lost"].double(), lost_BD.norm(dim=1), rtol=1e-4)
        assert (lost_BD.abs() <= got["scale"][:, None] * 0.501).all()
        assert torch.allclose(got["length"].double(), rotated_BD.norm(dim=1))
        score_BN = query_BD @ vectors_ND.T
        wanted_BG = score_BN.unflatten(1, (-1, group)).amax(dim=2) * got["scale"][:, None] * case["scale"]
        wanted_BG += got["length"][:, None] * case["error"]
        assert torch.allclose(got["bounds"].double(), wanted_BG), dim
        wanted_BM = (rotated_BD.float().double() @ vectors_ND.T).gather(1, case["numbers"]) / 127
        assert torch.allclose(got["scores"].double(), wanted_BM, rtol=0, atol=0.05), dim
        sets_BS = case["ranked"].nan_to_num()[:, : 4 * group].unflatten(1, (4, group)).amax(dim=2)
        assert torch.equal(got["sets"], sets_BS)
        wanted = case["ranked"].nan_to_num(nan=torch.inf, neginf=-torch.inf)
        order_BN = wanted.sort(dim=1, descending=True, stable=True).indices[:, :20]
        assert torch.equal(got["columns"], order_BN)
        assert torch.equal(got["best"].nan_to_num(), case["ranked"].gather(1, order_BN).nan_to_num())


RUN_KERNELS = """
import sys
from pathlib import Path
from unittest.mock import patch
import torch
from safetensors.torch import load_file, save_file
from realm.search import group_kernels
folder = Path(sys.argv[1])
cases, found = load_file(folder / "cases"), {}
for dim in {name.split(".")[0] for name in cases}:
    case = {name.split(".")[1]: part for name, part in cases.items() if name.startswith(dim + ".")}
    queries = group_kernels.quantized(case["rotated"])
    bounds = group_kernels.upper_bounds(*queries[:3], case["vectors"], case["scale"], case["error"])
    scores = group_kernels.gathered_scores(case["rotated"].float(), (case["vectors"] / 127).half(), case["numbers"])
    best, columns = group_kernels.best_columns(case["ranked"], 20)
    number_BN = case["ranked"].nan_to_num()
    sets = group_kernels.set_maxima(number_BN, 4)
    assert torch.equal(sets, group_kernels.set_maxima(number_BN.T.contiguous().T, 4))
    of_torch = group_kernels.best_columns(number_BN, 20)
    with patch.object(group_kernels, "MOST_HITS", 10), patch.object(group_kernels, "ROW_WIDTHS", (8,)):
        assert all(map(torch.equal, of_torch, group_kernels.best_columns(number_BN, 20)))
    results = (*queries, bounds, scores, sets, best, columns)
    names = ("query", "scale", "length", "lost", "bounds", "scores", "sets", "best", "columns")
    found |= {f"{dim}.{name}": part.contiguous() for name, part in zip(names, results, strict=True)}
save_file(found, folder / "found")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_whole_searches_by_the_kernels_are_exact():
    run = subprocess.run(
        [sys.executable, "-c", RUN_SEARCHES],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


RUN_SEARCHES = """
import numpy as np
import torch
from pytest import MonkeyPatch
from realm.search import exact, group_kernels, group_prefilter
from tests.search.test_exact import KINDS, as_on_a_gpu, assert_exact, made
with MonkeyPatch.context() as patch:
    as_on_a_gpu(patch)
    patch.setattr(group_kernels, "PASSAGES", 64)
    patch.setattr(group_prefilter, "kernels_run", lambda device, dim: dim <= 256)
    patch.setattr(exact, "ranked", lambda score_BN, k: exact.Hits(*group_kernels.best_columns(score_BN, k)))
    for kind in KINDS:
        draw = np.random.default_rng(1)
        vectors, query = made(kind, 1003, 24, draw), made("gaussian", 5, 24, draw).astype(np.float32)
        index = exact.MipsIndex(np.asfortranarray(vectors))
        assert_exact(index, vectors, query, 2)
        assert index._groups is not None
    assert index.search(torch.zeros(0, 24), 2).number_BK.shape == (0, 2)
"""
