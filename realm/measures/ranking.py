"""Ranks documents for the queries of a test collection, and measures the rankings with ir-measures (trec_eval).

The score of a document is the score of its best passage (MaxP, Dai and Callan 2019).

Axis letters: Q queries, K passages.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple, TypedDict

import numpy as np

from realm.errors import InputError
from realm.measures.collection import Collection, Query
from realm.measures.runs import Run
from realm.progress import counted, progress
from realm.qa.question_sets import Search
from realm.qa.scoring.significance import bootstrap_interval, percent
from realm.store.knowledge_base import KnowledgeBase

MEASURES = {"ndcg@10": "nDCG@10", "recall@100": "R@100", "mrr@10": "RR@10"}
"""Name of a measure -> its name in ir-measures."""
DOCUMENTS = 100
"""Number of documents in a ranking."""
PASSAGES_PER_DOCUMENT = 4
"""Number of passages that are searched first, per document of a ranking. If these passages belong to too few documents, more
passages are searched."""
QUERIES_AT_ONCE = 64


class Measured(TypedDict):
    """The mean of a measure over the queries in percent, and its 95 % interval (percentile bootstrap over queries)."""

    mean: float
    ci95: list[float]


class RankingJson(TypedDict):
    """The output of `realm evaluate --beir`."""

    split: str
    n: int
    """Number of queries with a relevant document."""
    measures: dict[str, Measured]
    unknown_relevant: int
    """Number of relevant documents that the knowledge base does not have; 0 if a file of rankings was measured."""
    unranked: int
    """Number of queries without a ranked document, such as queries that a file of rankings lacks. Their measures are 0."""


class QueryOutcome(TypedDict):
    """The measures of one query, between 0 and 1."""

    id: str
    measures: dict[str, float]


class RankingFile(RankingJson):
    """The file that `realm evaluate --beir --out` writes."""

    outcomes: list[QueryOutcome]


class RankingReport(NamedTuple):
    """The measures of each query, and a summary."""

    collection: Collection
    value_Q: dict[str, np.ndarray]
    """Name of a measure -> values of the queries, between 0 and 1."""
    unknown_relevant: int = 0
    unranked: int = 0

    def as_dict(self) -> RankingJson:
        """The summary, in percent."""
        return {
            "split": self.collection.split,
            "n": len(self.collection.queries),
            "measures": {
                name: {
                    "mean": percent(value_Q.mean()),
                    "ci95": [percent(end) for end in bootstrap_interval(value_Q)],
                }
                for name, value_Q in self.value_Q.items()
            },
            "unknown_relevant": self.unknown_relevant,
            "unranked": self.unranked,
        }

    def outcomes(self) -> list[QueryOutcome]:
        """The measures of each query."""
        return [
            {
                "id": query.id,
                "measures": {name: float(value_Q[place]) for name, value_Q in self.value_Q.items()},
            }
            for place, query in enumerate(self.collection.queries)
        ]

    def lines(self) -> list[str]:
        """The summary as lines for a terminal."""
        found = self.as_dict()
        lines = [f"{counted(found['n'], 'query', 'queries')} of the split {found['split']}"]
        for name, one in found["measures"].items():
            low, high = one["ci95"]
            lines.append(f"{name:<12}{one['mean']:6.2f} % (95 % interval {low:.2f} to {high:.2f})")
        if self.unknown_relevant:
            lines.append(
                f"relevant documents that are not in the knowledge base, and count as not found: {self.unknown_relevant:,}"
            )
        if self.unranked:
            lines.append(f"queries that have no ranked document, and count as 0 %: {self.unranked:,}")
        return lines


def rank_documents(kb: KnowledgeBase, queries: Sequence[Query], search: Search) -> Run:
    """The best 100 documents of each query.

    A document with the id of the query is left out, as in BEIR. Documents with the same title and text as a ranked document
    have the score of this document.
    """
    twins: dict[str, list[str]] = {}
    for document, original in kb.merged().items():
        twins.setdefault(original, []).append(document)
    run: Run = {}
    with progress(total=len(queries), description="evaluate", unit="query") as bar:
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            part = list(queries[start : start + QUERIES_AT_ONCE])
            passages = PASSAGES_PER_DOCUMENT * DOCUMENTS
            while part:
                score_QK, number_QK = search([query.text for query in part], passages)
                short = []
                for query, score_K, number_K in zip(part, score_QK, number_QK, strict=True):
                    known = number_K >= 0
                    ids = [passage.document_id for passage in kb.passages(number_K[known])]
                    best: dict[str, float] = {}
                    for document, score in zip(ids, score_K[known].tolist(), strict=True):
                        for one in (document, *twins.get(document, ())):
                            if one != query.id:
                                best.setdefault(one, score)  # the passages come best first
                    if len(best) < DOCUMENTS and known.sum() == passages < len(kb):
                        short.append(query)
                    else:
                        run[query.id] = dict(list(best.items())[:DOCUMENTS])
                        bar.update(1)
                part, passages = short, min(4 * passages, len(kb))
    return {query.id: run[query.id] for query in queries}


def measure(collection: Collection, run: Run, unknown_relevant: int = 0) -> RankingReport:
    """Measures the rankings of a run. A query without a ranking has the value 0.

    A document with the id of its query is left out, as in BEIR.

    Raises:
        InputError: ir-measures is not installed, or the run has no query of the collection.
    """
    if find_spec("ir_measures") is None:
        raise InputError("measuring rankings needs ir-measures: pip install 'realm-lm[beir]'")
    import ir_measures

    if not any(query.id in run for query in collection.queries):
        raise InputError(f"the rankings have no query of the split {collection.split} of {collection.folder}")
    run = {
        query: {document: score for document, score in scores.items() if document != query}
        for query, scores in run.items()
    }
    of_measure = {ir_measures.parse_measure(theirs): name for name, theirs in MEASURES.items()}
    place = {query.id: number for number, query in enumerate(collection.queries)}
    value_Q = {name: np.zeros(len(place)) for name in MEASURES}
    # Documents with equal scores have the order of trec_eval: by id, backwards. The measures of ir-measures would otherwise use
    # different orders, so each document gets the negative of its place as its score.
    ranked = {}
    for query in run.keys() & place.keys():
        scores = run[query]
        best = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
        ranked[query] = {document: -rank for rank, document in enumerate(best)}
    for found in ir_measures.iter_calc(list(of_measure), collection.grades, ranked):
        value_Q[of_measure[found.measure]][place[found.query_id]] = found.value
    return RankingReport(collection, value_Q, unknown_relevant, sum(not run.get(query) for query in place))


def count_unknown(kb: KnowledgeBase, collection: Collection) -> int:
    """Number of relevant documents that the knowledge base does not have.

    Raises:
        InputError: the knowledge base has no relevant document.
    """
    relevant = collection.relevant()
    unknown = len(relevant - kb.document_ids())
    if unknown == len(relevant):
        raise InputError(
            f"{kb.folder} has no relevant document of {collection.folder}: build the knowledge base with `realm kb build "
            f"{collection.folder / 'corpus.jsonl'}`"
        )
    return unknown
