"""Answers questions: retrieves passages, scores every span of these passages, and returns the best spans with their evidence.

Reading follows ORQA (Lee et al. 2019, section 3): the span reader scores every span of up to ten wordpieces in the best
passages. The score of an answer is the span score plus the retrieval score; `SpanConfig` has alternatives. An answer is a slice
of the text of a passage.

Axis letters: B questions, K passages per question, R passages of all questions, W span widths, T tokens.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.errors import InputError, at_least, check_shares
from realm.index.versions import APPROXIMATE, EXACT, RAY, IndexVersion, complete_index
from realm.interop.span_readers import take_reader
from realm.model.calibration import NO_FEATURES, Features, Method
from realm.model.device import DeviceConfig, Precision, autocast, choose_device
from realm.model.folder import Model, load_model
from realm.model.modes import evaluating
from realm.model.scores import scores
from realm.qa.answers import Answer, AnsweringIndex, Answers, Hit, RankedPassage, ReadPassage, Span
from realm.qa.reading import Reading, joint_reading, reference_question, reference_reading
from realm.qa.scoring.metrics import normalise_answer, stands_for
from realm.qa.span_ranking import PassageSpans, SpanRanking
from realm.search.postgres_table import is_address
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Passage
from realm.tokens.layouts import NULL_PASSAGE, passage_inputs, query_inputs

ROWS_READ = 16
"""Number of passages in a batch of the span reader."""
SPANS_ADDED_UP = 200
"""Number of best spans of a question whose softmax probabilities are added up by answer; all other spans are negligible."""
NEEDS_READER = "the model has no span reader: train one with `realm finetune`"


@dataclass(frozen=True)
class AnswerConfig(DeviceConfig):
    """Settings for answering questions."""

    precision: Precision = "fp32"
    read: int = 5
    """Passages read per question (paper: 5)."""
    reader: str | None = None
    """A span reader to use in place of the model's own: a checkpoint with BERT's question-answering head (a folder or a hub
    name), or a realm model. The probabilities are then not calibrated; to calibrate them, save this reader into a model with
    `realm convert --retriever`, and run `realm calibrate`. None: the model's own reader."""
    answers: int = 5
    """Largest number of answers returned. No answer stands for a later one (`stands_for`), and their spans do not overlap."""
    threshold: float | None = None
    """Probability below which an answer is a guess; None: the threshold of the calibration, or 0 without one."""
    mapped_index: bool = False
    """True: the vectors stay in a file that is mapped into memory, for indexes larger than memory."""
    search: str = EXACT
    """"exact"; "approximate": for indexes that are too large for exact search (docs/search.md); "ray": exact, with the vectors
    in the memory of all machines of a Ray cluster; or the address of a table in PostgreSQL,
    "postgresql://HOST/DATABASE?table=NAME", which `realm kb upload` made."""
    reference_compat: bool = False
    """True: behave as transformers 4.57.6 with the published checkpoints; docs/checkpoints.md lists the differences."""

    def __post_init__(self) -> None:
        at_least(self, read=1, answers=1)
        check_shares(self, "threshold")
        if self.search not in (EXACT, APPROXIMATE, RAY) and not is_address(self.search):
            # The value is not shown, because a mistyped address can contain a password.
            raise InputError("search is not exact, approximate, ray or an address postgresql://...")


class _Evidence(NamedTuple):
    """The passages to read for a question, their inner products with the question, and what is added to the span scores."""

    passages: Sequence[Passage]
    score_K: Tensor
    bonus_K: Tensor


class _Found(NamedTuple):
    """A span that may be the answer, its passage, and the normalised text of the best span with the same answer."""

    passage: int
    name: str
    span: Span


