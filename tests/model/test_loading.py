"""Encoders from disk, whole and damaged."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DistilBertConfig, DistilBertModel

from realm.errors import InputError
from realm.model.bert import Bert, MaskedBert
from realm.model.bert_files import save_bert
from realm.model.embedder import EmbedderConfig, embedder_from, load_pooler
from realm.model.masked_reader import MaskedReader, load_reader
from realm.tokens.tokenizer import Tokenizer
from tests.model.networks import CONFIG, VOCAB, masked_batch
from tests.transformers_twin import masked_twin, twin


def test_masked_lm_loads_with_its_own_head(
    reader: MaskedReader, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    masked_twin(reader.bert).save_pretrained(tmp_path)
    loaded = load_reader(str(tmp_path))
    batch = masked_batch(tokenizer, queries=2, candidates=2)
    with torch.no_grad():
        assert torch.allclose(loaded.eval().token_logp(*batch), reader.token_logp(*batch), atol=1e-5)


def test_headless_bert_gets_a_head_that_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bert = twin(Bert(CONFIG, pooler=True))
    bert.save_pretrained(tmp_path)
    loaded = load_reader(str(tmp_path))
    for name, value in loaded.bert.bert.state_dict().items():
        assert torch.equal(value, bert.state_dict()[name])
    transform = loaded.bert.cls.predictions.transform
    state = torch.randn(4, 16)
    assert torch.equal(transform.dense(state), state)
    assert loaded.bert.cls.predictions.decoder.weight is loaded.bert.bert.embeddings.word_embeddings.weight


def test_pooler_of_a_published_bert_is_kept_for_cls_towers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    published = twin(Bert(CONFIG, pooler=True))
    published.save_pretrained(tmp_path)
    for shared in (True, False):
        embedder = embedder_from(
            load_reader(str(tmp_path)), EmbedderConfig(dim=6, pooling="cls", norm="layer", shared=shared)
        )
        load_pooler(embedder, str(tmp_path))
        for tower in (embedder.query, embedder.passage):
            assert torch.equal(tower.encoder.pooler.dense.weight, published.pooler.dense.weight)
            assert torch.equal(tower.encoder.pooler.dense.bias, published.pooler.dense.bias)


@pytest.mark.parametrize(
    ("wrong", "says"), [(torch.zeros(16).char(), "is int8"), (torch.full((16,), math.nan), "has a NaN")]
)
def test_weights_that_are_no_finite_floats_are_named(wrong, says, tmp_path) -> None:
    save_bert(MaskedBert(CONFIG), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "bert.embeddings.LayerNorm.weight"
    save_file(tensors | {key: wrong}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"{key} {says}"):
        load_reader(str(tmp_path))


def test_a_decoder_is_refused(tmp_path) -> None:
    save_bert(MaskedBert(CONFIG), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    with pytest.raises(InputError, match="is a decoder"):
        load_reader(str(tmp_path))


def test_encoder_of_another_family_is_refused(tmp_path: Path) -> None:
    config = DistilBertConfig(vocab_size=VOCAB, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    DistilBertModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="distilbert") as error:
        load_reader(str(tmp_path))
    assert "\n" not in str(error.value)


def write_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def write_other_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))


@pytest.mark.parametrize(
    "damage",
    [
        write_garbage,
        cut_weights,
        write_other_shapes,
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text('{"model_type": "bert", "hid'),
        lambda folder: (folder / "config.json").unlink(),
    ],
)
def test_damaged_encoder_is_one_line(reader: MaskedReader, tmp_path: Path, damage) -> None:
    save_bert(reader.bert, tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError) as error:
        load_reader(str(tmp_path))
    assert "\n" not in str(error.value)
