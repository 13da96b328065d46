"""The tables as text: lines for a terminal, and Markdown."""

import numpy as np

from realm.compare.results import (
    Answered,
    FactsJson,
    Found,
    MadeBy,
    Retrieved,
    RowJson,
    StartJson,
    TableJson,
    measured_facts,
)
from realm.compare.rows import label_of
from realm.qa.scoring.metrics import RECALL_AT
from realm.qa.scoring.significance import PairedDifference
from realm.qa.scoring.tables import aligned, difference, fitting
from realm.systems import knn_lm

DASH = "-"
WITH_INTERVAL = "(95% interval)"
FOUND = (
    "first 1 / 5 / 20 / 100",
    "reciprocal rank",
    "first 1 / 5 / 20 / 100, answerable",
    "reciprocal rank, answerable",
)
"""Headings of columns: share of questions with an answer in the first 1, 5, 20 and 100 passages, and mean reciprocal rank; for
all questions and for answerable questions."""
EACH_SEED = "first 5, each seed"
LESS = "REALM minus row"
"""Heading of a column with differences of exact match."""
LESS_FOUND = f"{LESS}, first 5"
"""Heading of a column with differences of recall@5."""


def tables(report: TableJson) -> list[list[list[str]]]:
    """The tables as rows of cells; the first row of each table is the heading.

    The order is: answers and passages for each test, costs, starts for each test, starts on masked facts, and kNN-LM.
    """
    found, rows, starts = [], report["rows"], report["starts"]
    tests = list(next(iter(starts.values()))["tests"])
    if rows:
        of_test = (_answers_table, _parts_table, _passages_table)
        found += [one(rows, test) for test in tests for one in of_test]
        found.append(_costs_table(rows))
    found += [_starts_table(starts, test) for test in tests]
    if facts := measured_facts(report):
        found.append(_facts_table(facts))
    if report["masked_facts"] is not None:
        found.append(knn_lm.table(report["masked_facts"]))
    return found


def _answers_table(rows: dict[str, RowJson], test: str) -> list[list[str]]:
    n = next(iter(rows.values()))["tests"][test]["all"]["n"]
    table = [[f"{test}, {n:,} questions", f"exact {WITH_INTERVAL}", f"F1 {WITH_INTERVAL}", LESS]]
    for row in rows.values():
        one = row["tests"][test]
        table.append([row["label"], *_exact_and_f1(one["all"]), _difference(one["less"])])
    return table


def _parts_table(rows: dict[str, RowJson], test: str) -> list[list[str]]:
    parts = next(iter(rows.values()))["tests"][test]
    n = parts["answerable"]["n"]
    heading = [
        f"{test}, {n:,} answerable questions",
        f"exact {WITH_INTERVAL}",
        f"F1 {WITH_INTERVAL}",
        LESS,
        f"exact, seen answers ({parts['seen']['n']:,})",
        f"exact, unseen answers ({parts['unseen']['n']:,})",
    ]
    table = [heading]
    for row in rows.values():
        one = row["tests"][test]
        known = [f"{one[part]['em']:.1f}" if one[part]["n"] else DASH for part in ("seen", "unseen")]
        less = _difference(one.get("less_answerable"))
        table.append([row["label"], *_exact_and_f1(one["answerable"]), less, *known])
    return table


def _exact_and_f1(one: Answered) -> list[str]:
    if not one["n"]:
        return [DASH, DASH]
    return [
        f"{value:.1f} ({low:.1f}-{high:.1f})"
        for value, (low, high) in ((one["em"], one["em_ci95"]), (one["f1"], one["f1_ci95"]))
    ]


def _passages_table(rows: dict[str, RowJson], test: str) -> list[list[str]]:
    table = [[f"{test}, % of questions", *FOUND]]
    for row in rows.values():
        found = row["tests"][test]["retrieved"]
        table.append([row["label"], *([DASH] * len(FOUND) if found is None else _recalls(found))])
    return table


def _costs_table(rows: dict[str, RowJson]) -> list[list[str]]:
    table = [["costs", "million parameters", "training, seconds", "passages read", "ms per question"]]
    for row in rows.values():
        ms = np.mean([one["ms"] for one in row["tests"].values()])
        seconds = DASH if row["seconds"] is None else f"{row['seconds']:,.0f}"
        read_ = f"{row['read']:g}"
        table.append([row["label"], f"{row['parameters'] / 1e6:.1f}", seconds, read_, f"{ms:.1f}"])
    return table


