"""REALM pre-training: who gets gradients, what the loss is over the whole index, and that a run repeats exactly."""

import errno
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from realm.errors import RealmError
from realm.index.embedding import embed_passages
from realm.index.versions import IndexConfig, build_index, complete_index, publish
from realm.masking import masked_queries
from realm.masking.candidates import CandidateRule, choose_candidates, read_inputs
from realm.masking.held_out import held_out
from realm.masking.masked_queries import MaskedQuery, MaskingRule, SpanIndex, draw_queries, holds
from realm.model.folder import load_model, save_model
from realm.model.losses import marginal_loss
from realm.model.masked_reader import MaskedReader
from realm.search.exact import MipsIndex
from realm.settings import read_config
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
from realm.text.corpus import Annotations, Document
from realm.tokens.layouts import passage_inputs, query_inputs
from realm.train import health, pretrain
from realm.train.health import HealthWatch
from realm.train.ict import cloze_pairs
from realm.train.loop import TrainRun
from realm.train.pretrain import (
    Entries,
    PretrainConfig,
    describe,
    draw_chances,
    drawn_reader_loss,
    loss_entries,
    read,
    sampled_reader_loss,
    score,
    warm_start_loss,
)
from realm.train.refresh import refresher as refresh
from tests.conftest import tiny_documents
from tests.store.tiny import TinyTagger
from tests.train.stages import CONTRACT, assert_same_result, changed, metrics, stopped_at, tiny

EMBEDDER = {"embedder.query", "embedder.passage"}
X_CONFIG = KnowledgeBaseConfig(passage_tokens=48, held_out=0.2)
"""Of a corpus X beside the towns."""


def settings(*overrides: str) -> PretrainConfig:
    return tiny(PretrainConfig, "pretrain", "steps=6", "refresh.every=3", *overrides)


