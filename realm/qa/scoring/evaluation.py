"""The report of an evaluation: exact match, F1, recall, and the calibration of probabilities.

Axis letters: N questions.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np

from realm.errors import InputError
from realm.progress import counted
from realm.qa.question_files import Question
from realm.qa.scoring.calibration import Confidence, ConfidenceJson
from realm.qa.scoring.metrics import (
    OURS,
    RECALL_AT,
    Scoring,
    contains_answer,
    f1,
    first_hit,
    is_acceptable,
    is_correct,
    mean_reciprocal_rank,
    normalise_answer,
    recall_at,
)
from realm.qa.scoring.significance import percent, wilson_interval


class ReportJson(TypedDict):
    """The output of `realm evaluate`, in percent. The recall at k is null if fewer than k passages were requested.

    Without a span reader, `em`, `em_ci95`, `contains`, `f1` and `confidence` are null.
    """

    n: int
    em: float | None
    em_ci95: list[float] | None
    contains: float | None
    """Percentage of the questions whose predicted answer is correct or contains a correct answer."""
    f1: float | None
    recall: dict[str, float | None]
    mrr: float
    title_recall: NotRequired[dict[str, float]]
    """Recall by title, over the questions with `gold_titles`; absent if no question has `gold_titles`."""
    confidence: ConfidenceJson | None


class Outcome(TypedDict):
    """The outcome of one question.

    `f1` is between 0 and 1. `rank` is the rank of the first hit, counted from 1; 0 if there is no hit. Without a span reader,
    `correct`, `contains`, `f1` and `probability` are null.
    """

    id: str
    correct: bool | None
    contains: bool | None
    f1: float | None
    rank: int
    probability: float | None


class ReportFile(ReportJson):
    """The file that `realm evaluate --out` writes."""

    outcomes: list[Outcome]


class Report(NamedTuple):
    """The outcome of each question, for paired tests of two systems, and a summary."""

    correct_N: np.ndarray | None
    """bool: exact match or pattern match; None if there are no predictions."""
    contains_N: np.ndarray | None
    """bool: the prediction is correct or contains a right answer; None if there are no predictions."""
    acceptable_N: np.ndarray | None
    """bool: the prediction counts as right for probabilities (`is_acceptable`); None if there are no predictions."""
    f1_N: np.ndarray | None
    """float: token F1; for questions with patterns, 1 if correct, else 0; None if there are no predictions."""
    first_hit_N: np.ndarray
    """int: rank, from 1, of the first retrieved text that contains an answer; 0 if no text contains an answer."""
    depth: int
    """Number of texts requested per question."""
    first_title_N: np.ndarray | None = None
    """int: rank, from 1, of the first passage with a gold title; 0 if no passage has a gold title, -1 if the question has no
    gold titles; None if the titles of the passages are unknown."""
    confidence: Confidence | None = None
    """None if the predictions have no probabilities."""

    def as_dict(self) -> ReportJson:
        """The summary as JSON; the mean reciprocal rank is in percent too."""
        summary: ReportJson = {
            "n": len(self.first_hit_N),
            "em": None if self.correct_N is None else percent(self.correct_N.mean()),
            "em_ci95": None if self.correct_N is None else _interval(self.correct_N),
            "contains": None if self.contains_N is None else percent(self.contains_N.mean()),
            "f1": None if self.f1_N is None else percent(self.f1_N.mean()),
            "recall": {
                str(k): round(recall_at(self.first_hit_N, k), 3) if k <= self.depth else None
                for k in RECALL_AT
            },
            "mrr": percent(mean_reciprocal_rank(self.first_hit_N)),
            "confidence": (
                None
                if self.acceptable_N is None or self.confidence is None
                else self.confidence.as_dict(self.acceptable_N)
            ),
        }
        by_title = self._title_recall()
        return summary if by_title is None else {**summary, "title_recall": by_title}

    def _title_recall(self) -> dict[str, float] | None:
        known = self.first_title_N is not None and self.first_title_N >= 0
        if self.first_title_N is None or not np.any(known):
            return None
        ranks = self.first_title_N[known]
        return {str(k): round(recall_at(ranks, k), 3) for k in RECALL_AT if k <= self.depth}

    def lines(self) -> list[str]:
        """The summary as lines for a terminal."""
        summary = self.as_dict()
        recall = ", ".join(
            f"{share:.1f}% for k={k}" for k, share in summary["recall"].items() if share is not None
        )
        lines = [counted(summary["n"], "question")]
        if summary["em"] is not None and summary["em_ci95"] is not None:
            low, high = summary["em_ci95"]
            lines.append(
                f"answers: {summary['em']:.1f}% exact (95% interval {low:.1f} to {high:.1f}), {summary['contains']:.1f}% "
                f"contain a right answer, F1 {summary['f1']:.1f}%"
            )
        lines.append(
            f"passages: questions with an answer in the first k passages: {recall}; mean reciprocal rank {summary['mrr']:.1f}%"
        )
        if "title_recall" in summary:
            shares = ", ".join(f"{share:.1f}% for k={k}" for k, share in summary["title_recall"].items())
            lines.append(f"titles: questions with a gold title among the first k passages: {shares}")
        if self.confidence is not None and self.acceptable_N is not None:
            lines += self.confidence.lines(self.acceptable_N)
        return lines

    def outcomes(self, questions: Sequence[Question]) -> list[Outcome]:
        """The outcome of each question, in the order of the questions."""
        nothing = [None] * len(questions)
        correct = nothing if self.correct_N is None else self.correct_N.tolist()
        containing = nothing if self.contains_N is None else self.contains_N.tolist()
        scores = nothing if self.f1_N is None else self.f1_N.tolist()
        sure = nothing if self.confidence is None else self.confidence.probability_N.tolist()
        rows = zip(questions, correct, containing, scores, self.first_hit_N, sure, strict=True)
        return [
            {
                "id": question.id,
                "correct": right,
                "contains": contains,
                "f1": score,
                "rank": int(rank),
                "probability": probability,
            }
            for question, right, contains, score, rank, probability in rows
        ]


def evaluate(
    predictions: Iterable[str] | None,
    retrieved: Iterable[Sequence[str]],
    questions: Sequence[Question],
    depth: int | None = None,
    scoring: Scoring = OURS,
    titles: Iterable[Sequence[str]] | None = None,
) -> Report:
    """Scores predictions and retrieved texts, both in the order of the questions.

    Args:
        predictions: the best answer to each question; None: only retrieval is scored.
        retrieved: per question the texts of its passages, best first. An iterator is read one question at a time.
        titles: per question the titles of the same passages, for recall by title.
        depth: number of texts requested per question; a small knowledge base may have fewer passages. The default is the
            length of the longest list in `retrieved`.

    Raises:
        InputError: there are no questions.
    """
    if not questions:
        raise InputError("no questions to evaluate: give at least one")
    hits, title_hits, longest = [], [], 0
    named = repeat(()) if titles is None else titles
    for question, (texts, names) in zip(
        questions, zip(retrieved, named, strict=titles is not None), strict=True
    ):
        hits.append(first_hit(islice(texts, depth), question, scoring.contains))
        title_hits.append(_first_title(names, question))
        longest = max(longest, len(texts))
    first_title_N = None if titles is None else np.array(title_hits)
    retrieval = np.array(hits), longest if depth is None else depth, first_title_N
    if predictions is None:
        return Report(None, None, None, None, *retrieval)
    correct, containing, acceptable, scores = [], [], [], []
    for question, prediction in zip(questions, predictions, strict=True):
        right = is_correct(prediction, question, scoring)
        correct.append(right)
        containing.append(contains_answer(prediction, question, scoring))
        acceptable.append(is_acceptable(prediction, question, scoring))
        scores.append(float(right) if question.regex else f1(prediction, question.answers, scoring.normalise))
    return Report(np.array(correct), np.array(containing), np.array(acceptable), np.array(scores), *retrieval)


def _first_title(titles: Sequence[str], question: Question) -> int:
    """Rank, from 1, of the first of `titles` that is a gold title; 0 if there is no such title, -1 if the question has none."""
    if not question.gold_titles:
        return -1
    gold = set(map(normalise_answer, question.gold_titles))
    return next((rank for rank, title in enumerate(titles, start=1) if normalise_answer(title) in gold), 0)


def _interval(correct_N: np.ndarray) -> list[float]:
    return [percent(end) for end in wilson_interval(int(correct_N.sum()), len(correct_N))]
