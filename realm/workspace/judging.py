"""Compares the retrieval of an adapted model with that of its start model, on queries made from the user's own documents.

There are two kinds of queries, and neither needs labels. A masked fact is a name or date hidden in a held-out sentence; it
is found when another passage holds it. A made question is found when a passage holds its answer. Masked facts alone mislead:
an embedder that matches wording can gain on masked facts and lose on questions. So an adapted model is kept if it is better on
one kind and not worse on the other.

Axis letters: N queries.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from realm.index.versions import load_index
from realm.masking.candidates import embed_queries
from realm.masking.held_out import held_out_queries
from realm.masking.masked_queries import MaskedQuery
from realm.model.device import autocast, choose_device
from realm.model.folder import load_model
from realm.progress import progress
from realm.qa.metrics import recall_at
from realm.qa.probe import first_positives, first_positives_bm25
from realm.qa.question_files import Question
from realm.qa.question_sets import evaluate_words, question_ranks
from realm.qa.significance import PairedDifference, paired_difference
from realm.questions import MadeQuestion
from realm.store.knowledge_base import KnowledgeBase
from realm.workspace.report import Recall, TestJson

LEAST = 20
"""Smallest number of queries of each kind; fewer cannot show a difference."""
RANKS = (1, 5, 20)
AT = 5
"""The two models are compared by recall at this rank."""
SIGNIFICANT = 0.05
"""A difference counts if its p is below this."""
TOLERANCE = 1.0
"""A loss of at most this many points of recall does not count as worse unless it is significant."""
Ranks = dict[str, np.ndarray]
"""Per kind of queries: the rank, from 1, of each query's first positive, 0 for none -> [N]."""


class Queries(NamedTuple):
    """The queries that judge the models."""

    facts: list[MaskedQuery]
    questions: list[Question]

    @property
    def enough(self) -> bool:
        """Whether there are at least `LEAST` queries of each kind."""
        return min(len(self.facts), len(self.questions)) >= LEAST

    @property
    def too_few(self) -> str:
        """The reason why nothing was adapted, for the report, if there are too few queries."""
        return (
            f"the documents give {len(self.facts)} masked facts and {len(self.questions)} made questions, and judging an "
            f"adaptation needs {LEAST} of each; nothing was adapted"
        )

    @classmethod
    def draw(
        cls, kb: KnowledgeBase, made: Sequence[MadeQuestion], query_tokens: int, facts: int
    ) -> "Queries":
        """The questions and at most `facts` masked facts, the same facts in every call on one knowledge base."""
        asked = [Question(one.id, one.question, one.answers) for one in made]
        return cls(held_out_queries(kb, query_tokens - 2, facts), asked)


def drawn(made: Sequence[MadeQuestion], most: int) -> list[MadeQuestion]:
    """At most `most` of the made questions, the same in every call with the same questions."""
    return [made[n] for n in sorted(np.random.default_rng(0).permutation(len(made))[:most])]


def ranks_by_words(kb: KnowledgeBase, queries: Queries) -> Ranks:
    """Ranks by BM25."""
    found: Ranks = {}
    if queries.facts:
        found["masked_facts"] = first_positives_bm25(queries.facts, kb)
    if queries.questions:
        found["made_questions"] = evaluate_words(kb, queries.questions).first_hit_N
    return found


def ranks_of(path: str, kb: KnowledgeBase, queries: Queries, device: str, description: str) -> Ranks:
    """Ranks by a model that has an index in the knowledge base."""
    model = load_model(path, reader=False).to(choose_device(device))
    index = load_index(kb, model, path).index
    found: Ranks = {}
    total = len(queries.facts) + len(queries.questions)
    with (
        progress(total=total, description=description, unit="query") as bar,
        autocast(model.device, "auto"),
    ):
        if queries.facts:
            query_BD = embed_queries(model, queries.facts)
            found["masked_facts"] = first_positives(queries.facts, query_BD, index, kb.tokens)
            bar.update(len(queries.facts))
        if queries.questions:
            found["made_questions"] = question_ranks(model, kb, index, queries.questions, max(RANKS))
            bar.update(len(queries.questions))
    return found


def tests_of(words: Ranks, start: Ranks, adapted: Ranks | None) -> dict[str, TestJson]:
    """The results for the report, per kind of queries."""
    return {
        name: {
            "n": len(start[name]),
            "bm25": _recall(words[name]),
            "start": _recall(start[name]),
            "adapted": None if adapted is None else _recall(adapted[name]),
            "difference": None if adapted is None else paired_difference(adapted[name], start[name], AT),
        }
        for name in start
    }


def verdict(differences: Mapping[str, PairedDifference]) -> tuple[bool, str]:
    """Whether to keep the adapted model, and the reason; `differences` has the name of each kind of queries as its key."""
    better = [name for name, d in differences.items() if d["points"] > 0 and d["p"] < SIGNIFICANT]
    worse = [
        name
        for name, d in differences.items()
        if d["points"] < -TOLERANCE or (d["points"] < 0 and d["p"] < SIGNIFICANT)
    ]
    if worse:
        return False, f"adaptation made it worse on {' and '.join(worse)}"
    if not better:
        return False, "adaptation made it better on neither"
    others = [name for name in differences if name not in better]
    return True, f"better on {' and '.join(better)}" + "".join(f", not worse on {name}" for name in others)


def _recall(rank_N: np.ndarray) -> Recall:
    return cast(Recall, {str(k): round(recall_at(rank_N, k), 2) for k in RANKS})