@pytest.fixture(scope="module")
def made(tiny_kb, tiny_model_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("pretrain") / "out"
    return pretrain.train(tiny_kb, out, settings(), str(tiny_model_folder))


def test_model_that_is_saved_was_judged(made):
    judged = [line["index_step"] for line in metrics(made) if "index_step" in line]
    assert judged[0] == 0 and judged[-1] == 6


@pytest.fixture
def towers_folder(tiny_model, tmp_path) -> Path:
    """The tiny model with two towers."""
    tiny_model.embedder.untie()
    save_model(tiny_model, tmp_path / "towers")
    return tmp_path / "towers"


# -- one step, looked at closely


def widened(query: MaskedQuery, more: int, mask_id: int) -> MaskedQuery:
    """A query whose mask hides so many wordpieces more, behind the others."""
    first, last = int(query.positions[0]), int(query.positions[-1])
    positions = np.arange(first, min(last + more + 1, len(query.ids)))
    ids = query.ids.copy()
    ids[positions] = mask_id
    return query._replace(ids=ids, positions=positions, targets=query.original[positions])


@pytest.fixture
def step(tiny_kb, tiny_model):
    """A batch of 5 queries beside 6 candidates, and everything that a step's loss reads.

    The names of the corpus are one wordpiece each. Three of the queries hide what follows the name too: for a single masked
    token the two marginals are equal.
    """

    def make(config: PretrainConfig, seed: int = 0):
        tokens, rng = tiny_kb.tokens, np.random.default_rng(seed)
        lengths, mask_id = tiny_model.lengths, tiny_kb.tokenizer.mask_id
        queries = draw_queries(
            tokens, np.arange(len(tiny_kb)), 5, rng, MaskingRule(mask_id, lengths.query - 2)
        )
        queries = [widened(q, more, mask_id) for q, more in zip(queries, (2, 0, 1, 0, 2), strict=True)]
        vectors = embed_passages(tiny_model, tokens, np.arange(len(tiny_kb)))
        index = MipsIndex(vectors)
        batch = read_inputs(queries, np.full((5, 1), -1), tokens, tiny_model.tokenizer, lengths)
        query_BD = tiny_model.embedder.query(batch.queries)
        chosen = choose_candidates(
            queries, query_BD, index, tokens, CandidateRule(6, True, config.injected), SpanIndex(tokens)
        )
        batch = read_inputs(queries, chosen.number_BK, tokens, tiny_model.tokenizer, lengths)
        assert sorted(batch.mask_BM.sum(dim=1).tolist()) == [1, 1, 2, 3, 3]
        query_BD, score_BK = tiny_model.embedder.score(batch.queries, batch.passages, batch.place_BK)
        logp_BKM = read(tiny_model.reader, batch, queries, chosen, tokens, config)
        return queries, chosen, index, batch, query_BD, score_BK, logp_BKM

    return make


def config(**values) -> PretrainConfig:
    return PretrainConfig(**{"injected": 1, "reader_gradient": "none", **values})


def entries_of(made, settings: PretrainConfig, seed: int = 0) -> Entries:
    _, chosen, index, batch, query_BD, score_BK, logp_BKM = made
    rng = np.random.default_rng(seed)
    return loss_entries(query_BD, score_BK, logp_BKM, batch, chosen, index, rng, settings)


def loss_of(made, settings: PretrainConfig) -> torch.Tensor:
    entries = entries_of(made, settings)
    return marginal_loss(entries.score_BE, entries.logp_BEM, made[3].mask_BM, settings.marginal)


@pytest.mark.parametrize("marginal", ["span", "token"])
def test_loss_over_the_whole_index_is_that_of_reading_every_passage(tiny_kb, step, marginal) -> None:
    """Every passage but the query's own is a candidate; unread ones have the null passage's likelihood, less the gap."""
    settings = config(normalise="index", marginal=marginal)
    made = step(settings)
    _, chosen, index, batch, query_BD, score_BK, logp_BKM = made
    loss = loss_of(made, settings)
    total, masked = 0.0, 0
    for row in range(5):
        count = int(batch.mask_BM[row].sum())
        read_here = chosen.number_BK[row, 1:].tolist()
        unread = [n for n in range(len(tiny_kb)) if n not in {*read_here, *chosen.excluded[row].tolist()}]
        assert unread and not set(read_here) & set(chosen.excluded[row].tolist())
        scores = [*score_BK[row].tolist(), *(index.rows(unread) @ query_BD[row]).tolist()]
        prior = torch.tensor(scores, dtype=torch.float64).softmax(0)
        seen = logp_BKM[row, :, :count].double()
        imputed = (seen[0] - 1.5 / count).expand(len(unread), count)
        likelihood = torch.cat([seen, imputed]).exp()
        if marginal == "span":
            total -= float((prior @ likelihood.prod(dim=1)).log())
        else:
            total -= float((prior @ likelihood).log().sum())
        masked += count
    assert loss.item() == pytest.approx(total / masked, rel=1e-4)


@pytest.mark.parametrize("marginal", ["span", "token"])
def test_loss_over_the_candidates_is_the_papers(step, marginal) -> None:
    settings = config(normalise="candidates", marginal=marginal)
    made = step(settings)
    _, _, _, batch, _, score_BK, logp_BKM = made
    loss = loss_of(made, settings)
    total = 0.0
    for row in range(5):
        count = int(batch.mask_BM[row].sum())
        likelihood = logp_BKM[row, :, :count].double().exp()
        prior = score_BK[row].double().softmax(0)
        marginal_likelihood = prior @ (likelihood.prod(dim=1)[:, None] if marginal == "span" else likelihood)
        total -= marginal_likelihood.log().sum().item()
    assert loss.item() == pytest.approx(total / batch.mask_BM.sum().item(), rel=1e-4)


@pytest.mark.parametrize("marginal", ["span", "token"])
def test_null_passage_that_is_no_candidate_has_no_share_in_the_loss(tiny_model, step, marginal) -> None:
    settings = config(normalise="candidates", marginal=marginal, reader_gradient="sampled")
    _, chosen, _, batch, _, score_BK, logp_BKM = made = step(settings)
    _, alone_BK = score(tiny_model.embedder, batch, chosen, None, null_passage=False)
    assert torch.equal(alone_BK[:, 1:], score_BK[:, 1:])
    entries = entries_of((*made[:5], alone_BK, logp_BKM), settings)
    loss = marginal_loss(entries.score_BE, entries.logp_BEM, batch.mask_BM, marginal)
    others = marginal_loss(score_BK[:, 1:], logp_BKM[:, 1:], batch.mask_BM, marginal)
    assert loss.item() == pytest.approx(others.item(), rel=1e-6)
    _, share_BE = draw_chances(entries, batch.mask_BM, settings)
    assert (share_BE[:, 0] == 0).all()
    said = describe(alone_BK, logp_BKM, batch)
    assert said["null_probability"] == 0 and all(np.isfinite(value) for value in said.values())


def gradients(tiny_model, loss: torch.Tensor) -> set[str]:
    for part in tiny_model.parts().values():
        part.zero_grad()
    if loss.requires_grad:
        loss.backward()
    parts = {
        "reader": tiny_model.reader,
        "query": tiny_model.embedder.query,
        "passage": tiny_model.embedder.passage,
    }
    return {
        name
        for name, part in parts.items()
        if any(p.grad is not None and p.grad.any() for p in part.parameters())
    }


@pytest.mark.parametrize("normalise", ["index", "candidates"])
@pytest.mark.parametrize(
    ("gradient", "of_marginal", "of_sample"),
    [
        ("all", {"query", "passage", "reader"}, set()),
        ("sampled", {"query", "passage"}, {"reader"}),
        ("none", {"query", "passage"}, set()),
    ],
)
def test_gradients_reach_both_towers_and_the_reader_as_asked(
    tiny_model, step, normalise, gradient, of_marginal, of_sample
) -> None:
    tiny_model.embedder.untie()
    settings = config(normalise=normalise, reader_gradient=gradient)
    made = step(settings)
    loss = loss_of(made, settings)
    sampled = sampled_reader_loss(tiny_model.reader, made[3], entries_of(made, settings), settings)
    assert gradients(tiny_model, sampled) == of_sample
    assert gradients(tiny_model, loss) == of_marginal


def test_sampled_gradient_is_in_expectation_the_marginals(tiny_model, step) -> None:
    """With many draws the sampled reader gradient approaches that of -log p(y|x) over the candidates."""
    with torch.no_grad():
        for parameter in tiny_model.reader.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)  # a reader to whom passages make a difference
    every, some = (config(normalise="candidates", reader_gradient=how) for how in ("all", "sampled"))
    made = step(every)
    batch, loss = made[3], loss_of(made, every)
    entries = Entries(*(part.detach() for part in entries_of(made, some)))
    weight = tiny_model.reader.bert.cls.predictions.transform.dense.weight
    (expected,) = torch.autograd.grad(loss, weight)
    draws = []
    for seed in range(150):
        torch.manual_seed(seed)
        sampled = sampled_reader_loss(tiny_model.reader, batch, entries, some)
        draws.append(torch.autograd.grad(sampled, weight)[0])
    mean = torch.stack(draws).mean(dim=0)
    error = torch.stack(draws).std(dim=0) / len(draws) ** 0.5
    assert error.max() > 1e-3
    assert ((mean - expected).abs() <= 6 * error + 1e-5).all()
    assert torch.cosine_similarity(mean.flatten(), expected.flatten(), dim=0) > 0.99


