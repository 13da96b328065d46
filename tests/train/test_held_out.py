"""One held-out share: the knowledge base has it, models remember it, and stages and the probe refuse another one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from realm.errors import RealmError
from realm.masking.held_out import held_out
from realm.model.folder import save_model
from realm.model.manifest import HELD_OUT, encoder_held_out
from realm.qa.probe import ProbeConfig, probe
from realm.settings import read_config
from realm.store.knowledge_base import KnowledgeBase, build
from realm.store.settings import KnowledgeBaseConfig, Settings
from realm.text.corpus import HeldOut
from realm.train import adapt, ict, mlm, pretrain
from tests.conftest import tiny_documents
from tests.store.tiny import TinyTagger, holding_out
from tests.train.stages import tiny

STAGES: dict[str, Callable[[KnowledgeBase, Path, str], object]] = {
    "mlm": lambda kb, out, model: mlm.train(kb, out, tiny(mlm.MlmConfig, "mlm"), model),
    "ict": lambda kb, out, model: ict.train(kb, out, tiny(ict.IctConfig, "ict"), model),
    "pretrain": lambda kb, out, model: pretrain.train(
        kb, out, tiny(pretrain.PretrainConfig, "pretrain"), model
    ),
    "adapt": lambda kb, out, model: adapt.train(kb, out, tiny(adapt.AdaptConfig, "adapt"), model),
    "probe": lambda kb, out, model: probe(kb, model, ProbeConfig(device="cpu")),
}


@pytest.fixture
def trained(tiny_model, tmp_path) -> Callable[..., str]:
    """A model as a stage leaves it that held out what the record says."""

    def save(**record: float) -> str:
        tiny_model.stages = [{"stage": "ict", **record}]
        save_model(tiny_model, tmp_path / "model")
        return str(tmp_path / "model")

    return save


@pytest.mark.parametrize("stage", STAGES)
def test_model_trained_at_another_share_is_refused_in_one_line(tiny_kb, trained, tmp_path, stage) -> None:
    with pytest.raises(RealmError) as error:
        STAGES[stage](tiny_kb, tmp_path / "out", trained(held_out=0.03, passage_tokens=48))
    message = str(error.value)
    assert "held_out=0.03, passage_tokens=48" in message and "held_out=0.2, passage_tokens=48" in message
    assert "--set held_out=0.03 --set passage_tokens=48" in message and "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_model_trained_on_passages_of_another_length_is_refused(tiny_kb, trained) -> None:
    with pytest.raises(RealmError, match="passage_tokens=112, but knowledge base"):
        probe(tiny_kb, trained(held_out=0.2, passage_tokens=112), ProbeConfig(device="cpu"))


def test_text_and_knowledge_must_hold_out_the_same(tiny_kb, tiny_model_folder, tmp_path) -> None:
    text = holding_out(tiny_kb, 0.1)
    config = tiny(pretrain.PretrainConfig, "pretrain")
    with pytest.raises(
        RealmError, match=r"--kb .* has held_out=0\.2, .*has held_out=0\.1, .*`--set held_out=0\.2 "
    ):
        pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder), text)
    assert list(tmp_path.iterdir()) == []


def test_encoder_within_a_model_remembers_what_its_training_held_out(tiny_kb, trained, tmp_path) -> None:
    encoder = Path(trained(held_out=0.03, passage_tokens=48)) / "encoder"
    assert encoder_held_out(str(encoder)) == HeldOut(0.03, 48)
    with pytest.raises(RealmError, match=r"held_out=0\.03"):
        STAGES["mlm"](tiny_kb, tmp_path / "out", str(encoder))
    (encoder / HELD_OUT).write_text("[1]")
    with pytest.raises(RealmError, match=r"held_out\.json is damaged"):
        encoder_held_out(str(encoder))


def test_packaged_encoder_fits_the_presets_that_start_from_it() -> None:
    made = encoder_held_out("package:realm-mini", ["mine.txt", "package:factbook"])
    assert encoder_held_out("package:realm-mini", ["mine.txt"]) is None  # it never saw this text
    for preset in ("realm-mini", "demo", "demo-full"):
        kb = read_config(KnowledgeBaseConfig, preset, "kb")
        assert made == HeldOut(kb.held_out, kb.passage_tokens)


def test_share_is_kept_through_additions_and_starts_an_interrupted_build_over(tiny_kb, tmp_path) -> None:
    config = KnowledgeBaseConfig(passage_tokens=48, held_out=0.5)
    documents = tiny_documents()
    build(tmp_path / "kb", documents[4:], config, tiny_kb.tokenizer, TinyTagger())
    kb = KnowledgeBase.open(tmp_path / "kb")
    before = set(np.array(kb.ids)[held_out(kb.ids, kb.config.held_out)])
    kb.add(documents[:4], TinyTagger())
    again = KnowledgeBase.open(tmp_path / "kb")
    assert again.held_out == HeldOut(0.5, 48)
    assert before < set(np.array(again.ids)[held_out(again.ids, again.config.held_out)])
    other = Settings(KnowledgeBaseConfig(passage_tokens=48, held_out=0.1), kb.tokenizer.fingerprint)
    assert not Settings(config, kb.tokenizer.fingerprint).same_result(other)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"held_out is {share}: it must be 0 or more, and less than 1"):
        KnowledgeBaseConfig(held_out=share)


@pytest.mark.parametrize(
    "cls", [mlm.MlmConfig, ict.IctConfig, pretrain.PretrainConfig, adapt.AdaptConfig, ProbeConfig]
)
def test_no_stage_has_a_share_of_its_own(cls: type) -> None:
    with pytest.raises(RealmError, match=r"unknown key held_out \(known: "):
        read_config(cls, None, "any", ["held_out=0.1"])
