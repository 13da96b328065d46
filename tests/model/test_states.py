"""Layers over jagged rows, which a GPU computes, with CPU tensors: beside transformers' own forward pass."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realm.model import states
from realm.model.states import hidden_states, states_at
from realm.tokens.layouts import Tokens
from tests.model.cpu.test_packed import rows_of, small_bert, theirs
from tests.transformers_twin import twin


@pytest.fixture
def jagged():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_way", lambda bert, tokens: "jagged")
        yield


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_jagged_states_and_gradients_are_those_of_transformers(lengths) -> None:
    bert, tokens = small_bert(), rows_of(lengths)
    plain = twin(bert)
    real_BT1 = tokens.mask_BT[:, :, None].bool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_way", lambda bert, tokens: "jagged")
        found = hidden_states(bert, tokens)
    expected = theirs(plain, tokens)
    torch.testing.assert_close(found * real_BT1, expected * real_BT1)
    weight_BTH = torch.randn(expected.shape, dtype=torch.float64) * real_BT1
    gradients = [
        torch.autograd.grad((made * weight_BTH).sum(), list(network.parameters()))
        for network, made in ((bert, found), (plain, expected))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_jagged_states_at_some_tokens_are_those_among_all_of_them(jagged) -> None:
    bert, tokens = small_bert(), rows_of([9, 1, 4, 4])
    row_P, position_P = torch.tensor([3, 0, 2, 2, 1, 0]), torch.tensor([3, 8, 0, 2, 0, 8])
    found = states_at(bert, tokens, row_P, position_P)
    torch.testing.assert_close(found, theirs(twin(bert), tokens)[row_P, position_P])


def test_jagged_attention_drops_weights_in_training_alone(jagged) -> None:
    bert, tokens = small_bert(dropout=0.5), rows_of([9, 1, 4])
    bert.eval()
    with torch.no_grad():
        evaluated = hidden_states(bert, tokens)
        bert.encoder.layer[0].attention.self.train()
        torch.manual_seed(1)
        trained = hidden_states(bert, tokens)
        torch.manual_seed(1)
        assert torch.equal(trained, hidden_states(bert, tokens))
    assert torch.equal(evaluated, hidden_states(bert.eval(), tokens))
    assert not torch.allclose(trained, evaluated)


def test_jagged_states_in_bf16_are_near_those_in_float32(jagged) -> None:
    bert, tokens = small_bert().float(), rows_of([9, 6, 4])
    real_BT1 = tokens.mask_BT[:, :, None]
    with torch.no_grad():
        exact = hidden_states(bert, tokens) * real_BT1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = hidden_states(bert, tokens) * real_BT1
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.1)


def test_only_a_gpu_with_rows_of_different_lengths_needs_jagged_rows() -> None:
    bert, tokens = small_bert(), rows_of([5, 3])
    assert states._way(bert, tokens) == "packed"
    assert states._way(bert, tokens.to(torch.device("meta"))) == "padded"
    on_gpu, equal = (
        cast(Tokens, SimpleNamespace(ids_BT=gpu_BT, length_B=torch.tensor(lengths)))
        for gpu_BT in [SimpleNamespace(device=torch.device("cuda"), shape=(2, 5))]
        for lengths in ([5, 3], [5, 5])
    )
    assert [states._way(bert, one) for one in (on_gpu, equal)] == ["jagged", "padded"]
    bert.sharded = True
    assert states._way(bert, on_gpu) == "padded"
    assert states._way(bert, tokens) == "padded"
