"""Masked language modelling: what is hidden and shown, what the stage makes, and that it repeats exactly."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.errors import InputError
from realm.index.embedding import pooled_states
from realm.masking.held_out import held_out
from realm.masking.masked_queries import SpanIndex
from realm.model.bert_files import save_bert
from realm.model.calibration import Calibration
from realm.model.folder import Model, load_model, save_model
from realm.model.masked_reader import EncoderConfig, new_reader, save_reader
from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
from realm.store.schema import PassageTokens, Ragged
from realm.text.corpus import Annotations, Document, Span
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Tokenizer
from realm.train import mlm
from realm.train.finetune import start_reader
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

    def record(tokens, spans, passages, *rest):
        seen.update(passages.tolist())
        return masked_rows(tokens, spans, passages, *rest)

    monkeypatch.setattr(mlm, "masked_rows", record)
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


def test_reading_rows_are_a_sentence_beside_its_passage_one_close_to_it_another_holder_or_none(
    tiny_kb,
) -> None:
    config, tokens = settings("reading=1.0"), tiny_kb.tokens
    kinds = {"own": 0, "none": 0, "other": 0}
    bodies = [tokens.body.row(n).tolist() for n in range(len(tiny_kb))]
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
            elif beside == bodies[owners[0]]:
                kinds["own"] += 1
            else:
                kinds["other"] += 1
                away = (bodies.index(beside) - owners[0]) % len(bodies)
                assert away in (1, 2, len(bodies) - 1, len(bodies) - 2) or set(targets.values()) & set(beside)
    total = sum(kinds.values())
    assert abs(kinds["none"] / total - mlm.NO_PASSAGE) < 0.08
    assert abs(kinds["own"] / total - mlm.OWN_PASSAGE) < 0.12


@pytest.mark.parametrize("own", [5, 0])
def test_passage_beside_a_sentence_is_of_each_kind_as_often_as_meant(own) -> None:
    """Twelve passages, of which three hold the span; the first one has neighbours on one side only."""
    span, count, draws = [7, 8], 12, 4000
    positives = [own, (own + 4) % count, (own + 7) % count]
    tokens = PassageTokens(
        title=ragged([[9]] * count),
        body=ragged([[100 + n, *(span if n in positives else [20, 21])] for n in range(count)]),
        sentences=ragged([[0]] * count),
        span_starts=ragged([[1] if n in positives else [] for n in range(count)]),
        span_ends=ragged([[3] if n in positives else [] for n in range(count)]),
    )
    spans, rng = SpanIndex(tokens), np.random.default_rng(0)
    drawn = [mlm._beside(tokens, spans, own, np.array(span), rng) for _ in range(draws)]
    found = Counter(int(body[0]) - 100 if len(body) else None for body in drawn)
    other = 1 - mlm.OWN_PASSAGE - mlm.NEAR_PASSAGE - mlm.NO_PASSAGE
    near = [n for n in range(count) if 0 < abs(n - own) <= 2]
    expected = {
        own: mlm.OWN_PASSAGE,
        None: mlm.NO_PASSAGE,
        **{n: mlm.NEAR_PASSAGE / len(near) for n in near},
        **dict.fromkeys(positives[1:], other / 2),
    }
    assert found.keys() <= expected.keys()
    for kind, share in expected.items():
        assert abs(found[kind] / draws - share) < 4 * math.sqrt(share * (1 - share) / draws) + 1e-9


def test_sentence_whose_span_stands_nowhere_else_gets_its_own_passage_instead_of_anothers(
    monkeypatch,
) -> None:
    tokens = PassageTokens(
        title=ragged([[9]] * 3),
        body=ragged([[7, 8], [20], [21]]),
        sentences=ragged([[0]] * 3),
        span_starts=ragged([[0], [], []]),
        span_ends=ragged([[2], [], []]),
    )
    for name in ("OWN_PASSAGE", "NEAR_PASSAGE", "NO_PASSAGE"):
        monkeypatch.setattr(mlm, name, 0.0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert mlm._beside(tokens, SpanIndex(tokens), 0, np.array([7, 8]), rng).tolist() == [7, 8]


def test_only_passage_of_a_corpus_stands_beside_its_own_sentences(monkeypatch) -> None:
    tokens = PassageTokens(*(ragged([row]) for row in ([9], [7, 8], [0], [0], [2])))
    monkeypatch.setattr(mlm, "NEAR_PASSAGE", 1.0)
    monkeypatch.setattr(mlm, "NO_PASSAGE", 0.0)
    rng = np.random.default_rng(0)
    assert mlm._beside(tokens, SpanIndex(tokens), 0, np.array([7, 8]), rng).tolist() == [7, 8]


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


def test_projection_stays_random_where_the_paper_wants_it(tiny_kb, tmp_path) -> None:
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