def _starts_table(starts: dict[str, StartJson], test: str) -> list[list[str]]:
    table = [[f"{test}, before training on questions, %", *FOUND, EACH_SEED, LESS_FOUND]]
    for name, start in starts.items():
        less, found = _difference(start["less"].get(test)), start["tests"][test]
        table.append([label_of(name), *_recalls(found), _each_seed(found["all"]), less])
    return table


def _facts_table(measured: dict[str, FactsJson]) -> list[list[str]]:
    n = next(iter(measured.values()))["retrieved"]["n"]
    table = [[f"{n:,} masked facts, before training on questions, %", *FOUND[:2], EACH_SEED, LESS_FOUND]]
    for name, facts in measured.items():
        less = _difference(facts["less"])
        table.append([label_of(name), *_recall(facts["retrieved"]), _each_seed(facts["retrieved"]), less])
    return table


def _difference(less: PairedDifference | None) -> str:
    return DASH if less is None else difference(less)


def _each_seed(one: Retrieved) -> str:
    """Recall@5 of each seed; a dash if the seeds do not differ."""
    return " / ".join(f"{share:.1f}" for share in differing(one["recall_5_by_seed"])) or DASH


def differing(values: list[float]) -> list[float]:
    """The values of all seeds; an empty list if there is one seed, or the value does not depend on the seed."""
    return values if len(set(values)) > 1 else []


def _recalls(found: Found) -> list[str]:
    """Cells of the columns `FOUND`."""
    return [*_recall(found["all"]), *_recall(found["answerable"])]


def _recall(one: Retrieved) -> list[str]:
    shares = " / ".join(f"{one['recall'][str(k)]:.1f}" for k in RECALL_AT)
    return [shares, f"{one['mrr']:.1f}"] if one["n"] else [DASH, DASH]


def lines(report: TableJson, width: int = 0) -> list[str]:
    """The tables, and what the numbers depend on, as lines for a terminal with `width` columns (0: unknown).

    The last columns of a wider table are left out, and a line below the tables reports it.
    """
    found, left_out = [], False
    for table in tables(report):
        shown = fitting(table, width)
        left_out |= len(shown[0]) < len(table[0])
        found += [*aligned(shown), ""]
    if left_out:
        found += ["The terminal is too narrow for all columns.", ""]
    return [*found, *_notes(report), *made_lines(report["made_by"])]


def markdown(report: TableJson) -> str:
    """The tables, and what the numbers depend on, in Markdown."""
    parts = []
    for heading, *body in tables(report):
        rule = ["---"] * len(heading)
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in (heading, rule, *body)))
    parts.append("\n".join(f"- {line}" for line in (*_notes(report), *made_lines(report["made_by"]))))
    return "\n\n".join(parts) + "\n"


def _notes(report: TableJson) -> list[str]:
    """A line about the rows that are not compared with REALM."""
    other: dict[str, list[str]] = {}
    for name, start in report["starts"].items():
        if (beside := start.get("beside", "realm")) != "realm":
            other.setdefault(beside, []).append(label_of(name))
    return [
        f'"{LESS}" in these rows: {label_of(beside)} minus row: {", ".join(labels)}'
        for beside, labels in other.items()
    ]


def version_line(version: str, commit: str | None) -> str:
    """A version of realm with its commit, if it has one."""
    return version if commit is None else f"{version}, commit {commit}"


def made_lines(by: MadeBy) -> list[str]:
    """Lines with version, settings and data on which the numbers depend."""
    version = version_line(by["realm"], by["commit"])
    stages = "; ".join(one for one in by.get("stages_by", []) if one != version)
    seeds = ", ".join(map(str, by["seeds"]))
    sets = (
        f"{key}: {one['n']:,} questions, digest {one['digest']}"
        + (f" ({one['name']})" if one["name"] else "")
        for key, one in by["questions"].items()
    )
    return [
        f"realm {version}",
        *([f"stages by realm {stages}"] if stages else []),
        f"preset {by['preset']}, seeds {seeds}; number of seeds with training on questions: {by['answer_seeds']}",
        f"commands that could run at the same time: {by.get('jobs', 1)}",
        f"{by['passages']:,} passages, fingerprint {by['corpus']}",
        *(f"{name}, fingerprint {fingerprint}" for name, fingerprint in by.get("other_corpora", {}).items()),
        *sets,
        f"training and dev questions left out because they are also in a test: {by['dropped']:,}",
    ]
