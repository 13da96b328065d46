"""Layers without padding as on a GPU, with CPU tensors: beside transformers' own forward pass.

A CPU has no flash attention. Here, softmax attention row by row replaces it; the call of the kernel is tested with tensors that
have shapes only.
"""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realm.model import flash, states
from realm.model.bert import Bert, BertConfig
from realm.model.flash import Rows, hidden_states, states_at
from realm.model.modes import set_dropout
from tests.model.cpu.test_packed import rows_of, small_bert, theirs
from tests.transformers_twin import twin


def attend_by_row(
    query: Tensor, key: Tensor, value: Tensor, asked: Rows, rows: Rows, dropout: float
) -> Tensor:
    """Attention as in the textbook; the longest rows must be known."""
    found = []
    for (first, last), (start, end) in zip(*(spans(one) for one in (asked, rows)), strict=True):
        assert last - first <= asked.longest and end - start <= rows.longest
        score = torch.einsum("pad,nad->apn", query[first:last], key[start:end]) / math.sqrt(query.shape[2])
        weight = torch.nn.functional.dropout(score.softmax(dim=2), dropout)
        found.append(torch.einsum("apn,nad->pad", weight, value[start:end]))
    return torch.cat(found)


def spans(rows: Rows) -> list[tuple[int, int]]:
    assert rows.offset_B.dtype == torch.int32
    return list(pairwise(rows.offset_B.tolist()))


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(flash, "attend", attend_by_row)


def same_gradients(networks, made, weight) -> None:
    gradients = [
        torch.autograd.grad((values * weight).sum(), list(network.parameters()))
        for network, values in zip(networks, made, strict=True)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_states_and_gradients_are_those_of_transformers(lengths) -> None:
    bert, tokens = small_bert(), rows_of(lengths)
    plain = twin(bert)
    real_BT1 = tokens.mask_BT[:, :, None].bool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "attend", attend_by_row)
        found, expected = hidden_states(bert, tokens), theirs(plain, tokens) * real_BT1
    torch.testing.assert_close(found, expected)
    same_gradients((bert, plain), (found, expected), torch.randn(expected.shape, dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.data())
def test_states_at_some_tokens_are_those_among_all_of_them(lengths, data) -> None:
    """In any order, some twice, rows left out."""
    token = st.integers(0, len(lengths) - 1).flatmap(
        lambda row: st.tuples(st.just(row), st.integers(0, lengths[row] - 1))
    )
    row_P, position_P = torch.tensor(data.draw(st.lists(token, min_size=1, max_size=8))).T
    bert, tokens = small_bert(), rows_of(lengths)
    plain = twin(bert)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "attend", attend_by_row)
        found, expected = states_at(bert, tokens, row_P, position_P), theirs(plain, tokens)[row_P, position_P]
    torch.testing.assert_close(found, expected)
    same_gradients((bert, plain), (found, expected), torch.randn(expected.shape, dtype=torch.float64))


def test_states_at_no_token_are_none() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    bert = small_bert()
    found = states_at(bert, rows_of([3, 2]), nothing, nothing)
    assert found.shape == (0, 12)
    found.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in bert.parameters())


@pytest.mark.parametrize(
    "at", [hidden_states, lambda *given: states_at(*given, torch.tensor([2]), torch.tensor([0]))]
)
def test_attention_drops_weights_in_training_alone(at) -> None:
    bert, tokens = small_bert(dropout=0.5), rows_of([9, 1, 4])
    bert.eval()
    with torch.no_grad():
        evaluated = at(bert, tokens)
        bert.encoder.layer[-1].attention.self.train()
        torch.manual_seed(1)
        trained = at(bert, tokens)
        torch.manual_seed(1)
        assert torch.equal(trained, at(bert, tokens))
    assert torch.equal(evaluated, at(bert.eval(), tokens))
    assert not torch.allclose(trained, evaluated)