class Float64Reader(torch.nn.Module):
    """A reader of one table: a word's log-probability beside a row depends on the row's mean word."""

    def __init__(self, words: int):
        super().__init__()
        torch.manual_seed(2)
        self.word_VH = torch.nn.Parameter(3 * torch.randn(words, 6, dtype=torch.float64))
        self.head_HV = torch.nn.Parameter(3 * torch.randn(6, words, dtype=torch.float64))

    def token_logp(self, joint, position_BM, target_BM, mask_BM) -> torch.Tensor:
        real_RT1 = joint.mask_BT[:, :, None].double()
        state_RH = (self.word_VH[joint.ids_BT] * real_RT1).sum(dim=1) / real_RT1.sum(dim=1)
        logp_RV = (state_RH @ self.head_HV).log_softmax(dim=1)
        queries, most = target_BM.shape
        target_RM = target_BM.repeat_interleave(len(joint.ids_BT) // queries, dim=0)
        return logp_RV.gather(1, target_RM).view(queries, -1, most) * mask_BM[:, None]


SIGNALS, NORMALISED, MARGINALS = (
    get_args(get_type_hints(PretrainConfig)[name]) for name in ("signal", "normalise", "marginal")
)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("normalise", NORMALISED)
@pytest.mark.parametrize("marginal", MARGINALS)
def test_mean_of_all_draws_is_the_whole_gradient_under_every_setting(
    tiny_kb, step, monkeypatch, signal, normalise, marginal
) -> None:
    """Every entry of the loss is drawn once, and its gradient weighed with its chance: in float64 nothing is left over."""
    monkeypatch.setattr(pretrain, "UNRETRIEVED_GAP", -2.0)
    said = {"signal": signal, "normalise": normalise, "marginal": marginal}
    every, some = (config(reader_gradient=how, **said) for how in ("all", "sampled"))
    queries, chosen, index, batch, query_BD, score_BK, _ = step(every)
    batch = batch._replace(mask_BM=batch.mask_BM.double())
    reader = Float64Reader(tiny_kb.tokenizer.vocab_size)
    parameters = list(reader.parameters())

    def entries(settings: PretrainConfig) -> Entries:
        logp_BKM = read(reader, batch, queries, chosen, tiny_kb.tokens, settings).double()
        vectors = query_BD.detach(), score_BK.detach().double() / 4, logp_BKM
        found = loss_entries(*vectors, batch, chosen, index, np.random.default_rng(1), settings)
        return found._replace(score_BE=found.score_BE.double())

    whole = entries(every)
    loss = marginal_loss(whole.score_BE, whole.logp_BEM, batch.mask_BM, marginal)
    if signal == "entity":  # no reader, so none is trained either way
        assert not loss.requires_grad
        assert not sampled_reader_loss(reader, batch, entries(some), some).requires_grad
        return
    expected = torch.autograd.grad(loss, parameters)
    found = entries(some)
    credit_BEM, share_BE = draw_chances(found, batch.mask_BM, some)
    torch.testing.assert_close(share_BE.sum(dim=1), torch.ones(5, dtype=torch.float64))
    assert share_BE.shape[1] == (7 if normalise == "index" else 6)
    assert share_BE.min() < 0.1 and share_BE.max() > 0.3  # a draw makes a difference
    mean = [torch.zeros_like(part) for part in parameters]
    for entry in range(share_BE.shape[1]):
        weighed_BEM = credit_BEM * share_BE[:, :, None]
        drawn_B = torch.full((5,), entry)
        drawn = drawn_reader_loss(reader, batch, found, weighed_BEM, share_BE, drawn_B)
        mean = [sum_ + part for sum_, part in zip(mean, torch.autograd.grad(drawn, parameters), strict=True)]
    for one, other in zip(mean, expected, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("marginal", MARGINALS)
def test_entries_are_drawn_as_often_as_their_mean_credit_says(step, monkeypatch, marginal) -> None:
    monkeypatch.setattr(pretrain, "UNRETRIEVED_GAP", -4.0)
    settings = config(reader_gradient="sampled", marginal=marginal)
    made = step(settings)
    entries, batch = entries_of(made, settings), made[3]
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(pretrain, "drawn_reader_loss", lambda *rest: drawn.append(rest[-1]))
    torch.manual_seed(0)
    for _ in range(1500):
        sampled_reader_loss(None, batch, entries, settings)  # type: ignore[arg-type]
    share_BE = draw_chances(entries, batch.mask_BM, settings)[1]
    seen_BE = torch.nn.functional.one_hot(torch.stack(drawn), share_BE.shape[1]).double().mean(dim=0)
    assert ((seen_BE - share_BE).abs() <= 4.5 * (share_BE * (1 - share_BE) / 1500).sqrt()).all()
    assert seen_BE[:, -1].min() > 0  # the unread passages too


def test_query_that_draws_the_unread_passages_reads_nothing_and_trains_nothing(tiny_model, step) -> None:
    settings = config(reader_gradient="sampled")
    made = step(settings)
    entries, batch = entries_of(made, settings), made[3]
    chances = draw_chances(entries, batch.mask_BM, settings)
    rows: list[int] = []
    token_logp = tiny_model.reader.token_logp

    class Counting:
        def token_logp(self, joint, *rest):
            rows.append(len(joint.ids_BT))
            return token_logp(joint, *rest)

    for drawn in ([6, 0, 6, 2, 6], [6] * 5):
        loss = drawn_reader_loss(Counting(), batch, entries, *chances, torch.tensor(drawn))
    assert rows == [2, 1] and loss.item() == 0
    assert gradients(tiny_model, loss) == set()
    assert all(p.grad is not None for p in tiny_model.reader.bert.cls.predictions.transform.parameters())


def test_warm_start_loss_is_that_of_finding_each_sentences_passage(tiny_kb, tiny_model) -> None:
    passages, count = np.arange(len(tiny_kb)), 4
    drawn = np.random.default_rng(5).choice(passages, 4 * count, replace=False)  # as the draw of the loss
    assert len(drawn) <= len(tiny_kb)
    rng = np.random.default_rng(5)
    rng.choice(passages, 4 * count, replace=False)
    parts = cloze_pairs(tiny_kb.tokens, drawn, rng, 0.9, count)
    tower, words = tiny_model.embedder.query, tiny_model.tokenizer
    query_BD = tower(query_inputs(parts[0], words, tiny_model.lengths)).detach().double().numpy()
    passage_BD = (
        tower(passage_inputs(parts[1], parts[2], words, tiny_model.lengths)).detach().double().numpy()
    )
    total = 0.0
    for row in range(count):
        scores = [float(query_BD[row] @ other) for other in passage_BD]
        total += np.log(np.sum(np.exp(scores))) - scores[row]
    settings = config(ict=0.3, ict_batch=count)
    loss = warm_start_loss(tiny_model, tiny_kb.tokens, passages, np.random.default_rng(5), settings)
    assert loss.item() == pytest.approx(total / count, rel=1e-4)
    assert gradients(tiny_model, loss) == {"query", "passage"}


def test_warm_start_loss_without_weight_costs_nothing(tiny_kb, tiny_model) -> None:
    loss = warm_start_loss(tiny_model, tiny_kb.tokens, np.arange(0), np.random.default_rng(0), config())
    assert loss.item() == 0 and not loss.requires_grad


def test_shuffled_control_trades_likelihoods_among_real_candidates_only(step) -> None:
    settings = config(normalise="candidates", signal="shuffled")
    made = step(settings)
    logp_BKM, shuffled = made[-1], entries_of(made, settings).logp_BEM
    assert torch.equal(shuffled[:, 0], logp_BKM[:, 0])
    assert not torch.equal(shuffled, logp_BKM)
    for row in range(5):
        rows = sorted(map(tuple, logp_BKM[row, 1:].tolist()))
        assert sorted(map(tuple, shuffled[row, 1:].tolist())) == rows


def test_entity_control_credits_holders_without_a_reader(tiny_kb, step, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the reader was asked")

    monkeypatch.setattr(MaskedReader, "token_logp", refuse)
    settings = config(signal="entity", injected=2)
    made = step(settings)
    queries, chosen, _, batch, _, _, logp_BKM = made
    span_BK = (logp_BKM * batch.mask_BM[:, None]).sum(dim=-1)
    for row, query in enumerate(queries):
        gain = span_BK[row] - span_BK[row, 0]
        for column, number in enumerate(chosen.number_BK[row, 1:], start=1):
            expected = 6.2 if holds(tiny_kb.tokens.body.row(number), query.targets) else -1.6
            assert gain[column].item() == pytest.approx(expected, abs=1e-5)
    assert (span_BK <= 0).all()
    sampled = replace(settings, reader_gradient="sampled")
    assert sampled_reader_loss(None, batch, entries_of(made, sampled), sampled).item() == 0  # type: ignore[arg-type]


def test_description_is_what_its_names_say(step) -> None:
    _, _, _, batch, _, score_BK, logp_BKM = step(config())
    said = describe(score_BK, logp_BKM, batch)
    prior = score_BK.detach().double().softmax(dim=1)
    span = (logp_BKM * batch.mask_BM[:, None]).sum(dim=-1).double().exp()
    credit = prior * span
    assert said["null_probability"] == pytest.approx(prior[:, 0].mean().item(), rel=1e-4)
    assert said["marginal_logp"] == pytest.approx(credit.sum(dim=1).log().mean().item(), rel=1e-4)
    assert said["entropy"] == pytest.approx(-(prior * prior.log()).sum(dim=1).mean().item(), rel=1e-4)
    assert said["flip_rate"] == pytest.approx((prior.argmax(1) != credit.argmax(1)).double().mean().item())


# -- the stage


def test_stage_trains_everything_with_the_metrics_of_the_contract(made, tiny_model_folder) -> None:
    assert changed(made, tiny_model_folder) == {"reader"} | EMBEDDER
    rows = metrics(made)
    assert all(row.keys() >= CONTRACT for row in rows)
    (logged,) = [row for row in rows if row["loss"] is not None]
    assert all(np.isfinite(logged[key]) for key in CONTRACT)
    assert logged["step"] == 6 and logged["index_age"] == 1.0  # 0 1 2 0 1 2
    versions = [row for row in rows if "probe_recall_5" in row]
    assert [(row["step"], row["index_step"]) for row in versions] == [(0, 0), (3, 3), (6, 6)]
    assert "churn" not in versions[0] and 0 <= versions[1]["churn"] <= 1
    assert [row["step"] for row in rows if "positive_gap" in row] == [3, 6]


def test_same_seed_gives_the_same_model_and_another_seed_another(
    made, tiny_kb, tiny_model_folder, tmp_path
) -> None:
    again = pretrain.train(tiny_kb, tmp_path / "again", settings(), str(tiny_model_folder))
    assert_same_result(again, made)
    other = pretrain.train(tiny_kb, tmp_path / "other", settings("seed=1"), str(tiny_model_folder))
    assert changed(other, made) == {"reader"} | EMBEDDER


@pytest.mark.parametrize("at", [1, 2, 4])
def test_stopped_run_goes_on_as_if_nothing_had_happened(
    made, tiny_kb, tiny_model_folder, tmp_path, monkeypatch, at
) -> None:
    """Between two refreshes too: it takes the index up again that it had, not a newer one."""

    def train() -> Path:
        return pretrain.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))

    stopped_at(at, monkeypatch, train)
    assert_same_result(train(), made)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_stopped_run_whose_index_is_gone_builds_another(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    def train() -> Path:
        return pretrain.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))

    stopped_at(4, monkeypatch, train)
    shutil.rmtree(tmp_path / "out.training" / "index")
    assert load_model(train()).step == 6


