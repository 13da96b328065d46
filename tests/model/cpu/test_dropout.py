"""Dropout by the word: nn.Dropout's distribution, from bits that the backward pass draws again."""

import pytest
import torch
from torch import nn

from realm.model.cpu.dropout import FastDropout, drawing_from, kept, mark, new_seed, unmarked

FLOATS = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_what_stays_is_scaled_and_what_goes_is_zero_as_often_as_asked(dtype, probability) -> None:
    torch.manual_seed(0)
    values = torch.full((300, 301), 1.5, dtype=dtype)
    found = FastDropout(probability)(values)
    stays = found != 0
    assert stays.float().mean().item() == pytest.approx(1 - probability, abs=0.01)
    assert (found[stays] == values[stays] / (1 - probability if probability < 1 else 1)).all()
    assert found.dtype == dtype and (values == 1.5).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_gradient_passes_where_the_value_passed(dtype) -> None:
    values = torch.rand(40, 50, dtype=dtype).add_(1).requires_grad_()  # none is 0, as dropped elements are
    found = FastDropout(0.4)(values)
    given = torch.randn_like(found)
    (gradient,) = torch.autograd.grad(found, values, given)
    expected = torch.where(found != 0, given / 0.6, 0)
    torch.testing.assert_close(gradient, expected)


def test_the_same_seed_of_torch_drops_the_same_and_draws_differ_within_it() -> None:
    dropout, values = FastDropout(0.5), torch.ones(1000)
    torch.manual_seed(3)
    first, second = dropout(values), dropout(values)
    torch.manual_seed(3)
    assert torch.equal(dropout(values), first)
    assert not torch.equal(first, second)
    # Two fair coins agree half of the time: 1,000 of them stay within five deviations of 500.
    assert abs(int((first == second).sum()) - 500) < 80


def test_evaluation_drops_nothing_and_draws_nothing() -> None:
    values = torch.randn(5)
    before = torch.get_rng_state()
    assert FastDropout(0.5).eval()(values) is values
    assert torch.equal(torch.get_rng_state(), before)


def test_elsewhere_than_on_a_cpu_it_is_torchs_own() -> None:
    assert FastDropout(0.5)(torch.empty(3, device="meta")).device.type == "meta"


def test_whoever_sets_probabilities_finds_it() -> None:
    assert isinstance(FastDropout(), nn.Dropout)


def test_draws_have_no_pattern_from_one_element_to_the_next() -> None:
    """Four draws come from one word of the generator: neighbours at every distance up to 16 are independent."""
    bits = kept(torch.empty(1 << 18), (7, 0), 0.5).bool().float() - 0.5
    for distance in range(1, 17):
        assert (
            abs((bits[distance:] * bits[:-distance]).mean().item()) < 0.0025
        )  # five deviations of 0.25 / 512


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_signs_determine_what_is_dropped_and_lose_nothing(dtype, probability) -> None:
    values = torch.rand(30, 41).to(dtype)
    values[3] = 0
    bits = kept(values, (7, 1), probability)
    marked = mark(values.clone(), (7, 1), probability)
    assert torch.equal(marked.abs(), values)
    assert torch.equal(unmarked(marked), bits)
    assert torch.equal(marked.relu(), torch.where(bits.bool(), values, 0))


def test_seeds_of_a_thread_of_its_own_follow_from_one_and_leave_torchs_alone() -> None:
    before, drawn = torch.get_rng_state(), []
    for seed in (3, 4, 3):
        with drawing_from(seed):
            first = new_seed()
            with drawing_from(99):
                new_seed()
            drawn.append((first, new_seed()))
    assert drawn[0] == drawn[2] != drawn[1]
    assert len({*drawn[0], *drawn[1]}) == 4
    assert torch.equal(torch.get_rng_state(), before)
    new_seed()
    assert not torch.equal(torch.get_rng_state(), before)
