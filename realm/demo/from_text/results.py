"""Results of the demo from text and the tables that show them: recall of each retriever, paired tests, and accuracy.

All numbers come from files that the commands of the stages wrote. Recall and accuracy are in percent.

Axis letters: S seeds, N queries.
"""

import json
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from realm.demo.from_text.stages import DemoRun
from realm.files import read_json
from realm.model.manifest import last_record, read_manifest
from realm.qa.probe import ReadingJson
from realm.qa.question_files import read_questions
from realm.qa.scoring.metrics import RANKS, Recall, recall_at
from realm.qa.scoring.significance import PairedDifference, paired_difference
from realm.qa.scoring.tables import aligned, costs, difference
from realm.store.knowledge_base import KnowledgeBase

LABELS = {
    "bm25": "BM25",
    "encoder": "untrained start",
    "ict": "ICT",
    "realm": "REALM",
    "ict-same-seconds": "ICT, same seconds",
    "shuffled": "shuffled reader",
    "entity": "span match, no reader",
}
VERBS = ("kb build", "evaluate", "probe", "index", "ict", "pretrain", "finetune")
"""The times of stages whose names begin with the same entry of this tuple are added up."""
TESTS = {"probe": "masked facts", "dev": "made questions"}


class MeanRecall(Recall):
    """Recall on `n` queries, as the mean over the seeds."""

    n: int
    spread: NotRequired[dict[str, float]]
    """The standard deviation over the seeds, if there are several seeds."""


class ExactMatch(TypedDict):
    """Exact match on `n` dev questions before and after fine-tuning, in percent."""

    n: int
    before: float
    after: float


class Answered(TypedDict):
    """Results of the fine-tuned model on one question file. The keys are those of `ReportJson`."""

    n: int
    em: float
    em_ci95: list[float]
    f1: float


class Results(TypedDict):
    """Content of report.json without the costs. The keys of nested dictionaries are tests, then retrievers."""

    source: str
    documents: int
    passages: int
    made_questions: dict[str, int]
    seeds: list[int]
    recall: dict[str, dict[str, MeanRecall]]
    realm_against: dict[str, dict[str, PairedDifference]]
    reading: ReadingJson
    """Effect of retrieved passages on the reader of REALM, as means over the seeds."""
    exact_match: ExactMatch
    answers: dict[str, Answered]


class FromTextReport(Results):
    """Content of report.json."""

    seconds: dict[str, float]
    peak_memory_mb: float


def read(demo: DemoRun) -> Results:
    """The report of a demo whose stages are done, without the costs."""
    ranks = {
        test: {
            retriever: np.array([_ranks(demo, name, test) for name in models])
            for retriever, models in demo.retrievers().items()
        }
        for test in demo.tests()
    }
    kb = KnowledgeBase.open(demo.kb)
    made = {part: len(read_questions(demo.dev.with_name(f"{part}.jsonl"))) for part in ("train", "dev")}
    return {
        "source": demo.source,
        "documents": kb.document_count,
        "passages": len(kb),
        "made_questions": made,
        "seeds": list(demo.config.seeds),
        "recall": {test: {name: _recall(r_SN) for name, r_SN in by.items()} for test, by in ranks.items()},
        "realm_against": {
            test: {other: paired_difference(by["realm"], by[other]) for other in by if other != "realm"}
            for test, by in ranks.items()
        },
        "reading": _reading(demo),
        "exact_match": _exact_match(demo),
        "answers": _answers(demo),
    }


def lines(report: FromTextReport) -> list[str]:
    """Lines of the report: tables and a few sentences."""
    return [
        *_table(report),
        "",
        *_comparisons(report),
        "",
        *_accuracy(report),
        "",
        costs(report["seconds"], report["peak_memory_mb"], VERBS),
    ]


def _table(report: FromTextReport) -> list[str]:
    """Table of recall: one row per retriever, one group of columns per test."""
    recall, cell = report["recall"], 12 if len(report["seeds"]) > 1 else 7
    heads = [f"{by['bm25']['n']:,} {TESTS.get(test, test)}" for test, by in recall.items()]
    ranks = "".join(f"{'@' + str(k):>{cell}}" for k in RANKS)
    rows = [["", *heads], ["% found in the top k", *[ranks] * len(heads)]]
    for name in recall["probe"]:
        found = [[_cell(by[name], str(k)) for k in RANKS] for by in recall.values()]
        rows.append([LABELS[name], *["".join(f"{one:>{cell}}" for one in cells) for cells in found]])
    return aligned(rows)


