"""Compares a table with the report of an earlier run, and the answers of two rows with each other."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from realm.compare.plan import TablePlan
from realm.compare.results import Answered, TableJson, measured_facts, outcomes
from realm.errors import InputError
from realm.files import read_json
from realm.measures.paired import DISAGREEMENTS
from realm.progress import counted
from realm.qa.predictions import in_order, read_predictions
from realm.qa.question_files import read_questions
from realm.qa.scoring.significance import paired_difference, percent
from realm.qa.scoring.tables import difference
from realm.systems.knn_lm import PREDICTED_BY

PARTS = ("all", "answerable", "seen", "unseen")
"""Parts of the questions of a test, as in `Tested`."""
NATS = ", nats"
"""End of the names of losses; all other scores are percentages."""


class Deviation(TypedDict):
    """A score that differs from the expected score by more than the tolerance."""

    score: str
    expected: float
    found: float | None
    """None if the report lacks the score."""


def expected_report(file: str) -> TableJson:
    """The report of an earlier run.

    Raises:
        InputError: the file does not exist, or is not such a report.
    """
    if not Path(file).exists():
        raise InputError(f"{file} does not exist")
    try:
        report = cast(TableJson, read_json(file))
        scores = scores_of(report)
        if not scores or not all(map(math.isfinite, scores.values())):
            raise ValueError("no scores")
        return report
    except (KeyError, TypeError, AttributeError, ValueError):
        raise InputError(
            f"{file} is not a report of a table made by this version: give a table1.json or table2.json"
        ) from None


def deviations(
    report: TableJson, expected: TableJson, tolerance: float, partial: bool = False
) -> list[Deviation]:
    """Scores that differ by more than `tolerance` points, and expected scores that the report lacks.

    A loss may differ by `tolerance` percent of the expected loss. With `partial`, for a report that has only some rows of the
    table, scores that the report lacks are not compared.

    Raises:
        InputError: `partial`, and the report has none of the expected scores.
    """
    # Which questions are answerable depends on the rankings of all rows and starts.
    same = all(report[part].keys() == expected[part].keys() for part in ("rows", "starts"))
    parts = PARTS if same else tuple(part for part in PARTS if part != "answerable")
    found, wanted = scores_of(report, parts), scores_of(expected, parts)
    if partial:
        wanted = {name: value for name, value in wanted.items() if name in found}
        if not wanted:
            raise InputError("the report of --check has no score of the rows and tests of this table")
    return [
        {"score": name, "expected": value, "found": found.get(name)}
        for name, value in wanted.items()
        if name not in found
        or abs(found[name] - value) > tolerance * (value / 100 if name.endswith(NATS) else 1.0)
    ]


def scores_of(report: TableJson, parts: Sequence[str] = PARTS) -> dict[str, float]:
    """Exact match, F1, recall and reciprocal rank on these parts of the questions, and the scores on masked facts."""
    scores: dict[str, float] = {}
    for name, row in report["rows"].items():
        for test, one in row["tests"].items():
            for part in parts:
                answered = cast(Mapping[str, Answered], one)[part]
                scores |= _named(
                    f"{name}, {test}", part, {"exact match": answered["em"], "F1": answered["f1"]}
                )
            scores |= _passage_scores(f"{name}, {test}", one["retrieved"] or {}, parts)
    for name, start in report["starts"].items():
        for test, found in start["tests"].items():
            scores |= _passage_scores(f"start {name}, {test}", found, parts)
    for name, facts in measured_facts(report).items():
        scores |= _passage_scores(f"start {name}, masked facts", {"all": facts["retrieved"]}, parts)
    if predicted := report.get("masked_facts"):
        by = {how: cast(Mapping[str, Any], predicted)[how] for how in PREDICTED_BY if how in predicted}
        for how, one in by.items():
            scores[f"masked facts, {how}, spans"] = one["span_accuracy"]
            for part in ("nats", "nats_found", "nats_missed"):
                if (nats := one.get(part)) is not None:
                    scores[f"masked facts, {how}{part.removeprefix('nats').replace('_', ', ')}{NATS}"] = nats
    return scores


def _passage_scores(name: str, found: Mapping[str, Any], parts: Sequence[str]) -> dict[str, float]:
    """The scores of passages. `found` has a `Retrieved` for each part of the questions that was measured."""
    scores: dict[str, float] = {}
    for part in (part for part in parts if part in found):
        recall = {f"first {k}": share for k, share in found[part]["recall"].items()}
        scores |= _named(name, part, recall | {"reciprocal rank": found[part]["mrr"]})
    return scores


def _named(name: str, part: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Scores with names such as "realm, NQ, F1", for all questions, and "realm, NQ, answerable, F1"."""
    of = name if part == "all" else f"{name}, {part}"
    return {f"{of}, {measure}": score for measure, score in scores.items()}


def disagreements(plan: TablePlan, one: str, other: str) -> list[str]:
    """Lines with the difference in exact match, and the questions that one row answers right and the other row wrong.

    The difference is tested over all seeds with answers. The questions are from the first seed: at most `DISAGREEMENTS` for
    each test and each of the two rows.

    Raises:
        InputError: a row does not exist, has no answers yet, or has answers to other questions.
    """
    shown = []
    seeds = plan.config.seeds[: max(1, plan.config.answer_seeds)]
    for name in (one, other):
        if name not in plan.table:
            raise InputError(f"there is no row {name!r}: rows are {', '.join(plan.table)}")
    for name in (one, other):
        files = {test: [plan.report(name, seed, test) for seed in seeds] for test in plan.tests()}
        if missing := [test for test, reports in files.items() if not all(map(Path.is_file, reports))]:
            raise InputError(
                f"{plan.folder} has no answers of the row {name} to {', '.join(missing)}: run the command without --diff first"
            )
    for test, file in plan.tests().items():
        questions = read_questions(file)
        correct = {
            name: outcomes([plan.report(name, seed, test) for seed in seeds], "correct", questions)
            for name in (one, other)
        }
        answers = {}
        for name in (one, other):
            predictions = plan.predictions(name, seeds[0], test)
            found = in_order(read_predictions(predictions), questions, str(predictions))
            answers[name] = [prediction.answer for prediction in found]
        tested = difference(paired_difference(correct[one], correct[other], 1))
        em = [f"{percent(correct[name].mean()):.1f} % ({plan.table[name].label})" for name in (one, other)]
        shown.append(f"{test}: exact match {em[0]} and {em[1]}, difference in points {tested}")
        for right, wrong in ((one, other), (other, one)):
            places = np.flatnonzero(correct[right][0] & ~correct[wrong][0])
            shown.append(
                f"{test}: {plan.table[right].label} is right and {plan.table[wrong].label} is wrong for "
                f"{counted(len(places), 'question')}"
            )
            for place in places[:DISAGREEMENTS]:
                shown.append(
                    f"    {questions[place].question}  {answers[right][place]!r}, not {answers[wrong][place]!r}"
                )
    return shown
