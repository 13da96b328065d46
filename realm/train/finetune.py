"""Fine-tuning on questions and answers (ORQA, Lee et al. 2019, section 3; REALM section 3.3).

The loss is the sum of two losses of equal weight. The retriever's loss is taken over the best few hundred passages: at least
one of them should hold an answer. It teaches the retriever before the reader finds any answer. The reader's loss is taken over
every span of the best five passages; the score of a span includes the retrieval score of its passage. Two settings give other
losses of the reader: `objective` (REALM eq. 1) and `span_loss` (Min et al. 2019).

Passage vectors are constant and only the query tower trains, unless `update_passages` is set. Then the passages that are read
are embedded with gradient, and the index is refreshed as in pre-training (`realm.train.refresh.refresher`), from which later
work gained most (Sachan et al. 2021, EMDR2, section 4).

Axis letters: B questions, b questions whose passages train the reader, N retrieved passages, K passages read, U distinct
passages, W span widths, T tokens, D embedding, X spans of all passages of a question.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from realm import distributed
from realm.errors import InputError, at_least
from realm.index.versions import IndexVersion, load_index
from realm.interop.span_readers import take_reader
from realm.model.bert import Bert
from realm.model.calibration import Calibration, Method
from realm.model.device import choose_device
from realm.model.embedder import freeze_input_embeddings
from realm.model.folder import Model, load_model
from realm.model.losses import any_correct_loss
from realm.model.scores import own_scores
from realm.model.span_reader import Objective, SpanConfig, SpanReader
from realm.qa.metrics import Containment
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.question_files import Question
from realm.qa.question_sets import evaluate
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE, Lengths
from realm.train.examples import Examples
from realm.train.loop import TrainRun
from realm.train.refresh.refresher import IndexRefresher, RefreshConfig
from realm.train.run_config import RunConfig, generator
from realm.train.span_losses import SpanLoss, counted, joint_scores, read, sampled_reader_loss

NOT_THERE = -1e9
"""Retrieval score of a missing passage, if a method finds too few: p(z|x) and the gradient are 0."""
MOST_HARD = 0.8
"""Largest probability of a hard step of "hard-em" (Min et al. 2019)."""


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Settings of `realm finetune` (released code: batch 1, rate 1e-5, 5 passages read, 5,000 retrieved)."""

    batch_size: int = 8
    """Questions per step."""
    learning_rate: float = 1e-5
    """Peak learning rate of the reader."""
    head_rate: float | None = None
    """Peak learning rate of the reader's span head; None: `learning_rate`. A fresh head needs about ten times that rate."""
    retriever_rate: float = 1e-5
    """Peak learning rate of the query tower, and with `update_passages` of the passage tower; 0: the embedder is frozen."""
    read: int = 5
    """Passages read per question."""
    method: Method | None = None
    """Search method in training and in answers of the new model: "dense" (vectors, paper), "bm25" (words) or "hybrid" (both).
    None: the method of the start model. p(z|x) is always computed from vectors."""
    reader: str | None = None
    """Span reader to start from: a checkpoint with BERT's question-answering head, by folder or hub name, or a model folder.
    None: the start model's span reader, or a fresh span head if the model has none (paper)."""
    input_embeddings: Literal["trained", "frozen"] = "trained"
    """Word, position and segment embeddings of the reader, and of the embedder if it trains. "frozen": they do not train."""
    passages: Literal["retrieved", "contrast"] = "retrieved"
    """Which passages train the reader. "retrieved": the best of the index, as for an answer (paper). "contrast": one positive,
    from the question's own document if the question file names it, and the best passages without an answer."""
    reader_gradient: Literal["all", "sampled"] = "sampled"
    """"all": through every passage read (paper). "sampled": all passages are read without gradient and dropout; some are then
    read again with gradient, drawn in proportion to their share of the loss's gradient and weighted so that the expected
    gradient is the same. "sampled" is faster if most passages read teach nothing."""
    objective: Objective = "joint"
    """p(y|x) of the reader's loss, and of the answers of the new model. "joint": one softmax over the spans of all passages
    read, of span score plus retrieval score (ORQA, released code). "mixture": the sum over passages of p(z|x) p(y|z,x), each a
    softmax of its own (paper, eq. 1)."""
    span_loss: SpanLoss = "marginal"
    """Which correct spans the reader's loss counts (Min et al. 2019). "marginal": the sum over all (paper). "first": the first
    in the best passage that has one. "hard-em": with probability min(step / `hard_em_steps`, 0.8) the one with the highest
    score alone, else all."""
    hard_em_steps: int = 1000
    """tau of "hard-em" (Min et al. 2019: 8,000 for NaturalQuestions, 4,000 for TriviaQA)."""
    retrieval_score: bool = True
    """False: the score of a span does not include the retrieval score of its passage, neither in training nor in answers of
    the new model; then the reader's loss does not train the retriever. For baselines; only with "joint"."""
    unanswerable: float = 0.0
    """Share of questions that are read with passages without an answer. Above 0 the reader learns "no answer", which has the
    score 0 beside the scores of spans and is right if no passage read holds an answer."""
    retrieved: int = 500
    """Retrieved passages in the retriever's loss."""
    contains: Containment = "tokens"
    """How a retrieved passage must hold an answer to be a positive: as whole "tokens", or as a raw "substring" (ORQA)."""
    reading_tokens: int = 0
    """Longest input of the span reader in wordpieces, question and passage together (ORQA's code: 320). 0: the length of the
    start model, which by default holds a whole passage."""
    whole_words: bool = True
    """Answers begin and end at word boundaries (released code: anywhere)."""
    dev_every: int = 200
    """Steps between two evaluations on dev questions; the model with the best exact match is kept."""
    dev_questions: int = 500
    """Dev questions in each evaluation."""
    update_passages: bool = False
    """Trains the passage tower too (paper: no). The new model then gets an index of its own."""
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    """When and where the index is rebuilt; only with `update_passages`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.unanswerable < 1:
            raise ValueError(f"unanswerable is {self.unanswerable}: it must be 0 or more, and below 1")
        if self.retrieved < self.read:
            raise ValueError(
                f"retrieved is {self.retrieved}: it must be {self.read} or more, as many as are read"
            )
        if self.update_passages and not self.retriever_rate > 0:
            raise ValueError("update_passages trains the embedder: retriever_rate must be above 0")
        at_least(self, hard_em_steps=1)
        # SpanConfig refuses what does not fit.
        SpanConfig(objective=self.objective, retrieval_score=self.retrieval_score)


class FinetunedFrom(TypedDict):
    """What fine-tuning saves with the model beside its settings."""

    init: str
    kb: str
    """Fingerprint of the knowledge base."""
    questions: str
    """Digest of the questions and answers."""


def train(
    kb: KnowledgeBase,
    out: Path,
    config: FinetuneConfig,
    init: str,
    questions: Sequence[Question],
    dev: Sequence[Question],
) -> Path:
    """Fine-tunes the model folder `init` -> `out`.

    The knowledge base must have an index of `init`, which the new model uses too. With `update_passages` no index is needed,
    and the new model's index is published in the knowledge base.
    """
    if not questions:
        raise InputError("there is no training question")
    # The model moves before the index is loaded, which goes where the model is.
    model = load_model(init).to(choose_device(config.device))
    kb.check_tokenizer(model.tokenizer, init)
    if config.reading_tokens:
        model.lengths = reading_lengths(model.lengths, config.reading_tokens)
    moves = config.update_passages
    found = None if moves else load_index(kb, model, init)
    finds_none = config.unanswerable > 0
    if config.reader is not None:
        take_reader(model, config.reader)
    reader = model.span_reader or start_reader(model, config.seed, config.whole_words, finds_none)
    if finds_none and not reader.config.finds_none:
        raise InputError(
            f"the span reader of {config.reader or init} always finds an answer: unanswerable = 0 trains it further, a model "
            "without a span reader gets one that may find none"
        )
    reader.config = replace(reader.config, objective=config.objective, retrieval_score=config.retrieval_score)
    method = config.method or model.calibration.method
    model.calibration = Calibration(method=method)
    head_rate = config.learning_rate if config.head_rate is None else config.head_rate
    rates: dict[nn.Module, float] = {reader.encoder: config.learning_rate}
    rates |= dict.fromkeys(reader.head(), head_rate)
    if config.retriever_rate == 0:
        model.embedder.requires_grad_(False)
    elif moves:
        rates[model.embedder] = config.retriever_rate
    else:
        model.embedder.untie()
        rates[model.embedder.query] = config.retriever_rate
    if config.input_embeddings == "frozen":
        reader.encoder.embeddings.requires_grad_(False)
        if config.retriever_rate > 0:
            freeze_input_embeddings(model.embedder)
    examples = Examples(kb, model, questions, config.contains)
    asked = hashlib.sha256(repr((questions, dev)).encode()).hexdigest()[:16]
    names: FinetunedFrom = {"init": init, "kb": kb.fingerprint, "questions": asked}
    with (
        TrainRun("finetune", out, config, model, rates, names, True) as run,
        IndexRefresher(kb, run.folder, config.refresh, config.precision, run.report) as refresher,
    ):
        version = found or refresher.build_initial(model, run.step, run.state.get("index"))
        if moves:
            run.after_checkpoint = lambda: refresher.prune(run.checkpointed("index"))
        retriever = Retriever(kb, version.index)
        best = Best(run, kb, model, version, dev[: config.dev_questions], config)
        if run.step == 0:
            best.evaluate()
        contrast, sampled = config.passages == "contrast", config.reader_gradient == "sampled"
        for step in run.steps():
            batch = distributed.shard(examples.batch(config.seed, step, config.batch_size))
            with run.autocast():
                tokens = examples.inputs(batch).to(run.device)
                query_BD = search_BD = model.embedder.query(tokens)
                if moves and version.embedder is not None:  # refresh.search
                    search_BD = version.embedder.query(tokens)
                _, number_BN = retriever.search(
                    examples.texts(batch), config.retrieved, method, search_BD.detach()
                )
                holds_BN = examples.holds(batch, number_BN)
                number_BN, holds_BN = examples.choose(
                    batch, number_BN, holds_BN, contrast, distributed.shard(unanswerable(config, step))
                )
                read_BK = number_BN[:, : config.read]
                there_BN = number_BN != NULL_PASSAGE
                passage_BND = version.index.rows((number_BN * there_BN).ravel()).view(*number_BN.shape, -1)
                if moves:  # the live model scores the passages that are read
                    passage_UD, place_BK = examples.vectors(read_BK)
                    passage_BND = torch.cat([passage_UD[place_BK], passage_BND[:, config.read :]], dim=1)
                score_BN = own_scores(query_BD, passage_BND)
                score_BN = score_BN.masked_fill(~torch.from_numpy(there_BN).to(run.device), NOT_THERE)
                correct_BN = torch.from_numpy(holds_BN).to(run.device)
                retriever_loss = own_share(score_BN, correct_BN) * any_correct_loss(score_BN, correct_BN)
                rows, read_b = examples.rows(reader, batch, read_BK).that_teach(reader)
                span_RWT = read(reader, rows, sampled)
                logit_bX, correct_bX = joint_scores(reader, span_RWT, rows, score_BN[read_b])
                counted_bX = counted(logit_bX, correct_bX, span_RWT, config.span_loss, is_hard(config, step))
                reader_loss = any_correct_loss(logit_bX, counted_bX)
                taught, sampled_loss = len(span_RWT), reader_loss.new_zeros(())
                if sampled:
                    rng = generator(config.seed, 9, step)
                    sampled_loss, taught = sampled_reader_loss(reader, rows, span_RWT, reader_loss, rng)
                share = own_share(logit_bX, counted_bX)
                reader_loss, sampled_loss = share * reader_loss, share * sampled_loss
            run.update(
                retriever_loss + reader_loss + sampled_loss,
                {
                    "retriever_loss": retriever_loss.item(),
                    "reader_loss": reader_loss.item(),
                    "recall_read": holds_BN[:, : config.read].any(axis=1).mean(),
                    "readable": correct_bX.any(dim=1).sum().item() / len(batch),
                    "passages_taught": taught / len(batch),
                }
                | (refresher.metrics(version, step) if moves else {}),
            )
            if moves:
                refresher.request(model, run.step)
                built = refresher.poll(run.step)
                if built is not None:
                    version, retriever = built, Retriever(kb, built.index)
                    run.log({"index_step": version.step, "index_number": version.number, **version.cost})
                best.search_in(version)
                run.state["index"] = refresher.state_dict(version)
            if run.step % config.dev_every == 0 or run.step == config.steps:
                best.evaluate()
        best.restore()
        if moves:
            refresher.publish_final(model, run.step, version, out)
        return run.finish()


def own_share(logit_BX: Tensor, correct_BX: Tensor) -> Tensor:
    """Factor of this rank's `any_correct_loss`, which is a mean over its questions with a correct entry -> scalar."""
    usable_B = (correct_BX & logit_BX.isfinite()).any(dim=1)
    return distributed.loss_weight(usable_B.sum().float())


