"""WORKSPACE/report.json: its content, its text for a terminal, and the test of whether a workspace is up to date.

Recall is the percentage of queries with a positive among the top 1, 5 and 20 passages. This file does not import torch.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from realm import __version__
from realm.documents.reading import stamp
from realm.errors import DamagedError
from realm.files import read_json
from realm.folders import KB
from realm.qa.scoring.metrics import Recall
from realm.qa.scoring.significance import PairedDifference, p_value
from realm.qa.scoring.tables import RECALL_HEAD, aligned, recall_cell
from realm.store.tables.table import PASSAGES, newest_version
from realm.workspace.settings import FitConfig
from realm.workspace.sources import check_sources, source_names, watched_documents

MODEL = "model"
REPORT = "report.json"
TESTS = {"masked_facts": "masked facts", "made_questions": "made questions"}
ROWS = {
    "bm25": "BM25 (words)",
    "start": "start (vectors)",
    "start_hybrid": "start + BM25",
    "adapted": "adapted (vectors)",
    "adapted_hybrid": "adapted + BM25",
}
"""Key of a recall in a report -> its row in the table."""


class TestJson(TypedDict):
    """Recall of BM25, of the start model and of the adapted model on one kind of queries.

    "hybrid" is the ranking by the vectors of the model and BM25 together, in which answers are found.
    """

    n: int
    bm25: Recall
    start: Recall
    start_hybrid: Recall
    adapted: Recall | None
    """None if no model was adapted."""
    adapted_hybrid: Recall | None
    difference: PairedDifference | None


class AdaptationJson(TypedDict):
    """The last adaptation and its outcome."""

    minutes: float
    """Time limit of the adaptation."""
    kept: bool
    """Whether the workspace uses the adapted model; otherwise it uses the start model."""
    why: str
    """Reason for `kept`."""
    changed: int
    """Number of passages that were added or removed since the adaptation."""


class ExampleJson(TypedDict):
    """A question made from the documents, and the answer of the workspace."""

    question: str
    expected: str
    """The answer for which the question was made."""
    answer: str | None
    """None if the model has no span reader."""
    probability: float | None
    found: bool | None
    """Whether `probability` reaches the threshold; an answer with a lower probability is a guess."""
    title: str
    evidence: str
    """The part of the passage around the answer, with the answer in [[ ]]."""


class FitJson(TypedDict):
    """The content of report.json and the output of `realm fit --json`."""

    version: str
    """Version of realm that made the workspace."""
    settings: dict[str, Any]
    """The fields of `FitConfig`."""
    sources: list[str]
    stamp: str
    """Digest of the names, sizes and times of the sources' files when they were last read; empty until the fit is complete."""
    documents: int
    """Number of documents in the knowledge base, without merged documents and those without passages."""
    passages: int
    left_out: dict[str, int]
    """Reason -> number of files, lines and rows that were not read for this reason."""
    kb_version: int
    """Version of the passages at the end of the fit; 0 until the fit is complete."""
    seconds: dict[str, float]
    """Step of the last run -> duration of this step."""
    tests: dict[str, TestJson]
    """Kind of queries -> results; empty if no queries can be made."""
    adaptation: AdaptationJson | None
    """None if no fit has had a time limit above 0 yet."""
    examples: NotRequired[list[ExampleJson]]
    """Present when the fit is complete."""


def read_report(workspace: Path) -> FitJson | None:
    """The report of the last fit; None if the workspace has no report yet."""
    if not (workspace / REPORT).is_file():
        return None
    found = read_json(workspace / REPORT)
    if not isinstance(found, dict) or not FitJson.__required_keys__ <= found.keys():
        raise DamagedError(f"{workspace / REPORT} is damaged: remove it, and repeat `realm fit`")
    return cast(FitJson, found)


def up_to_date(
    workspace: Path, sources: Sequence[str], config: FitConfig, dropped: Sequence[str] = ()
) -> FitJson | None:
    """The report if no file, setting or passage has changed since the report was written, and nothing of the dropped sources is
    there; else None.

    Raises:
        InputError: a source is dropped too, or an earlier source is missing.
    """
    report = read_report(workspace)
    sources, dropped = source_names(sources), source_names(dropped)
    check_sources(workspace, sources, dropped, report["sources"] if report is not None else ())
    if report is None or "examples" not in report or watched_documents(workspace, dropped):
        return None
    adapted = report["adaptation"]["minutes"] if report["adaptation"] is not None else 0.0
    same = (
        report["version"] == __version__
        and report["settings"] == {**dataclasses.asdict(config), "minutes": report["settings"]["minutes"]}
        and config.minutes <= adapted
        and report["sources"] == sources
        and report["kb_version"] == newest_version(workspace / KB / PASSAGES)
        and (workspace / MODEL).is_dir()
        and report["stamp"] == stamp(sources, (workspace,))
    )
    return report if same else None


def lines(report: FitJson) -> list[str]:
    """The report for a terminal: a table of recall, the outcome of the adaptation, and the examples."""
    text: list[str] = []
    if report["tests"]:
        text += [*_table(report["tests"]), ""]
    if report["adaptation"] is not None:
        text += [*_differences(report["tests"]), *_verdict(report["adaptation"]), ""]
    if examples := report.get("examples"):
        text += ["Some made questions, first those that are answered as expected:", ""]
        text += [line for example in examples for line in _example(example)]
    return text[:-1] if text and not text[-1] else text


def _table(tests: dict[str, TestJson]) -> list[str]:
    """Recall as a table: a row for BM25 and for each model, a group of columns for each kind of queries."""
    heads = [f"{test['n']:,} {TESTS[name]}" for name, test in tests.items()]
    rows = [["", *heads], ["% found in the top", *[RECALL_HEAD] * len(tests)]]
    for key, label in ROWS.items():
        found: list[Any] = [test.get(key) for test in tests.values()]
        if None not in found:
            rows.append([label, *map(recall_cell, found)])
    return aligned(rows)


def _differences(tests: dict[str, TestJson]) -> list[str]:
    return [
        f"adapted minus start, {TESTS[name]}: {d['points']:+.1f} points in the top 5 "
        f"(95% interval {d['low']:+.1f} to {d['high']:+.1f}; p {p_value(d['p'])})"
        for name, test in tests.items()
        if (d := test["difference"]) is not None
    ]


def _verdict(adaptation: AdaptationJson) -> list[str]:
    text = [
        f"the workspace uses the {'adapted' if adaptation['kept'] else 'start'} model: {adaptation['why']}"
    ]
    if adaptation["changed"]:
        text.append(f"({adaptation['changed']:,} passages were added or removed since this comparison)")
    return text


def _example(example: ExampleJson) -> list[str]:
    answer = "(the model has no span reader: passages only)"
    if example["answer"] is not None:
        guess = "" if example["found"] else "a guess, "
        answer = f"{example['answer']}  ({guess}probability {example['probability']:.2f})"
    return [
        f"Q  {example['question']}  (made from: {example['expected']})",
        f"A  {answer}",
        f"   {example['title']}: {example['evidence']}",
        "",
    ]
