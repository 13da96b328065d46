"""Results of a table: scores of every row on every test, paired tests, costs; as lines, Markdown and JSON.

All numbers come from files that the commands of the stages have written. Shares are in percent of questions.

Axis letters: S seeds, N questions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from realm.compare.plan import Plan
from realm.files import read_json
from realm.model.manifest import read_manifest
from realm.model.tensor_files import load_tensors
from realm.qa.metrics import RECALL_AT, is_correct, mean_reciprocal_rank, normalise_answer, recall_at
from realm.qa.predictions import read_predictions
from realm.qa.question_files import Question, read_questions
from realm.qa.significance import PairedDifference, paired_difference, percent, wilson_interval
from realm.stages.tables import aligned, difference
from realm.systems import knn_lm
from realm.systems.knn_lm import KnnJson
from realm.systems.system import WEIGHTS, is_system, read_system

DASH = "-"
FOUND = "in the first 1 / 5 / 20 / 100"
"""Heading of shares of questions with an answer among the first passages."""


class Answered(TypedDict):
    """Answers of a row to some questions: exact match with its 95 % interval, and token F1."""

    n: int
    em: float
    em_ci95: list[float]
    f1: float


class Retrieved(TypedDict):
    """Passages of a system for some questions: answer among the first k, and mean reciprocal rank."""

    n: int
    recall: dict[str, float]
    mrr: float


class Tested(TypedDict):
    """A row on one test."""

    all: Answered
    answerable: Answered
    """Only questions for which a row of the table found an answer in its first 100 passages."""
    seen: Answered
    """Only questions with an answer that is an answer of a training question."""
    unseen: Answered
    """All questions that are not in `seen`."""
    retrieved: Retrieved | None
    """None for a system without passages."""
    less: PairedDifference | None
    """Exact match of the first row named realm minus this row; None for that row, and in a table without it."""
    ms: float
    """Milliseconds per question."""


class RowJson(TypedDict):
    """A row of the table."""

    label: str
    parameters: int
    """Numbers in the networks that answer a question."""
    seconds: float
    """Training time of the system and of all models that it started from."""
    read: int | None
    """Passages read per question; None if the settings have no such number."""
    tests: dict[str, Tested]


class StartJson(TypedDict):
    """Retrieval of a start, before any question was seen."""

    tests: dict[str, Retrieved]
    less: dict[str, PairedDifference]
    """Test -> share found in the first 5, of the start realm minus this start."""


class TableJson(TypedDict):
    """Content of report.json."""

    made_by: dict[str, Any]
    """Version, preset, settings and digests of the data."""
    rows: dict[str, RowJson]
    starts: dict[str, StartJson]
    masked_facts: KnnJson | None
    """kNN-LM and REALM on masked facts; None without REALM."""


def read(plan: Plan, made_by: dict[str, Any]) -> TableJson:
    """The results of a table whose stages are done."""
    tests = {name: read_questions(file) for name, file in plan.tests().items()}
    return {
        "made_by": made_by,
        "rows": _rows(plan, tests),
        "starts": _starts(plan, tests),
        "masked_facts": read_json(plan.datastore / "report.json") if plan.predicts_spans else None,
    }


# -- rows -----------------------------------------------------------------------------------------------------------


def _outcomes(plan: Plan, name: str, test: str, seeds: Sequence[int], key: str) -> np.ndarray:
    """A value of each question -> [S, N]."""
    reports = [read_json(plan.report(name, seed, test)) for seed in seeds]
    return np.array([[one[key] for one in report["outcomes"]] for report in reports])


def _rows(plan: Plan, tests: dict[str, list[Question]]) -> dict[str, RowJson]:
    seeds, names = plan.config.seeds[: plan.config.answer_seeds], list(plan.rows())
    if not seeds:
        return {}
    trained = {
        normalise_answer(answer) for one in read_questions(plan.questions("train")) for answer in one.answers
    }
    rows: dict[str, RowJson] = {}
    columns = {test: _column(plan, names, test, seeds) for test in tests}
    for name in names:
        row, first = plan.table[name], plan.row_model(name, seeds[0])
        tested: dict[str, Tested] = {}
        for test, questions in tests.items():
            correct, f1, rank = (columns[test][key] for key in ("correct", "f1", "rank"))
            found_N = np.any([rank_SN[0] > 0 for rank_SN in rank.values()], axis=0)
            seen_N = np.array([_is_seen(question, trained) for question in questions])
            every_N = np.ones(len(questions), dtype=bool)
            score = {
                part: _answered(correct[name], f1[name], chosen_N)
                for part, chosen_N in (
                    ("all", every_N), ("answerable", found_N), ("seen", seen_N), ("unseen", ~seen_N),
                )
            }  # fmt: skip
            times = [one.ms for one in read_predictions(plan.predictions(name, seeds[0], test))]
            tested[test] = {
                "all": score["all"],
                "answerable": score["answerable"],
                "seen": score["seen"],
                "unseen": score["unseen"],
                "retrieved": _retrieved(rank[name]) if rank[name].any() else None,
                "less": None
                if name == "realm" or "realm" not in names
                else paired_difference(correct["realm"], correct[name], 1),
                "ms": round(float(np.mean(times)), 1),
            }
        rows[name] = {
            "label": row.label,
            "parameters": _parameters(first, words=row.method == "bm25" or "method=bm25" in row.settings),
            "seconds": round(sum(record.get("seconds", 0.0) for record in _records(plan, name, seeds[0])), 1),
            "read": _records(plan, name, seeds[0])[-1].get("read"),
            "tests": tested,
        }
    return rows


def _column(
    plan: Plan, names: Sequence[str], test: str, seeds: Sequence[int]
) -> dict[str, dict[str, np.ndarray]]:
    """Key -> row -> the values of one test [S, N]."""
    keys = ("correct", "f1", "rank")
    return {key: {name: _outcomes(plan, name, test, seeds, key) for name in names} for key in keys}


def _is_seen(question: Question, trained: set[str]) -> bool:
    if question.regex:
        return any(is_correct(answer, question) for answer in trained)
    return any(normalise_answer(answer) in trained for answer in question.answers)


def _answered(correct_SN: np.ndarray, f1_SN: np.ndarray, chosen_N: np.ndarray) -> Answered:
    """Means over seeds and the chosen questions. The interval is that of as many questions, whatever the number of seeds."""
    n = int(chosen_N.sum())
    if not n:
        return {"n": 0, "em": 0.0, "em_ci95": [0.0, 100.0], "f1": 0.0}
    share = float(correct_SN[:, chosen_N].mean())
    low, high = wilson_interval(round(share * n), n)
    return {
        "n": n,
        "em": percent(share),
        "em_ci95": [percent(low), percent(high)],
        "f1": percent(float(f1_SN[:, chosen_N].mean())),
    }


def _retrieved(rank_SN: np.ndarray) -> Retrieved:
    return {
        "n": rank_SN.shape[1],
        "recall": {
            str(k): round(float(np.mean([recall_at(rank_N, k) for rank_N in rank_SN])), 2) for k in RECALL_AT
        },
        "mrr": percent(float(np.mean([mean_reciprocal_rank(rank_N) for rank_N in rank_SN]))),
    }


def _records(plan: Plan, name: str, seed: int) -> list[dict[str, Any]]:
    """The stages that led to a row's system, oldest first."""
    folder, row = plan.row_model(name, seed), plan.table[name]
    if is_system(folder):
        return [*read_manifest(plan.start_model(row.start, seed))["stages"], *read_system(folder)["stages"]]
    return list(read_manifest(folder)["stages"])


