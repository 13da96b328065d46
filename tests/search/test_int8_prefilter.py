"""What 8-bit codes say of scores, against the scores."""

import numpy as np
import pytest
import torch

from realm.search.int8_prefilter import Codes, are_fast

needs_codes = pytest.mark.skipif(not are_fast(), reason="this CPU has no sums of products of 8-bit numbers")
pytestmark = needs_codes


def rough_scores(codes: Codes, query: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rough scores in the products' units, and how far off they can be."""
    rounded = codes.ask(query)
    whole = rounded._code_BD.numpy().astype(np.int64) @ codes.code_ND.numpy().astype(np.int64).T
    return whole * rounded._unit_B[:, None], (rounded._error_B * rounded._unit_B)[:, None]


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_no_score_is_further_off_than_said(size):
    draw = torch.Generator().manual_seed(0)
    vectors = (torch.randn(500, 48, generator=draw) * torch.rand(500, 1, generator=draw) * size).half()
    query = torch.randn(40, 48, generator=draw)
    codes = Codes(vectors)
    codes.write(torch.arange(7), 5 * vectors[:7])  # beyond the scale
    vectors[:7] *= 5
    rough, error = rough_scores(codes, query)
    off = np.abs(rough[:, :500] - query.double().numpy() @ vectors.double().numpy().T)
    assert (off <= error).all()
    assert off.max() > error.min() / 50  # and the bound says something


def test_error_of_vectors_of_one_size_is_small():
    vectors = torch.nn.functional.normalize(
        torch.randn(2000, 128, generator=torch.Generator().manual_seed(1))
    )
    _, error = rough_scores(Codes(vectors.half()), vectors[:5])
    assert error.max() < 0.03


@pytest.mark.parametrize("queries", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("dim", [8, 9, 128, 300])
def test_products_of_the_largest_codes_are_not_clipped(queries, dim):
    """What an instruction for 8-bit numbers that sums in 16 bits would get wrong."""
    draw = np.random.default_rng(0)
    left, right = (draw.choice([-127, 127], (n, dim), p=[0.1, 0.9]).astype(np.int8) for n in (queries, 256))
    score = torch.empty(queries, 256, dtype=torch.int32)
    torch._int_mm(torch.from_numpy(left), torch.from_numpy(right).T, out=score)
    assert np.array_equal(score.numpy(), left.astype(np.int32) @ right.astype(np.int32).T)