def unanswerable(config: FinetuneConfig, step: int) -> np.ndarray:
    """Which questions of a step are read with passages that hold no answer -> [B] bool."""
    return generator(config.seed, 8, step).random(config.batch_size) < config.unanswerable


def is_hard(config: FinetuneConfig, step: int) -> bool:
    """Whether a step of "hard-em" counts the best correct span alone."""
    drawn = generator(config.seed, 10, step).random()
    return bool(drawn < min(step / config.hard_em_steps, MOST_HARD))


def reading_lengths(lengths: Lengths, tokens: int) -> Lengths:
    """`lengths` with inputs of `tokens` wordpieces for the span reader; raises InputError if a question leaves no room."""
    if not lengths.query < tokens <= lengths.joint:
        raise InputError(
            f"reading_tokens is {tokens}: it must be more than a question's {lengths.query} wordpieces, and at most "
            f"{lengths.joint}, which hold a whole passage too"
        )
    return replace(lengths, reading=tokens)


def start_reader(model: Model, seed: int, whole_words: bool = True, finds_none: bool = False) -> SpanReader:
    """Gives the model a span reader: a copy of the masked reader's encoder with a fresh span head."""
    torch.manual_seed(seed)
    encoder = Bert(model.reader.config)
    encoder.load_state_dict(model.reader.bert.bert.state_dict())
    continues_V = torch.zeros(encoder.config.vocab_size, dtype=torch.bool)
    if whole_words:
        continues_V[model.tokenizer.continuing_ids()] = True
    model.span_reader = SpanReader(encoder, continues_V, SpanConfig(finds_none=finds_none))
    return model.span_reader


