"""Fine-tuning on questions and answers (ORQA, Lee et al. 2019, section 3; REALM section 3.3).

The loss is the sum of two losses of equal weight:

- The loss of the retriever is -log of the total p(z|x) of the passages that contain an answer, among the best few hundred
  passages. This loss trains the retriever even if the reader does not find any answer yet.
- The loss of the reader is -log of the total probability of the correct spans, among all spans of the best five passages. The
  score of a span includes the retrieval score of its passage. With the settings `objective` (REALM eq. 1) and `span_loss`
  (Min et al. 2019), the reader has other losses.

Without `update_passages`, passage vectors are constant, and the query tower is the only tower that is trained. With
`update_passages`, the passages that are read are embedded with gradient, and the index is refreshed as in pre-training
(`realm.train.refresh.refresher`). In later work, training the passage tower was the largest improvement (Sachan et al. 2021,
EMDR2, section 4).

Axis letters: B questions, b questions whose passages train the reader, N retrieved passages, K passages read, U distinct
passages, W span widths, T tokens, D embedding, X spans of all passages of a question.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from realm import distributed
from realm.errors import InputError, at_least
from realm.index.versions import IndexVersion, complete_index
from realm.interop.span_readers import take_reader
from realm.model.bert import Bert
from realm.model.calibration import Calibration, Method
from realm.model.device import choose_device
from realm.model.embedder import freeze_input_embeddings
from realm.model.folder import Model, load_model
from realm.model.losses import any_correct_loss
from realm.model.scores import own_scores
from realm.model.span_reader import Objective, SpanConfig, SpanReader
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.question_files import Question, digest_of
from realm.qa.question_sets import ask
from realm.qa.scoring.metrics import Containment
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE, Lengths
from realm.train.best_weights import BestWeights
from realm.train.examples import Examples
from realm.train.loop import TrainRun
from realm.train.refresh.refresher import IndexRefresher, RefreshConfig
from realm.train.run_config import QuestionsRunConfig, generator
from realm.train.span_losses import SpanLoss, counted, joint_scores, read, sampled_reader_loss

NOT_THERE = -1e9
"""Retrieval score of a missing passage, if a search finds fewer passages than requested; p(z|x) and the gradient are then 0."""
MOST_HARD = 0.8
"""Largest probability with which a step of "hard-em" is a hard step (Min et al. 2019)."""


@dataclass(frozen=True)
class FinetuneConfig(QuestionsRunConfig):
    """Settings of `realm finetune` (released code: batch 1, rate 1e-5, 5 passages read, 5,000 retrieved)."""

    batch_size: int = 8
    """Questions per step."""
    learning_rate: float = 1e-5
    """Peak learning rate of the reader."""
    head_rate: float | None = None
    """Peak learning rate of the span head of the reader. None: `learning_rate`. A new head needs about ten times the learning
    rate of the reader."""
    retriever_rate: float = 1e-5
    """Peak learning rate of the query tower; if `update_passages` is True, of both towers. 0: the embedder is not trained."""
    read: int = 5
    """Passages that are read per question."""
    method: Method | None = None
    """Search method in training and in answers of the new model: "dense" (vectors, paper), "bm25" (words) or "hybrid" (both).
    None: the method of the start model. p(z|x) is always computed from vectors."""
    reader: str | None = None
    """Span reader to start from: a checkpoint with BERT's question-answering head, by folder or hub name, or a model folder.
    None: the span reader of the start model; if the start model has no span reader, a new span head (paper)."""
    input_embeddings: Literal["trained", "frozen"] = "trained"
    """Word, position and segment embeddings of reader and embedder. "frozen": these embeddings are not trained."""
    passages: Literal["retrieved", "contrast"] = "retrieved"
    """Passages that train the reader. "retrieved": the best passages of the search, as for an answer (paper). "contrast": one
    positive and the best passages without an answer; the positive is from the document of the question, if the question file
    names this document."""
    reader_gradient: Literal["all", "sampled"] = "sampled"
    """Passages through which the reader is trained. "all": all passages that are read (paper). "sampled": all passages are read
    without gradient and dropout; then passages with large gradients, and a random choice of other passages, are read again with
    gradient. The expected gradient is the same. "sampled" is faster if most passages have small gradients."""
    objective: Objective = "joint"
    """p(y|x) in the loss of the reader, and in answers of the new model. "joint": one softmax over the spans of all passages
    that are read; the logit is the span score plus the retrieval score (ORQA, released code). "mixture": the sum of
    p(z|x) p(y|z,x) over passages, where p(z|x) is a softmax over passages, and p(y|z,x) over the spans of a passage (paper,
    eq. 1)."""
    span_loss: SpanLoss = "marginal"
    """Correct spans whose total probability the loss of the reader maximizes (Min et al. 2019). "marginal": all correct spans
    (paper). "first": the first correct span in the best passage that contains one. "hard-em": with probability
    min(step / `hard_em_steps`, 0.8) only the correct span with the highest score, else all correct spans."""
    hard_em_steps: int = 1000
    """tau of "hard-em" (Min et al. 2019: 8,000 for NaturalQuestions, 4,000 for TriviaQA)."""
    retrieval_score: bool = True
    """False: the score of a span does not include the retrieval score of its passage, neither in training nor in answers of the
    new model. Then the loss of the reader does not train the retriever. For baselines; only with the objective "joint"."""
    unanswerable: float = 0.0
    """Share of questions for which only passages without an answer are read. If above 0, the reader can also find "no answer",
    which has the span score 0, and which is correct if no passage that is read contains an answer."""
    retrieved: int = 500
    """Retrieved passages in the loss of the retriever."""
    contains: Containment = "tokens"
    """When a retrieved passage is a positive: if it contains an answer as whole "tokens", or as a "substring" (ORQA)."""
    reading_tokens: int = 0
    """Longest input of the span reader in wordpieces, question and passage together (ORQA's code: 320). 0: as in the start
    model; the default there is long enough for a question and a whole passage."""
    whole_words: bool = True
    """Answers begin and end at word boundaries. False: anywhere (released code)."""
    dev_every: int = 200
    update_passages: bool = False
    """The passage tower is trained too (paper: no). The new model then has an index of its own."""
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    """When and where the index is rebuilt; used only with `update_passages`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.unanswerable < 1:
            raise ValueError(f"unanswerable is {self.unanswerable}: it must be 0 or more, and below 1")
        if self.retrieved < self.read:
            raise ValueError(
                f"retrieved is {self.retrieved}: it must be at least {self.read}, the number of passages that are read"
            )
        if self.update_passages and not self.retriever_rate > 0:
            raise ValueError("update_passages trains the embedder: retriever_rate must be above 0")
        at_least(self, read=1, hard_em_steps=1, reading_tokens=0)
        # SpanConfig raises an error if `retrieval_score` does not fit `objective`.
        SpanConfig(objective=self.objective, retrieval_score=self.retrieval_score)


class FinetunedFrom(TypedDict):
    """What fine-tuning saves with the model, in addition to the settings."""

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

    The knowledge base must have the index of `init`; the new model uses the same index. With `update_passages`, the knowledge
    base needs no index, and the run writes the index of the new model into the knowledge base.
    """
    if not questions:
        raise InputError("there is no training question")
    # The model is moved to its device first, because the index is loaded onto the device of the model.
    model = load_model(init).to(choose_device(config.device))
    kb.check_tokenizer(model.tokenizer, init)
    if config.reading_tokens:
        model.lengths = reading_lengths(model.lengths, config.reading_tokens)
    moves = config.update_passages
    found = None if moves else complete_index(kb, model, init)
    reader = _reader_to_train(model, config, init)
    method = config.method or model.calibration.method
    model.calibration = Calibration(method=method)
    rates = _learning_rates(model, reader, config)
    examples = Examples(kb, model, questions, config.contains)
    names: FinetunedFrom = {"init": init, "kb": kb.fingerprint, "questions": digest_of(questions, dev)}
    with (
        TrainRun("finetune", out, config, model, rates, names, shares=True) as run,
        IndexRefresher(kb, run.folder, config.refresh, config.precision, run.report) as refresher,
    ):
        version = found or refresher.build_initial(model, run.step, run.state.get("index"))
        if moves:
            run.after_checkpoint = lambda: refresher.prune(run.checkpointed("index"))
        retriever = Retriever(kb, version.index)
        best = Best(run, kb, model, version, dev[: config.dev_questions], config)
        if run.step == 0:
            best.evaluate()
        losses = _Losses(run, examples, model, reader, config, method)
        for step in run.steps():
            with run.autocast():
                loss, metrics = losses.of_step(step, version, retriever)
            run.update(loss, metrics | (refresher.metrics(version, step) if moves else {}))
            if moves:
                refresher.request(model, run.step)
                built = refresher.poll(run.step)
                if built is not None:
                    version, retriever = built, Retriever(kb, built.index)
                    run.log({"index_step": version.step, "index_number": version.number, **version.cost})
                best.search_in(version)
                run.state["index"] = refresher.state_dict(version)
            if run.step % config.dev_every == 0 or run.step == config.steps:
                run.check_finite()
                best.evaluate()
        best.restore()
        if moves:
            refresher.publish_final(model, run.step, version, out)
        if not distributed.any_rank(run.state.get("answers") != 0):
            run.report(
                "no passage that was found for a training question contained one of its answers, so no answer was learned"
            )
        return run.finish()


class _Losses:
    """Computes the loss of each step."""

    def __init__(
        self,
        run: TrainRun,
        examples: Examples,
        model: Model,
        reader: SpanReader,
        config: FinetuneConfig,
        method: Method,
    ):
        self._run, self._examples, self._model, self._reader = run, examples, model, reader
        self._config, self._method = config, method

    def of_step(
        self, step: int, version: IndexVersion, retriever: Retriever
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        """The loss of a step -> scalar, and its metrics. `retriever` searches the index of `version`."""
        config, examples = self._config, self._examples
        batch = distributed.shard(examples.batch(config.seed, step, config.batch_size))
        query_BD, number_BN, holds_BN = self._retrieve(batch, step, version, retriever)
        score_BN = self._scores(query_BD, number_BN, version)
        correct_BN = torch.from_numpy(holds_BN).to(self._run.device)
        retriever_loss = own_share(score_BN, correct_BN) * any_correct_loss(score_BN, correct_BN)
        reader_loss, sampled_loss, readable, taught = self._read(
            batch, step, number_BN[:, : config.read], score_BN
        )
        return retriever_loss + reader_loss + sampled_loss, {
            "retriever_loss": retriever_loss,
            "reader_loss": reader_loss,
            "recall_read": holds_BN[:, : config.read].any(axis=1).mean(),
            "readable": readable / len(batch),
            "passages_taught": taught / len(batch),
        }

    def _retrieve(
        self, batch: np.ndarray, step: int, version: IndexVersion, retriever: Retriever
    ) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """Vectors of the questions [B, D], the chosen passages [B, N], and whether each contains an answer [B, N]."""
        config, examples, run = self._config, self._examples, self._run
        tokens = examples.inputs(batch).to(run.device)
        query_BD = search_BD = self._model.embedder.query(tokens)
        if config.update_passages and version.embedder is not None:  # refresh.search
            search_BD = version.embedder.query(tokens)
        _, number_BN = retriever.search(
            examples.texts(batch), config.retrieved, self._method, search_BD.detach()
        )
        holds_BN = examples.holds(batch, number_BN)
        run.state["answers"] = run.state.get("answers", 0) + int(holds_BN.any(axis=1).sum())
        without_answer = distributed.shard(unanswerable(config, step))
        contrast = config.passages == "contrast"
        return query_BD, *examples.choose(batch, number_BN, holds_BN, contrast, without_answer)

    def _scores(self, query_BD: Tensor, number_BN: np.ndarray, version: IndexVersion) -> Tensor:
        """Scores of the passages -> [B, N]."""
        there_BN = number_BN != NULL_PASSAGE
        passage_BND = version.index.rows((number_BN * there_BN).ravel()).view(*number_BN.shape, -1)
        if self._config.update_passages:
            # The passages that are read are scored with the weights that are being trained.
            read = self._config.read
            passage_UD, place_BK = self._examples.vectors(number_BN[:, :read])
            passage_BND = torch.cat([passage_UD[place_BK], passage_BND[:, read:]], dim=1)
        score_BN = own_scores(query_BD, passage_BND)
        return score_BN.masked_fill(~torch.from_numpy(there_BN).to(score_BN.device), NOT_THERE)

    def _read(
        self, batch: np.ndarray, step: int, read_BK: np.ndarray, score_BN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """The loss of the reader, the loss of its sampled gradient, the number of questions with a right span, and the number
        of passages through which the reader is trained."""
        config, reader = self._config, self._reader
        sampled = config.reader_gradient == "sampled"
        rows, read_b = self._examples.rows(reader, batch, read_BK).that_teach(reader)
        rows = rows.to(self._run.device)
        span_RWT = read(reader, rows, sampled)
        logit_bX, correct_bX = joint_scores(reader, span_RWT, rows, score_BN[read_b])
        counted_bX = counted(logit_bX, correct_bX, span_RWT, config.span_loss, is_hard(config, step))
        reader_loss = any_correct_loss(logit_bX, counted_bX)
        taught, sampled_loss = len(span_RWT), reader_loss.new_zeros(())
        if sampled:
            rng = generator(config.seed, 9, step)
            sampled_loss, taught = sampled_reader_loss(reader, rows, span_RWT, reader_loss, rng)
        share = own_share(logit_bX, counted_bX)
        readable = rows.correct_RWT.view(rows.questions, -1).any(dim=1).sum()
        return share * reader_loss, share * sampled_loss, readable, taught


def _reader_to_train(model: Model, config: FinetuneConfig, init: str) -> SpanReader:
    """The span reader of `config.reader` or of the model, or a new one, with the objective of the settings.

    Raises:
        InputError: the reader always finds an answer, but is to be trained with questions without an answer.
    """
    finds_none = config.unanswerable > 0
    if config.reader is not None:
        take_reader(model, config.reader)
    reader = model.span_reader or start_reader(model, config.seed, finds_none)
    if finds_none and not reader.config.finds_none:
        raise InputError(
            f"the span reader of {config.reader or init} always finds an answer, so it cannot be trained with unanswerable = "
            f"{config.unanswerable:g}: set unanswerable to 0, or start from a model without a span reader"
        )
    set_whole_words(reader, model, config.whole_words)
    reader.config = replace(reader.config, objective=config.objective, retrieval_score=config.retrieval_score)
    return reader


def _learning_rates(model: Model, reader: SpanReader, config: FinetuneConfig) -> dict[nn.Module, float]:
    """Each part that is trained -> its learning rate; all other weights are frozen.

    If only the query tower is trained, the two towers no longer share weights.
    """
    head_rate = config.learning_rate if config.head_rate is None else config.head_rate
    rates: dict[nn.Module, float] = {reader.encoder: config.learning_rate}
    rates |= dict.fromkeys(reader.head(), head_rate)
    if config.retriever_rate == 0:
        model.embedder.requires_grad_(False)
    elif config.update_passages:
        rates[model.embedder] = config.retriever_rate
    else:
        model.embedder.untie()
        rates[model.embedder.query] = config.retriever_rate
    if config.input_embeddings == "frozen":
        reader.encoder.embeddings.requires_grad_(False)
        if config.retriever_rate > 0:
            freeze_input_embeddings(model.embedder)
    return rates


def own_share(logit_BX: Tensor, correct_BX: Tensor) -> Tensor:
    """Factor for the `any_correct_loss` of this rank -> scalar.

    `any_correct_loss` is a mean over the questions that have a correct entry. With this factor, the mean of the losses over the
    ranks is the mean over all such questions of all ranks.
    """
    usable_B = (correct_BX & logit_BX.isfinite()).any(dim=1)
    return distributed.loss_weight(usable_B.sum().float())


def unanswerable(config: FinetuneConfig, step: int) -> np.ndarray:
    """Whether each question of a step is read only with passages without an answer -> [B] bool."""
    return generator(config.seed, 8, step).random(config.batch_size) < config.unanswerable


def is_hard(config: FinetuneConfig, step: int) -> bool:
    """Whether a step of "hard-em" is a hard step, in which only the best correct span counts."""
    drawn = generator(config.seed, 10, step).random()
    return bool(drawn < min(step / config.hard_em_steps, MOST_HARD))


def reading_lengths(lengths: Lengths, tokens: int) -> Lengths:
    """`lengths`, but with inputs of at most `tokens` wordpieces for the span reader.

    Raises:
        InputError: `tokens` is not more than the query length, or is more than a question and a whole passage need.
    """
    if not lengths.query < tokens <= lengths.joint:
        raise InputError(
            f"reading_tokens is {tokens}: it must be more than {lengths.query} wordpieces, the length of the longest question, "
            f"and at most {lengths.joint}, the length of the longest question and the longest passage together"
        )
    return replace(lengths, reading=tokens)


def start_reader(model: Model, seed: int, finds_none: bool = False) -> SpanReader:
    """Adds a span reader to the model: a copy of the encoder of the masked reader, with a new span head -> the span reader.

    Its answers are whole words.
    """
    torch.manual_seed(seed)
    encoder = Bert(model.reader.config)
    encoder.load_state_dict(model.reader.bert.bert.state_dict())
    model.span_reader = SpanReader(encoder, config=SpanConfig(finds_none=finds_none))
    set_whole_words(model.span_reader, model, True)
    return model.span_reader


def set_whole_words(reader: SpanReader, model: Model, whole_words: bool) -> None:
    """Lets the answers of a reader begin and end at word boundaries, or else anywhere."""
    reader.continues_V.zero_()
    if whole_words:
        reader.continues_V[list(model.tokenizer.continuing_ids)] = True


class Best(BestWeights):
    """Keeps the best weights of the query tower and the span reader; with `update_passages`, of the passage tower too."""

    def __init__(
        self,
        run: TrainRun,
        kb: KnowledgeBase,
        model: Model,
        version: IndexVersion,
        dev: Sequence[Question],
        config: FinetuneConfig,
    ):
        assert model.span_reader is not None
        super().__init__(
            run, [model.embedder if config.update_passages else model.embedder.query, model.span_reader]
        )
        self._dev = dev
        self._answerer = Answerer(
            kb,
            model,
            version,
            AnswerConfig(read=config.read, answers=1, device=config.device, precision=config.precision),
        )

    def search_in(self, version: IndexVersion) -> None:
        """Uses the index `version` in later evaluations."""
        before = self._answerer
        self._answerer = Answerer(before.kb, before.model, version, before.config)

    def evaluate(self) -> None:
        """Answers the dev questions, logs the scores, and keeps the weights if they are the best."""
        if not self._dev:
            return
        report = ask(self._answerer, self._dev).report(self._dev, self._answerer.threshold).as_dict()
        assert report["em"] is not None  # the model has a span reader
        self._run.log({"dev_em": report["em"], "dev_f1": report["f1"], "dev_recall_5": report["recall"]["5"]})
        self.keep(report["em"])