def _parameters(folder: Path, words: bool) -> int:
    """Numbers in the networks that answer; `words`: passages are found by words, without the embedder."""
    if is_system(folder):
        files = [folder / WEIGHTS]
    else:
        files = [folder / "span_reader.safetensors", *([] if words else [folder / "embedder.safetensors"])]
    return sum(value.numel() for file in files for value in load_tensors(file).values())


# -- starts ---------------------------------------------------------------------------------------------------------


def _starts(plan: Plan, tests: dict[str, list[Question]]) -> dict[str, StartJson]:
    ranks = {
        start: {
            test: _outcomes(plan, f"retrieval-{start}", test, plan.config.seeds, "rank") for test in tests
        }
        for start in plan.starts()
    }
    return {
        start: {
            "tests": {test: _retrieved(rank_SN) for test, rank_SN in by_test.items()},
            "less": {
                test: paired_difference(ranks["realm"][test], rank_SN)
                for test, rank_SN in by_test.items()
                if "realm" in ranks and start != "realm"
            },
        }
        for start, by_test in ranks.items()
    }


# -- tables ---------------------------------------------------------------------------------------------------------


def tables(report: TableJson) -> list[list[list[str]]]:
    """The tables as rows of cells, the first row being the heading: answers and passages by test, costs, starts by test."""
    found, rows, starts = [], report["rows"], report["starts"]
    tests = list(next(iter(starts.values()))["tests"])
    if rows:
        found += [one(rows, test) for test in tests for one in (_answers_table, _passages_table)]
        found.append(_costs_table(rows))
    found += [_starts_table(starts, test) for test in tests]
    if report["masked_facts"] is not None:
        found.append(knn_lm.table(report["masked_facts"]))
    return found


