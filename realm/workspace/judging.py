"""Compares the retrieval of an adapted model with that of its start model, on queries made from the user's documents.

There are two kinds of queries; neither needs labels. A masked fact is a sentence of a held-out passage in which a name or date
is masked; a positive is another passage that contains this name or date. A made question is a question made by rules; a
positive is a passage that contains the answer. Masked facts are not sufficient, because an embedder that matches wording can
become better on masked facts and worse on questions. Therefore an adapted model is kept if it is better on one kind of queries
and not worse on the other kind.

Axis letters: N queries.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from realm.index.versions import complete_index
from realm.masking.candidates import embed_queries
from realm.masking.held_out import held_out_queries
from realm.masking.masked_queries import MaskedQuery
from realm.model.device import autocast, choose_device
from realm.model.folder import load_model
from realm.progress import progress
from realm.qa.probe import first_positives, first_positives_by
from realm.qa.question_files import Question
from realm.qa.question_sets import evaluate_bm25, question_ranks
from realm.qa.scoring.metrics import RANKS, Recall, recall_at
from realm.qa.scoring.significance import PairedDifference, paired_difference
from realm.questions import MadeQuestion
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.workspace.report import TestJson

LEAST = 20
"""Smallest number of queries of each kind, because fewer queries cannot show a difference."""
AT = 5
"""The rank at which the recall of the two models is compared."""
SIGNIFICANT = 0.05
"""A difference is significant if its p is below this value."""
TOLERANCE = 1.0
"""A loss of at most this number of points of recall, or of one query, does not count as worse, unless it is significant."""
Ranks = dict[str, np.ndarray]
"""Kind of queries -> rank of the first positive of each query, counted from 1; 0 if no positive was found -> [N]."""


class ModelRanks(NamedTuple):
    """The ranks by the vectors of a model, which are compared, and by its vectors and BM25 together, as answers are found."""

    vectors: Ranks
    hybrid: Ranks


class Queries(NamedTuple):
    """The queries on which the models are compared."""

    facts: list[MaskedQuery]
    questions: list[Question]

    @property
    def enough(self) -> bool:
        """Whether there are at least `LEAST` queries of each kind."""
        return min(len(self.facts), len(self.questions)) >= LEAST

    @property
    def too_few(self) -> str:
        """The sentence of the report with the reason why the model was not adapted, if there are too few queries."""
        return (
            f"the model was not adapted, because a comparison needs {LEAST} masked facts and {LEAST} made questions, and the "
            f"documents give {len(self.facts)} and {len(self.questions)}"
        )

    @classmethod
    def draw(
        cls, kb: KnowledgeBase, made: Sequence[MadeQuestion], query_tokens: int, facts: int
    ) -> "Queries":
        """The questions, and at most `facts` masked facts, which are the same in every call with the same knowledge base."""
        asked = [Question(one.id, one.question, one.answers) for one in made]
        return cls(held_out_queries(kb, query_tokens - 2, facts), asked)


def drawn(made: Sequence[MadeQuestion], most: int) -> list[MadeQuestion]:
    """At most `most` of the made questions, which are the same in every call with the same `made`."""
    return [made[n] for n in sorted(np.random.default_rng(0).permutation(len(made))[:most])]


def ranks_by_bm25(kb: KnowledgeBase, queries: Queries) -> Ranks:
    """Ranks of the first positives by BM25."""
    found: Ranks = {}
    if queries.facts:
        found["masked_facts"] = first_positives_by("bm25", queries.facts, Retriever(kb), kb)
    if queries.questions:
        found["made_questions"] = evaluate_bm25(kb, queries.questions).first_hit_N
    return found


def ranks_of(path: str, kb: KnowledgeBase, queries: Queries, device: str, description: str) -> ModelRanks:
    """Ranks of the first positives by a model that has an index in the knowledge base."""
    model = load_model(path, reader=False).to(choose_device(device))
    index = complete_index(kb, model, path).index
    retriever, found = Retriever(kb, index), ModelRanks({}, {})
    total = len(queries.facts) + len(queries.questions)
    with progress(total=total, description=description, unit="query") as bar, autocast(model.device, "auto"):
        if queries.facts:
            query_BD = embed_queries(model, queries.facts)
            found.vectors["masked_facts"] = first_positives(queries.facts, query_BD, index, kb.tokens)
            found.hybrid["masked_facts"] = first_positives_by(
                "hybrid", queries.facts, retriever, kb, query_BD
            )
            bar.update(len(queries.facts))
        if queries.questions:
            asked = queries.questions
            found.vectors["made_questions"] = question_ranks(model, kb, retriever, asked, max(RANKS))
            found.hybrid["made_questions"] = question_ranks(model, kb, retriever, asked, max(RANKS), "hybrid")
            bar.update(len(queries.questions))
    return found


def tests_of(words: Ranks, start: ModelRanks, adapted: ModelRanks | None) -> dict[str, TestJson]:
    """Kind of queries -> results for the report."""
    tests: dict[str, TestJson] = {}
    for name, rank_N in start.vectors.items():
        tests[name] = {
            "n": len(rank_N),
            "bm25": _recall(words[name]),
            "start": _recall(rank_N),
            "start_hybrid": _recall(start.hybrid[name]),
            "adapted": None,
            "adapted_hybrid": None,
            "difference": None,
        }
        if adapted is not None:
            tests[name]["adapted"] = _recall(adapted.vectors[name])
            tests[name]["adapted_hybrid"] = _recall(adapted.hybrid[name])
            tests[name]["difference"] = paired_difference(adapted.vectors[name], rank_N, AT)
    return tests


def verdict(differences: Mapping[str, PairedDifference]) -> tuple[bool, str]:
    """Whether to keep the adapted model, and the reason. The keys of `differences` are the names of the kinds of queries."""
    differences = {name.replace("_", " "): difference for name, difference in differences.items()}
    better = [name for name, d in differences.items() if d["points"] > 0 and d["p"] < SIGNIFICANT]
    worse = [
        name
        for name, d in differences.items()
        if (d["points"] < -TOLERANCE and d["only_b"] - d["only_a"] > 1)
        or (d["points"] < 0 and d["p"] < SIGNIFICANT)
    ]
    if worse:
        return False, f"the adapted model is worse on {' and '.join(worse)}"
    if not better:
        return False, f"the adapted model is not significantly better on {' or '.join(differences)}"
    others = [name for name in differences if name not in better]
    kept = f"the adapted model is better on {' and '.join(better)}"
    return True, kept + "".join(f" and not worse on {name}" for name in others)


def _recall(rank_N: np.ndarray) -> Recall:
    return cast(Recall, {str(k): round(recall_at(rank_N, k), 3) for k in RANKS})
