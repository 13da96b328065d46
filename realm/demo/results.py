"""What the demo's outcomes say: what each retriever finds, what the same reader answers from it, paired tests; the tables.

Everything is read from files that the stages' commands wrote. Figures are in percent of queries.

N questions.
"""

from typing import NotRequired, TypedDict

import numpy as np

from realm.demo.pairs import Against, against
from realm.demo.stages import DemoRun
from realm.demo.tables import aligned, costs, difference, paragraph
from realm.files import read_json
from realm.workspace.report import AdaptationJson, FitJson, Recall, TestJson

RANKS = ("1", "5", "20")
LABELS = {"bm25": "BM25"}
"""How systems are called in tables, where it is not by their names."""


class Scores(TypedDict):
    """What is found for questions among the first 1, 5 and 20 passages, and how many answers are exactly right."""

    found: Recall
    exact: float
    exact_ci95: list[float]


class Compared(TypedDict):
    """The last of the systems, hybrid apart, less another one."""

    found: Against
    """In the first 5."""
    exact: Against


class Part(TypedDict):
    """One corpus."""

    documents: int
    passages: int
    questions: int
    systems: dict[str, Scores]
    less: dict[str, Compared]
    """The last system, hybrid apart, less each other one."""
    adaptation: AdaptationJson | None
    masked_facts: NotRequired[TestJson]


class Answered(TypedDict):
    """A question of the end, what the texts say, and the answer."""

    question: str
    expected: str
    answer: str
    probability: float
    right: bool
    """Whether it contains the words that a right answer does."""
    found: bool
    """Whether it reaches the threshold; below, it is a guess."""
    title: str


class DemoReport(TypedDict):
    """What report.json holds."""

    source: str
    later: str
    articles: Part
    added: Part
    asked: list[Answered]
    seconds: dict[str, float]
    peak_memory_mb: float


def articles(demo: DemoRun) -> Part:
    """What chapters 1 and 2 found."""
    fit: FitJson = read_json(demo.first_fit)
    part = _part(demo, "articles", demo.retrievers(), fit)
    facts = fit["tests"].get("masked_facts")
    return part if facts is None else {**part, "masked_facts": facts}


def added(demo: DemoRun) -> Part:
    """What chapters 3 and 4 found."""
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
                "found": {"1": found["recall"]["1"], "5": found["recall"]["5"], "20": found["recall"]["20"]},
                "exact": found["em"],
                "exact_ci95": found["em_ci95"],
            }
            for name, found in reports.items()
        },
        "less": {
            other: {
                "found": against(rank_N[last][None], rank_N[other][None]),
                "exact": against(correct_N[last][None], correct_N[other][None], 1),
            }
            for other in others
        },
        "adaptation": fit["adaptation"],
    }


def articles_lines(part: Part) -> list[str]:
    """The table of section 2."""
    facts = part.get("masked_facts")
    heads = [f"{part['questions']:,} made questions"]
    heads += [] if facts is None else [f"{facts['n']:,} masked facts"]
    ranks = "".join(f"{rank:>7}" for rank in RANKS)
    rows = [["", *heads], ["% found in the first", ranks + "   exact", *[ranks] * (facts is not None)]]
    for name, scores in part["systems"].items():
        cells = [_found(scores["found"]) + f"{scores['exact']:>8.1f}"]
        if facts is not None:
            found = None if name == "hybrid" else facts[name]  # type: ignore[literal-required]
            cells.append("" if found is None else _found(found))
        rows.append([LABELS.get(name, name), *cells])
    return [*aligned(rows), "", *_comparison(part), *_verdict(part), "", paragraph(READ_IT)]


def added_lines(part: Part) -> list[str]:
    """The table of section 4."""
    rows = [["", f"{part['questions']:,} made questions"]]
    rows.append(["% found in the first", "".join(f"{rank:>7}" for rank in RANKS) + "   exact"])
    for name, scores in part["systems"].items():
        rows.append([LABELS.get(name, name), _found(scores["found"]) + f"{scores['exact']:>8.1f}"])
    return [*aligned(rows), "", *_comparison(part), *_verdict(part)]


READ_IT = (
    "found: a passage that holds the answer is among the first 1, 5 or 20. exact: the reader's answer, from the first 5, is "
    "word for word the expected one. masked facts: a name or date hidden in a sentence that is not trained on; found when "
    "another passage holds it. less: difference in points, its 95% interval in brackets, and the p of the exact McNemar test "
    "on the same queries; below .05 it is unlikely to be chance."
)


def _found(recall: Recall) -> str:
    return "".join(f"{recall[rank]:>7.1f}" for rank in ("1", "5", "20"))


def _comparison(part: Part) -> list[str]:
    *_, last, _ = part["systems"]
    rows = [[f"{LABELS.get(last, last)} less", "found in the first 5", "exact"]]
    for other, compared in part["less"].items():
        rows.append([LABELS.get(other, other), difference(compared["found"]), difference(compared["exact"])])
    return aligned(rows)


def _verdict(part: Part) -> list[str]:
    """What became of the adaptation, and what it did for masked facts."""
    done, facts = part["adaptation"], part.get("masked_facts")
    told = []
    if facts is not None and facts["difference"] is not None:
        told.append(f"masked facts, first 5, adapted less start: {difference(facts['difference'])}")
    if done is not None:
        kept = "The adapted retriever was kept" if done["kept"] else "The start was kept"
        told += ["", paragraph(f"{kept}: {done['why']}.")]
    return told


def asked_line(asked: list[Answered]) -> str:
    """How many of the last questions were answered right."""
    guesses = sum(not one["found"] for one in asked)
    told = f"Right: {sum(one['right'] for one in asked)} of {len(asked)}."
    return f"{told} Guesses among the answers, below the model's threshold: {guesses}." if guesses else told


def costs_line(report: DemoReport) -> str:
    """What it all took."""
    return costs(report["seconds"], report["peak_memory_mb"], ("fit", "evaluate"))