def _comparisons(report: FromTextReport) -> list[str]:
    """Table of the differences REALM minus another retriever: one row per retriever, one column per test."""
    compared = report["realm_against"]
    rows = [["found @5, REALM vs", *(TESTS.get(test, test) for test in compared)]]
    for other in compared["probe"]:
        found = [by[other] for by in compared.values()]
        cells = [difference(one) for one in found]
        rows.append([LABELS[other], *cells])
    return [
        *aligned(rows),
        "(percentage points; in brackets: 95% interval; p: exact McNemar test; several seeds: t test over seeds and questions)",
    ]


def _accuracy(report: FromTextReport) -> list[str]:
    reading, match = report["reading"], report["exact_match"]
    answered = "; ".join(
        f"{found['em']:.1f}% of {found['n']:,} {TESTS.get(test, test)}"
        for test, found in report["answers"].items()
    )
    return [
        f"Masked spans that the reader of REALM predicts exactly: {reading['span_accuracy']:.1f}% with retrieval, "
        f"{reading['span_accuracy_without']:.1f}% without retrieval.",
        f"Exact answers to {match['n']:,} dev questions: {match['before']:.1f}% before fine-tuning, "
        f"{match['after']:.1f}% after.",
        f"Exact answers after fine-tuning, on each test: {answered}.",
    ]


def _recall(rank_SN: np.ndarray) -> MeanRecall:
    """Recall as the mean over the seeds, with the standard deviation if there are several seeds."""
    by_seed = {k: [recall_at(rank_N, k) for rank_N in rank_SN] for k in RANKS}
    shares = {str(k): round(float(np.mean(v)), 3) for k, v in by_seed.items()}
    found = cast(MeanRecall, {"n": rank_SN.shape[1]} | shares)
    if len(rank_SN) > 1:
        found["spread"] = {str(k): round(float(np.std(v, ddof=1)), 3) for k, v in by_seed.items()}
    return found


def _reading(demo: DemoRun) -> ReadingJson:
    """Effect of retrieved passages on the reader, as means over the seeds."""
    probes = [_outcome(demo, name, "probe") for name in demo.retrievers()["realm"]]
    names = ReadingJson.__annotations__
    means = {name: round(float(np.mean([probe[name] for probe in probes])), 3) for name in names}
    return cast(ReadingJson, means)


def _exact_match(demo: DemoRun) -> ExactMatch:
    """Exact match before and after fine-tuning, on the dev questions by which the best model was chosen."""
    metrics = (demo.model("qa") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    looks = [line["dev_em"] for line in map(json.loads, metrics) if "dev_em" in line]
    all_of_dev = _outcome(demo, "qa", "dev")["n"]
    used = last_record(read_manifest(demo.model("qa"))["stages"], "finetune")["dev_questions"]
    return {"n": min(used, all_of_dev), "before": looks[0], "after": max(looks)}


def _answers(demo: DemoRun) -> dict[str, Answered]:
    """Test -> results of the fine-tuned model, for the tests that are question files."""
    outcomes = {test: _outcome(demo, "qa", test) for test, file in demo.tests().items() if file is not None}
    return {
        test: {"n": o["n"], "em": o["em"], "em_ci95": o["em_ci95"], "f1": o["f1"]}
        for test, o in outcomes.items()
    }


def _ranks(demo: DemoRun, name: str, test: str) -> list[int]:
    return [one["rank"] for one in _outcome(demo, name, test)["outcomes"]]


def _outcome(demo: DemoRun, name: str, test: str) -> dict[str, Any]:
    outcome: dict[str, Any] = read_json(demo.outcome(name, test))
    return outcome


def _cell(recall: MeanRecall, k: str) -> str:
    spread = f" ±{recall['spread'][k]:.1f}" if "spread" in recall else ""
    return f"{recall[k]:.1f}{spread}"  # type: ignore[literal-required]