def test_states_in_bf16_are_near_those_in_float32() -> None:
    bert, tokens = small_bert().float(), rows_of([9, 6, 4])
    with torch.no_grad():
        exact = hidden_states(bert, tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = hidden_states(bert, tokens)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_fused_parts_get_the_weights_of_their_layer(monkeypatch, activation) -> None:
    pytest.importorskip("triton")
    from realm.model import fused

    settings = []

    def added(found, bias, given, weight, shift, epsilon, dropout):
        assert found.dtype == given.dtype == torch.bfloat16
        settings.append((epsilon, dropout))
        return F.layer_norm((found + bias) + given, bias.shape, weight, shift, epsilon).bfloat16()

    def activated(found, bias, tanh):
        assert tanh is (activation == "gelu_new")
        return F.gelu(found + bias, approximate="tanh" if tanh else "none").bfloat16()

    bert = small_bert(hidden_act=activation, layer_norm_eps=0.01).float()
    tokens = rows_of([9, 6, 4])
    row_P, position_P = torch.tensor([2, 0, 0]), torch.tensor([3, 8, 0])
    with torch.no_grad():
        exact = hidden_states(bert, tokens), states_at(bert, tokens, row_P, position_P)
        monkeypatch.setattr(flash, "_is_fused", lambda *_: True)
        monkeypatch.setattr(fused, "added", added)
        monkeypatch.setattr(fused, "activated", activated)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = hidden_states(bert, tokens), states_at(bert, tokens, row_P, position_P)
            assert set(settings) == {(0.01, 0.0)}
            settings.clear()
            set_dropout(bert, 0.3)
            hidden_states(bert.train(), tokens)
            assert settings == 4 * [(0.01, 0.3)]
            settings.clear()
            hidden_states(bert.eval(), tokens)
            assert settings == 4 * [(0.01, 0.0)]
    for one, other in zip(rounded, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("settings", "fused"),
    [
        ({}, True),
        ({"hidden_act": "gelu_new"}, True),
        ({"hidden_act": "relu"}, False),
        ({"hidden_size": 9216}, False),
    ],
)
def test_layers_are_fused_where_their_kernels_run_and_fit(monkeypatch, settings, fused) -> None:
    monkeypatch.setattr(flash, "_fused_kernels_run", lambda device: device.type == "cuda")
    with torch.device("meta"):
        bert = Bert(BertConfig(**settings, num_hidden_layers=1))
    assert flash._is_fused(bert, torch.device("cuda")) is fused
    assert not flash._is_fused(bert, torch.device("cpu"))


def test_torch_accepts_the_call_of_flash_attention_and_its_backward_pass(monkeypatch) -> None:
    """With meta tensors, which have shapes but no values."""
    monkeypatch.undo()
    meta = torch.device("meta")
    bert, tokens = small_bert().float().to(meta), rows_of([9, 1, 4]).to(meta)
    at = torch.zeros(4, dtype=torch.int64, device=meta)
    found = states_at(bert, tokens, at, at)
    assert hidden_states(bert, tokens).shape == (3, 9, 12) and found.shape == (4, 12)
    found.sum().backward()
    key = bert.encoder.layer[0].attention.self.key.weight
    assert key.grad is not None and key.grad.shape == (12, 12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_attention_gives_the_states_and_gradients_of_padded_rows_in_float32(monkeypatch) -> None:
    """No token of one row is requested, and one token is requested twice."""
    monkeypatch.undo()
    gpu = torch.device("cuda")
    bert = small_bert(hidden_size=64, num_attention_heads=2, max_position_embeddings=400).float().to(gpu)
    with torch.no_grad():
        for name, weight in bert.named_parameters():
            # What all tokens have in common adds nothing to the gradients of queries and keys but rounding errors: flash
            # attention computes these gradients from the rounded sum of the values.
            weight.mul_(0.0 if name.endswith(("value.bias", "LayerNorm.bias")) else 0.5)
    tokens = rows_of([350, 17, 1, 96, 200]).to(gpu)
    row_P = torch.tensor([4, 0, 0, 2, 4, 1], device=gpu)
    position_P = torch.tensor([199, 3, 3, 0, 5, 16], device=gpu)
    real_BT1 = tokens.mask_BT[:, :, None]
    made = {}
    for bits in (32, 16):
        bert.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bits == 16):
            assert states._way(bert, tokens) == ("flash" if bits == 16 else "padded")
            found = (
                states.hidden_states(bert, tokens) * real_BT1,
                states.states_at(bert, tokens, row_P, position_P),
            )
        torch.manual_seed(0)
        sum((one * torch.randn_like(one)).sum() for one in found).backward()
        # The gradient of the biases of keys is 0 but for rounding errors.
        weights = [weight for name, weight in bert.named_parameters() if not name.endswith("key.bias")]
        made[bits] = [*found, *(weight.grad for weight in weights if weight.grad is not None)]
    for exact, rounded in zip(*made.values(), strict=True):
        assert (exact - rounded).norm() <= 0.05 * exact.norm() + 1e-3


@pytest.mark.parametrize(
    ("precision", "capability", "size", "sharded", "way"),
    [
        (torch.bfloat16, (9, 0), 64, False, "flash"),
        (torch.bfloat16, (8, 0), 8, False, "flash"),
        (torch.bfloat16, (7, 5), 64, False, "padded"),
        (torch.bfloat16, (9, 0), 12, False, "padded"),
        (torch.bfloat16, (9, 0), 200, False, "padded"),
        (torch.bfloat16, (9, 0), 64, True, "padded"),
        (None, (9, 0), 64, False, "padded"),
    ],
)
def test_a_gpu_computes_padding_only_where_flash_attention_is_missing(
    monkeypatch, precision, capability, size, sharded, way
) -> None:
    bert = small_bert(hidden_size=2 * size, num_attention_heads=2)
    bert.sharded = sharded
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: precision is not None)
    monkeypatch.setattr(flash, "_has_kernel", flash._has_kernel.__wrapped__)
    on_gpu = rows_of([5, 3])
    on_gpu.__dict__["ids_BT"] = type("Ids", (), {"device": torch.device("cuda")})()
    assert states._way(bert, on_gpu) == way
    assert states._way(bert, rows_of([5, 3])) == ("padded" if sharded else "packed")
