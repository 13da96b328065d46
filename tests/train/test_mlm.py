"""Masked language modelling: what is hidden and shown, what the stage makes, and that it repeats exactly."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.config import InputError
from realm.model.encoders import TrunkConfig, new_reader
from realm.model.folder import load_model
from realm.retrieval.embedding import pooled_states
from realm.retrieval.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
from realm.retrieval.masked_queries import SpanIndex, held_out
from realm.retrieval.passages import PassageTokens, Ragged
from realm.text.corpus import Annotations, Document, Span
from realm.text.inputs import Lengths, Tokenizer
from realm.train import mlm
from realm.train.mlm import MlmConfig, masked_rows
from tests.train.stages import CONTRACT, assert_same_result, changed, metrics, stopped_at, tiny

LENGTHS = Lengths(
    query=20, passage=32
)  # shorter than the towns' passages, so that everything is cut somewhere


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
    assert model.step == 20 and list(model.stages) == ["mlm"]
    assert model.embedder.config.dim == 32


def test_metrics_have_the_keys_of_the_contract_and_the_probe(made) -> None:
    rows = metrics(made)
    assert all(row.keys() >= CONTRACT for row in rows)
    assert [row["step"] for row in rows if row["loss"] is not None] == [10, 20]
    probes = [row for row in rows if "own_passage_nats" in row]
    assert [row["step"] for row in probes] == [10, 20]
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
        assert torch.equal(value, tower.trunk.state_dict()[name])
    everything = np.arange(len(tiny_kb))
    pooled = pooled_states(tower, tiny_kb.tokens, everything, model.tokenizer, model.lengths, model.device)
    projected = tower.projection(pooled).detach()[:, :20]  # 28 passages fix 27 directions
    np.testing.assert_allclose(projected.mean(dim=0), np.zeros(20), atol=1e-2)
    np.testing.assert_allclose((projected.T @ projected / 28).numpy(), np.eye(20), atol=2e-2)


def test_no_sentence_of_a_held_out_passage_is_trained_on(tiny_kb, tmp_path, monkeypatch) -> None:
    seen: set[int] = set()

    def record(tokens, spans, passages, *rest):
        seen.update(passages.tolist())
        return masked_rows(tokens, spans, passages, *rest)

    monkeypatch.setattr(mlm, "masked_rows", record)
    mlm.train(tiny_kb, tmp_path / "out", settings("steps=2"))
    assert seen == set(np.flatnonzero(~held_out(tiny_kb.ids, 0.2)).tolist())
    assert 0 < len(seen) < len(tiny_kb)


def test_no_steps_wrap_an_encoder_as_it_is(tiny_kb, tmp_path) -> None:
    torch.manual_seed(5)
    reader = new_reader(TrunkConfig(layers=1, hidden=16, heads=2, positions=96), tiny_kb.tokenizer)
    reader.bert.save_pretrained(tmp_path / "hf")
    tiny_kb.tokenizer.save(tmp_path / "hf")
    out = mlm.train(tiny_kb, tmp_path / "out", settings("steps=0"), str(tmp_path / "hf"))
    loaded = load_model(out).reader.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in reader.state_dict().items())


def test_adapting_a_model_keeps_what_made_it(made, tiny_kb, tmp_path) -> None:
    model = load_model(made)
    model.stages = {"earlier": {"steps": 3}}
    from realm.model.folder import save_model

    save_model(model, tmp_path / "start")
    out = mlm.train(tiny_kb, tmp_path / "out", settings("steps=1"), str(tmp_path / "start"))
    assert list(load_model(out).stages) == ["earlier", "mlm"]


def test_bf16_training_is_close_to_full_precision(made, tiny_kb, tmp_path) -> None:
    out = mlm.train(tiny_kb, tmp_path / "out", settings("precision=bf16"))
    cast, full = ([row["loss"] for row in metrics(folder) if row["loss"]] for folder in (out, made))
    np.testing.assert_allclose(cast, full, rtol=0.02)


# -- what it refuses


def test_encoder_with_another_tokenizer_is_one_line(tiny_kb, tmp_path) -> None:
    tokenizer = Tokenizer.train(["quite other words"], vocab_size=40)
    new_reader(TrunkConfig(layers=1, hidden=16, heads=2), tokenizer).bert.save_pretrained(tmp_path / "hf")
    tokenizer.save(tmp_path / "hf")
    with pytest.raises(InputError, match="tokenizer") as error:
        mlm.train(tiny_kb, tmp_path / "out", settings(), str(tmp_path / "hf"))
    assert "\n" not in str(error.value)


def test_inputs_longer_than_the_encoder_takes_are_one_line(tiny_kb, tmp_path) -> None:
    with pytest.raises(InputError, match=r"32 .* 48 .* 64") as error:
        mlm.train(tiny_kb, tmp_path / "out", settings("trunk.positions=64"))
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


# -- the rows


def ragged(rows) -> Ragged:
    offsets = np.cumsum([0] + [len(r) for r in rows])
    return Ragged(np.array([x for r in rows for x in r], dtype=np.int32), offsets)


def batches(kb, config: MlmConfig, count: int = 30, lengths: Lengths = LENGTHS):
    passages = np.arange(len(kb))
    spans = SpanIndex(kb.tokens)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        yield masked_rows(kb.tokens, spans, passages, rng, kb.tokenizer, lengths, config)


def rows_of(rows):
    """Per row: its tokens, its segments, and {position: target}."""
    targets = [{} for _ in rows.tokens.ids_BT]
    for row, position, target in zip(*(t.tolist() for t in rows[1:]), strict=True):
        targets[row][position] = target
    real = rows.tokens.mask_BT.sum(dim=1).tolist()
    for ids, segments, length, wanted in zip(
        rows.tokens.ids_BT.tolist(), rows.tokens.segments_BT.tolist(), real, targets, strict=True
    ):
        yield ids[:length], segments[:length], wanted


def restored(ids: list[int], targets: dict[int, int]) -> list[int]:
    return [targets.get(place, token) for place, token in enumerate(ids)]


def test_plain_rows_are_passages_whose_targets_undo_the_masks(tiny_kb) -> None:
    config, tokenizer = settings("reading=0.0"), tiny_kb.tokenizer
    bodies = [tiny_kb.tokens.body.row(n).tolist() for n in range(len(tiny_kb))]
    titled = visible = masked = 0
    for (rows,) in batches(tiny_kb, config):
        for ids, segments, targets in rows_of(rows):
            first = segments.index(1)
            body = restored(ids, targets)[first:-1]
            (owner,) = [n for n, b in enumerate(bodies) if b[: len(body)] == body]
            title = ids[1 : first - 1]
            assert title in ([], tiny_kb.tokens.title.row(owner).tolist())
            assert ids[0] == tokenizer.cls_id and ids[first - 1] == ids[-1] == tokenizer.sep_id
            assert all(first <= place < len(ids) - 1 for place in targets)
            assert tokenizer.mask_id not in restored(ids, targets)
            titled += bool(title)
            masked += sum(ids[place] == tokenizer.mask_id for place in targets)
            visible += sum(ids[place] != tokenizer.mask_id for place in targets)
    assert 0.3 < titled / 240 < 0.7
    assert 0.05 < visible / (visible + masked) < 0.16


def test_reading_rows_are_a_sentence_beside_its_passage_another_holder_or_none(tiny_kb) -> None:
    config, tokens = settings("reading=1.0"), tiny_kb.tokens
    kinds = {"own": 0, "none": 0, "other": 0}
    for (rows,) in batches(tiny_kb, config, lengths=Lengths(query=20, passage=60)):
        for ids, segments, targets in rows_of(rows):
            first = segments.index(1)
            sentence, beside = restored(ids, targets)[1 : first - 1], ids[first:-1]
            assert len(targets) >= 1 and all(0 < place < first - 1 for place in targets)
            assert all(ids[place] == tiny_kb.tokenizer.mask_id for place in targets)
            owners = [
                n
                for n in range(len(tiny_kb))
                for start, end in zip(
                    tokens.sentences.row(n),
                    np.append(tokens.sentences.row(n)[1:], len(tokens.body.row(n))),
                    strict=True,
                )
                if tokens.body.row(n)[start:end][:18].tolist() == sentence
            ]
            assert len(owners) == 1
            if not beside:
                kinds["none"] += 1
            elif beside == tokens.body.row(owners[0]).tolist():
                kinds["own"] += 1
            else:
                kinds["other"] += 1
                assert any(beside == tokens.body.row(n).tolist() for n in range(len(tiny_kb)))
                assert set(targets.values()) & set(beside)  # it holds a hidden span
    total = sum(kinds.values())
    assert abs(kinds["none"] / total - config.no_passage) < 0.08
    assert abs(kinds["own"] / total - config.own_passage) < 0.12


def test_batch_mixes_both_kinds_in_their_share(tiny_kb) -> None:
    for reading, plain in batches(tiny_kb, settings("batch_size=8", "reading=0.25"), count=5):
        assert (len(reading.tokens.ids_BT), len(plain.tokens.ids_BT)) == (2, 6)


def test_sentence_of_no_wordpieces_does_no_harm(tiny_kb) -> None:
    """Such as one of control characters, which the tokenizer drops."""
    draw = np.random.default_rng(0)
    tokens = PassageTokens(
        title=ragged([[9], [9]]),
        body=ragged([draw.integers(10, 99, 12), draw.integers(10, 99, 9)]),
        sentences=ragged([[0, 5, 5, 12], [0, 0]]),
        span_starts=ragged([[1], []]),
        span_ends=ragged([[3], []]),
    )
    config = settings("reading=1.0")
    for seed in range(50):
        rng = np.random.default_rng(seed)
        rows = masked_rows(tokens, SpanIndex(tokens), np.arange(2), rng, tiny_kb.tokenizer, LENGTHS, config)
        assert all(len(part.row_P) for part in rows)


def test_inverse_frequency_is_the_log_of_passages_over_holders(tiny_kb) -> None:
    tokens, tokenizer = tiny_kb.tokens, tiny_kb.tokenizer
    weight_V = mlm.inverse_frequency(tokens, tokenizer)
    special = {tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id}
    for word in range(tokenizer.vocab_size):
        holders = sum(word in tokens.body.row(n) or word in tokens.title.row(n) for n in range(len(tiny_kb)))
        expected = 0.0 if word in special else math.log((len(tiny_kb) + 1) / (holders + 1))
        assert weight_V[word].item() == pytest.approx(expected, abs=1e-6)


def test_word_pooling_starts_from_the_corpus(tiny_kb, tmp_path) -> None:
    out = mlm.train(
        tiny_kb, tmp_path / "out", tiny(mlm.MlmConfig, "mlm", "steps=1", "embedder.pooling=words")
    )
    tower = load_model(out).embedder.query
    expected = mlm.inverse_frequency(tiny_kb.tokens, tiny_kb.tokenizer)
    assert torch.equal(tower.importance.weight[:, 0], expected)


def test_projection_stays_random_where_the_paper_wants_it(tiny_kb, tmp_path) -> None:
    first = mlm.start_model(tiny_kb, settings("principal=false"), None).embedder.query.projection.weight
    out = mlm.train(tiny_kb, tmp_path / "out", settings("steps=1", "principal=false"))
    assert torch.equal(load_model(out).embedder.query.projection.weight, first)