@pytest.mark.parametrize(
    ("overrides", "trained"),
    [
        (["reader_gradient=all"], {"reader"} | EMBEDDER),
        (["reader_gradient=sampled"], {"reader"} | EMBEDDER),
        (["reader_gradient=none"], EMBEDDER),
        (["signal=entity"], EMBEDDER),
        (["signal=shuffled"], {"reader"} | EMBEDDER),
        (["ict=0.5", "ict_batch=3"], {"reader"} | EMBEDDER),
        (["masking=token", "normalise=candidates"], {"reader"} | EMBEDDER),
        (["masking=span", "marginal=token", "mask_repeats=false", "injected=0"], {"reader"} | EMBEDDER),
        (["masking=bert", "normalise=candidates", "exclude_own=false"], {"reader"} | EMBEDDER),
        (["null_passage=false"], {"reader"} | EMBEDDER),
        (["null_passage=false", "normalise=candidates", "reader_gradient=all"], {"reader"} | EMBEDDER),
    ],
)
def test_every_switch_trains_what_it_should(tiny_kb, towers_folder, tmp_path, overrides, trained) -> None:
    config = settings("steps=2", *overrides)
    out = pretrain.train(tiny_kb, tmp_path / "out", config, str(towers_folder))
    assert changed(out, towers_folder) == trained


