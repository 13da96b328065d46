"""Question in, answers with evidence out; a masked sentence in, what each passage did for it out.

Reading follows ORQA (Lee et al. 2019, section 3): the best passages by inner product, every span of up to ten wordpieces
in them, score = span score + retrieval score. Answers are slices of the passage's own text.

Letters: B questions, K passages read, N passages, W span widths, T tokens, P masked tokens, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.config import InputError, progress, write_json_lines
from realm.model.device import autocast, choose_device
from realm.model.encoders import evaluating
from realm.model.folder import Model, load_model
from realm.qa import evaluation
from realm.qa.evaluation import Question, first_hit, normalise_answer
from realm.qa.reading import Reading, joint_reading, peer_question, peer_reading
from realm.retrieval.bm25 import Bm25Index
from realm.retrieval.hybrid import reciprocal_rank_fusion
from realm.retrieval.index import IndexVersion, load_index
from realm.retrieval.knowledge_base import KnowledgeBase
from realm.retrieval.mips import MipsIndex
from realm.text.corpus import Passage
from realm.text.inputs import query_inputs

Method = Literal["dense", "bm25", "hybrid"]
ROWS_READ = 16
"""Passages that the span reader takes together."""
EVALUATION_DEPTH = 100
"""Passages retrieved per question for recall."""


@dataclass(frozen=True)
class AnswerConfig:
    """How questions are answered."""

    read: int = 5
    """Passages that the reader reads (paper: 5)."""
    answers: int = 5
    """Different answers returned, best first."""
    device: str = "auto"
    """"auto": a GPU when there is one, else the CPU; or any torch device."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """Of matrix products."""
    mapped_index: bool = False
    """Leaves the vectors on disk, in a file that is mapped into memory: for indexes that memory does not hold."""
    peer_compat: bool = False
    """Reads and writes as transformers 4.57.6 does with the published checkpoints, oddities and all: docs/published.md."""


class Evidence(NamedTuple):
    """A retrieved passage; `probability` is p(z|x) among the passages that were read."""

    passage: Passage
    rank: int
    probability: float

    def to_json(self) -> dict[str, Any]:
        passage = self.passage
        return {
            "id": passage.id,
            "title": passage.title,
            "text": passage.text,
            "rank": self.rank,
            "probability": self.probability,
        }


class Answer(NamedTuple):
    """A span of a passage: `evidence.passage.text[start:end]`; `probability` is over all spans of all passages read."""

    text: str
    score: float
    probability: float
    start: int
    end: int
    evidence: Evidence

    def to_json(self) -> dict[str, Any]:
        values = self._asdict()
        return {k: v for k, v in values.items() if k != "evidence"} | {"passage": self.evidence.to_json()}


class Answers(NamedTuple):
    """What `realm answer` says; the JSON is a contract (docs and DESIGN section 4)."""

    question: str
    answers: list[Answer]
    version: int
    step: int
    ms: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "answers": [answer.to_json() for answer in self.answers],
            "index": {"version": self.version, "step": self.step},
            "ms": {stage: round(value, 2) for stage, value in self.ms.items()},
        }

    def lines(self) -> list[str]:
        lines = []
        for answer in self.answers:
            passage = answer.evidence.passage
            marked = f"{passage.text[: answer.start]}[[{answer.text}]]{passage.text[answer.end :]}"
            lines += [
                f"{answer.text}   (probability {answer.probability:.2f})",
                f"    {passage.title or passage.document_id}, rank {answer.evidence.rank}, "
                f"p(z|x) {answer.evidence.probability:.2f}",
                f"    {_around(marked, answer.start)}",
            ]
        return lines or ["no answer: the knowledge base has no passage to read"]


class Answerer:
    """A model and a knowledge base, ready for questions."""

    def __init__(self, kb: KnowledgeBase, model: Model, version: IndexVersion, config: AnswerConfig):
        self.kb, self.model, self.version, self.config = kb, model, version, config

    @classmethod
    def load(cls, kb: str, model: str, config: AnswerConfig) -> "Answerer":
        """Raises InputError when the parts do not belong together, or the index is missing or lacks passages."""
        opened, loaded = open_pair(kb, model, config.device)
        return cls(opened, loaded, load_index(opened, loaded, model, config.mapped_index), config)

    def answer(self, question: str) -> Answers:
        return self.answer_batch([question])[0]

    @torch.no_grad()
    def answer_batch(self, questions: Sequence[str]) -> list[Answers]:
        """Answers to several questions at once; `ms` is the batch's time per question."""
        if self.model.span_reader is None:
            raise InputError("the model has no span reader: `realm finetune` gives it one")
        clock = _Clock(len(questions))
        ids = self.tokenized(questions)
        query_BD = self.embed(ids)
        clock.lap("embed")
        hits = self.version.index.search(query_BD, self.config.read)
        clock.lap("search")
        passages = self.kb.passages(hits.number_BK.cpu().numpy().ravel())
        found = self._read(ids, passages, hits.score_BK)
        clock.lap("read")
        version = self.version
        return [
            Answers(question, answers, version.number, version.step, clock.ms)
            for question, answers in zip(questions, found, strict=True)
        ]

    def tokenized(self, questions: Sequence[str]) -> list[list[int]]:
        """The wordpieces of questions, no special tokens added."""
        if self.config.peer_compat:
            return [peer_question(question, self.model.tokenizer) for question in questions]
        return self.model.tokenizer.encode(questions)

    def embed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Vectors of tokenized questions -> [B, D]."""
        lengths = self.model.lengths
        if self.config.peer_compat:  # it cuts no question
            lengths = replace(lengths, query=self.model.embedder.trunk_config.max_position_embeddings)
        inputs = query_inputs(ids, self.model.tokenizer, lengths).to(self.model.device)
        with evaluating(self.model.embedder), autocast(self.model.device, self.config.precision):
            return self.model.embedder.query(inputs)

    def _read(
        self, questions: Sequence[Sequence[int]], passages: Sequence[Passage], score_BK: Tensor
    ) -> list[list[Answer]]:
        """The best different spans of each question's passages; none where there are no passages."""
        read = score_BK.shape[1]
        rows = list(range(len(passages)))
        grids: list[Tensor] = [torch.empty(0)] * len(rows)
        readings: list[tuple[Reading, int]] = [None] * len(rows)  # type: ignore[list-item]
        # Rows of similar length together, those of all questions: little is padding.
        rows.sort(key=lambda row: -len(passages[row].text))
        for start in range(0, len(rows), ROWS_READ):
            part = rows[start : start + ROWS_READ]
            reading = self._reading([questions[r // read] for r in part], [passages[r].text for r in part])
            grid_RWT = self._spans(reading)
            for place, row in enumerate(part):
                grids[row], readings[row] = grid_RWT[place], (reading, place)
        return [
            self._best(
                grids[first : first + read],
                readings[first : first + read],
                passages[first : first + read],
                score_BK[first // read] if read else score_BK,
            )
            for first in (question * read for question in range(len(questions)))
        ]

    def _reading(self, questions: Sequence[Sequence[int]], texts: Sequence[str]) -> Reading:
        tokenizer, lengths = self.model.tokenizer, self.model.lengths
        if self.config.peer_compat:
            return peer_reading(questions, texts, tokenizer, lengths.reading or lengths.joint)
        return joint_reading(questions, texts, tokenizer, lengths)

    def _spans(self, reading: Reading) -> Tensor:
        """Scores of all spans of some rows -> [R, W, T]."""
        model = self.model
        assert model.span_reader is not None
        with evaluating(model.span_reader), autocast(model.device, self.config.precision):
            return model.span_reader(reading.tokens.to(model.device), reading.body_BT.to(model.device)).cpu()

    def _best(
        self,
        grids: Sequence[Tensor],
        readings: Sequence[tuple[Reading, int]],
        passages: Sequence[Passage],
        score_K: Tensor,
    ) -> list[Answer]:
        """The best different spans of one question's passages; `grids` hold the scores of each passage's spans, [W, T]."""
        if not passages:
            return []
        score_K = score_K.cpu()
        joint_F = torch.cat([(grid + score).flatten() for grid, score in zip(grids, score_K, strict=True)])
        ends = np.cumsum([grid.numel() for grid in grids])
        probability_F = joint_F.softmax(dim=0)
        prior_K = score_K.softmax(dim=0).tolist()
        answers: dict[str, Answer] = {}
        for place in joint_F.argsort(descending=True, stable=True).tolist():
            score = float(joint_F[place])
            if score == -torch.inf or len(answers) == self.config.answers:
                break
            row = int(np.searchsorted(ends, place, side="right"))
            width, first = divmod(place - int(ends[row]) + grids[row].numel(), grids[row].shape[1])
            reading, at = readings[row]
            start, end = reading.text_span(at, first, first + width)
            text = passages[row].text[start:end]
            if self.config.peer_compat:
                ids = reading.tokens.ids_BT[at, first : first + width + 1].tolist()
                text = self.model.tokenizer.as_published().decode(ids, skip_special_tokens=False)
            evidence = Evidence(passages[row], row + 1, prior_K[row])
            answers.setdefault(
                normalise_answer(text), Answer(text, score, float(probability_F[place]), start, end, evidence)
            )
        return list(answers.values())


class Retriever:
    """Ranks all passages for questions by vectors, by words, or by both."""

    def __init__(self, kb: KnowledgeBase, method: Method, answerer: Answerer | None):
        self._answerer, self._method = answerer, method
        self._bm25 = None
        if method != "dense":
            self._bm25 = Bm25Index(kb.titles, kb.texts())

    def search(self, questions: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and passage numbers, best first -> two of [B, k]; a hybrid score is that of reciprocal rank fusion."""
        rankings = []
        if self._answerer is not None and self._method != "bm25":
            with torch.no_grad():
                query_BD = self._answerer.embed(self._answerer.tokenized(questions))
            hits = self._answerer.version.index.search(query_BD, k)
            rankings.append((hits.score_BK.cpu().numpy(), hits.number_BK.cpu().numpy()))
        if self._bm25 is not None:
            ranking = self._bm25.search(questions, k)
            rankings.append((ranking.score_BK, ranking.number_BK))
        if len(rankings) == 1:
            return rankings[0]
        fused = reciprocal_rank_fusion([numbers for _, numbers in rankings])
        return fused.score_BK[:, :k], fused.number_BK[:, :k]


def retrieve_to_file(
    kb: KnowledgeBase,
    model: str | None,
    questions: Sequence[Question],
    k: int,
    method: Method,
    out: Path,
    config: AnswerConfig,
) -> None:
    """JSON Lines `{"id", "question", "passages": [{"id", "title", "text", "score"}]}`, written aside and renamed in."""
    answerer = (
        Answerer.load(str(kb.folder), model, config) if model is not None and method != "bm25" else None
    )
    retriever = Retriever(kb, method, answerer)

    def lines() -> Iterator[dict[str, Any]]:
        for part in _batches(questions, 64, "retrieve"):
            scores, numbers = retriever.search([q.question for q in part], k)
            for question, score_K, number_K in zip(part, scores, numbers, strict=True):
                passages = [
                    {"id": p.id, "title": p.title, "text": p.text, "score": round(float(score), 6)}
                    for p, score in zip(kb.passages(number_K[number_K >= 0]), score_K, strict=False)
                ]
                yield {"id": question.id, "question": question.question, "passages": passages}

    write_json_lines(out, lines())


def evaluate(
    answerer: Answerer, questions: Sequence[Question], method: Method = "dense"
) -> evaluation.Report:
    """Scores a model's answers and its retrieval; without a span reader every answer is empty and only recall counts."""
    retriever = Retriever(answerer.kb, method, answerer)
    predictions: list[str] = []
    texts: list[list[str]] = []
    for part in _batches(questions, 16, "evaluate"):
        asked = [q.question for q in part]
        _, numbers = retriever.search(asked, EVALUATION_DEPTH)
        texts += [[p.text for p in answerer.kb.passages(row[row >= 0])] for row in numbers]
        if answerer.model.span_reader is None:
            predictions += [""] * len(part)
        else:
            found = answerer.answer_batch(asked)
            predictions += [one.answers[0].text if one.answers else "" for one in found]
    return evaluation.evaluate(predictions, texts, questions, EVALUATION_DEPTH)


@torch.no_grad()
def question_ranks(
    model: Model, kb: KnowledgeBase, index: MipsIndex, questions: Sequence[Question], depth: int
) -> np.ndarray:
    """Rank from 1 of the first passage that holds an answer, 0 where none of the top `depth` does -> [B]."""
    ranks = []
    for start in range(0, len(questions), 64):
        part = questions[start : start + 64]
        ids = model.tokenizer.encode([q.question for q in part])
        with evaluating(model.embedder):
            query_BD = model.embedder.query(
                query_inputs(ids, model.tokenizer, model.lengths).to(model.device)
            )
        numbers = index.search(query_BD, depth).number_BK.cpu().numpy()
        for question, row in zip(part, numbers, strict=True):
            ranks.append(first_hit([p.text for p in kb.passages(row)], question))
    return np.array(ranks)


def open_pair(kb: str, model: str, device: str) -> tuple[KnowledgeBase, Model]:
    """A knowledge base and a model that share a tokenizer, the model on its device."""
    opened, loaded = KnowledgeBase.open(Path(kb)), load_model(model)
    opened.check_tokenizer(loaded.tokenizer, model)
    return opened, loaded.to(choose_device(device))


class _Clock:
    """Milliseconds per question of the stages of a batch."""

    def __init__(self, questions: int):
        self._questions, self._last = max(1, questions), time.perf_counter()
        self.ms: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.ms[stage] = 1000 * (now - self._last) / self._questions
        self._last = now


def _batches(questions: Sequence[Question], size: int, description: str) -> Iterator[Sequence[Question]]:
    with progress(total=len(questions), description=description, unit="question") as bar:
        for start in range(0, len(questions), size):
            yield questions[start : start + size]
            bar.update(len(questions[start : start + size]))


def _around(text: str, place: int, width: int = 160) -> str:
    """The part of a passage around its answer, on one line."""
    first = max(0, place - width // 2)
    part = " ".join(text[first : first + 2 * width].split())
    return ("... " if first else "") + part + (" ..." if first + 2 * width < len(text) else "")