class Answerer:
    """Answers questions with a model and a knowledge base."""

    def __init__(self, kb: KnowledgeBase, model: Model, version: IndexVersion, config: AnswerConfig):
        self.kb, self.model, self.version, self.config = kb, model, version, config
        self.retriever = Retriever(kb, version.index)

    @classmethod
    def load(cls, kb: str, model: str, config: AnswerConfig) -> "Answerer":
        """Loads the knowledge base, the model and the index.

        Raises:
            InputError: the knowledge base and the model do not belong together, or there is no index of this model.
        """
        opened, loaded = open_pair(kb, model, config.device, reader=False)
        if config.reader is not None:
            take_reader(loaded, config.reader)
        return cls(
            opened, loaded, complete_index(opened, loaded, model, config.mapped_index, config.search), config
        )

    def answer(self, question: str) -> Answers:
        """Answers to one question; see `answer_batch`."""
        return self.answer_batch([question])[0]

    @torch.no_grad()
    def answer_batch(
        self,
        questions: Sequence[str],
        method: Method | None = None,
        read: int | None = None,
        where: str | None = None,
    ) -> list[Answers]:
        """Answers to several questions, each from `read` passages; `ms` has the mean times of a question in the batch.

        With a filter `where`, only passages that match the filter are read (`KnowledgeBase.matching`).
        `method` ranks the passages; None: `self.method`. With every method, p(z|x) and the retrieval part of an answer's score
        are computed from the inner products of the embedder. The reason is that the span reader was trained with inner
        products, and BM25 scores have another scale. With "hybrid", the hybrid score of the passage is also added to the score
        of an answer, because hybrid scores rank passages better.
        """
        clock = _Clock(len(questions))
        ids = self.tokenized(questions)
        query_BD = self.embed(ids)
        clock.lap("embed")
        method = method or self.method
        score_BK, number_BK = self.retriever.search(
            questions, read or self.config.read, method, query_BD, where
        )
        clock.lap("search")
        return self._answers(questions, ids, query_BD, number_BK, clock, hybrid_bonus(score_BK, method))

    @torch.no_grad()
    def answer_from(
        self, questions: Sequence[str], number_BK: np.ndarray, bonus_BK: np.ndarray | None = None
    ) -> list[Answers]:
        """Answers from the given passages; rows have the best passage first, and are filled up with `NULL_PASSAGE`.

        `bonus_BK` is added to the span scores of each passage; None: nothing is added.
        """
        clock, ids = _Clock(len(questions)), self.tokenized(questions)
        if bonus_BK is None:
            bonus_BK = np.zeros(number_BK.shape)
        return self._answers(questions, ids, self.embed(ids), number_BK, clock, bonus_BK)

    def _answers(
        self,
        questions: Sequence[str],
        ids: Sequence[Sequence[int]],
        query_BD: Tensor,
        number_BK: np.ndarray,
        clock: "_Clock",
        bonus_BK: np.ndarray,
    ) -> list[Answers]:
        if self.model.span_reader is None:
            raise InputError(NEEDS_READER)
        evidence = self._evidence(query_BD, number_BK, bonus_BK)
        return self._answers_in(questions, ids, query_BD, evidence, clock)

    @torch.no_grad()
    def answer_passages(self, question: str, passages: Sequence[Passage]) -> Answers:
        """Answers to a question from the given passages, which need not be in the knowledge base.

        The rank of a passage is its position in `passages`, from 1 on. The reader reads only the beginning of a passage that is
        longer than its input.
        """
        if self.model.span_reader is None:
            raise InputError(NEEDS_READER)
        clock, ids = _Clock(1), self.tokenized([question])
        query_BD = self.embed(ids)
        clock.lap("embed")
        score_K = torch.zeros(0)
        if passages:
            titles, bodies = (
                self.model.tokenizer.encode(texts)
                for texts in ([one.title for one in passages], [one.text for one in passages])
            )
            tokens = passage_inputs(titles, bodies, self.model.tokenizer, self.model.lengths)
            tower = self.model.embedder.passage
            with evaluating(tower), autocast(self.model.device, self.config.precision):
                vector_KD = tower(tokens.to(self.model.device))
            score_K = scores(query_BD.float(), vector_KD.float())[0].cpu()
        evidence = _Evidence(passages, score_K, torch.zeros(len(passages), dtype=torch.float64))
        return self._answers_in([question], ids, query_BD, [evidence], clock)[0]

    def _answers_in(
        self,
        questions: Sequence[str],
        ids: Sequence[Sequence[int]],
        query_BD: Tensor,
        evidence: Sequence[_Evidence],
        clock: "_Clock",
    ) -> list[Answers]:
        read = self._read(ids, query_BD, evidence)
        clock.lap("read")
        index = AnsweringIndex(self.version.number, self.version.step, self.version.created)
        return [
            Answers(
                question, answers, index, clock.ms, passages, null,
                found=bool(answers) and answers[0].probability >= self.threshold, features=features,
            )
            for question, (answers, passages, null, features) in zip(questions, read, strict=True)
        ]  # fmt: skip

    @property
    def threshold(self) -> float:
        """Probability below which an answer is a guess: the setting, or the threshold of the model's calibration."""
        threshold = self.config.threshold
        return self.model.calibration.threshold if threshold is None else threshold

    @property
    def method(self) -> Method:
        """The method that ranks passages by default: that of the calibration, or "dense" without a calibration."""
        return self.model.calibration.method

    def tokenized(self, questions: Sequence[str]) -> list[list[int]]:
        """The wordpieces of questions, without special tokens."""
        if self.config.reference_compat:
            return [reference_question(question, self.model.tokenizer) for question in questions]
        return self.model.tokenizer.encode(questions)

    def embed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Vectors of tokenized questions -> [B, D]."""
        lengths = self.model.lengths
        if self.config.reference_compat:  # the reference implementation does not cut questions
            lengths = replace(lengths, query=self.model.embedder.encoder_config.max_position_embeddings)
        inputs = query_inputs(ids, self.model.tokenizer, lengths).to(self.model.device)
        with evaluating(self.model.embedder), autocast(self.model.device, self.config.precision):
            return self.model.embedder.query(inputs)

    @torch.no_grad()
    def retrieve(
        self, questions: Sequence[str], k: int, method: Method | None = None, where: str | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores [B, K] and numbers [B, K] of the best passages, as from `Retriever.search`; `method` None: `self.method`."""
        method = method or self.method
        query_BD = None if method == "bm25" else self.embed(self.tokenized(questions))
        return self.retriever.search(questions, k, method, query_BD, where)

    def hits(
        self, questions: Sequence[str], k: int, method: Method | None = None, where: str | None = None
    ) -> list[list[Hit]]:
        """The best passages for each question, with the scores of `retrieve`, best first."""
        found = []
        for score_K, number_K in zip(*self.retrieve(questions, k, method, where), strict=True):
            passages = self.kb.passages(number_K[number_K != NULL_PASSAGE])
            found.append(
                [
                    Hit(one.id, one.document_id, one.title, one.text, float(score), dict(one.fields))
                    for one, score in zip(passages, score_K, strict=False)
                ]
            )
        return found

    @torch.no_grad()
    def passages(
        self, question: str, k: int, method: Method | None = None, where: str | None = None
    ) -> list[RankedPassage]:
        """The best passages for a question, with p(z|x) normalised over these passages."""
        query_BD = self.embed(self.tokenized([question]))
        _, number_BK = self.retriever.search([question], k, method or self.method, query_BD, where)
        numbers = number_BK[0][number_BK[0] >= 0]
        return self._ranked(self._scores(query_BD[0], numbers), self.kb.passages(numbers))

    def _scores(self, query_D: Tensor, numbers: np.ndarray) -> Tensor:
        """Inner products of a question and passages -> [K]."""
        index = self.version.index
        return scores(query_D[None].float().to(index.device), index.rows(numbers))[0].cpu()

    @staticmethod
    def _ranked(score_K: Tensor, passages: Sequence[Passage]) -> list[RankedPassage]:
        shares = zip(passages, score_K.softmax(dim=0).tolist(), strict=True)
        return [
            RankedPassage.of(passage, rank, share) for rank, (passage, share) in enumerate(shares, start=1)
        ]

    @cached_property
    def _null_D(self) -> Tensor:
        """The vector of the null passage -> [D]."""
        with autocast(self.model.device, self.config.precision):
            return self.model.null_vector()[0].float()

    def _evidence(self, query_BD: Tensor, number_BK: np.ndarray, bonus_BK: np.ndarray) -> list[_Evidence]:
        """The passages with these numbers, with their inner products with the question."""
        numbers = [row[row >= 0] for row in number_BK]
        passages = self.kb.passages(np.concatenate(numbers)) if len(numbers) else []
        bonuses = [bonus_K[row >= 0] for bonus_K, row in zip(bonus_BK, number_BK, strict=True)]
        evidence, end = [], 0
        for query_D, own, bonus_K in zip(query_BD.float(), numbers, bonuses, strict=True):
            part = slice(end, end := end + len(own))
            evidence.append(_Evidence(passages[part], self._scores(query_D, own), torch.from_numpy(bonus_K)))
        return evidence

    def _read(
        self, ids: Sequence[Sequence[int]], query_BD: Tensor, evidence: Sequence[_Evidence]
    ) -> list[tuple[list[Answer], list[ReadPassage], float, Features]]:
        """For each question: the best distinct answers, the passages read with their best spans, p(null|x), and features."""
        spans = self._spans(
            [own for own, one in zip(ids, evidence, strict=True) for _ in one.passages],
            [passage.text for one in evidence for passage in one.passages],
        )
        found, end = [], 0
        for query_D, (passages, score_K, bonus_K) in zip(query_BD.float(), evidence, strict=True):
            part = slice(end, end := end + len(passages))
            null = torch.cat([scores(query_D[None], self._null_D[None])[0].cpu(), score_K]).softmax(dim=0)[0]
            answers, read, features = self._best(
                spans[part], score_K, bonus_K, self._ranked(score_K, passages)
            )
            found.append((answers, read, float(null), features))
        return found

    def _spans(self, questions: Sequence[Sequence[int]], texts: Sequence[str]) -> list[PassageSpans]:
        """Scores of all spans of each text, for the question that belongs to the text."""
        model = self.model
        assert model.span_reader is not None
        found: dict[int, PassageSpans] = {}
        # A batch has texts of similar length, of any question, so that there is little padding.
        rows = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        for start in range(0, len(rows), ROWS_READ):
            part = rows[start : start + ROWS_READ]
            reading = self._reading([questions[row] for row in part], [texts[row] for row in part])
            tokens, body_BT = reading.tokens.to(model.device), reading.body_BT.to(model.device)
            with evaluating(model.span_reader), autocast(model.device, self.config.precision):
                score_RWT = model.span_reader(tokens, body_BT).cpu()
            for place, row in enumerate(part):
                score_WT = score_RWT[place]
                if not self.config.reference_compat:
                    no_answer_WT = reading.no_answer_WT(place, texts[row], len(score_WT))
                    score_WT = score_WT.masked_fill(no_answer_WT, -torch.inf)
                found[row] = PassageSpans(score_WT, reading, place)
        return [found[row] for row in range(len(texts))]

    def _reading(self, questions: Sequence[Sequence[int]], texts: Sequence[str]) -> Reading:
        tokenizer, lengths = self.model.tokenizer, self.model.lengths
        if self.config.reference_compat:
            return reference_reading(questions, texts, tokenizer, lengths.reading or lengths.joint)
        return joint_reading(questions, texts, tokenizer, lengths)

    def _best(
        self, spans: Sequence[PassageSpans], score_K: Tensor, bonus_K: Tensor, ranked: Sequence[RankedPassage]
    ) -> tuple[list[Answer], list[ReadPassage], Features]:
        """The best distinct answers to one question, each passage with its best span, and the features.

        `score_K + bonus_K` is the retrieval part of the score of an answer.
        """
        if not ranked:
            return [], [], NO_FEATURES
        assert self.model.span_reader is not None
        ranking = SpanRanking(self.model.span_reader, spans, score_K + bonus_K)
        likely = ranking.likely(max(SPANS_ADDED_UP, 20 * self.config.answers))
        if not likely:
            return [], [ReadPassage(**vars(passage), span=None) for passage in ranked], NO_FEATURES
        best = ranking.locate(likely[0]).passage
        features = Features(float(score_K[best]), float(bonus_K[best]), float(spans[best].score_WT.max()))
        found = self._with_probabilities(ranking, likely, ranked, features)
        read = [
            ReadPassage(**vars(passage), span=found[top].span if top in found else None)
            for top, passage in zip(ranking.tops, ranked, strict=True)
        ]
        return _distinct(found.values(), ranked, self.config.answers), read, features

    def _with_probabilities(
        self,
        ranking: SpanRanking,
        places: Sequence[int],
        ranked: Sequence[RankedPassage],
        features: Features,
    ) -> dict[int, _Found]:
        """Place -> the span, with the calibrated probability of its answer; the first place is that of the best span.

        The probabilities of spans with the same answer (`_first_of_answer`) are added up.
        """
        located = {place: ranking.locate(place) for place in places}
        texts = {place: ranked[one.passage].text[one.start : one.end] for place, one in located.items()}
        if self.config.reference_compat:
            published = self.model.tokenizer.as_huggingface()
            texts = {
                place: published.decode(one.ids, skip_special_tokens=False) for place, one in located.items()
            }
        normalised = {place: normalise_answer(text) for place, text in texts.items()}
        first_of = _first_of_answer(normalised.values())
        names = {place: first_of[name] for place, name in normalised.items()}
        shares: dict[str, float] = {}
        for place, name in names.items():
            shares[name] = shares.get(name, 0.0) + float(ranking.share_F[place])
        calibration, best_name = self.model.calibration, names[places[0]]
        best_share = min(1.0, shares[best_name])
        scale = calibration.scale(best_share, features)
        probability = {name: share * scale for name, share in shares.items()}
        probability[best_name] = calibration.probability(best_share, features)
        return {
            place: _Found(
                one.passage,
                names[place],
                Span(
                    texts[place], float(ranking.joint_F[place]), probability[names[place]], one.start, one.end
                ),
            )
            for place, one in located.items()
        }


