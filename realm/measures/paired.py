"""Compares two models on the same questions, or on the same queries of a test collection, by paired tests.

Axis letters: N questions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np

from realm.measures.collection import Collection
from realm.measures.ranking import RankingReport
from realm.model.calibration import Method
from realm.progress import counted
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.predictions import Prediction
from realm.qa.question_files import Question
from realm.qa.question_sets import ask, evaluate_retrieval
from realm.qa.scoring.evaluation import Report
from realm.qa.scoring.metrics import RANKS, reciprocal_ranks
from realm.qa.scoring.significance import (
    MeanDifference,
    PairedDifference,
    p_value,
    paired_bootstrap,
    paired_difference,
    percent,
)

DISAGREEMENTS = 20
"""Largest number of disagreements that are listed for each of two models, or of two rows of a table."""


class Disagreement(TypedDict):
    """A question that one model answers right and the other model answers wrong."""

    question: str
    answers: list[str]
    """Right answers."""
    a: str
    b: str


class ComparedJson(TypedDict):
    """The output of `realm compare-models` for a question file. Scores are in percent."""

    n: int
    a: dict[str, float]
    b: dict[str, float]
    """Name of a measure -> score of the model."""
    difference: dict[str, PairedDifference | MeanDifference]
    """Name of a measure -> score of model a minus score of model b."""
    only_a: list[Disagreement]
    only_b: list[Disagreement]


class Asked(NamedTuple):
    """The results of a model on the questions: its scores, and its best answers if the model has a span reader."""

    report: Report
    predictions: list[Prediction] | None


def ask_model(
    kb: str, model: str, questions: Sequence[Question], method: Method | None, config: AnswerConfig
) -> Asked:
    """The results of a model on all questions; if the model has no span reader, only its passages are measured.

    Raises:
        InputError: as in `Answerer.load`.
    """
    answerer = Answerer.load(kb, model, config)
    if answerer.model.span_reader is None:
        return Asked(evaluate_retrieval(answerer, questions, method), None)
    answered = ask(answerer, questions, method)
    return Asked(answered.report(questions, answerer.threshold), answered.predictions)


def compare_models(questions: Sequence[Question], a: Asked, b: Asked) -> ComparedJson:
    """Compares exact match and F1, if both models answer questions, and recall@1, @5 and @20, and the mean reciprocal rank.

    At most `DISAGREEMENTS` disagreements are listed for each model.
    """
    found: ComparedJson = {
        "n": len(questions),
        "a": {},
        "b": {},
        "difference": {},
        "only_a": [],
        "only_b": [],
    }

    def add(name: str, a_N: np.ndarray, b_N: np.ndarray, test: PairedDifference | MeanDifference) -> None:
        found["a"][name], found["b"][name] = percent(a_N.mean()), percent(b_N.mean())
        found["difference"][name] = test

    if a.predictions is not None and b.predictions is not None:
        assert a.report.correct_N is not None and b.report.correct_N is not None
        assert a.report.f1_N is not None and b.report.f1_N is not None
        a_N, b_N = a.report.correct_N.astype(bool), b.report.correct_N.astype(bool)
        add("exact match", a_N, b_N, paired_difference(a_N.astype(int), b_N.astype(int), k=1))
        add("f1", a.report.f1_N, b.report.f1_N, _mean_difference(a.report.f1_N, b.report.f1_N))
        for disagreements, only_N in ((found["only_a"], a_N & ~b_N), (found["only_b"], b_N & ~a_N)):
            for place in np.flatnonzero(only_N)[:DISAGREEMENTS]:
                disagreements.append(
                    {
                        "question": questions[place].question,
                        "answers": list(questions[place].answers),
                        "a": a.predictions[place].answer,
                        "b": b.predictions[place].answer,
                    }
                )
    a_N, b_N = a.report.first_hit_N, b.report.first_hit_N
    for k in RANKS:
        add(f"recall@{k}", (a_N >= 1) & (a_N <= k), (b_N >= 1) & (b_N <= k), paired_difference(a_N, b_N, k=k))
    reciprocal_a_N, reciprocal_b_N = reciprocal_ranks(a_N), reciprocal_ranks(b_N)
    add("mrr", reciprocal_a_N, reciprocal_b_N, _mean_difference(reciprocal_a_N, reciprocal_b_N))
    return found


class ComparedRankingsJson(TypedDict):
    """The output of `realm compare-models --beir`, in percent."""

    n: int
    a: dict[str, float]
    b: dict[str, float]
    difference: dict[str, MeanDifference]


def compare_rankings(collection: Collection, a: RankingReport, b: RankingReport) -> ComparedRankingsJson:
    """Compares the measures of two rankings for the same queries."""
    one, other = (
        {name: found["mean"] for name, found in side.as_dict()["measures"].items()} for side in (a, b)
    )
    return {
        "n": len(collection.queries),
        "a": one,
        "b": other,
        "difference": {name: _mean_difference(a.value_Q[name], b.value_Q[name]) for name in a.value_Q},
    }


def _mean_difference(a_N: np.ndarray, b_N: np.ndarray) -> MeanDifference:
    found = paired_bootstrap(100 * np.asarray(a_N, dtype=float), 100 * np.asarray(b_N, dtype=float))
    points, low, high = (round(value, 3) for value in found[:3])
    return {"points": points, "low": low, "high": high, "p": found.p}


def lines(compared: ComparedJson | ComparedRankingsJson, a: str, b: str) -> list[str]:
    """The comparison as lines for a terminal; `a` and `b` are the names of the two models."""
    shown = [f"a = {a}, b = {b}; {counted(compared['n'], 'question')}; scores in percent"]
    differences: Mapping[str, MeanDifference | PairedDifference] = compared["difference"]
    for name, test in differences.items():
        shown.append(
            f"{name:<11}  a {compared['a'][name]:5.1f}  b {compared['b'][name]:5.1f}  "
            f"a - b {test['points']:+5.1f} ({test['low']:+.1f} to {test['high']:+.1f}), p {p_value(test['p'])}"
        )
    return shown


def disagreement_lines(compared: ComparedJson) -> list[str]:
    """The questions that only one model answers right, as lines for a terminal."""
    shown = []
    for side, found in (("a", compared["only_a"]), ("b", compared["only_b"])):
        if found:
            shown.append(f"only {side} is right:")
        shown += [f"    {one['question']}  a: {one['a']!r}, b: {one['b']!r}" for one in found]
    return shown
