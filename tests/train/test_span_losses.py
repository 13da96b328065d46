"""Losses of the span reader against plain loops over spans, and the answers of models trained with them."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from realm.errors import InputError
from realm.index.versions import complete_index
from realm.model.bert import Bert
from realm.model.folder import Model, load_model, save_model
from realm.model.losses import any_correct_loss
from realm.model.manifest import MANIFEST, manifest_checksum
from realm.model.masked_reader import EncoderConfig, new_reader
from realm.model.span_reader import SpanConfig, SpanReader, body_mask
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.scoring.metrics import normalise_answer, stands_for
from realm.tokens.layouts import NULL_PASSAGE, joint_inputs
from realm.train import finetune, span_losses
from realm.train.examples import Examples, Rows
from realm.train.finetune import NOT_THERE, is_hard, start_reader
from realm.train.span_losses import counted, joint_scores
from tests.conftest import RIVERS
from tests.train.stages import assert_same_result, metrics, stopped_at
from tests.train.test_finetune import DEV, TRAIN, settings, train

B, K, W, T = 4, 3, 3, 7
CONFIG = AnswerConfig(device="cpu")


@pytest.fixture(scope="module")
def encoder(tiny_kb) -> Bert:
    return new_reader(EncoderConfig(layers=1, hidden=8, heads=2, positions=16), tiny_kb.tokenizer).bert.bert


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Span scores [R, W, T], correct spans and retrieval scores [B, K] in float64, with all that is special about them.

    Some spans are impossible. Question 0 has a passage without any span, question 1 has no correct span, the only correct span
    of question 2 is impossible, and question 3 has several correct spans in all passages.
    """
    rng = torch.Generator().manual_seed(seed)
    span_RWT = 3 * torch.randn(B * K, W, T, generator=rng, dtype=torch.float64)
    span_RWT[torch.rand(span_RWT.shape, generator=rng) < 0.3] = -torch.inf
    correct_RWT = torch.rand(span_RWT.shape, generator=rng) < 0.2
    span_RWT[0] = -torch.inf
    correct_RWT[K : 3 * K] = False
    correct_RWT[2 * K + 1, 1, 2], span_RWT[2 * K + 1, 1, 2] = True, -torch.inf
    score_BK = torch.randn(B, K, generator=rng, dtype=torch.float64)
    return span_RWT.requires_grad_(), correct_RWT, score_BK.requires_grad_()


Entry = tuple[int, int, int]
"""A span: passage, start and width."""


def plain_probabilities(
    config: SpanConfig, span_KWT: Tensor, score_K: Tensor
) -> tuple[dict[Entry, Tensor], Tensor]:
    """p(span|x) of every possible span, and p("no answer"|x), as the formulas are printed."""
    possible = [
        (k, t, w)
        for k, t, w in itertools.product(range(K), range(T), range(W))
        if span_KWT[k, w, t].isfinite()
    ]
    prior = [score_K[k].exp() / sum(score_K[j].exp() for j in range(K)) for k in range(K)]
    nothing, none = torch.zeros((), dtype=torch.float64), 1.0 if config.finds_none else 0.0
    if config.objective == "mixture":
        total = [
            sum((span_KWT[k, w, t].exp() for j, t, w in possible if j == k), nothing) + none for k in range(K)
        ]
        probability = {(k, t, w): prior[k] * span_KWT[k, w, t].exp() / total[k] for k, t, w in possible}
        no_answer = sum((prior[k] * none / total[k] for k in range(K) if none), nothing)
        # what a passage without any span has of p(z|x) is shared by the others
        everything = sum(probability.values(), nothing) + no_answer
        return {entry: p / everything for entry, p in probability.items()}, no_answer / everything
    if not config.retrieval_score:
        weight = [nothing + 1] * K
    else:
        weight = prior if config.head == "ends" else [score.exp() for score in score_K]
    unscaled = {(k, t, w): span_KWT[k, w, t].exp() * weight[k] for k, t, w in possible}
    everything = sum(unscaled.values(), nothing) + none
    return {entry: p / everything for entry, p in unscaled.items()}, none / everything


