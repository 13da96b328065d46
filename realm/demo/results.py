"""Results of the demo and the tables that show them: recall and exact match of each retriever, and paired tests.

All numbers come from files that the commands of the stages wrote. Recall and exact match are in percent of the queries.

Axis letters: N questions.
"""

from typing import NotRequired, TypedDict, cast

import numpy as np

from realm.demo.stages import DemoRun
from realm.files import read_json
from realm.qa.scoring.metrics import RANKS, Recall
from realm.qa.scoring.significance import PairedDifference, paired_difference
from realm.qa.scoring.tables import RECALL_HEAD, aligned, difference, paragraph, recall_cell
from realm.workspace.report import AdaptationJson, FitJson, TestJson

LABELS = {"bm25": "BM25"}
"""Retriever -> label in the tables, if the label differs from the name."""


class Scores(TypedDict):
    """Results of one retriever on questions, in percent."""

    found: Recall
    """Share of questions with an answer in the first 1, 5 or 20 passages."""
    exact: float
    """Share of questions with an exact match."""
    exact_ci95: list[float]


class Compared(TypedDict):
    """The last retriever before "hybrid" minus another retriever: differences in percentage points."""

    found: PairedDifference
    """Difference in the share of questions with an answer in the first 5 passages."""
    exact: PairedDifference
    """Difference in exact match."""


class Part(TypedDict):
    """Results on one set of questions."""

    documents: int
    passages: int
    questions: int
    systems: dict[str, Scores]
    less: dict[str, Compared]
    """Retriever -> its comparison with the last retriever before "hybrid"."""
    adaptation: AdaptationJson | None
    masked_facts: NotRequired[TestJson]


class Answered(TypedDict):
    """A question of section 5 with its expected and its actual answer."""

    question: str
    expected: str
    answer: str
    probability: float
    right: bool
    """Whether the answer contains `Asked.right`."""
    found: bool
    """Whether the probability reaches the threshold of the model; an answer with a lower probability is a guess."""
    title: str


class DemoReport(TypedDict):
    """Content of report.json."""

    source: str
    later: str
    articles: Part
    added: Part
    asked: list[Answered]
    seconds: dict[str, float]
    peak_memory_mb: float


def articles(demo: DemoRun) -> Part:
    """Results of sections 1 and 2."""
    fit: FitJson = read_json(demo.first_fit)
    part = _part(demo, "articles", demo.retrievers(), fit)
    facts = fit["tests"].get("masked_facts")
    return part if facts is None else {**part, "masked_facts": facts}


def added(demo: DemoRun) -> Part:
    """Results of sections 3 and 4."""
    return _part(demo, "later", ("bm25", "before", "after"), read_json(demo.outcome("fit-again")))


def _part(demo: DemoRun, part: str, names: tuple[str, ...], fit: FitJson) -> Part:
    reports = {name: read_json(demo.outcome(f"{part}-{name}")) for name in (*names, "hybrid")}
    rank_N, correct_N = (
        {name: np.array([one[key] for one in report["outcomes"]]) for name, report in reports.items()}
        for key in ("rank", "correct")
    )
    *others, last = names
    return {
        "documents": fit["documents"],
        "passages": fit["passages"],
        "questions": reports[last]["n"],
        "systems": {
            name: {
                "found": cast(Recall, {str(k): found["recall"][str(k)] for k in RANKS}),
                "exact": found["em"],
                "exact_ci95": found["em_ci95"],
            }
            for name, found in reports.items()
        },
        "less": {
            other: {
                "found": paired_difference(rank_N[last][None], rank_N[other][None]),
                "exact": paired_difference(correct_N[last][None], correct_N[other][None], 1),
            }
            for other in others
        },
        "adaptation": fit["adaptation"],
    }


def lines(part: Part) -> list[str]:
    """Lines with the tables of section 2 or section 4."""
    facts = part.get("masked_facts")
    heads = [f"{part['questions']:,} made questions"]
    heads += [] if facts is None else [f"{facts['n']:,} masked facts"]
    head = [RECALL_HEAD + "   exact", *[RECALL_HEAD] * (facts is not None)]
    rows = [["", *heads], ["% found in the first", *head]]
    for name, scores in part["systems"].items():
        cells = [recall_cell(scores["found"]) + f"{scores['exact']:>8.1f}"]
        if facts is not None:
            found = None if name == "hybrid" else facts[name]  # type: ignore[literal-required]
            cells.append("" if found is None else recall_cell(found))
        rows.append([LABELS.get(name, name), *cells])
    return [*aligned(rows), "", *_comparison(part), *_verdict(part)]


READ_IT = (
    "found in the first 1, 5, 20: % of questions for which one of these passages contains the answer. exact: % of questions "
    "for which the reader extracts exactly the expected answer from the first 5 passages. masked facts: a name or date is "
    "masked in a sentence that was not used for training; the fact is found if another passage that contains this name or "
    "date is among the first passages. vs: difference in percentage points, with the 95% interval in brackets and the p value "
    "of the exact McNemar test on the same queries; if p is below .05, the difference is unlikely to be chance."
)


def _comparison(part: Part) -> list[str]:
    *_, last, _ = part["systems"]
    rows = [[f"{LABELS.get(last, last)} vs", "found in the first 5", "exact"]]
    for other, compared in part["less"].items():
        rows.append([LABELS.get(other, other), difference(compared["found"]), difference(compared["exact"])])
    return aligned(rows)


def _verdict(part: Part) -> list[str]:
    """Lines on whether the adapted retriever was kept and why, and on its difference from the start on masked facts."""
    done, facts = part["adaptation"], part.get("masked_facts")
    lines = []
    if facts is not None and facts["difference"] is not None:
        lines.append(f"masked facts, first 5, adapted minus start: {difference(facts['difference'])}")
    if done is not None:
        kept = "The adapted retriever was kept" if done["kept"] else "The start model was kept"
        lines += ["", paragraph(f"{kept}: {done['why']}.")]
    return lines


def asked_line(asked: list[Answered]) -> str:
    """A line with the numbers of right answers and of guesses to the questions of section 5."""
    guesses = sum(not one["found"] for one in asked)
    right = f"Right answers: {sum(one['right'] for one in asked)} of {len(asked)}."
    return (
        f"{right} Guesses, whose probability is below the threshold of the model: {guesses}."
        if guesses
        else right
    )