def test_papers_switches_run(tiny_kb, towers_folder, tmp_path) -> None:
    small = [
        "steps=2",
        "batch_size=2",
        "device=cpu",
        "refresh.every=1",
        "refresh.in_background=false",
    ]
    config = read_config(PretrainConfig, "paper", "pretrain", small)
    out = pretrain.train(tiny_kb, tmp_path / "out", config, str(towers_folder))
    assert changed(out, towers_folder) == {"reader"} | EMBEDDER


def test_spans_are_indexed_only_where_something_asks_for_them(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the corpus' spans were indexed")

    monkeypatch.setattr(masked_queries, "_polynomial", refuse)
    monkeypatch.setattr(health, "held_out_queries", lambda *_: [])  # the probe asks
    pretrain.train(tiny_kb, tmp_path / "out", settings("steps=1", "injected=0"), str(tiny_model_folder))
    with pytest.raises(AssertionError, match="spans were indexed"):
        pretrain.train(tiny_kb, tmp_path / "injected", settings("steps=1"), str(tiny_model_folder))


def test_embedder_does_not_move_before_the_reader_is_ready(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    moved: list[set[str]] = []
    update = TrainRun.update

    def watch(run, *args):
        before = [p.detach().clone() for p in run.model.embedder.parameters()]
        update(run, *args)
        moved.append(
            any(not torch.equal(p, b) for p, b in zip(run.model.embedder.parameters(), before, strict=True))
        )

    monkeypatch.setattr(TrainRun, "update", watch)
    monkeypatch.setattr(health, "GATE_EVERY", 2)
    config = settings("health.gate=1e9", "health.gate_limit=4", "ict=1")
    with pytest.raises(RealmError, match="after 4 steps, but the gate is"):
        pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))
    assert moved == [False] * 4


