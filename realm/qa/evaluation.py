"""The report of a set of predictions: exact match, F1, recall, how far probabilities hold.

N questions.
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
    """What `realm evaluate` reports, in percent; recall beyond what was retrieved is null, not guessed.

    Without a span reader no answer is read: `em`, `em_ci95`, `f1` and `confidence` are null.
    """

    n: int
    em: float | None
    em_ci95: list[float] | None
    f1: float | None
    recall: dict[str, float | None]
    mrr: float
    confidence: ConfidenceJson | None


class Outcome(TypedDict):
    """One question's share in a report: `f1` between 0 and 1, `rank` of the first hit from 1, 0 for none.

    Without a span reader `correct`, `f1` and `probability` are null.
    """

    id: str
    correct: bool | None
    f1: float | None
    rank: int
    probability: float | None


class ReportFile(ReportJson):
    """What `realm evaluate --out` writes."""

    outcomes: list[Outcome]


class Report(NamedTuple):
    """Outcome per question, so that two systems can be compared in pairs, and their summary."""

    correct_N: np.ndarray | None
    """bool, exact match or pattern match; None where no answer was read."""
    f1_N: np.ndarray | None
    """float; for questions with patterns, which have no answer to share tokens with, 1 where correct; None as above."""
    first_hit_N: np.ndarray
    """int, rank of the first retrieved text with an answer, 0 for none."""
    depth: int
    """Texts asked for per question."""
    confidence: Confidence | None = None
    """None where the predictions came without probabilities."""

    def as_dict(self) -> ReportJson:
        """The summary, reciprocal rank in percent too."""
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
        """The summary for a person."""
        said = self.as_dict()
        recall = ", ".join(f"{share:g}% at {k}" for k, share in said["recall"].items() if share is not None)
        lines = [f"{said['n']:,} questions"]
        if said["em"] is not None and said["em_ci95"] is not None:
            low, high = said["em_ci95"]
            lines.append(
                f"answers: {said['em']:g}% exact (95% interval {low:g} to {high:g}), F1 {said['f1']:g}%"
            )
        lines.append(
            f"passages: an answer is among the first ones for {recall}; reciprocal rank {said['mrr']:g}%"
        )
        if self.confidence is not None and self.correct_N is not None:
            lines += self.confidence.lines(self.correct_N)
        return lines

    def outcomes(self, questions: Sequence[Question]) -> list[Outcome]:
        """Each question's own, in the order of the questions."""
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
        predictions: None: no answers were read, and only retrieval is scored.
        retrieved: per question the passages' texts, best first. An iterator is read one question at a time.
        depth: how many texts were asked for, when a small knowledge base gave fewer; default the longest list.
    """
    if not questions:
        raise InputError("no questions to evaluate")
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
