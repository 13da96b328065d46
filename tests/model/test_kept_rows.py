"""Modes of networks, and activations that are made again instead of kept."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from realm.model import modes
from realm.model.device import autocast
from realm.model.embedder import Embedder, EmbedderConfig, embedder_from
from realm.model.masked_reader import MaskedReader
from realm.model.modes import cache_rows, evaluating, set_dropout
from realm.tokens.tokenizer import Tokenizer
from tests.model.networks import masked_batch


def test_networks_without_dropout_train_as_they_evaluate(reader: MaskedReader, tokenizer: Tokenizer) -> None:
    """Also inside the attention."""
    joint, position, target, mask = masked_batch(tokenizer, queries=2, candidates=2)
    with torch.no_grad():
        evaluated = reader.token_logp(joint, position, target, mask)
        assert not torch.allclose(reader.train().token_logp(joint, position, target, mask), evaluated)
        set_dropout(reader, 0.0)
        assert torch.equal(reader.train().token_logp(joint, position, target, mask), evaluated)


def test_evaluating_gives_back_the_mode_even_after_an_error() -> None:
    one, other = nn.Dropout(), nn.Dropout().eval()

    def fail() -> None:
        with evaluating(one, other):
            assert not one.training
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert one.training and not other.training


Loss = Callable[[], torch.Tensor]


def loss_and_gradients(loss_of: Loss, *networks: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    loss = loss_of()
    parameters = [p for network in networks for p in network.parameters()]
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    assert sum(bool(gradient.any()) for gradient in found) > 20
    return [loss.detach(), *found]


def parts_of_a_step(
    reader: MaskedReader, tokenizer: Tokenizer, pooling: str, dropout: float
) -> tuple[Embedder, Loss]:
    """A loss in which each text's vector and each masked word has a weight of its own."""
    embedder = embedder_from(reader, EmbedderConfig(dim=5, pooling=pooling))
    for network in (reader, embedder):
        set_dropout(network.train(), dropout)
    joint, position, target, mask = masked_batch(tokenizer, queries=2, candidates=3)
    weight = torch.randn(6, 5)

    def loss() -> torch.Tensor:
        logp_BKM = reader.token_logp(joint, position, target, mask)
        return (logp_BKM * weight[:, :1].view(2, 3, 1)).sum() + (embedder.query(joint) * weight).sum()

    return embedder, loss


@pytest.mark.parametrize("pooling", ["mean", "cls", "words"])
@pytest.mark.parametrize("kept", [1, 2, 5])
def test_a_batch_whose_activations_are_made_again_gives_the_whole_batchs_loss_and_gradients(
    reader: MaskedReader, tokenizer: Tokenizer, pooling: str, kept: int
) -> None:
    embedder, loss = parts_of_a_step(reader, tokenizer, pooling, dropout=0.0)
    found = []
    for rows in (0, kept):
        cache_rows(reader, rows)
        cache_rows(embedder, rows)
        found.append(loss_and_gradients(loss, reader, embedder))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_activations_that_are_made_again_drop_what_was_dropped(
    reader: MaskedReader, tokenizer: Tokenizer, monkeypatch
) -> None:
    embedder, loss = parts_of_a_step(reader, tokenizer, "mean", dropout=0.3)
    cache_rows(reader, 2)
    cache_rows(embedder, 2)
    made_again = loss_and_gradients(loss, reader, embedder)
    monkeypatch.setattr("realm.model.modes.recomputed", lambda function, *inputs: function(*inputs))
    for one, other in zip(made_again, loss_and_gradients(loss, reader, embedder), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_many_small_parts_in_bf16_are_added_up_in_float32(
    reader: MaskedReader, tokenizer: Tokenizer
) -> None:
    """The same row 400 times, one at a time: in bf16 the sum stops growing before."""
    embedder = embedder_from(reader, EmbedderConfig(dim=5, pooling="mean")).eval()
    joint, *_ = masked_batch(tokenizer, queries=1, candidates=1)
    one = joint.rows(torch.tensor([0]))
    many = joint.rows(torch.zeros(400, dtype=torch.int64))
    weight_D = torch.randn(5)
    dense = embedder.query.encoder.encoder.layer[0].attention.self.query.weight
    norms = []
    for tokens in (one, many):
        cache_rows(embedder, 1)
        with autocast(torch.device("cpu"), "bf16"):
            (gradient,) = torch.autograd.grad((embedder.query(tokens) * weight_D).sum(), dense)
        norms.append(gradient.norm().item())
    assert norms[1] / norms[0] == pytest.approx(400, rel=0.01)


def test_a_batch_whose_activations_are_made_again_keeps_few_of_them(
    reader: MaskedReader, tokenizer: Tokenizer
) -> None:
    joint, *_ = masked_batch(tokenizer, queries=4, candidates=8)
    embedder = embedder_from(reader, EmbedderConfig(dim=5, pooling="mean")).train()
    kept_bytes = []
    for rows in (0, 2):
        cache_rows(embedder, rows)
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            vectors = embedder.query(joint)
        weights = {p.untyped_storage().data_ptr() for p in embedder.parameters()}
        kept_bytes.append(sum(size for place, size in saved.items() if place not in weights))
        vectors.sum().backward()
    assert kept_bytes[1] < kept_bytes[0] / 10


def test_torch_sees_the_device_of_what_is_made_again(
    reader: MaskedReader, tokenizer: Tokenizer, monkeypatch
) -> None:
    """It saves the random states of the devices of the tensors among the arguments: else dropout would differ on a GPU."""
    seen = []

    def checkpoint(function, *inputs, **_):
        seen.append(inputs)
        return function(*inputs)

    monkeypatch.setattr(modes, "checkpoint", checkpoint)
    joint, *_ = masked_batch(tokenizer, queries=1, candidates=2)
    embedder = embedder_from(reader, EmbedderConfig(dim=5, pooling="mean"))
    cache_rows(embedder, 1)
    embedder.query(joint)
    assert len(seen) == 2 and all(any(isinstance(one, torch.Tensor) for one in inputs) for inputs in seen)