def test_frozen_reader_below_the_gate_ends_the_run_at_once(tiny_kb, tiny_model_folder, tmp_path) -> None:
    config = settings("health.gate=1e9", "reader_gradient=none")
    with pytest.raises(RealmError, match="after 0 steps, but the gate is"):
        pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))


@pytest.mark.slow
def test_refresh_in_the_background_is_swapped_in(tiny_kb, tiny_model_folder, tmp_path, monkeypatch) -> None:
    """A build is a real process, so steps wait for it here."""
    poll = pretrain.IndexRefresher.poll

    def patient(refresher, step):
        child = refresher._builder._child
        while child is not None and child.poll():
            time.sleep(0.02)
        return poll(refresher, step)

    monkeypatch.setattr(pretrain.IndexRefresher, "poll", patient)
    config = settings("steps=1", "refresh.every=1", "refresh.in_background=true")
    out = pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))
    assert [row["index_step"] for row in metrics(out) if "index_step" in row] == [0, 1]


# -- the index that the model finds


@pytest.fixture
def bare_kb(own_kb) -> KnowledgeBase:
    """The towns, without an index."""
    shutil.rmtree(own_kb.folder / "indexes")
    return own_kb


def own_indexes(kb: KnowledgeBase) -> set[str]:
    return {folder.name for folder in vectors.folders(kb.folder)}


def assert_index_is_the_models(kb: KnowledgeBase, out: Path, atol: float = 0) -> None:
    """`realm index` finds nothing to embed, and what is there is what it would have made."""
    model = load_model(out)
    found = complete_index(kb, model, str(out))
    every = np.arange(len(kb))
    wanted = embed_passages(model, kb.tokens, every)
    np.testing.assert_allclose(found.index.rows(every), wanted, atol=atol)
    assert build_index(kb, str(out), IndexConfig(device="cpu", precision="fp32"))["embedded"] == 0


