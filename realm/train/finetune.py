"""Fine-tuning on questions and answers (ORQA, Lee et al. 2019, section 3; REALM section 3.3).

Two losses of equal weight: the retriever's, over the best few hundred passages (does one of them hold an answer?), which
teaches before the reader finds anything; and the reader's, over every span of the best five, whose scores contain the
retrieval score. Passage vectors stay as they are and only the question side of the embedder moves, unless
`update_passages`: then the passages that are read are embedded anew with gradient, and the index is refreshed as in
pre-training (`realm.train.refresh.refresher`). Later work gains most from that (Sachan et al. 2021, EMDR2, section 4).

Letters: B questions, N retrieved passages, K passages read, U distinct ones, W span widths, T tokens, D embedding.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from realm.errors import InputError
from realm.index.versions import IndexVersion, load_index
from realm.interop.span_readers import take_reader
from realm.model.bert import Bert
from realm.model.calibration import Calibration, Method
from realm.model.device import choose_device
from realm.model.folder import Model, load_model
from realm.model.losses import any_correct_loss
from realm.model.modes import evaluating
from realm.model.scores import own_scores
from realm.model.span_reader import SpanConfig, SpanReader, body_mask
from realm.qa.metrics import Containment, has_answer
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.question_files import Question
from realm.qa.question_sets import evaluate
from realm.qa.spans import answer_pieces, body_start, correct_mask
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.store.schema import Lookup, key_of
from realm.text.corpus import Passage
from realm.tokens.layouts import NULL_PASSAGE, Lengths, Tokens, passage_inputs, query_inputs, reading_inputs
from realm.train.loop import TrainRun
from realm.train.refresh.cached_states import freeze_input_embeddings
from realm.train.refresh.refresher import IndexRefresher, RefreshConfig
from realm.train.run_config import RunConfig, generator

NOT_THERE = -1e9
"""The retrieval score in place of a passage where a method finds too few: no share of p(z|x), and none of the gradient."""
SURE = 0.5
"""Size of a passage's gradient from which on it is always read again. At 1 a twentieth of the time is saved, for six times the
noise."""
PASSAGES_KEPT = 50_000
"""Passages whose texts stay in memory, about 3 kB each: 150 MB. A step that retrieves more keeps those of this step."""


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Settings of `realm finetune` (released: batch 1, rate 1e-5, 5 passages read, 5,000 retrieved)."""

    batch_size: int = 8
    """Questions per step."""
    learning_rate: float = 1e-5
    """Peak rate of the reader."""
    head_rate: float | None = None
    """Peak rate of the reader's span head; none: `learning_rate`. A fresh head needs about ten times the layers' rate."""
    retriever_rate: float = 1e-5
    """Peak rate of the question side of the embedder; 0: the embedder stays as it is."""
    read: int = 5
    """Passages read per question."""
    method: Method | None = None
    """What finds passages, for an answer of the new model too: vectors ("dense", paper), words ("bm25"), or both ("hybrid");
    none: what does for the model that it starts from. p(z|x) is that of the vectors in any case."""
    reader: str | None = None
    """The span reader to start from: a checkpoint with BERT's question-answering head, by folder or hub name, or a model of
    ours; none: the model's own, or a fresh head where it has none (paper)."""
    input_embeddings: Literal["trained", "frozen"] = "trained"
    """Of the reader, and of the embedder where it trains: words, positions, segments. "frozen": they stay as they are."""
    passages: Literal["retrieved", "contrast"] = "retrieved"
    """Which `read` passages train the reader. "retrieved": the best of the index, as for an answer (paper). "contrast": one
    that holds an answer, from the question's own document where the question file names it, and the best that hold none."""
    reader_gradient: Literal["all", "sampled"] = "sampled"
    """"all": through every passage read (paper). "sampled": all are read without gradient and dropout, and of these some again
    with both, drawn by how much of the loss's gradient is theirs and weighted so that it is the same in expectation. It is
    faster where most passages teach nothing: of five that are found, not of one or two that are known to answer."""
    unanswerable: float = 0.0
    """Share of the questions that are read with passages that hold no answer. Above 0 the reader learns to find no answer:
    that has the score 0 beside the spans' scores, and is right where no passage read holds an answer."""
    retrieved: int = 500
    """Passages over which the retriever's loss is taken."""
    contains: Containment = "tokens"
    """When a retrieved passage is right: it holds an answer as whole tokens, or as a raw "substring" (ORQA)."""
    reading_tokens: int = 0
    """Wordpieces that the span reader reads of a question and a passage; 0: as the model does, by default a whole passage
    (ORQA's code: 320)."""
    whole_words: bool = True
    """Answers begin and end where words do (released code: anywhere)."""
    dev_every: int = 200
    """Steps between two evaluations on the dev questions; the best model by exact match is kept."""
    dev_questions: int = 500
    """Dev questions used for that."""
    update_passages: bool = False
    """Trains the passage side of the embedder too (paper: no). The new model then has an index of its own."""
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    """With `update_passages`: when and where the index is rebuilt."""

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


