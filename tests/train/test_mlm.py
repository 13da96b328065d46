"""Masked language modelling: what is hidden and shown, what the stage makes, and that it repeats exactly."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.errors import InputError
from realm.index.embedding import pooled_states
from realm.masking.held_out import held_out
from realm.masking.masked_rows import RowMaker
from realm.model.bert_files import save_bert
from realm.model.calibration import Calibration
from realm.model.folder import Model, load_model, save_model
from realm.model.masked_reader import EncoderConfig, new_reader, save_reader
from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
from realm.text.corpus import Annotations, Document, Span
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Tokenizer
from realm.train import mlm
from realm.train.finetune import start_reader
from realm.train.mlm import MlmConfig
from tests.train.stages import CONTRACT, assert_same_result, changed, metrics, stopped_at, tiny


def settings(*overrides: str) -> MlmConfig:
    return tiny(MlmConfig, "mlm", *overrides)


@pytest.fixture(scope="module")
def made(tiny_kb, tmp_path_factory) -> Path:
    return mlm.train(tiny_kb, tmp_path_factory.mktemp("mlm") / "out", settings())


# -- the stage


def test_stage_makes_a_model_that_loads(made, tiny_kb) -> None:
    model = load_model(made)
    assert model.tokenizer.fingerprint == tiny_kb.tokenizer.fingerprint
    assert model.lengths == Lengths(query=32, passage=48)
    assert model.step == 20 and [record["stage"] for record in model.stages] == ["mlm"]
    assert model.embedder.config.dim == 32


def test_metrics_have_the_keys_of_the_contract_and_the_probe(made) -> None:
    rows = metrics(made)
    assert all(row.keys() >= CONTRACT for row in rows)
    assert [row["step"] for row in rows if row["loss"] is not None] == [10, 20]
    probes = [row for row in rows if "own_passage_nats" in row]
    assert [row["step"] for row in probes] == [20]
    assert all(0 < row["none_passage_nats"] < 12 and 0 <= row["own_passage_accuracy"] <= 1 for row in probes)


def test_same_seed_gives_the_same_model_and_another_seed_another(made, tiny_kb, tmp_path) -> None:
    again = mlm.train(tiny_kb, tmp_path / "again", settings())
    assert_same_result(again, made)
    other = mlm.train(tiny_kb, tmp_path / "other", settings("seed=1", "steps=2"))
    assert "reader" in changed(other, made)


@pytest.mark.parametrize("step", [9, 13])
def test_stopped_stage_goes_on_as_if_nothing_had_happened(made, tiny_kb, tmp_path, monkeypatch, step) -> None:
    def train() -> Path:
        return mlm.train(tiny_kb, tmp_path / "out", settings())

    stopped_at(step, monkeypatch, train)
    assert_same_result(train(), made)


def test_embedder_starts_at_the_whitened_components_of_the_corpus(made, tiny_kb) -> None:
    model = load_model(made)
    tower = model.embedder.passage
    for name, value in model.reader.bert.bert.state_dict().items():
        assert torch.equal(value, tower.encoder.state_dict()[name])
    everything = np.arange(len(tiny_kb))
    pooled = pooled_states(tower, tiny_kb.tokens, everything, model.tokenizer, model.lengths)
    projected = tower.projection(pooled).detach()[:, :20]  # 28 passages fix 27 directions
    np.testing.assert_allclose(projected.mean(dim=0), np.zeros(20), atol=1e-2)
    np.testing.assert_allclose((projected.T @ projected / 28).numpy(), np.eye(20), atol=2e-2)


def test_no_sentence_of_a_held_out_passage_is_trained_on(tiny_kb, tmp_path, monkeypatch) -> None:
    seen: set[int] = set()
    batch = RowMaker.batch

    def record(maker, passages, *rest):
        seen.update(passages.tolist())
        return batch(maker, passages, *rest)

    monkeypatch.setattr(RowMaker, "batch", record)
    mlm.train(tiny_kb, tmp_path / "out", settings("steps=2"))
    assert seen == set(np.flatnonzero(~held_out(tiny_kb.ids, 0.2)).tolist())
    assert 0 < len(seen) < len(tiny_kb)


def test_no_steps_wrap_an_encoder_as_it_is(tiny_kb, tmp_path) -> None:
    torch.manual_seed(5)
    reader = new_reader(EncoderConfig(layers=1, hidden=16, heads=2, positions=96), tiny_kb.tokenizer)
    save_bert(reader.bert, tmp_path / "hf")
    tiny_kb.tokenizer.save(tmp_path / "hf")
    out = mlm.train(tiny_kb, tmp_path / "out", settings("steps=0"), str(tmp_path / "hf"))
    loaded = load_model(out).reader.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in reader.state_dict().items())


def test_adapting_a_model_keeps_what_made_it(made, tiny_kb, tmp_path) -> None:
    model = load_model(made)
    model.stages = [{"stage": "earlier", "steps": 3}]
    from realm.model.folder import save_model

    save_model(model, tmp_path / "start")
    out = mlm.train(tiny_kb, tmp_path / "out", settings("steps=1"), str(tmp_path / "start"))
    assert [record["stage"] for record in load_model(out).stages] == ["earlier", "mlm"]


def test_bf16_training_is_close_to_full_precision(made, tiny_kb, tmp_path) -> None:
    out = mlm.train(tiny_kb, tmp_path / "out", settings("precision=bf16"))
    cast, full = ([row["loss"] for row in metrics(folder) if row["loss"]] for folder in (out, made))
    np.testing.assert_allclose(cast, full, rtol=0.02)


# -- what it refuses


def test_encoder_with_another_tokenizer_is_one_line(tiny_kb, tmp_path) -> None:
    tokenizer = Tokenizer.train(["quite other words"], vocab_size=40)
    save_bert(new_reader(EncoderConfig(layers=1, hidden=16, heads=2), tokenizer).bert, tmp_path / "hf")
    tokenizer.save(tmp_path / "hf")
    with pytest.raises(InputError, match="tokenizer") as error:
        mlm.train(tiny_kb, tmp_path / "out", settings(), str(tmp_path / "hf"))
    assert "\n" not in str(error.value)


def test_inputs_longer_than_the_encoder_takes_are_one_line(tiny_kb, tmp_path) -> None:
    with pytest.raises(InputError, match=r"32 .* 48 .* 64") as error:
        mlm.train(tiny_kb, tmp_path / "out", settings("encoder.positions=64"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.training").exists()


class OneSentenceTagger:
    name = "one"

    def annotate(self, texts):
        for text in texts:
            yield Annotations(((0, len(text)),), (Span(0, 5, "NAME"),))


def test_corpus_of_one_passage_has_no_probe_and_still_trains(tiny_kb, tmp_path) -> None:
    document = Document("Arden", "Arden sells wool to Corvo.", "d")
    build(tmp_path / "kb", [document], KnowledgeBaseConfig(48), tiny_kb.tokenizer, OneSentenceTagger())
    out = mlm.train(KnowledgeBase.open(tmp_path / "kb"), tmp_path / "out", settings("steps=2"))
    assert all(np.isfinite(row["loss"]) for row in metrics(out))


# -- the embedder and the copy head


@pytest.mark.parametrize("counted", [7, 1 << 16])
def test_inverse_frequency_is_the_log_of_passages_over_holders(tiny_kb, counted, monkeypatch) -> None:
    monkeypatch.setattr(mlm, "COUNTED", counted)
    tokens, tokenizer = tiny_kb.tokens, tiny_kb.tokenizer
    weight_V = mlm.inverse_frequency(tokens, tokenizer)
    special = {tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id}
    for word in range(tokenizer.vocab_size):
        positives = sum(
            word in tokens.body.row(n) or word in tokens.title.row(n) for n in range(len(tiny_kb))
        )
        expected = 0.0 if word in special else math.log((len(tiny_kb) + 1) / (positives + 1))
        assert weight_V[word].item() == pytest.approx(expected, abs=1e-6)


def test_word_pooling_starts_from_the_corpus(tiny_kb, tmp_path) -> None:
    out = mlm.train(
        tiny_kb, tmp_path / "out", tiny(mlm.MlmConfig, "mlm", "steps=1", "embedder.pooling=words")
    )
    model = load_model(out)
    tower = model.embedder.query
    expected = mlm.inverse_frequency(tiny_kb.tokens, tiny_kb.tokenizer).clamp_min(0.01)
    assert torch.allclose(tower.importance(torch.arange(len(expected))), expected)
    assert torch.equal(tower.words.weight, model.reader.bert.bert.embeddings.word_embeddings.weight)


def test_copy_head_weighs_words_by_their_rarity_the_rarest_with_1(tiny_kb) -> None:
    assert mlm.start_model(tiny_kb, settings(), None).reader.copy_head is None
    head = mlm.start_model(tiny_kb, settings("copy_head=true"), None).reader.copy_head
    weight_V = mlm.inverse_frequency(tiny_kb.tokens, tiny_kb.tokenizer).numpy()
    np.testing.assert_allclose(
        head.importance.weight[:, 0].detach().numpy(), weight_V / weight_V.max(), rtol=1e-6
    )
    assert head.importance.weight[tiny_kb.tokenizer.mask_id] == 0


def test_copy_head_is_trained_with_its_reader_and_adapted_as_it_came(tiny_kb, tmp_path) -> None:
    config = settings("copy_head=true", "steps=3")
    start = mlm.start_model(tiny_kb, config, None).reader.copy_head.state_dict()
    out = mlm.train(tiny_kb, tmp_path / "out", config)
    trained = load_model(out).reader.copy_head.state_dict()
    assert all(not torch.equal(value, trained[name]) for name, value in start.items())
    again = mlm.start_model(tiny_kb, config, str(out)).reader.copy_head.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in trained.items())


def test_projection_stays_random_as_in_the_paper(tiny_kb, tmp_path) -> None:
    first = mlm.start_model(tiny_kb, settings("principal=false"), None).embedder.query.projection.weight
    out = mlm.train(tiny_kb, tmp_path / "out", settings("steps=1", "principal=false"))
    assert torch.equal(load_model(out).embedder.query.projection.weight, first)


def test_embedder_may_start_from_the_encoder_as_it_came(tiny_kb, tiny_model, tmp_path) -> None:
    encoder = tmp_path / "encoder"
    save_reader(tiny_model.reader, encoder)
    tiny_model.tokenizer.save(encoder)
    given = mlm.train(tiny_kb, tmp_path / "given", settings('embedder_start="given"'), str(encoder))
    assert (changed_encoder(given, tiny_model), changed_reader(given, tiny_model)) == (False, True)
    trained = mlm.train(tiny_kb, tmp_path / "trained", settings(), str(encoder))
    assert (changed_encoder(trained, tiny_model), changed_reader(trained, tiny_model)) == (True, True)


def test_embedder_of_a_model_may_stay_as_it_is(tiny_kb, tiny_model_folder, tmp_path) -> None:
    out = mlm.train(tiny_kb, tmp_path / "out", settings('embedder_start="given"'), str(tiny_model_folder))
    assert changed(out, tiny_model_folder) == {"reader"}


def test_embedder_of_a_model_may_become_two_towers_that_start_equal(
    tiny_kb, tiny_model_folder, tmp_path
) -> None:
    given = settings('embedder_start="given"', "embedder.shared=false", "steps=0")
    towers = load_model(mlm.train(tiny_kb, tmp_path / "out", given, str(tiny_model_folder))).embedder
    assert towers.passage is not towers.query
    before = load_model(tiny_model_folder).embedder.query.state_dict()
    for tower in (towers.query, towers.passage):
        assert all(torch.equal(value, before[name]) for name, value in tower.state_dict().items())


def test_a_span_reader_stays_as_it_is_and_its_calibration_does_while_the_embedder_does(
    tiny_kb, tiny_model, tmp_path
) -> None:
    start_reader(tiny_model, seed=5)
    tiny_model.calibration = Calibration(slope=0.5, offset=-1.0, threshold=0.3)
    save_model(tiny_model, tmp_path / "qa")
    towers = {"embedder.query", "embedder.passage"}
    for start in ("given", "trained"):
        out = mlm.train(
            tiny_kb, tmp_path / start, settings(f'embedder_start="{start}"'), str(tmp_path / "qa")
        )
        assert changed(out, tmp_path / "qa") == {"reader"} | (towers if start == "trained" else set())
        assert load_model(out).span_reader is not None
        assert load_model(out).calibration == (tiny_model.calibration if start == "given" else Calibration())


def test_input_embeddings_of_an_encoder_may_stay_as_they_are(tiny_kb, tiny_model_folder, tmp_path) -> None:
    frozen = settings('input_embeddings="frozen"')
    reader = load_model(mlm.train(tiny_kb, tmp_path / "out", frozen, str(tiny_model_folder))).reader
    start = load_model(tiny_model_folder).reader.bert.bert.state_dict()
    same = {name for name, value in reader.bert.bert.state_dict().items() if torch.equal(value, start[name])}
    assert same == {name for name in start if name.startswith("embeddings.")}
    with pytest.raises(InputError, match="needs an init"):
        mlm.train(tiny_kb, tmp_path / "no", frozen)


def changed_encoder(folder: Path, model: Model) -> bool:
    encoder = load_model(folder).embedder.query.encoder.state_dict()
    came = model.reader.bert.bert.state_dict()
    return any(not torch.equal(value, came[name]) for name, value in encoder.items())


def changed_reader(folder: Path, model: Model) -> bool:
    came = model.reader.state_dict()
    return any(not torch.equal(v, came[n]) for n, v in load_model(folder).reader.state_dict().items())


def test_text_that_is_all_held_out_is_one_line(tiny_kb, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mlm, "held_out", lambda ids, share: np.ones(len(ids), dtype=bool))
    with pytest.raises(InputError, match="all passages with text are held out: use more text") as error:
        mlm.train(tiny_kb, tmp_path / "out", settings())
    assert "\n" not in str(error.value) and not (tmp_path / "out.training").exists()