@pytest.mark.parametrize("switch", ["steps=3", "steps=2", "steps=0", 'passage_encoder="frozen"'])
def test_model_finds_its_index_in_the_knowledge_base(bare_kb, tiny_model_folder, tmp_path, switch) -> None:
    """Where the last build is of the last step, where it is not, where nothing trained, and with states."""
    out = pretrain.train(bare_kb, tmp_path / "out", settings("steps=2", switch), str(tiny_model_folder))
    assert_index_is_the_models(bare_kb, out, 0.03 if "frozen" in switch else 0)  # states have 16 bits
    model = load_model(out)
    assert own_indexes(bare_kb) == {model.compute_passage_fingerprint()}
    assert complete_index(bare_kb, model, str(out)).number == 1


def test_refused_version_is_never_the_models_index(bare_kb, tiny_model_folder, tmp_path, monkeypatch) -> None:
    """The embedder goes back to the start, so the start's index is the model's."""
    recalls = iter([100.0, 0.0, 0.0])

    def look(watch: HealthWatch, *_: object) -> tuple[float, np.ndarray]:
        return next(recalls), np.zeros((0, 0))

    monkeypatch.setattr(HealthWatch, "_look", look)
    out = pretrain.train(
        bare_kb, tmp_path / "out", settings("steps=4", "health.margin=2"), str(tiny_model_folder)
    )
    assert next(recalls, None) is None
    assert changed(out, tiny_model_folder) == {"reader"}
    assert_index_is_the_models(bare_kb, out)
    assert own_indexes(bare_kb) == {load_model(out).compute_passage_fingerprint()}


def test_embedder_that_moved_on_after_its_last_index_gets_one_of_its_own(
    bare_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    """As where a build in the background was accepted some steps after its snapshot, and the next one refused."""
    last = pretrain.IndexRefresher.build_final

    def nudged(refresher, model, step):
        version = last(refresher, model, step)
        with torch.no_grad():
            model.embedder.query.projection.bias.add_(0.1)
        return version

    monkeypatch.setattr(pretrain.IndexRefresher, "build_final", nudged)
    out = pretrain.train(bare_kb, tmp_path / "out", settings("steps=1"), str(tiny_model_folder))
    assert_index_is_the_models(bare_kb, out)


@pytest.mark.parametrize("there", [True, False], ids=["after", "before"])
def test_run_stopped_around_the_publishing_of_its_index_publishes_it_once(
    bare_kb, tiny_model_folder, tmp_path, monkeypatch, there
) -> None:
    config, finish = settings("steps=3", "checkpoint_seconds=0", "log_every=1"), TrainRun.finish

    def stop(run: TrainRun) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainRun, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(bare_kb, tmp_path / "out", config, str(tiny_model_folder))
    published = own_indexes(bare_kb)
    if not there:
        shutil.rmtree(bare_kb.folder / "indexes")
    monkeypatch.setattr(TrainRun, "finish", finish)
    out = pretrain.train(bare_kb, tmp_path / "out", config, str(tiny_model_folder))
    assert own_indexes(bare_kb) == published
    found = complete_index(bare_kb, load_model(out), str(out))
    assert (found.number, found.step) == (1, 3)


def test_knowledge_base_that_cannot_be_written_costs_the_index_and_not_the_model(
    bare_kb, tiny_model_folder, tmp_path, monkeypatch, capsys
) -> None:
    def refuse(kb, model, path, folder, array=None):
        if folder.is_relative_to(bare_kb.folder):
            raise OSError(errno.EROFS, "Read-only file system")
        return publish(kb, model, path, folder, array)

    monkeypatch.setattr(refresh, "publish", refuse)
    out = pretrain.train(bare_kb, tmp_path / "out", settings("steps=1"), str(tiny_model_folder))
    assert load_model(out).step == 1
    said = capsys.readouterr().err
    assert f"Read-only file system; run `realm index --kb {bare_kb.folder} --model {out}`" in said


# -- X and Z


def test_masked_sentences_come_from_x_and_candidates_from_z(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    documents = [
        Document(f"X {n}", f"Berthe left for Corvo with {n} carts of salt. Lorca fell.", f"x{n}")
        for n in range(30)
    ]
    build(tmp_path / "x", documents, X_CONFIG, tiny_kb.tokenizer, TinyTagger())
    text = KnowledgeBase.open(tmp_path / "x")
    seen = []

    def record(queries, vectors, index, knowledge, rule, *rest):
        chosen = choose_candidates(queries, vectors, index, knowledge, rule, *rest)
        seen.append((queries, knowledge, rule.same_corpus, chosen.number_BK))
        return chosen

    monkeypatch.setattr(pretrain, "choose_candidates", record)
    pretrain.train(tiny_kb, tmp_path / "out", settings("steps=3"), str(tiny_model_folder), text)
    for queries, knowledge, same_corpus, number_BK in seen:
        assert knowledge is tiny_kb.tokens and not same_corpus
        assert number_BK.max() < len(tiny_kb)
        for query in queries:
            body = text.tokens.body.row(query.passage)
            assert holds(body, query.original)


def test_same_knowledge_base_opened_twice_is_one_corpus(tiny_kb, made, tiny_model_folder, tmp_path) -> None:
    again = KnowledgeBase.open(tiny_kb.folder)
    out = pretrain.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder), again)
    assert_same_result(out, made)


