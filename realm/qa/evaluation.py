"""The report of an evaluation: exact match, F1, recall, and the calibration of probabilities.

Axis letters: N questions.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypedDict

import numpy as np

from realm.errors import InputError
from realm.qa.calibration import Confidence, ConfidenceJson
from realm.qa.metrics import (
    OURS,
    RECALL_AT,
    Scoring,
    f1,
    first_hit,
    is_correct,
    mean_reciprocal_rank,
    recall_at,
)
from realm.qa.question_files import Question
from realm.qa.significance import percent, wilson_interval


class ReportJson(TypedDict):
    """The output of `realm evaluate`, in percent; recall at a rank beyond the retrieved passages is null.

    Without a span reader, `em`, `em_ci95`, `f1` and `confidence` are null.
    """

    n: int
    em: float | None
    em_ci95: list[float] | None
    f1: float | None
    recall: dict[str, float | None]
    mrr: float
    confidence: ConfidenceJson | None


class Outcome(TypedDict):
    """The outcome of one question: `f1` between 0 and 1; `rank` of the first hit, from 1, 0 for none.

    Without a span reader, `correct`, `f1` and `probability` are null.
    """

    id: str
    correct: bool | None
    f1: float | None
    rank: int
    probability: float | None


class ReportFile(ReportJson):
    """The file that `realm evaluate --out` writes."""

    outcomes: list[Outcome]


class Report(NamedTuple):
    """The outcome of each question, which allows paired tests of two systems, and a summary."""

    correct_N: np.ndarray | None
    """bool: exact match or pattern match; None if no answers were read."""
    f1_N: np.ndarray | None
    """float: token F1; for questions with patterns, 1 if correct, else 0; None if no answers were read."""
    first_hit_N: np.ndarray
    """int: rank of the first retrieved text that holds an answer, 0 for none."""
    depth: int
    """Number of texts requested per question."""
    confidence: Confidence | None = None
    """None if the predictions have no probabilities."""

    def as_dict(self) -> ReportJson:
        """The summary; the mean reciprocal rank, too, is in percent."""
        return {
            "n": len(self.first_hit_N),
            "em": None if self.correct_N is None else percent(self.correct_N.mean()),
            "em_ci95": None if self.correct_N is None else _interval(self.correct_N),
            "f1": None if self.f1_N is None else percent(self.f1_N.mean()),
            "recall": {
                str(k): round(recall_at(self.first_hit_N, k), 2) if k <= self.depth else None
                for k in RECALL_AT
            },
            "mrr": percent(mean_reciprocal_rank(self.first_hit_N)),
            "confidence": (
                None
                if self.correct_N is None or self.confidence is None
                else self.confidence.as_dict(self.correct_N)
            ),
        }

    def lines(self) -> list[str]:
        """The summary as lines for a terminal."""
        summary = self.as_dict()
        recall = ", ".join(
            f"{share:g}% at {k}" for k, share in summary["recall"].items() if share is not None
        )
        lines = [f"{summary['n']:,} questions"]
        if summary["em"] is not None and summary["em_ci95"] is not None:
            low, high = summary["em_ci95"]
            lines.append(
                f"answers: {summary['em']:g}% exact (95% interval {low:g} to {high:g}), F1 {summary['f1']:g}%"
            )
        lines.append(
            f"passages: an answer is among the first ones for {recall}; reciprocal rank {summary['mrr']:g}%"
        )
        if self.confidence is not None and self.correct_N is not None:
            lines += self.confidence.lines(self.correct_N)
        return lines

    def outcomes(self, questions: Sequence[Question]) -> list[Outcome]:
        """The outcome of each question, in the order of the questions."""
        nothing = [None] * len(questions)
        correct = nothing if self.correct_N is None else self.correct_N.tolist()
        scores = nothing if self.f1_N is None else self.f1_N.tolist()
        sure = nothing if self.confidence is None else self.confidence.probability_N.tolist()
        rows = zip(questions, correct, scores, self.first_hit_N, sure, strict=True)
        return [
            {"id": question.id, "correct": right, "f1": score, "rank": int(rank), "probability": probability}
            for question, right, score, rank, probability in rows
        ]


def evaluate(
    predictions: Iterable[str] | None,
    retrieved: Iterable[Sequence[str]],
    questions: Sequence[Question],
    depth: int | None = None,
    scoring: Scoring = OURS,
) -> Report:
    """Scores predictions and retrieved texts, both in the order of the questions.

    Args:
        predictions: the best answer to each question; None: only retrieval is scored.
        retrieved: per question the texts of its passages, best first. An iterator is read one question at a time.
        depth: number of texts requested per question, which a small knowledge base may not reach; default: the longest list.

    Raises:
        InputError: there are no questions.
    """
    if not questions:
        raise InputError("no questions to evaluate: give at least one")
    hits, longest = [], 0
    for question, texts in zip(questions, retrieved, strict=True):
        hits.append(first_hit(islice(texts, depth), question, scoring.contains))
        longest = max(longest, len(texts))
    retrieval = np.array(hits), longest if depth is None else depth
    if predictions is None:
        return Report(None, None, *retrieval)
    correct, scores = [], []
    for question, prediction in zip(questions, predictions, strict=True):
        right = is_correct(prediction, question, scoring)
        correct.append(right)
        scores.append(float(right) if question.regex else f1(prediction, question.answers, scoring.normalise))
    return Report(np.array(correct), np.array(scores), *retrieval)


def _interval(correct_N: np.ndarray) -> list[float]:
    return [percent(end) for end in wilson_interval(int(correct_N.sum()), len(correct_N))]
