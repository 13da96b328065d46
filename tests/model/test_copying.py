"""The reader's copy term against a plain loop over the passage's wordpieces."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from realm.config import InputError
from realm.model.copying import passage_mask
from realm.model.encoders import MaskedReader, load_reader, save_reader
from realm.text.inputs import Lengths, Tokenizer, Tokens, joint_inputs

VOCAB = 40
LENGTHS = Lengths(query=10, passage=12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c d e f g h"], vocab_size=VOCAB)


@pytest.fixture
def reader() -> MaskedReader:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    reader = MaskedReader(BertForMaskedLM(config), copy=True).eval()
    with torch.no_grad():
        for parameter in reader.copy_head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return reader


def rows(tokenizer: Tokenizer) -> Tokens:
    """Three queries: beside a passage with repeats, beside a longer one, and beside none."""
    sentences = [[7, tokenizer.mask_id, 9, tokenizer.mask_id], [tokenizer.mask_id, 8], [6, tokenizer.mask_id]]
    return joint_inputs(sentences, [[10, 11, 10, 12], list(range(20, 29)), []], tokenizer, LENGTHS)


ROWS, PLACES = torch.tensor([0, 0, 1, 2]), torch.tensor([2, 4, 1, 2])


def by_hand(reader: MaskedReader, tokens: Tokens, row: int, place: int) -> np.ndarray:
    """p(word) = (1 - g) p_mlm(word) + g * attention to the passage's wordpieces that are the word."""
    real = int(tokens.mask_BT[row].sum())
    ids, segments = tokens.ids_BT[row, :real], tokens.segments_BT[row, :real]
    with torch.no_grad():
        states = reader.bert.bert(ids[None], token_type_ids=segments[None]).last_hidden_state[0]
        plain = reader.bert.cls(states[place]).softmax(-1).double().numpy()
        passage = [t for t in range(real - 1) if segments[t] == 1]
        if not passage:
            return plain
        head = reader.copy_head
        score = (head.key(states[passage]) @ head.query(states[place])) / 16**0.5
        attention = score.double().softmax(0).numpy()
        gate = head.gate(states[place]).double().sigmoid().item()
    mixed = (1 - gate) * plain
    for weight, position in zip(attention, passage, strict=True):
        mixed[ids[position]] += gate * weight
    return mixed


def test_distribution_is_the_mixture_written_out(reader, tokenizer) -> None:
    tokens = rows(tokenizer)
    with torch.no_grad():
        probability = reader(tokens, ROWS, PLACES).exp().numpy()
    np.testing.assert_allclose(probability.sum(axis=1), np.ones(4), atol=1e-5)
    for found, row, place in zip(probability, ROWS.tolist(), PLACES.tolist(), strict=True):
        np.testing.assert_allclose(found, by_hand(reader, tokens, row, place), atol=1e-5)


@pytest.mark.parametrize("target", [10, 12, 25, 30])
def test_target_logp_is_the_targets_part_of_the_distribution(reader, tokenizer, target) -> None:
    tokens = rows(tokenizer)
    with torch.no_grad():
        whole = reader(tokens, ROWS, PLACES)[:, target]
        alone = reader.target_logp(tokens, ROWS, PLACES, torch.full((4,), target))
    assert torch.allclose(alone, whole, atol=1e-4)


def test_beside_no_passage_nothing_is_copied(reader, tokenizer) -> None:
    tokens = rows(tokenizer).rows(torch.tensor([2]))
    plain = MaskedReader(reader.bert)
    row, place = torch.tensor([0]), torch.tensor([2])
    with torch.no_grad():
        assert torch.allclose(reader(tokens, row, place), plain(tokens, row, place), atol=1e-5)


def test_gradients_are_those_of_the_mixture_and_finite_where_nothing_can_be_copied(reader, tokenizer) -> None:
    tokens, targets = rows(tokenizer), torch.tensor([10, 30, 25, 10])
    gradients = []
    for values in (
        lambda: reader.target_logp(tokens, ROWS, PLACES, targets),
        lambda: reader(tokens, ROWS, PLACES)[torch.arange(4), targets],
    ):
        reader.zero_grad()
        values().sum().backward()
        gradients.append([p.grad.clone() for p in reader.parameters() if p.grad is not None])
    assert all(gradient.isfinite().all() for gradient in gradients[0])
    assert reader.copy_head.gate.weight.grad.abs().sum() > 0
    for mine, other in zip(*gradients, strict=True):
        assert torch.allclose(mine, other, atol=1e-3)


def test_only_the_passage_is_copied_from(tokenizer) -> None:
    tokens = rows(tokenizer)
    expected = (tokens.segments_BT == 1) & (tokens.ids_BT != tokenizer.sep_id) & (tokens.mask_BT == 1)
    assert torch.equal(passage_mask(tokens), expected)


def test_copy_head_travels_with_its_encoder(reader, tokenizer, tmp_path: Path) -> None:
    save_reader(reader, tmp_path)
    loaded = load_reader(str(tmp_path))
    tokens = rows(tokenizer)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens, ROWS, PLACES), reader(tokens, ROWS, PLACES))
    (tmp_path / "copy_head.safetensors").write_bytes(b"garbage")
    with pytest.raises(InputError, match="copy_head") as error:
        load_reader(str(tmp_path))
    assert "\n" not in str(error.value)