def test_held_out_passages_stay_held_out_when_x_repeats_them(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    more = Document("Oakham", "Oakham lies on the Tarn. Berthe sold the bells of Oakham.", "o")
    build(tmp_path / "x", [more, *tiny_documents()], X_CONFIG, tiny_kb.tokenizer, TinyTagger())
    text = KnowledgeBase.open(tmp_path / "x")
    secret = {i for i, out in zip(tiny_kb.ids, held_out(tiny_kb.ids, 0.2), strict=True) if out}
    drawn: set[str] = set()

    def record(tokens, passages, *rest):
        drawn.update(text.ids[n] for n in passages)
        return draw_queries(tokens, passages, *rest)

    monkeypatch.setattr(pretrain, "draw_queries", record)
    pretrain.train(tiny_kb, tmp_path / "out", settings("steps=1"), str(tiny_model_folder), text)
    assert secret and drawn and not drawn & secret


# -- what it refuses


class SpanlessTagger:
    name = "spanless"

    def annotate(self, texts):
        for text in texts:
            yield Annotations(((0, len(text)),), ())


def test_corpus_without_salient_spans_is_one_line(tiny_kb, tiny_model_folder, tmp_path) -> None:
    build(tmp_path / "x", tiny_documents(), X_CONFIG, tiny_kb.tokenizer, SpanlessTagger())
    text = KnowledgeBase.open(tmp_path / "x")
    with pytest.raises(RealmError, match="no passage with a salient span") as error:
        pretrain.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder), text)
    assert "\n" not in str(error.value)
    out = pretrain.train(
        tiny_kb, tmp_path / "out", settings("steps=1", "masking=token"), str(tiny_model_folder), text
    )
    assert load_model(out).step == 1


def test_more_guided_candidates_than_there_is_room_for_are_one_line() -> None:
    with pytest.raises(RealmError, match="at most 3 can be injected") as error:
        settings("candidates=4", "injected=4")
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def frozen(tiny_kb, tiny_model_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("frozen") / "out"
    return pretrain.train(tiny_kb, out, settings('passage_encoder="frozen"'), str(tiny_model_folder))


def test_frozen_passage_encoder_stays_while_all_else_trains(frozen, tiny_model) -> None:
    trained = load_model(frozen).embedder
    assert trained.passage is not trained.query
    before = dict(tiny_model.embedder.passage.named_parameters())
    moved = {n for n, p in trained.passage.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"projection.weight", "projection.bias"}
    assert not torch.equal(
        trained.query.encoder.encoder.layer[0].output.dense.weight,
        before["encoder.encoder.layer.0.output.dense.weight"],
    )


def test_frozen_input_embeddings_stay_while_all_else_of_the_tower_trains(
    tiny_kb, tiny_model, tiny_model_folder, tmp_path
) -> None:
    config = settings('input_embeddings="frozen"')
    trained = load_model(pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))).embedder
    before = dict(tiny_model.embedder.query.named_parameters())
    stood = {n for n, p in trained.query.named_parameters() if torch.equal(p, before[n])}
    assert stood == {name for name in before if name.startswith("encoder.embeddings.")}


def test_index_versions_of_frozen_passages_are_as_many_and_need_no_other_process(
    frozen, made, monkeypatch
) -> None:
    versions = [
        [line["index_step"] for line in metrics(out) if "index_step" in line] for out in (frozen, made)
    ]
    assert versions[0] == versions[1] == [0, 3, 6]


def test_stopped_run_with_frozen_passages_goes_on_as_if_nothing_had_happened(
    frozen, tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    def train() -> Path:
        config = settings('passage_encoder="frozen"')
        return pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))

    stopped_at(4, monkeypatch, train)
    assert_same_result(train(), frozen)
