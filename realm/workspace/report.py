"""WORKSPACE/report.json: its content, its text for a terminal, and whether a fit has anything left to do. Without torch.

Recall is the percentage of queries with a positive among the top 1, 5 and 20 passages.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from realm import __version__
from realm.documents.readers import stamp
from realm.files import read_json
from realm.store.tables import PASSAGES, newest_version
from realm.workspace.settings import FitConfig

KB = "kb"
MODEL = "model"
REPORT = "report.json"
TESTS = {"masked_facts": "masked facts", "made_questions": "made questions"}
Recall = TypedDict("Recall", {"1": float, "5": float, "20": float})


class DifferenceJson(TypedDict):
    """Recall at 5 of the adapted model minus that of the start: points, 95 % interval, and McNemar's counts and p."""

    points: float
    low: float
    high: float
    only_adapted: int
    only_start: int
    p: float


class TestJson(TypedDict):
    """Recall of BM25, the start and the adapted model on one kind of queries."""

    n: int
    bm25: Recall
    start: Recall
    adapted: Recall | None
    """None if nothing was adapted."""
    difference: DifferenceJson | None


class AdaptationJson(TypedDict):
    """The last adaptation and its outcome."""

    minutes: float
    """Time limit."""
    kept: bool
    """True: the adapted model answers; False: the start model does."""
    why: str
    """Reason for `kept`."""
    changed: int
    """Passages added or removed since then."""


class ExampleJson(TypedDict):
    """A question made from the documents, and the answer of the workspace."""

    question: str
    expected: str
    """The answer that the question was made for."""
    answer: str | None
    """None if the model has no span reader."""
    probability: float | None
    found: bool | None
    """Whether `probability` reaches the threshold; an answer below the threshold is a guess."""
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
    passages: int
    left_out: dict[str, int]
    """Number of files, lines and rows that were not read, per reason."""
    kb_version: int
    """Version of the passages at the end of the fit; 0 until then."""
    seconds: dict[str, float]
    """Duration of each step of the last run."""
    tests: dict[str, TestJson]
    """Per kind of queries; empty if no queries can be made."""
    adaptation: AdaptationJson | None
    """None if no fit has asked for an adaptation yet."""
    examples: NotRequired[list[ExampleJson]]
    """Present when the fit is complete."""


def read_report(workspace: Path) -> FitJson | None:
    """The report of the last fit; None if the workspace has no report yet."""
    if not (workspace / REPORT).is_file():
        return None
    found: FitJson = read_json(workspace / REPORT)
    return found


def source_names(sources: Sequence[str]) -> list[str]:
    """The sources as the report stores them, with paths normalised: "docs/" becomes "docs"."""
    return [one if one.startswith("package:") else os.path.normpath(one) for one in sources]


def settings_json(config: FitConfig) -> dict[str, Any]:
    """The settings as the report stores them."""
    return dataclasses.asdict(config)


def up_to_date(workspace: Path, sources: Sequence[str], config: FitConfig) -> FitJson | None:
    """The report, if no file, setting or passage has changed since it was written; else None, and a fit has work to do."""
    report = read_report(workspace)
    if report is None or "examples" not in report:
        return None
    adapted = report["adaptation"]["minutes"] if report["adaptation"] is not None else 0.0
    same = (
        report["version"] == __version__
        and report["settings"] == {**settings_json(config), "minutes": report["settings"]["minutes"]}
        and config.minutes <= adapted
        and report["sources"] == source_names(sources)
        and report["kb_version"] == newest_version(workspace / KB / PASSAGES)
        and (workspace / MODEL).is_dir()
        and report["stamp"] == stamp(sources, workspace)
    )
    return report if same else None


def lines(report: FitJson) -> list[str]:
    """The report for a terminal: a table of recall, the outcome of the adaptation, and the examples."""
    text: list[str] = []
    if report["tests"]:
        text += [*_table(report["tests"]), ""]
    if report["adaptation"] is not None:
        text += [*_differences(report["tests"]), *_verdict(report["adaptation"]), ""]
    for example in report.get("examples", []):
        text += _example(example)
    return text[:-1] if text and not text[-1] else text


def _table(tests: dict[str, TestJson]) -> list[str]:
    """Recall as a table: a row for BM25 and for each model, a group of columns for each kind of queries."""
    heads = [f"{test['n']:,} {TESTS[name]}" for name, test in tests.items()]
    rows = [["", *heads], ["% found in the top", *[f"{1:>7}{5:>7}{20:>7}" for _ in tests]]]
    for key, label in (("bm25", "BM25 (words)"), ("start", "start"), ("adapted", "adapted")):
        found: list[Any] = [test[key] for test in tests.values()]  # type: ignore[literal-required]
        if None not in found:
            rows.append([label, *["".join(f"{one[k]:>7.1f}" for k in ("1", "5", "20")) for one in found]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{first:<{widths[0]}}" + "".join(f"   {c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))
        for first, *cells in rows
    ]


def _differences(tests: dict[str, TestJson]) -> list[str]:
    return [
        f"adapted minus start, {TESTS[name]}: {d['points']:+.1f} points in the top 5 "
        f"(95% interval {d['low']:+.1f} to {d['high']:+.1f}; p {_p(d['p'])})"
        for name, test in tests.items()
        if (d := test["difference"]) is not None
    ]


def _verdict(adaptation: AdaptationJson) -> list[str]:
    text = [f"the {'adapted model' if adaptation['kept'] else 'start'} answers: {adaptation['why']}"]
    if adaptation["changed"]:
        text.append(f"({adaptation['changed']:,} passages were added or removed since this was measured)")
    return text


def _example(example: ExampleJson) -> list[str]:
    answer = "(the model has no span reader: passages only)"
    if example["answer"] is not None:
        guess = "" if example["found"] else "a guess, "
        answer = f"{example['answer']}   ({guess}probability {example['probability']:.2f})"
    return [
        f"Q  {example['question']}   (made from: {example['expected']})",
        f"A  {answer}",
        f"   {example['title']}: {example['evidence']}",
        "",
    ]


def _p(p: float) -> str:
    return "< .001" if p < 0.001 else f"{p:.3f}"
