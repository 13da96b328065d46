"""A converted checkpoint is where training starts: on one's own corpus, on questions, and back to the reference's files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from realm.index.embedding import IndexConfig
from realm.index.versions import build_index
from realm.interop.blocks import convert_checkpoint, export_model
from realm.model.folder import load_model
from realm.qa.question_files import Question
from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
from realm.train import finetune, pretrain
from tests.conftest import tiny_documents
from tests.interop.reference_environment import FIXTURES
from tests.store.tiny import TinyTagger
from tests.train.stages import metrics, tiny


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedder and an encoder joined, and a knowledge base in their wordpieces."""
    folder = tmp_path_factory.mktemp("start")
    convert_checkpoint(
        str(FIXTURES / "embedder" / "new"), folder / "model", encoder=str(FIXTURES / "encoder" / "new")
    )
    tokenizer = load_model(folder / "model").tokenizer
    config = KnowledgeBaseConfig(passage_tokens=48)
    build(folder / "kb", tiny_documents(), config, tokenizer, TinyTagger())
    return folder


def test_pretraining_goes_on_from_published_weights_and_back(start: Path, tmp_path: Path) -> None:
    kb = KnowledgeBase.open(start / "kb")
    config = tiny(pretrain.PretrainConfig, "pretrain", "steps=3", "refresh.every=100", "health.queries=4")
    pretrain.train(kb, tmp_path / "trained", config, str(start / "model"))
    assert {line["step"] for line in metrics(tmp_path / "trained") if "loss" in line} == {0, 3}
    made = export_model(str(tmp_path / "trained"), tmp_path / "out")
    assert made["classes"].keys() == {"embedder", "scorer", "encoder"}
    trained = load_model(tmp_path / "trained")
    assert trained.step == 3
    exported = load_file(tmp_path / "out" / "encoder" / "model.safetensors")
    before = load_file(FIXTURES / "encoder" / "safetensors" / "model.safetensors")
    name = "realm.encoder.layer.0.output.dense.weight"
    ours = trained.reader.bert.bert.encoder.layer[0].output.dense.weight
    assert torch.equal(exported[name], ours) and not torch.equal(exported[name], before[name])


def test_fine_tuning_goes_on_from_published_weights(start: Path, tmp_path: Path) -> None:
    kb = KnowledgeBase.open(start / "kb")
    build_index(kb, str(start / "model"), IndexConfig(device="cpu", precision="fp32"))
    questions = [Question("a", "who built a tower in Arden?", ("Alaric",), False)] * 4
    config = tiny(finetune.FinetuneConfig, "finetune", "steps=2", "dev_every=2", "whole_words=false")
    finetune.train(kb, tmp_path / "qa", config, str(start / "model"), questions, questions)
    made = export_model(str(tmp_path / "qa"), tmp_path / "out", str(start / "kb"))
    assert "openqa" in made["classes"]
    exported = load_file(tmp_path / "out" / "openqa" / "model.safetensors")
    assert exported["block_emb"].shape == (len(kb), 8) and exported["block_emb"].dtype == torch.float32
