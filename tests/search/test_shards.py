"""An index in parts finds and sums what a whole one does: parts in this process, and on two and three ranks."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from realm import distributed
from realm.search import exact, group_operations
from realm.search.exact import Hits, MipsIndex, PassageIndex, add_rests, merge_hits, ranked, with_gradient
from realm.search.shards import divided_index, own_passages
from tests.ranks import run_on_ranks

DIM = 4


def small_whole_numbers(shape: tuple[int, int], draw: np.random.Generator, largest: int) -> np.ndarray:
    """Numbers whose products are exact in float32, so that equal scores are equal on every path."""
    return draw.integers(-largest, largest + 1, size=shape).astype(np.float16)


def sorted_hits(vectors_ND: np.ndarray, query_BD: np.ndarray, k: int) -> Hits:
    """By sorting all scores: the best first, of equal scores the one of the smaller number."""
    score_BN = query_BD.astype(np.float64) @ vectors_ND.astype(np.float64).T
    number_BK = np.argsort(-score_BN, axis=1, kind="stable")[:, :k]
    score_BK = np.take_along_axis(score_BN, number_BK, axis=1)
    return Hits(torch.from_numpy(score_BK).float(), torch.from_numpy(number_BK))


def summed(vectors_ND: np.ndarray, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """logsumexp of the scores that are not left out, and its gradient, by float64 and autograd."""
    query_BD = query_BD.detach().double().requires_grad_()
    score_BN = query_BD @ torch.from_numpy(vectors_ND).double().T
    out_BN = torch.zeros_like(score_BN, dtype=torch.bool)
    for row, numbers in enumerate(left_out):
        out_BN[row, torch.from_numpy(numbers)] = True
    total_B = score_BN.masked_fill(out_BN, -torch.inf).logsumexp(dim=1)
    (gradient_BD,) = torch.autograd.grad((total_B * torch.arange(1, len(total_B) + 1)).sum(), query_BD)
    return total_B.detach(), gradient_BD


def weighted_gradient(total_B: Tensor, query_BD: Tensor) -> Tensor:
    (gradient_BD,) = torch.autograd.grad((total_B * torch.arange(1, len(total_B) + 1)).sum(), query_BD)
    return gradient_BD


@given(
    count=st.integers(1, 700),
    bounds=st.lists(st.integers(0, 700), max_size=4),
    queries=st.integers(1, 5),
    k=st.integers(1, 40),
    largest=st.sampled_from([0, 1, 9]),
    prepared=st.booleans(),
    few_scores=st.sampled_from([0, exact.FEW_SCORES]),
    seed=st.integers(0, 1000),
)
def test_any_split_of_the_vectors_gives_the_same_hits_and_the_same_softmax(
    count, bounds, queries, k, largest, prepared, few_scores, seed
):
    draw = np.random.default_rng(seed)
    vectors_ND = small_whole_numbers((count, DIM), draw, largest)
    query_BD = torch.from_numpy(small_whole_numbers((queries, DIM), draw, 3)).float().requires_grad_()
    left_out = [draw.permutation(count)[: int(draw.integers(count + 1))] for _ in range(queries)]
    left_out[0] = np.arange(count) if seed % 7 == 0 else left_out[0]
    ends = [0, *sorted(min(bound, count) for bound in bounds), count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MIN_PASSAGES", 1)
        patch.setattr(exact, "CHUNK", 256)
        patch.setattr(exact, "FEW_SCORES", few_scores)
        hits, rests = [], []
        for first, stop in itertools.pairwise(ends):
            part = MipsIndex(vectors_ND[first:stop])
            if prepared:
                part.prepare()
            found = part.search(query_BD, k)
            hits.append(Hits(found.score_BK, found.number_BK + first))
            own = [numbers[(numbers >= first) & (numbers < stop)] - first for numbers in left_out]
            rests.append(part.rest(query_BD, own))
    merged, wanted = merge_hits(hits, k), sorted_hits(vectors_ND, query_BD.detach().numpy(), k)
    assert torch.equal(merged.number_BK, wanted.number_BK)
    assert torch.equal(merged.score_BK, wanted.score_BK)
    total_B, gradient_BD = summed(vectors_ND, query_BD, left_out)
    found_B = with_gradient(query_BD, add_rests(rests))
    torch.testing.assert_close(found_B.double(), total_B, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        weighted_gradient(found_B, query_BD).double(), gradient_BD, rtol=1e-4, atol=1e-4
    )


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    k=st.integers(0, 8),
)
def test_equal_scores_are_ranked_by_number_and_the_smaller_numbers_are_kept(rows, k):
    found = ranked(torch.tensor(rows, dtype=torch.float32), k)
    wanted = [sorted(range(6), key=lambda column: (-row[column], column))[:k] for row in rows]
    assert found.number_BK.tolist() == wanted
    assert found.score_BK.tolist() == [[row[c] for c in best] for row, best in zip(rows, wanted, strict=True)]


NUMBERS = st.sampled_from([-np.inf, -3.0e38, -2.5, -1e-30, -0.0, 0.0, 1e-30, 2.5, 3.0e38])


@given(
    rows=st.lists(st.lists(NUMBERS, min_size=11, max_size=11), min_size=1, max_size=4),
    k=st.integers(0, 13),
    group=st.integers(1, 12),
)
def test_a_device_ranks_as_a_cpu(rows, k, group):
    score_BN = torch.tensor(rows, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_operations, "GROUP", group)
        best_BK, column_BK = group_operations.best_columns(score_BN, min(k, 11))
    wanted = ranked(score_BN, k)
    assert torch.equal(column_BK, wanted.number_BK)
    assert torch.equal(best_BK, wanted.score_BK)


@pytest.mark.parametrize("columns", [9, 1000])
def test_ranking_on_a_device_reads_no_value(columns):
    hits = ranked(torch.empty(3, columns, device="meta"), 4)  # reading a value of this device is an error
    assert hits.number_BK.shape == hits.score_BK.shape == (3, 4)


def test_search_among_ranks_only_the_given_passages():
    index = MipsIndex(np.array([[1], [5], [3], [5], [2]], dtype=np.float16))
    among = [np.array([0, 1, 3, 4]), np.array([2]), np.array([], dtype=np.int64)]
    hits = index.search_among(torch.ones(3, 1), among, 3)
    assert hits.number_BK.tolist() == [[1, 3, 4], [2, -1, -1], [-1, -1, -1]]
    assert hits.score_BK.tolist() == [[5, 5, 2], [3, -np.inf, -np.inf], [-np.inf] * 3]


# -- on ranks


def vectors_of_all() -> np.ndarray:
    return small_whole_numbers((50, DIM), np.random.default_rng(0), 2)


def asked_by(rank: int) -> tuple[Tensor, list[np.ndarray]]:
    """The queries of a rank, as many as its number, and the passages that each query names."""
    draw = np.random.default_rng(rank + 1)
    query_BD = torch.from_numpy(small_whole_numbers((rank, DIM), draw, 3)).float()
    return query_BD, [np.sort(draw.permutation(50)[: int(draw.integers(50))]) for _ in range(rank)]


def answers(index: PassageIndex, query_BD: Tensor, named: list[np.ndarray]) -> list[Tensor]:
    """What an index says to a rank's queries, by all its methods."""
    query_BD = query_BD.requires_grad_()
    rest_B = index.rest_logsumexp(query_BD, named)
    gradient_BD = weighted_gradient(rest_B, query_BD)
    rows_nD = index.rows(np.concatenate([np.array([], dtype=np.int64), *named])[::-1].copy())
    deep = index.search(query_BD, 80)
    return [
        *index.search(query_BD, 7), *deep, *index.search_among(query_BD, named, 30), rows_nD,
        rest_B.detach(), gradient_BD,
    ]  # fmt: skip


def of_rank(rank: int, ranks: int, file: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    vectors_ND = vectors_of_all()
    index = divided_index(vectors_ND[own_passages(50)], 50, torch.device("cpu"))
    index.prepare()
    assert len(index) == 50
    torch.save(answers(index, *asked_by(rank)), f"{results}{rank}")
    small = divided_index(vectors_ND[:1][own_passages(1)], 1, torch.device("cpu"))
    assert small.search(asked_by(rank)[0], 3).number_BK.tolist() == [[0]] * rank
    distributed.shutdown()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_that_share_an_index_get_the_answers_of_a_whole_one(ranks, tmp_path) -> None:
    meet, results = str(tmp_path / "meet"), str(tmp_path / "found")
    run_on_ranks(of_rank, (ranks, meet, results), ranks)
    whole = MipsIndex(vectors_of_all())
    for rank in range(ranks):
        found, wanted = torch.load(Path(f"{results}{rank}")), answers(whole, *asked_by(rank))
        for one, other in zip(found[:-2], wanted[:-2], strict=True):
            assert torch.equal(one, other)
        for one, other in zip(found[-2:], wanted[-2:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