def plain_loss(
    config: SpanConfig, how: str, span_RWT: Tensor, correct_RWT: Tensor, score_BK: Tensor
) -> Tensor:
    losses = []
    for question in range(B):
        mine = slice(K * question, K * question + K)
        correct_KWT = correct_RWT[mine]
        probability, none = plain_probabilities(config, span_RWT[mine], score_BK[question])
        right = sorted(entry for entry in probability if correct_KWT[entry[0], entry[2], entry[1]])
        if right:
            best = max(right, key=lambda entry: probability[entry].item())
            chosen = {"marginal": right, "first": right[:1], "hard-em": [best]}[how]
            losses.append(-sum(probability[entry] for entry in chosen).log())
        elif config.finds_none and not correct_KWT.any():
            losses.append(-none.log())
    return sum(losses) / len(losses)


CONFIGS = [
    SpanConfig(head=head, finds_none=none, objective=objective, retrieval_score=score)
    for head, none, (objective, score) in itertools.product(
        ("pairs", "ends"), (False, True), (("joint", True), ("joint", False), ("mixture", True))
    )
]


@pytest.mark.parametrize("how", ["marginal", "first", "hard-em"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_loss_and_its_gradients_are_those_of_a_plain_loop_over_spans(encoder, config, how) -> None:
    reader = SpanReader(encoder, config=config)
    for seed in range(3):
        span_RWT, correct_RWT, score_BK = drawn(seed)
        rows = Rows(None, None, correct_RWT, B)
        more_BN = torch.cat([score_BK, score_BK[:, :1]], dim=1)  # retrieved, not read
        logit_BX, correct_BX = joint_scores(reader, span_RWT, rows, more_BN)
        loss = any_correct_loss(logit_BX, counted(logit_BX, correct_BX, span_RWT, how, hard=True))
        expected = plain_loss(config, how, span_RWT, correct_RWT, score_BK)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
        mine = torch.autograd.grad(loss, (span_RWT, score_BK), materialize_grads=True)
        theirs = torch.autograd.grad(expected, (span_RWT, score_BK), allow_unused=True)
        for one, other in zip(mine, theirs, strict=True):
            other = torch.zeros_like(one) if other is None else other
            torch.testing.assert_close(one, other.nan_to_num(0.0), rtol=1e-7, atol=1e-10)
        if not config.retrieval_score:
            assert not mine[1].any()


def test_defaults_are_the_sum_of_both_scores_and_every_correct_span(encoder) -> None:
    span_RWT, correct_RWT, score_BK = drawn(0)
    rows = Rows(None, None, correct_RWT, B)
    logit_BX, correct_BX = joint_scores(SpanReader(encoder), span_RWT, rows, score_BK)
    assert torch.equal(logit_BX, (span_RWT.view(B, K, -1) + score_BK[:, :, None]).view(B, -1))
    assert torch.equal(correct_BX, correct_RWT.view(B, -1))
    config = settings()
    assert config.objective == SpanConfig().objective == "joint" and config.retrieval_score
    assert counted(logit_BX, correct_BX, span_RWT, config.span_loss) is correct_BX
    assert counted(logit_BX, correct_BX, span_RWT, "hard-em", hard=False) is correct_BX


def test_first_span_is_the_first_in_reading_order_of_the_best_ranked_passage(encoder) -> None:
    span_RWT = torch.zeros(2, W, T)
    correct_RWT = torch.zeros_like(span_RWT, dtype=torch.bool)
    for k, t, w in ((0, 5, 0), (0, 2, 2), (0, 2, 1), (0, 1, 0), (1, 0, 0)):
        correct_RWT[k, w, t] = True
    span_RWT[0, 0, 1] = -torch.inf  # the first of all is impossible
    rows = Rows(None, None, correct_RWT, 1)
    logit_BX, correct_BX = joint_scores(SpanReader(encoder), span_RWT, rows, torch.zeros(1, 2))
    ((_, place),) = counted(logit_BX, correct_BX, span_RWT, "first").nonzero().tolist()
    assert (place // T, place % T) == (1, 2)  # the shorter of the two that begin at 2


def test_missing_passages_add_nothing_to_a_mixture(tiny_kb, tiny_model) -> None:
    """Neither to the loss nor, as NaN, to the gradients."""
    examples = Examples(tiny_kb, tiny_model, TRAIN)
    number = next(n for n, passage in enumerate(tiny_kb) if RIVERS[0] in passage.text)
    for finds_none in (False, True):
        reader = start_reader(tiny_model, 0, finds_none=finds_none).eval()
        reader.config = replace(reader.config, objective="mixture")
        found = []
        for passages in ([number, 1, NULL_PASSAGE], [number, 1]):
            score_BN = torch.tensor([[1.0, 2.0, NOT_THERE][: len(passages)]], requires_grad=True)
            rows = examples.rows(reader, np.array([0]), np.array([passages]))
            span_RWT = reader(rows.tokens, rows.body_RT)
            loss = any_correct_loss(*joint_scores(reader, span_RWT, rows, score_BN))
            reader.zero_grad()
            loss.backward()
            assert score_BN.grad is not None and reader.ends.weight.grad is not None
            found.append((loss.item(), score_BN.grad[:, :2], reader.ends.weight.grad.clone()))
        assert found[0][0] > 0 and found[0][0] == pytest.approx(found[1][0], rel=1e-5)
        for one, other in zip(found[0][1:], found[1][1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_hard_steps_are_as_frequent_as_in_the_publication() -> None:
    config = settings("span_loss=hard-em", "hard_em_steps=1000")
    seeds = [replace(config, seed=seed) for seed in range(2000)]
    for step, share in ((0, 0.0), (100, 0.1), (500, 0.5), (800, 0.8), (10_000, 0.8)):
        often = np.mean([is_hard(one, step) for one in seeds])
        assert abs(often - share) < 4 * math.sqrt(share * (1 - share) / 2000) + 1e-9
    assert [is_hard(config, n) for n in range(50)] == [is_hard(config, n) for n in range(50)]


@pytest.mark.parametrize("how", ["marginal", "first", "hard-em"])
@pytest.mark.parametrize("objective", ["joint", "mixture"])
def test_sampled_gradient_is_that_of_whichever_loss(tiny_kb, tiny_model, monkeypatch, objective, how) -> None:
    """Every row with a gradient is read again here; test_finetune.py has the expectation over the draws."""
    monkeypatch.setattr(span_losses, "SURE", 1e-12)
    reader = start_reader(tiny_model, seed=0).eval()
    for layer in (reader.ends, reader.score):
        torch.nn.init.normal_(layer.weight, std=0.5)
    reader.config = replace(reader.config, objective=objective)
    rows = Examples(tiny_kb, tiny_model, TRAIN).rows(reader, np.array([0, 14]), np.array([[0, 1], [10, 8]]))
    gradients = []
    for sampled in (False, True):
        span_RWT = span_losses.read(reader, rows, sampled)
        logit_BX, correct_BX = joint_scores(reader, span_RWT, rows, torch.tensor([[1.0, 0.5], [0.0, 2.0]]))
        loss = any_correct_loss(logit_BX, counted(logit_BX, correct_BX, span_RWT, how, hard=True))
        if sampled:
            rng = np.random.default_rng(0)
            loss = loss + span_losses.sampled_reader_loss(reader, rows, span_RWT, loss, rng)[0]
        reader.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in reader.parameters() if p.grad is not None])
    assert any(one.any() for one in gradients[0])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# -- the stage, and answers


def trained(kb, folder: Path, out: Path, *overrides: str) -> Model:
    """A model that `realm finetune` saved, with larger weights in the head so that spans differ."""
    model = load_model(train(kb, out, folder, "steps=2", *overrides, dev=[]))
    assert model.span_reader is not None
    torch.manual_seed(1)
    for layer in (model.span_reader.ends, model.span_reader.score):
        torch.nn.init.normal_(layer.weight)
    return model


def every_span(
    answerer: Answerer, question: str, read: int
) -> tuple[list[list[tuple[float, str, int]]], Tensor]:
    """Score, text and first character of every span of each of the best passages, and their inner products."""
    model, kb = answerer.model, answerer.kb
    (ids,) = model.tokenizer.encode([question])
    score_N = answerer.version.index.rows(np.arange(len(kb))) @ answerer.embed([ids])[0].detach()
    found = []
    for number in (best := score_N.argsort(descending=True)[:read]).tolist():
        (passage,) = kb.passages([number])
        (encoding,) = model.tokenizer.encode_with_offsets([passage.text])
        tokens = joint_inputs([ids], [encoding.ids], model.tokenizer, model.lengths)
        with torch.no_grad():
            grid = model.span_reader(tokens, body_mask(tokens, model.tokenizer.sep_id))[0]
        first = tokens.segments_BT[0].tolist().index(1)
        found.append(
            [
                (grid[w, t].item(), passage.text[start : encoding.ends[t - first + w]], start)
                for w, t in grid.isfinite().nonzero().tolist()
                for start in [encoding.starts[t - first]]
            ]
        )
    return found, score_N[best].double()


@pytest.mark.parametrize("more", [[], ["unanswerable=0.2"]], ids=["an answer always", "no answer too"])
def test_answers_of_a_mixture_are_ranked_by_p_of_the_passage_times_p_of_the_span(
    tiny_kb, tiny_model_folder, tmp_path, more
) -> None:
    model = trained(tiny_kb, tiny_model_folder, tmp_path / "out", "objective=mixture", *more)
    assert model.span_reader is not None and model.span_reader.config.objective == "mixture"
    answerer = Answerer(tiny_kb, model, complete_index(tiny_kb, model, str(tmp_path / "out")), CONFIG)
    moved = 0
    for question in [q.question for q in DEV] + ["who built a tower in Arden?", "wool"]:
        passages, score_K = every_span(answerer, question, 5)
        every = []
        for row, (spans, prior) in enumerate(zip(passages, score_K.softmax(0).tolist(), strict=True)):
            total = sum(math.exp(score) for score, *_ in spans) + bool(more)
            for score, text, start in spans:
                p = prior * math.exp(score) / total
                every.append((p, normalise_answer(text), {(row, start + n) for n in range(len(text))}))
        best: dict[str, tuple[float, set[tuple[int, int]]]] = {}
        together: Counter[str] = Counter()
        for p, name, characters in sorted(every, key=lambda one: -one[0]):
            first = next((one for one in best if stands_for(one, name)), name)
            best.setdefault(first, (p, characters))
            together[first] += p
        taken: set[tuple[int, int]] = set()  # row of the passage and place of each character of an answer
        expected = []
        for name, (_, characters) in best.items():
            if len(expected) < 5 and not characters & taken:
                expected.append(name)
                taken |= characters
        said = answerer.answer(question).answers
        assert [normalise_answer(answer.text) for answer in said] == expected
        for answer, name in zip(said, expected, strict=True):
            assert answer.score == pytest.approx(math.log(best[name][0]), abs=1e-3)
            assert answer.probability == pytest.approx(together[name], rel=1e-2)
        joint = max(
            (score + prior, text)
            for spans, prior in zip(passages, score_K.tolist(), strict=True)
            for score, text, _ in spans
        )
        moved += normalise_answer(joint[1]) != expected[0]
    assert moved  # the joint score has other winners


def test_answers_without_retrieval_scores_are_ranked_by_the_span_scores_alone(
    tiny_kb, tiny_model_folder, tmp_path
) -> None:
    model = trained(tiny_kb, tiny_model_folder, tmp_path / "out", "retrieval_score=false", "method=hybrid")
    answerer = Answerer(tiny_kb, model, complete_index(tiny_kb, model, str(tmp_path / "out")), CONFIG)
    for question in [q.question for q in DEV]:
        passages, _ = every_span(answerer, question, 5)
        score, text, _ = max(span for spans in passages for span in spans)
        for method in ("dense", None):
            (said,) = answerer.answer_batch([question], method)
            if method == "dense":
                assert (said.answers[0].text, said.answers[0].score) == (text, pytest.approx(score, abs=1e-3))
            assert said.answers[0].score == max(p.span.score for p in said.passages if p.span)


def test_span_losses_train_other_models_and_are_recorded(tiny_kb, tiny_model_folder, tmp_path) -> None:
    losses = {}
    for name in ("span_loss=marginal", "span_loss=first", "objective=mixture", "retrieval_score=false"):
        out = train(tiny_kb, tmp_path / name, tiny_model_folder, name, "dropout=0", dev=[])
        (losses[name],) = [row["reader_loss"] for row in metrics(out) if row["loss"] is not None]
        assert math.isfinite(losses[name])
    assert len(set(losses.values())) == 4 and losses["span_loss=first"] > losses["span_loss=marginal"]
    spans = load_model(tmp_path / "objective=mixture").span_reader.config
    assert (spans.objective, spans.retrieval_score) == ("mixture", True)
    spans = load_model(tmp_path / "retrieval_score=false").span_reader.config
    assert (spans.objective, spans.retrieval_score) == ("joint", False)
    again = train(  # a reader that is there is trained, and answers, as the new run says
        tiny_kb, tmp_path / "again", tmp_path / "objective=mixture", "retriever_rate=0", "steps=1", dev=[]
    )
    assert load_model(again).span_reader.config.objective == "joint"


def test_stopped_hard_em_goes_on_as_if_nothing_had_happened(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    hard = ["span_loss=hard-em", "hard_em_steps=4", "objective=mixture"]
    one = train(tiny_kb, tmp_path / "one", tiny_model_folder, *hard)
    stopped_at(3, monkeypatch, lambda: train(tiny_kb, tmp_path / "two", tiny_model_folder, *hard))
    assert_same_result(train(tiny_kb, tmp_path / "two", tiny_model_folder, *hard), one)
    drawn_hard = [is_hard(settings(*hard), step) for step in range(6)]
    assert True in drawn_hard and False in drawn_hard


def test_model_saved_before_these_settings_answers_as_it_did(tiny_kb, tiny_model_folder, tmp_path) -> None:
    model = load_model(tiny_model_folder)
    reader = start_reader(model, seed=0)
    torch.nn.init.normal_(reader.ends.weight)
    save_model(model, tmp_path / "model")
    file = tmp_path / "model" / MANIFEST
    now = Answerer.load(str(tiny_kb.folder), str(tmp_path / "model"), CONFIG).answer(DEV[0].question)
    values = json.loads(file.read_text())
    del values["span"]["objective"], values["span"]["retrieval_score"]
    values["checksums"][MANIFEST] = manifest_checksum(values)
    file.write_text(json.dumps(values))
    old = load_model(tmp_path / "model").span_reader
    assert old is not None and old.config == SpanConfig()
    said = Answerer.load(str(tiny_kb.folder), str(tmp_path / "model"), CONFIG).answer(DEV[0].question)
    assert said.answers == now.answers


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["objective=mixture", "retrieval_score=false"], 'objective "mixture" weights passages'),
        (["hard_em_steps=0"], "hard_em_steps is 0: it must be 1 or more"),
        (["span_loss=hardest"], "span_loss"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(wrong, says) -> None:
    with pytest.raises(InputError, match=says) as error:
        settings(*wrong)
    assert "\n" not in str(error.value)
    assert finetune.MOST_HARD == 0.8
