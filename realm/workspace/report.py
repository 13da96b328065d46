"""What a fit found, as it is kept in WORKSPACE/report.json; and whether anything is left to do. Without torch.

Recall is in percent of queries whose passage is among the first 1, 5 and 20.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from realm import __version__
from realm.files import read_json
from realm.store.tables import PASSAGES, newest_version
from realm.text.readers import stamp
from realm.workspace.settings import FitConfig

KB = "kb"
MODEL = "model"
REPORT = "report.json"
TESTS = {"masked_facts": "masked facts", "made_questions": "made questions"}
Recall = TypedDict("Recall", {"1": float, "5": float, "20": float})


class DifferenceJson(TypedDict):
    """The adapted model less the start, in points of recall at 5: 95 % interval, McNemar's counts and p."""

    points: float
    low: float
    high: float
    only_adapted: int
    only_start: int
    p: float


class TestJson(TypedDict):
    """One kind of queries, made from the documents: what words and models find of them."""

    n: int
    bm25: Recall
    start: Recall
    adapted: Recall | None
    """None where nothing was adapted."""
    difference: DifferenceJson | None


class AdaptationJson(TypedDict):
    """What became of the adaptation."""

    minutes: float
    """What it was given."""
    kept: bool
    """Whether the adapted model answers; else the start does."""
    why: str
    changed: int
    """Passages that came or went since."""


class ExampleJson(TypedDict):
    """A question made from the documents, and what the workspace says."""

    question: str
    expected: str
    """What the question was made to ask for."""
    answer: str | None
    """None where the model has no span reader."""
    probability: float | None
    found: bool | None
    """Whether it reaches the threshold; below, it is a guess."""
    title: str
    evidence: str
    """The part of the passage around the answer, which stands in [[ ]]."""


class FitJson(TypedDict):
    """What report.json holds, and `realm fit --json` prints."""

    version: str
    """Of realm."""
    settings: dict[str, Any]
    """As in `FitConfig`."""
    sources: list[str]
    stamp: str
    """Of the sources' files, when they were read last."""
    documents: int
    passages: int
    left_out: dict[str, int]
    """How many files, lines and rows, by reason."""
    kb_version: int
    """Of the passages, when the fit ended."""
    seconds: dict[str, float]
    """By stage, of the last run."""
    tests: dict[str, TestJson]
    """By kind; none where too few queries can be made."""
    adaptation: AdaptationJson | None
    """None where none was asked for yet."""
    examples: NotRequired[list[ExampleJson]]
    """There when the fit is complete."""


def read_report(workspace: Path) -> FitJson | None:
    """What the last fit wrote; none before the workspace answers."""
    if not (workspace / REPORT).is_file():
        return None
    found: FitJson = read_json(workspace / REPORT)
    return found


def source_names(sources: Sequence[str]) -> list[str]:
    """The sources as they are kept: "docs/" is "docs"."""
    return [one if one.startswith("package:") else os.path.normpath(one) for one in sources]


def settings_json(config: FitConfig) -> dict[str, Any]:
    """The settings as they are kept."""
    return dataclasses.asdict(config)


def up_to_date(workspace: Path, sources: Sequence[str], config: FitConfig) -> FitJson | None:
    """The report of a workspace where a fit would change nothing: no file, no setting, no passage is another since then."""
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
    """The report as a table, what became of the adaptation, and the examples."""
    told: list[str] = []
    if report["tests"]:
        told += [*_table(report["tests"]), ""]
    if report["adaptation"] is not None:
        told += [*_differences(report["tests"]), *_verdict(report["adaptation"]), ""]
    for example in report.get("examples", []):
        told += _example(example)
    return told[:-1] if told and not told[-1] else told


def _table(tests: dict[str, TestJson]) -> list[str]:
    """Recall: a row for words and each model, a group of columns for each kind of queries."""
    heads = [f"{test['n']:,} {TESTS[name]}" for name, test in tests.items()]
    rows = [["", *heads], ["% found in the first", *[f"{1:>7}{5:>7}{20:>7}" for _ in tests]]]
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
        f"adapted less start, {TESTS[name]}: {d['points']:+.1f} points in the first 5 "
        f"(95% interval {d['low']:+.1f} to {d['high']:+.1f}; p {_p(d['p'])})"
        for name, test in tests.items()
        if (d := test["difference"]) is not None
    ]


def _verdict(adaptation: AdaptationJson) -> list[str]:
    told = [f"the {'adapted model' if adaptation['kept'] else 'start'} answers: {adaptation['why']}"]
    if adaptation["changed"]:
        told.append(f"({adaptation['changed']:,} passages have come or gone since this was measured)")
    return told


def _example(example: ExampleJson) -> list[str]:
    said = "(the model has no span reader: passages only)"
    if example["answer"] is not None:
        guess = "" if example["found"] else "a guess, "
        said = f"{example['answer']}   ({guess}probability {example['probability']:.2f})"
    return [
        f"Q  {example['question']}   (made from: {example['expected']})",
        f"A  {said}",
        f"   {example['title']}: {example['evidence']}",
        "",
    ]


def _p(p: float) -> str:
    return "< .001" if p < 0.001 else f"{p:.3f}"