class FinetunedFrom(TypedDict):
    """What fine-tuning saves beside its settings."""

    init: str
    kb: str
    """The knowledge base's fingerprint."""
    questions: str
    """A digest of the questions and answers."""


def train(
    kb: KnowledgeBase,
    out: Path,
    config: FinetuneConfig,
    init: str,
    questions: Sequence[Question],
    dev: Sequence[Question],
) -> Path:
    """Fine-tunes the model folder `init`; its index must be there, and serves the new model too.

    With `update_passages` no index need be there, and the new model's own is published in the knowledge base.
    """
    if not questions:
        raise InputError("there is no training question")
    model = load_model(init).to(
        choose_device(config.device)
    )  # before the index, which goes where the model is
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
        TrainRun("finetune", out, config, model, rates, names) as run,
        IndexRefresher(kb, run.folder, config.refresh, config.precision, run.report) as refresher,
    ):
        version = found or refresher.build_initial(model, run.step, run.state.get("index"))
        if moves:
            run.after_checkpoint = lambda: refresher.prune(run.checkpointed("index"))
        retriever = Retriever(kb, version.index)
        best = Best(run, kb, model, version, dev[: config.dev_questions], config)
        if run.step == 0:
            best.look()
        for step in run.steps():
            batch = examples.batch(config.seed, step, config.batch_size)
            with run.autocast():
                tokens = examples.inputs(batch).to(run.device)
                query_BD = search_BD = model.embedder.query(tokens)
                if moves and version.embedder is not None:  # refresh.search
                    search_BD = version.embedder.query(tokens)
                _, number_BN = retriever.search(
                    examples.texts(batch), config.retrieved, method, search_BD.detach()
                )
                holds_BN = examples.holds(batch, number_BN)
                number_BN, holds_BN = examples.choose(batch, number_BN, holds_BN, config, step)
                read_BK = number_BN[:, : config.read]
                there_BN = number_BN != NULL_PASSAGE
                passage_BND = version.index.rows((number_BN * there_BN).ravel()).view(*number_BN.shape, -1)
                if moves:  # those that are read are scored by the live model
                    passage_UD, place_BK = examples.vectors(read_BK)
                    passage_BND = torch.cat([passage_UD[place_BK], passage_BND[:, config.read :]], dim=1)
                score_BN = own_scores(query_BD, passage_BND)
                score_BN = score_BN.masked_fill(~torch.from_numpy(there_BN).to(run.device), NOT_THERE)
                retriever_loss = any_correct_loss(score_BN, torch.from_numpy(holds_BN).to(run.device))
                rows, read_b = examples.rows(reader, batch, read_BK).that_teach(reader)
                span_RWT = read(reader, rows, config)
                logit_bX, correct_bX = joint_scores(reader, span_RWT, rows, score_BN[read_b])
                reader_loss = any_correct_loss(logit_bX, correct_bX)
                sampled_loss, read_again = sampled_reader_loss(
                    reader, rows, span_RWT, reader_loss, config, step
                )
            run.update(
                retriever_loss + reader_loss + sampled_loss,
                {
                    "retriever_loss": retriever_loss.item(),
                    "reader_loss": reader_loss.item(),
                    "recall_read": holds_BN[:, : config.read].any(axis=1).mean(),
                    "readable": correct_bX.any(dim=1).sum().item() / len(batch),
                    "passages_taught": read_again / len(batch),
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
                best.look()
        best.restore()
        if moves:
            refresher.publish_final(model, run.step, version, out)
        return run.finish()


def reading_lengths(lengths: Lengths, tokens: int) -> Lengths:
    """The lengths with `tokens` for the span reader; raises InputError where a longest question leaves no room."""
    if not lengths.query < tokens <= lengths.joint:
        raise InputError(
            f"reading_tokens is {tokens}: it must be more than a question's {lengths.query} wordpieces, and at most "
            f"{lengths.joint}, which hold a whole passage too"
        )
    return replace(lengths, reading=tokens)


def start_reader(model: Model, seed: int, whole_words: bool = True, finds_none: bool = False) -> SpanReader:
    """A span reader on a copy of the masked-LM reader's encoder, with a fresh span head; part of the model from now on."""
    torch.manual_seed(seed)
    encoder = Bert(model.reader.config)
    encoder.load_state_dict(model.reader.bert.bert.state_dict())
    continues_V = torch.zeros(encoder.config.vocab_size, dtype=torch.bool)
    if whole_words:
        continues_V[model.tokenizer.continuing_ids()] = True
    model.span_reader = SpanReader(encoder, continues_V, SpanConfig(finds_none=finds_none))
    return model.span_reader


class Rows(NamedTuple):
    """What the span reader reads: each question beside each of its passages, a question's passages in a row."""

    tokens: Tokens
    body_RT: Tensor
    """True where an answer may stand."""
    correct_RWT: Tensor
    """True at the spans that are answers."""
    questions: int

    def that_teach(self, reader: SpanReader) -> tuple["Rows", Tensor]:
        """Those of the questions whose passages teach a reader, and the numbers of these questions; one question at least.

        Where no passage holds an answer there is nothing to learn, but for a reader that may find none.
        """
        passages = len(self.body_RT) // self.questions
        readable_B = self.correct_RWT.flatten(1).any(dim=1).view(self.questions, passages).any(dim=1)
        if reader.config.finds_none or bool(readable_B.all()):
            return self, torch.arange(self.questions, device=self.body_RT.device)
        asked_b = (
            readable_B.nonzero().squeeze(1) if bool(readable_B.any()) else readable_B.new_zeros(1).long()
        )
        row_bK = asked_b[:, None] * passages + torch.arange(passages, device=asked_b.device)
        return self.of(row_bK.flatten())._replace(questions=len(asked_b)), asked_b

    def of(self, rows: Tensor) -> "Rows":
        """Some of the rows, cut to the longest of them."""
        tokens = self.tokens.rows(rows)
        length = tokens.ids_BT.shape[1]
        return Rows(
            tokens, self.body_RT[rows, :length], self.correct_RWT[rows, :length, :length], self.questions
        )


def read(reader: SpanReader, rows: Rows, config: FinetuneConfig) -> Tensor:
    """Scores of the spans -> [R, W, T]; with the reader's gradient only where every passage trains it."""
    if config.reader_gradient == "all":
        scores_RWT: Tensor = reader(rows.tokens, rows.body_RT)
        return scores_RWT
    with torch.no_grad(), evaluating(reader):
        scores_RWT = reader(rows.tokens, rows.body_RT)
    return scores_RWT.requires_grad_()


def joint_scores(reader: SpanReader, span_RWT: Tensor, rows: Rows, score_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Span + retrieval scores over all passages read, and which spans are answers -> two of [B, X].

    X is K * W * T, and one more, "no answer", at the end where the reader may find none.
    """
    passages = len(span_RWT) // rows.questions
    score_BK = reader.beside(score_BN[:, :passages])
    logit_BX = (span_RWT.view(rows.questions, passages, -1) + score_BK[:, :, None]).flatten(1)
    correct_BX = rows.correct_RWT.view(rows.questions, -1)
    if reader.config.finds_none:
        none_B1 = ~correct_BX.any(dim=1, keepdim=True)
        logit_BX = torch.cat([logit_BX, logit_BX.new_zeros(rows.questions, 1)], dim=1)
        correct_BX = torch.cat([correct_BX, none_B1], dim=1)
    return logit_BX, correct_BX


def sampled_reader_loss(
    reader: SpanReader, rows: Rows, span_RWT: Tensor, loss: Tensor, config: FinetuneConfig, step: int
) -> tuple[Tensor, int]:
    """A loss of value 0 whose gradient in the reader is in expectation that of `loss`, and how many rows had a gradient.

    The gradient of `loss` in a row's span scores has a size, the sum of its absolute values: what the row has to gain or lose
    of a question's probability, at most 2. A row of size `SURE` or more is read again; another with a probability in
    proportion to its size, and its gradient is divided by that.
    """
    if config.reader_gradient == "all":
        return loss.new_zeros(()), len(span_RWT)
    (gradient_RWT,) = torch.autograd.grad(loss, span_RWT, retain_graph=True)
    # The loss is a mean over questions.
    chance_R = (gradient_RWT.abs().sum(dim=(1, 2)) * rows.questions / SURE).clamp(max=1)
    drawn_R = torch.from_numpy(generator(config.seed, 9, step).random(len(chance_R), dtype=np.float32))
    weight_R = torch.where(drawn_R.to(chance_R.device) < chance_R, 1 / chance_R, 0)
    again_r = weight_R.nonzero().squeeze(1)
    if len(again_r) == 0:
        again_r = again_r.new_zeros(1)  # with weight 0: the reader's gradient is 0 then, and not missing
    again = rows.of(again_r)
    score_rWT = reader(again.tokens, again.body_RT)
    weight_rWT = (
        weight_R[again_r, None, None] * gradient_RWT[again_r, : score_rWT.shape[1], : score_rWT.shape[2]]
    )
    value = (weight_rWT * score_rWT.masked_fill(~score_rWT.isfinite(), 0)).sum()
    return value - value.detach(), len(again_r)


class Examples:
    """Training questions: their wordpieces, and where their answers stand."""

    def __init__(
        self,
        kb: KnowledgeBase,
        model: Model,
        questions: Sequence[Question],
        contains: Containment = FinetuneConfig.contains,
    ):
        self._kb, self._model, self._questions, self._contains = kb, model, questions, contains
        self._ids = model.tokenizer.encode([q.question for q in questions])
        self._answer_ids = [  # an [UNK] would be found in every word that the tokenizer does not know
            [
                ids
                for ids in model.tokenizer.encode(q.answers)
                if model.tokenizer.unk_id not in ids and not q.regex
            ]
            for q in questions
        ]
        self._passages: dict[int, Passage] = {}
        self._by_document = Lookup(kb.document_keys_N)

    def batch(self, seed: int, step: int, size: int) -> np.ndarray:
        """The numbers of a step's questions: each question once per epoch, in an order that belongs to the epoch."""
        places = np.arange(step * size, (step + 1) * size)
        count = len(self._questions)
        orders = {
            epoch: generator(seed, 7, int(epoch)).permutation(count) for epoch in np.unique(places // count)
        }
        return np.array([orders[place // count][place % count] for place in places])

    def inputs(self, batch: np.ndarray) -> Tokens:
        return query_inputs([self._ids[q] for q in batch], self._model.tokenizer, self._model.lengths)

    def texts(self, batch: np.ndarray) -> list[str]:
        return [self._questions[q].question for q in batch]

    def holds(self, batch: np.ndarray, number_BN: np.ndarray) -> np.ndarray:
        """Whether each retrieved passage holds an answer -> [B, N] bool."""
        self._load(number_BN.ravel())
        return np.array(
            [[self._has(int(q), int(n)) for n in row] for q, row in zip(batch, number_BN, strict=True)]
        )

    def choose(
        self,
        batch: np.ndarray,
        number_BN: np.ndarray,
        holds_BN: np.ndarray,
        config: FinetuneConfig,
        step: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The retrieved passages with those in front that the step reads -> two of [B, N].

        A question's own passage takes the place of the last one where it was not retrieved.
        """
        number_BN, holds_BN = number_BN.copy(), holds_BN.copy()
        without_B = generator(config.seed, 8, step).random(len(batch)) < config.unanswerable
        for row, question in enumerate(batch.tolist()):
            number_N, holds_N = number_BN[row], holds_BN[row]
            first = np.zeros(0, dtype=np.int64)
            if config.passages == "contrast" and not without_B[row]:
                own = self._own(question)
                if own is not None and own not in number_N:
                    number_N[-1], holds_N[-1] = own, True
                first = np.flatnonzero(holds_N if own is None else number_N == own)[:1]
            if len(first) or without_B[row]:  # the best that hold no answer, then the others
                missing_N = number_N == NULL_PASSAGE
                rest = (~holds_N & ~missing_N, holds_N, missing_N)
                order = np.concatenate([first, *map(np.flatnonzero, rest)])
                order = order[np.sort(np.unique(order, return_index=True)[1])]
                number_BN[row], holds_BN[row] = number_N[order], holds_N[order]
        return number_BN, holds_BN

    def _own(self, question: int) -> int | None:
        """The first passage of the question's own document that holds an answer, if there is one."""
        name = self._questions[question].passage_id
        if not name:
            return None
        numbers = self._by_document.all(key_of(name))
        self._load(numbers)
        return next((int(n) for n in numbers if self._has(question, int(n))), None)

    def vectors(self, number_BK: np.ndarray) -> tuple[Tensor, Tensor]:
        """The distinct passages as the live embedder has them, with gradient -> [U, D], and which is where -> [B, K]."""
        model, tokens = self._model, self._kb.tokens
        distinct, place = np.unique(number_BK, return_inverse=True)
        inputs = passage_inputs(
            [tokens.title.row(n) for n in distinct],
            [tokens.body.row(n) for n in distinct],
            model.tokenizer,
            model.lengths,
        )
        passage_UD = model.embedder.passage(inputs.to(model.device))
        return passage_UD, torch.from_numpy(place.reshape(number_BK.shape)).to(model.device)

    def rows(self, reader: SpanReader, batch: np.ndarray, number_BK: np.ndarray) -> Rows:
        """The questions of a batch beside their passages, on the model's device."""
        model = self._model
        self._load(number_BK.ravel())
        texts = ["" if n == NULL_PASSAGE else self._passages[int(n)].text for n in number_BK.ravel()]
        encodings = model.tokenizer.encode_with_offsets(texts)
        owner = np.repeat(batch, number_BK.shape[1])
        tokens = reading_inputs(
            [self._ids[q] for q in owner], [e.ids for e in encodings], model.tokenizer, model.lengths
        )
        spans = [
            answer_pieces(self._questions[q], self._answer_ids[q], text, encoding, reader.config.max_width)
            for q, text, encoding in zip(owner, texts, encodings, strict=True)
        ]
        starts = [body_start(self._ids[q], model.lengths) for q in owner]
        length = tokens.ids_BT.shape[1]
        shape = (len(owner), min(reader.config.max_width, length), length)
        correct_RWT = correct_mask(spans, starts, shape).to(model.device)
        tokens = tokens.to(model.device)
        return Rows(tokens, body_mask(tokens, model.tokenizer.sep_id), correct_RWT, len(batch))

    def _load(self, numbers: np.ndarray) -> None:
        """Has these passages at hand; of the others those that were asked for last stay, `PASSAGES_KEPT` in all."""
        asked = np.unique(numbers[numbers != NULL_PASSAGE]).tolist()
        new = [n for n in asked if n not in self._passages]
        found = dict(zip(new, self._kb.passages(new), strict=True))
        for number in asked:  # at the end, in the order of their last use
            self._passages[number] = found[number] if number in found else self._passages.pop(number)
        for number in list(self._passages)[: -max(PASSAGES_KEPT, len(asked))]:
            del self._passages[number]

    def _has(self, question: int, number: int) -> bool:
        return number != NULL_PASSAGE and has_answer(
            self._passages[number].text, self._questions[question], self._contains
        )


class Best:
    """Remembers the weights with the highest exact match on the dev questions; survives a restart with the run."""

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
        """Evaluates with this index from now on."""
        before = self._answerer
        self._answerer = Answerer(before.kb, before.model, version, before.config)

    def look(self) -> None:
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
        """Puts the best weights back into the model."""
        if "best" in self._run.state:
            for part, states in zip(self._parts, self._run.state["best"], strict=True):
                assert part is not None
                part.load_state_dict(states)