class Best:
    """Keeps the weights with the highest exact match on dev questions in the state of the run, which checkpoints save."""

    def __init__(
        self,
        run: TrainRun,
        kb: KnowledgeBase,
        model: Model,
        version: IndexVersion,
        dev: Sequence[Question],
        config: FinetuneConfig,
    ):
        self._run, self._dev = run, dev
        self._answerer = Answerer(
            kb,
            model,
            version,
            AnswerConfig(read=config.read, answers=1, device=config.device, precision=config.precision),
        )
        self._parts = [
            model.embedder if config.update_passages else model.embedder.query,
            model.span_reader,
        ]

    def search_in(self, version: IndexVersion) -> None:
        """Uses another index in later evaluations."""
        before = self._answerer
        self._answerer = Answerer(before.kb, before.model, version, before.config)

    def evaluate(self) -> None:
        """Evaluates, logs, and keeps the weights if they are the best so far."""
        if not self._dev:
            return
        state = self._run.state
        report = evaluate(self._answerer, self._dev).as_dict()
        assert report["em"] is not None  # the model has a span reader
        self._run.log({"dev_em": report["em"], "dev_f1": report["f1"], "dev_recall_5": report["recall"]["5"]})
        if report["em"] >= state.get("best_em", -1.0):
            state["best_em"], state["best_step"] = report["em"], self._run.step
            state["best"] = [
                {k: v.detach().clone() for k, v in p.state_dict().items()} for p in self._parts if p
            ]

    def restore(self) -> None:
        """Loads the best weights into the model."""
        if "best" in self._run.state:
            for part, states in zip(self._parts, self._run.state["best"], strict=True):
                assert part is not None
                part.load_state_dict(states)
