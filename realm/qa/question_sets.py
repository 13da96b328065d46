"""Operations on sets of questions: write retrieved passages to a file, and score answers.

Axis letters: B questions, K passages retrieved, N passages.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

from realm.errors import InputError
from realm.files import write_json_lines
from realm.keys import Lookup, hex_id, key_of
from realm.model.calibration import Method
from realm.model.folder import Model, add_weights
from realm.model.modes import evaluating
from realm.progress import progress
from realm.qa.answers import Answers
from realm.qa.kept_answers import BestAnswer, Certainty, KeptAnswers, known_or_new
from realm.qa.pipeline import NEEDS_READER, AnswerConfig, Answerer, hybrid_bonus
from realm.qa.predictions import DEPTH, Prediction, score_predictions
from realm.qa.question_files import Question
from realm.qa.scoring import evaluation
from realm.qa.scoring.calibration import Confidence
from realm.qa.scoring.metrics import OURS, Scoring, first_hit, has_answer
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE, query_inputs


class HitJson(TypedDict):
    """A retrieved passage; `score` is the score of the retrieval method."""

    id: str
    title: str
    text: str
    score: float
    document: str
    """Id of the document."""
    fields: dict[str, Any]


class RetrievedJson(TypedDict):
    """A line of the file that `realm retrieve` writes: a question and its passages, best first."""

    id: str
    question: str
    passages: list[HitJson]


Search = Callable[[Sequence[str], int], tuple[np.ndarray, np.ndarray]]
"""Questions [B], and K -> scores [B, K] and passage numbers [B, K], best first; short rows are filled with `NULL_PASSAGE`."""


def searcher(
    kb: str, model: str | None, method: Method | None, config: AnswerConfig, where: str | None = None
) -> tuple[KnowledgeBase, Search]:
    """A knowledge base, and its search with a method; "bm25" needs no model. `method` None: the default of the model.

    The search returns passage numbers of the returned knowledge base. With a filter `where`, only passages
    that match the filter are found.

    Raises:
        InputError: there is no model, and `method` is not "bm25"; or the knowledge base, the filter or the model cannot be
            used.
    """
    opened = KnowledgeBase.open(kb)
    if where is not None:
        opened.matching(where)  # a wrong filter is an error before the model is loaded
    if method == "bm25":
        return opened, partial(Retriever(opened).search, method="bm25", query_BD=None, where=where)
    if model is None:
        raise InputError(f"the method {method or 'dense'} needs a model; without a model, use bm25")
    answerer = Answerer.load(kb, model, config)
    return answerer.kb, partial(answerer.retrieve, method=method, where=where)


def retrieve_to_file(
    kb: str,
    model: str | None,
    questions: Sequence[Question],
    k: int,
    method: Method | None,
    where: str | None = None,
    *,
    out: Path,
    config: AnswerConfig,
) -> None:
    """Writes a line of `RetrievedJson` for each question. The file appears when it is complete.

    Arguments and errors as in `searcher`.
    """
    opened, search = searcher(kb, model, method, config, where)

    def lines() -> Iterator[RetrievedJson]:
        with _batches(questions, 64, "retrieve") as parts:
            for part in parts:
                scores, numbers = search([q.question for q in part], k)
                for question, score_K, number_K in zip(part, scores, numbers, strict=True):
                    passages: list[HitJson] = [
                        {
                            "id": p.id,
                            "title": p.title,
                            "text": p.text,
                            "score": round(float(score), 6),
                            "document": p.document_id,
                            "fields": dict(p.fields),
                        }
                        for p, score in zip(opened.passages(number_K[number_K >= 0]), score_K, strict=False)
                    ]
                    yield {"id": question.id, "question": question.question, "passages": passages}

    out.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(out, lines())


class Answered(NamedTuple):
    """The best answers to questions, in the order of the questions."""

    kb: KnowledgeBase
    answers: list[BestAnswer]

    def report(
        self, questions: Sequence[Question], threshold: float, scoring: Scoring = OURS
    ) -> evaluation.Report:
        """The report; `threshold` is the probability below which an answer is a guess."""
        without_N = None if self.without is None else probability_N(self.without)
        confidence = Confidence(probability_N(self.certainties), threshold, without_N)
        report = score_predictions(self.kb, self.predictions, questions, scoring)
        return report._replace(confidence=confidence)

    @property
    def predictions(self) -> list[Prediction]:
        """The best answer to each question with its evidence; an empty answer if there is none."""
        return [one.prediction for one in self.answers]

    @property
    def certainties(self) -> list[Certainty]:
        """The certainty of each best answer."""
        return [one.certainty for one in self.answers]

    @property
    def without(self) -> list[Certainty] | None:
        """The certainty of each best answer without positives; None if these answers were not computed."""
        found = [one.without for one in self.answers if one.without is not None]
        return found or None


def probability_N(certainties: Sequence[Certainty]) -> np.ndarray:
    """The probability of each answer -> [N]."""
    return np.array([one.probability for one in certainties])


def identity(answerer: Answerer, *flags: object) -> tuple[object, ...]:
    """All on which the answers of a model depend besides the question: weights, passages, settings and `flags`."""
    model, digest = answerer.model, hashlib.sha256()
    for part in (model.embedder, model.span_reader):
        if part is not None:
            add_weights(digest, part.state_dict())
    corpus = (answerer.kb.fingerprint, answerer.kb.table.version, answerer.version.number)
    return digest.hexdigest(), model.lengths, model.calibration, corpus, answerer.config, *flags


def ask(
    answerer: Answerer,
    questions: Sequence[Question],
    method: Method | None = None,
    unanswerable: bool = False,
    gold: bool = False,
    kept: KeptAnswers | None = None,
) -> Answered:
    """Retrieves passages, and finds the best answers with the span reader, except for the questions whose answers are kept.

    Args:
        method: how passages are ranked; None: the default of the answerer.
        unanswerable: also answer each question without its positives, to measure how often a wrong answer is declined.
        gold: read all passages of the document that each question names (`document_id`), in the order of the document, in place
            of retrieved passages.

    Raises:
        InputError: the model has no span reader; or `gold` is set, and a question names no document or an unknown document.
    """
    if answerer.model.span_reader is None:
        raise InputError(NEEDS_READER)
    own_passages = _OwnPassages(answerer.kb) if gold else None
    answer = partial(_ask, answerer, method, unanswerable, own_passages)
    with _batches(questions, 16, "evaluate") as parts:
        answers = [one for part in parts for one in known_or_new(kept, part, answer)]
    return Answered(answerer.kb, answers)


def _ask(
    answerer: Answerer,
    method: Method | None,
    unanswerable: bool,
    own_passages: "_OwnPassages | None",
    questions: Sequence[Question],
) -> list[BestAnswer]:
    asked = [q.question for q in questions]
    if own_passages is not None:
        number_BN = own_passages(questions)
        read, bonus_BN = number_BN.shape[1], np.zeros(number_BN.shape)
    else:
        score_BN, number_BN = answerer.retrieve(asked, max(DEPTH, answerer.config.read), method)
        read, bonus_BN = answerer.config.read, hybrid_bonus(score_BN, method or answerer.method)
    answers = answerer.answer_from(asked, number_BN[:, :read], bonus_BN[:, :read])
    without: list[Certainty | None] = [None] * len(questions)
    if unanswerable:
        texts = [[passage.text for passage in answerer.kb.passages(row[row >= 0])] for row in number_BN]
        others_BN = _without_answers(questions, number_BN, texts, read)
        without = [_certainty(one) for one in answerer.answer_from(asked, others_BN, bonus_BN)]
    return [
        BestAnswer(_prediction(answerer.kb, question, number_N, read, found), _certainty(found), certainty)
        for question, number_N, found, certainty in zip(questions, number_BN, answers, without, strict=True)
    ]


def _certainty(found: Answers) -> Certainty:
    return Certainty(found.answers[0].probability, found.features) if found.answers else Certainty()


def _prediction(
    kb: KnowledgeBase, question: Question, number_N: np.ndarray, read: int, found: Answers
) -> Prediction:
    """The best answer to a question, for which the first `read` of these passages were read."""
    listed_N = number_N[:DEPTH]
    one = Prediction(
        question.id,
        question.question,
        "",
        passages=tuple(map(hex_id, kb.keys_N[listed_N[listed_N != NULL_PASSAGE]].tolist())),
        read=int((number_N[:read] != NULL_PASSAGE).sum()),
        ms=round(sum(found.ms.values()), 2),
    )
    for best in found.answers[:1]:
        one = replace(
            one,
            answer=best.text,
            score=best.score,
            passage_id=best.passage.id,
            start=best.start,
            end=best.end,
        )
    return one


class _OwnPassages:
    """Finds the passages of the documents that questions name (`document_id`)."""

    def __init__(self, kb: KnowledgeBase):
        self._kb, self._by_document = kb, Lookup(kb.document_keys_N)

    def __call__(self, questions: Sequence[Question]) -> np.ndarray:
        """Numbers of the passages [B, N]; rows are filled up with `NULL_PASSAGE`.

        Raises:
            InputError: a question names no document, or a document without passages in the knowledge base.
        """
        found = [self._by_document.all(key_of(question.document_id)) for question in questions]
        for question, numbers in zip(questions, found, strict=True):
            if not question.document_id:
                raise InputError(
                    f"question {question.id} names no document: with --gold, each question needs a document_id"
                )
            if not len(numbers):
                raise InputError(
                    f"question {question.id} names document {question.document_id!r}, but {self._kb.folder} has no passages of "
                    "this document"
                )
        number_BN = np.full((len(questions), max(map(len, found))), NULL_PASSAGE)
        for row, numbers in zip(number_BN, found, strict=True):
            row[: len(numbers)] = numbers
        return number_BN


def _without_answers(
    questions: Sequence[Question], number_BN: np.ndarray, texts: Sequence[Sequence[str]], read: int
) -> np.ndarray:
    """The first `read` passages of each row that contain no answer, in the same columns as in `number_BN` -> [B, N].

    All other columns are `NULL_PASSAGE`.
    """
    others_BN = np.full_like(number_BN, NULL_PASSAGE)
    for other_N, question, number_N, found in zip(others_BN, questions, number_BN, texts, strict=True):
        kept = [place for place, text in enumerate(found) if not has_answer(text, question)][:read]
        other_N[kept] = number_N[kept]
    return others_BN


def evaluate_bm25(
    kb: KnowledgeBase, questions: Sequence[Question], scoring: Scoring = OURS
) -> evaluation.Report:
    """Scores the passages that BM25 retrieves; needs no model."""
    search = partial(Retriever(kb).search, method="bm25", query_BD=None)
    return _evaluate_passages(kb, questions, search, scoring)


def evaluate_retrieval(
    answerer: Answerer, questions: Sequence[Question], method: Method | None = None, scoring: Scoring = OURS
) -> evaluation.Report:
    """Scores the passages that `method` retrieves, without answers; `method` None: the default of the answerer."""
    return _evaluate_passages(answerer.kb, questions, partial(answerer.retrieve, method=method), scoring)


def _evaluate_passages(
    kb: KnowledgeBase, questions: Sequence[Question], search: Search, scoring: Scoring
) -> evaluation.Report:
    texts: list[list[str]] = []
    titles: list[list[str]] = []
    with _batches(questions, 16, "evaluate") as parts:
        for part in parts:
            _, number_BN = search([q.question for q in part], DEPTH)
            for passages in (kb.passages(row[row >= 0]) for row in number_BN):
                texts.append([passage.text for passage in passages])
                titles.append([passage.title for passage in passages])
    return evaluation.evaluate(None, texts, questions, DEPTH, scoring, titles)


@torch.no_grad()
def question_ranks(
    model: Model,
    kb: KnowledgeBase,
    retriever: Retriever,
    questions: Sequence[Question],
    depth: int,
    method: Method = "dense",
) -> np.ndarray:
    """Rank, from 1, of the first passage that contains an answer; 0 if none of the best `depth` passages does -> [B]."""
    ranks = []
    for start in range(0, len(questions), 64):
        part = questions[start : start + 64]
        ids = model.tokenizer.encode([q.question for q in part])
        with evaluating(model.embedder):
            query_BD = model.embedder.query(
                query_inputs(ids, model.tokenizer, model.lengths).to(model.device)
            )
        _, number_BK = retriever.search([q.question for q in part], depth, method, query_BD)
        for question, row in zip(part, number_BK, strict=True):
            ranks.append(first_hit([p.text for p in kb.passages(row)], question))
    return np.array(ranks)


@contextmanager
def _batches(
    questions: Sequence[Question], size: int, description: str
) -> Iterator[Iterator[Sequence[Question]]]:
    """The questions in batches, with a progress bar that ends with the `with` block, also after Ctrl-C."""
    with progress(total=len(questions), description=description, unit="question") as bar:

        def parts() -> Iterator[Sequence[Question]]:
            for start in range(0, len(questions), size):
                yield questions[start : start + size]
                bar.update(len(questions[start : start + size]))

        yield parts()
