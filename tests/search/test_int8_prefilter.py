"""The int8 scores and their error bound, against exact scores."""

import numpy as np
import pytest
import torch

from realm.search.int8_prefilter import Int8Vectors, QuantizedQueries, int8_products, is_fast

needs_int8 = pytest.mark.skipif(not is_fast(), reason="this CPU has no int8 dot-product instructions")
pytestmark = needs_int8


def approximate_scores(vectors: Int8Vectors, query: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Int8 scores in units of inner products, and the bound of their error."""
    quantized = QuantizedQueries(vectors, query)
    whole = quantized.int8_BD.numpy().astype(np.int64) @ vectors.int8_ND.numpy().astype(np.int64).T
    return whole * quantized.unit_B[:, None], (quantized.error_B * quantized.unit_B)[:, None]


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_no_score_is_further_off_than_the_bound(size):
    draw = torch.Generator().manual_seed(0)
    vectors = (torch.randn(5000, 48, generator=draw) * torch.rand(5000, 1, generator=draw) * size).half()
    vectors[1:4999:700] *= 5  # not in the sample that sets the scale: clipped
    query = torch.randn(40, 48, generator=draw)
    rough, error = approximate_scores(Int8Vectors(vectors), query)
    off = np.abs(rough[:, :5000] - query.double().numpy() @ vectors.double().numpy().T)
    assert (off <= error).all()
    assert off.max() > error.min() / 50  # the bound is not trivially large


def test_error_of_vectors_of_one_length_is_small():
    vectors = torch.nn.functional.normalize(
        torch.randn(2000, 128, generator=torch.Generator().manual_seed(1))
    )
    _, error = approximate_scores(Int8Vectors(vectors.half()), vectors[:5])
    assert error.max() < 0.03


@pytest.mark.parametrize("queries", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("dim", [8, 9, 128, 300])
def test_products_of_the_largest_int8_numbers_do_not_saturate(queries, dim):
    """Instructions that sum in 16 bits would saturate."""
    draw = np.random.default_rng(0)
    left, right = (draw.choice([-127, 127], (n, dim), p=[0.1, 0.9]).astype(np.int8) for n in (queries, 256))
    score = torch.empty(queries, 256, dtype=torch.int32)
    int8_products(torch.from_numpy(left), torch.from_numpy(right), score)
    assert np.array_equal(score.numpy(), left.astype(np.int32) @ right.astype(np.int32).T)
