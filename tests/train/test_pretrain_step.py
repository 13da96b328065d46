"""One step of pre-training, looked at closely: the loss, its gradients, and the controls."""

from contextlib import nullcontext
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from realm.index.embedding import embed_passages
from realm.masking.candidates import CandidateRule, choose_candidates, read_inputs
from realm.masking.masked_queries import MaskedQuery, MaskingRule, SpanIndex, draw_queries, holds
from realm.model import states
from realm.model.losses import marginal_loss
from realm.model.masked_reader import MaskedReader
from realm.search.exact import MipsIndex
from realm.store.knowledge_base import KnowledgeBaseConfig
from realm.tokens.layouts import passage_inputs, query_inputs
from realm.train import pretrain
from realm.train.ict import ClozeRule, cloze_pairs
from realm.train.metrics import StepMeans
from realm.train.optimizer import Optimizer
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
    unretrieved_logsumexp,
    warm_start_loss,
)

EMBEDDER = {"embedder.query", "embedder.passage"}
X_CONFIG = KnowledgeBaseConfig(passage_tokens=48, held_out=0.2)
"""Of a corpus X beside the towns."""


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
    rest_B = unretrieved_logsumexp(query_BD, chosen, index, settings)
    return loss_entries(score_BK, logp_BKM, batch.mask_BM, rest_B, rng, settings)


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


def test_networks_and_optimizer_read_nothing_back_from_a_gpu(tiny_model, step, monkeypatch) -> None:
    """With meta tensors, which have no values: reading one is an error. Layers are computed as on a GPU."""
    settings = config(normalise="candidates", marginal="span", reader_gradient="all", steps=10)
    queries, chosen, _, batch, *_ = step(settings)
    tiny_model.reader.copy_head = None
    tiny_model.to(torch.device("meta"))
    monkeypatch.setattr(states, "_way", lambda bert, tokens: "flash")
    # Autocast needs a real device.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    batch = batch.to(torch.device("meta"))
    optimizer, means = Optimizer({tiny_model.embedder: 1e-3, tiny_model.reader: 1e-3}, settings), StepMeans()
    optimizer.adamw.step = lambda: None  # torch's own needs a real device too
    for number in range(2):
        _, score_BK = score(tiny_model.embedder, batch, chosen, None)
        logp_BKM = read(tiny_model.reader, batch, queries, chosen, None, settings)
        entries = loss_entries(score_BK, logp_BKM, batch.mask_BM, None, np.random.default_rng(0), settings)
        loss = marginal_loss(entries.score_BE, entries.logp_BEM, batch.mask_BM, settings.marginal)
        loss.backward()
        means.add(number, {"loss": loss, **describe(score_BK, logp_BKM, batch), "norm": optimizer.clip()})
        optimizer.step(number)
    with pytest.raises(RuntimeError, match="meta"):
        means.read()


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
        rest_B = unretrieved_logsumexp(query_BD.detach(), chosen, index, settings)
        score = score_BK.detach().double() / 4
        found = loss_entries(score, logp_BKM, batch.mask_BM, rest_B, np.random.default_rng(1), settings)
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
def test_entries_are_drawn_in_proportion_to_their_mean_credit(step, monkeypatch, marginal) -> None:
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
    rng = np.random.default_rng(5)
    drawn = rng.choice(passages, len(passages), replace=False)  # as the draw of the loss
    parts = cloze_pairs(tiny_kb.tokens, drawn, ClozeRule(count, 0.9), rng)
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


def test_description_is_made_of_its_names(step) -> None:
    _, _, _, batch, _, score_BK, logp_BKM = step(config())
    said = describe(score_BK, logp_BKM, batch)
    prior = score_BK.detach().double().softmax(dim=1)
    span = (logp_BKM * batch.mask_BM[:, None]).sum(dim=-1).double().exp()
    credit = prior * span
    assert said["null_probability"] == pytest.approx(prior[:, 0].mean().item(), rel=1e-4)
    assert said["marginal_logp"] == pytest.approx(credit.sum(dim=1).log().mean().item(), rel=1e-4)
    assert said["entropy"] == pytest.approx(-(prior * prior.log()).sum(dim=1).mean().item(), rel=1e-4)
    assert said["flip_rate"] == pytest.approx((prior.argmax(1) != credit.argmax(1)).double().mean().item())