def _first_of_answer(texts: Iterable[str]) -> dict[str, str]:
    """Normalised text of a span -> the first text that stands for it (`stands_for`); both texts are the same answer.

    `texts` has the texts of all spans, best span first.
    """
    first_of: dict[str, str] = {}
    answers: list[str] = []
    for text in dict.fromkeys(texts):
        first = next((answer for answer in answers if stands_for(answer, text)), None)
        if first is None:
            answers.append(text)
        first_of[text] = text if first is None else first
    return first_of


def _distinct(found: Iterable[_Found], ranked: Sequence[RankedPassage], most: int) -> list[Answer]:
    """The best spans of the first `most` answers, without answers whose best span overlaps an earlier one."""
    best_of: dict[str, _Found] = {}
    for one in found:
        best_of.setdefault(one.name, one)
    taken: list[_Found] = []
    for one in best_of.values():
        covered = any(
            one.passage == other.passage
            and one.span.start < other.span.end
            and other.span.start < one.span.end
            for other in taken
        )
        if not covered:
            taken.append(one)
    return [Answer(**vars(one.span), passage=ranked[one.passage]) for one in taken[:most]]


def hybrid_bonus(score_BK: np.ndarray, method: Method) -> np.ndarray:
    """The part of the ranking scores that is added to span scores: all of it for "hybrid", else zeros -> [B, K]."""
    return score_BK if method == "hybrid" else np.zeros_like(score_BK)


def open_pair(kb: str, model: str, device: str, reader: bool = True) -> tuple[KnowledgeBase, Model]:
    """Opens a knowledge base, and loads a model on `device`; `reader` as in `load_model`.

    Raises:
        InputError: the tokenizers of knowledge base and model differ; or see `KnowledgeBase.open` and `load_model`.
    """
    opened, loaded = KnowledgeBase.open(Path(kb)), load_model(model, reader)
    opened.check_tokenizer(loaded.tokenizer, model)
    return opened, loaded.to(choose_device(device))


class _Clock:
    """Measures the times of the stages of a batch, in milliseconds per question."""

    def __init__(self, questions: int):
        self._questions, self._last = max(1, questions), time.perf_counter()
        self.ms: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.ms[stage] = 1000 * (now - self._last) / self._questions
        self._last = now