def _answers_table(rows: dict[str, RowJson], test: str) -> list[list[str]]:
    n = next(iter(rows.values()))["tests"][test]["all"]["n"]
    table = [[f"{test}, {n:,} questions", "exact, % (95% interval)", "F1", "REALM minus row"]]
    for row in rows.values():
        one = row["tests"][test]
        low, high = one["all"]["em_ci95"]
        exact = f"{one['all']['em']:.1f} ({low:.1f}-{high:.1f})"
        less = DASH if one["less"] is None else difference(one["less"])
        table.append([row["label"], exact, f"{one['all']['f1']:.1f}", less])
    return table


def _passages_table(rows: dict[str, RowJson], test: str) -> list[list[str]]:
    table = [[f"{test}, % of questions", FOUND, "exact if answerable", "if seen", "unseen"]]
    for row in rows.values():
        one = row["tests"][test]
        found = DASH if one["retrieved"] is None else _recalls(one["retrieved"])
        exact = [f"{one[part]['em']:.1f}" for part in ("answerable", "seen", "unseen")]
        table.append([row["label"], found, *exact])
    return table


def _costs_table(rows: dict[str, RowJson]) -> list[list[str]]:
    table = [["costs", "million numbers", "training, minutes", "passages read", "ms per question"]]
    for row in rows.values():
        ms = np.mean([one["ms"] for one in row["tests"].values()])
        read_ = DASH if row["read"] is None else str(row["read"])
        table.append(
            [row["label"], f"{row['parameters'] / 1e6:.1f}", f"{row['seconds'] / 60:.1f}", read_, f"{ms:.1f}"]
        )
    return table


def _starts_table(starts: dict[str, StartJson], test: str) -> list[list[str]]:
    table = [[f"{test}, before any question, %", FOUND, "REALM minus row, first 5"]]
    for name, start in starts.items():
        less = DASH if test not in start["less"] else difference(start["less"][test])
        table.append([name, _recalls(start["tests"][test]), less])
    return table


def _recalls(found: Retrieved) -> str:
    return " / ".join(f"{found['recall'][str(k)]:.1f}" for k in RECALL_AT)


def lines(report: TableJson) -> list[str]:
    """The tables for a terminal."""
    return [line for table in tables(report) for line in (*aligned(table), "")]


def markdown(report: TableJson) -> str:
    """The tables in Markdown, and what made them."""
    parts = []
    for heading, *body in tables(report):
        rule = ["---"] * len(heading)
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in (heading, rule, *body)))
    made = "; ".join(f"{key} {value}" for key, value in report["made_by"].items())
    return "\n\n".join(parts) + f"\n\nMade by: {made}\n"


# -- comparing ------------------------------------------------------------------------------------------------------


class Deviation(TypedDict):
    """A score that differs from the expected one by more than the tolerance."""

    score: str
    expected: float
    found: float


def deviations(report: TableJson, expected: TableJson, tolerance: float) -> list[Deviation]:
    """Exact match of rows, and share found in the first 5 of starts, that differ by more than `tolerance` points.

    A score that only the expected report has counts as 0.
    """
    found, wanted = _scores(report), _scores(expected)
    return [
        {"score": name, "expected": value, "found": found.get(name, 0.0)}
        for name, value in wanted.items()
        if abs(found.get(name, 0.0) - value) > tolerance
    ]


def _scores(report: TableJson) -> dict[str, float]:
    scores = {
        f"{name}, {test}, exact match": one["all"]["em"]
        for name, row in report["rows"].items()
        for test, one in row["tests"].items()
    }
    scores |= {
        f"start {name}, {test}, first 5": one["recall"]["5"]
        for name, start in report["starts"].items()
        for test, one in start["tests"].items()
    }
    return scores


def disagreements(plan: Plan, one: str, other: str, most: int = 20) -> list[str]:
    """Lines with questions that one row answers right and the other wrong, `most` for each direction and test."""
    shown = []
    seed = plan.config.seeds[0]
    for test, file in plan.tests().items():
        questions = read_questions(file)
        outcome = {name: _outcomes(plan, name, test, [seed], "correct")[0] for name in (one, other)}
        answer = {
            name: {
                prediction.id: prediction.answer
                for prediction in read_predictions(plan.predictions(name, seed, test))
            }
            for name in (one, other)
        }
        for right, wrong in ((one, other), (other, one)):
            places = np.flatnonzero(outcome[right] & ~outcome[wrong])
            shown.append(
                f"{test}: {plan.table[right].label} is right, {plan.table[wrong].label} is wrong: {len(places)}"
            )
            for place in places[:most]:
                question = questions[place]
                shown.append(
                    f"    {question.question}  {answer[right][question.id]!r}, not {answer[wrong][question.id]!r}"
                )
    return shown
