"""The probe: tests a model, without labels, on masked sentences of held-out passages of its corpus.

A probe query is a sentence of a held-out passage with a masked span. No training query was cut from a held-out passage, and the
span also occurs in another passage. Retrieval is right at k if the span is in one of the best k passages, apart from passages
that repeat the text of the query. Reading is right if the reader predicts the whole span.

Axis letters: B queries, K candidates with the null passage, M masked tokens, D embedding, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from realm.errors import InputError, at_least
from realm.index.versions import complete_index
from realm.masking.candidates import CANDIDATES, CandidateRule, choose_candidates, embed_queries, read_inputs
from realm.masking.held_out import held_out_queries
from realm.masking.masked_queries import MaskedQuery, SpanIndex, holds, repeats_text
from realm.model.device import DeviceConfig, autocast, choose_device
from realm.model.folder import Model, load_model
from realm.model.losses import passage_utility, retrieval_utility
from realm.model.modes import evaluating
from realm.progress import progress
from realm.qa.scoring.metrics import RANKS, RECALL_AT, recall_at
from realm.search.exact import PassageIndex
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.tokens.layouts import NULL_PASSAGE


@dataclass(frozen=True)
class ProbeConfig(DeviceConfig):
    """Settings of the probe."""

    queries: int = 2000
    """Largest number of probe queries for recall."""
    read: int = 256
    """Number of these queries that the reader reads. 0: only recall is measured."""

    def __post_init__(self) -> None:
        at_least(self, queries=1, read=0)


class ReadingJson(TypedDict):
    """Quality of the predictions of the reader with retrieved passages."""

    span_accuracy: float
    """Percentage of spans of which every wordpiece is predicted; probabilities are marginalised over the hits and the null
    passage."""
    span_accuracy_without: float
    """Percentage of spans of which every wordpiece is predicted with the null passage as the only candidate."""
    retrieval_utility: float
    """Gain in log-likelihood over the null passage, in nats per masked wordpiece."""
    null_probability: float
    """Mean p(z|x) of the null passage among the hits."""
    positive_gap: float
    """Mean utility of passages that contain the span, minus the mean utility of all other passages read, in nats per span. Two
    passages more than the hits are read for this value: passages that contain the span, or else further hits."""


class ProbeJson(ReadingJson):
    """The output of `realm probe`: the number of queries, recall in percent, and the results of reading."""

    n: int
    recall: dict[str, float]


class ProbeOutcome(TypedDict):
    """The outcome of one query.

    `passage` is the id of the query's passage. `rank` is the rank of the first positive, counted from 1; 0 if none of the first
    100 passages is a positive.
    """

    passage: str
    rank: int


class ProbeFile(ProbeJson):
    """The file that `realm probe --out` writes."""

    outcomes: list[ProbeOutcome]


@dataclass(frozen=True)
class ProbeReport:
    """The result of the probe; `recall` is in percent."""

    n: int
    recall: dict[int, float]
    reading: ReadingJson
    ranks: np.ndarray
    """Rank of the first positive of each query (`first_positives`), for paired tests."""
    passages: list[str]
    """Ids of the passages from which the queries were cut."""

    def as_dict(self) -> ProbeJson:
        """The report as JSON, with rounded numbers."""
        reading = {name: round(value, 3) for name, value in self.reading.items()}  # type: ignore[call-overload]
        recall = {str(k): round(v, 3) for k, v in self.recall.items()}
        return {"n": self.n, "recall": recall, **reading}  # type: ignore[typeddict-item]

    def outcomes(self) -> list[ProbeOutcome]:
        """The outcome of each query, in the order of the probe."""
        rows = zip(self.passages, self.ranks, strict=True)
        return [{"passage": passage, "rank": int(rank)} for passage, rank in rows]


def first_positives(
    queries: Sequence[MaskedQuery],
    query_BD: Tensor,
    index: PassageIndex,
    tokens: PassageTokens,
    depth: int = max(RANKS),
) -> np.ndarray:
    """Rank, from 1, of the first passage that contains the masked span; 0 if none of the best `depth` passages does -> [B].

    Passages that repeat the text of the query are left out of the ranking.
    """
    return _ranks(
        queries, lambda rows, k: index.search(query_BD[rows], k).number_BK.cpu().numpy(), tokens, depth
    )


def first_positives_by(
    method: Literal["bm25", "hybrid"],
    queries: Sequence[MaskedQuery],
    retriever: Retriever,
    kb: KnowledgeBase,
    query_BD: Tensor | None = None,
    depth: int = max(RANKS),
) -> np.ndarray:
    """The ranks of `first_positives`, but for a search by the unmasked words of each query -> [B].

    A hybrid search also uses the vectors `query_BD`.
    """
    texts = [kb.tokenizer.decode(q.ids[q.ids != kb.tokenizer.mask_id]) for q in queries]

    def search(rows: list[int], k: int) -> np.ndarray:
        vectors = None if query_BD is None else query_BD[rows]
        return retriever.search([texts[row] for row in rows], k, method, vectors)[1]

    return _ranks(queries, search, kb.tokens, depth)


def _ranks(
    queries: Sequence[MaskedQuery],
    search: Callable[[list[int], int], np.ndarray],
    tokens: PassageTokens,
    depth: int,
) -> np.ndarray:
    """`search` gives the best k passages of some rows of the queries."""
    ranks = np.zeros(len(queries), dtype=np.int64)
    rows, k = list(range(len(queries))), depth + 8
    while rows:
        number_BK, short = search(rows, k), []
        for row, number_K in zip(rows, number_BK, strict=True):
            rank = _rank(queries[row], number_K, tokens, depth)
            if rank is None:
                short.append(row)
            else:
                ranks[row] = rank
        if k >= len(tokens.body.lengths):
            break
        rows, k = short, 4 * k  # many hits repeat the text of the query
    return ranks


def _rank(query: MaskedQuery, number_K: np.ndarray, tokens: PassageTokens, depth: int) -> int | None:
    """The rank of the first positive; 0 if there is none; None if further hits are needed to know it."""
    rank = 0
    for number in number_K.tolist():
        if number == NULL_PASSAGE:  # there are no further hits
            return 0
        body = tokens.body.row(number)
        if number == query.passage or repeats_text(query.original, body):
            continue
        rank += 1
        if rank > depth:
            return 0
        if holds(body, query.targets):
            return rank
    return 0 if rank == depth else None


INJECTED = 2
"""Largest number of passages that are read, in addition to the hits, because they contain the masked span."""


@torch.no_grad()
def read_queries(
    model: Model,
    queries: Sequence[MaskedQuery],
    query_BD: Tensor,
    index: PassageIndex,
    tokens: PassageTokens,
    spans: SpanIndex,
    *,
    at_once: int = 16,
) -> ReadingJson:
    """Predicts the span of each query from its hits and without passages, and measures the gain from hits and from positives.

    Raises:
        InputError: the corpus has too few passages.
    """
    hits = min(CANDIDATES, max(2, len(index) - INJECTED))  # with the null passage; a small corpus has fewer
    rule = CandidateRule(hits + INJECTED, same_corpus=True, injected=INJECTED)
    right_with: list[bool] = []
    right_without: list[bool] = []
    gains: dict[bool, list[float]] = {True: [], False: []}
    utility = null = pieces = 0.0
    with (
        evaluating(model.reader, model.embedder),
        progress(total=len(queries), description="read the probe", unit="query") as bar,
    ):
        for start in range(0, len(queries), at_once):
            part = queries[start : start + at_once]
            chosen = choose_candidates(part, query_BD[start : start + at_once], index, tokens, rule, spans)
            batch = read_inputs(part, chosen.number_BK, tokens, model.tokenizer, model.lengths).to(
                model.device
            )
            _, score_BK = model.embedder.score(batch.queries, batch.passages, batch.place_BK)
            logp_PKV = model.reader.vocabulary_logp(batch.joint, batch.position_BM, batch.mask_BM)
            row_P, masked_P = batch.mask_BM.nonzero(as_tuple=True)
            target_P = batch.target_BM[row_P, masked_P]
            logp_BKM = torch.zeros(*score_BK.shape, batch.mask_BM.shape[1], device=score_BK.device)
            logp_BKM[row_P, :, masked_P] = logp_PKV[torch.arange(len(row_P)), :, target_P]
            prior_PK = score_BK[:, :hits].log_softmax(dim=1)[row_P]
            marginal_PV = (prior_PK[:, :, None] + logp_PKV[:, :hits]).logsumexp(dim=1)
            for predicted_P, right in (
                (marginal_PV.argmax(dim=1), right_with),
                (logp_PKV[:, 0].argmax(dim=1), right_without),
            ):
                wrong_B = torch.zeros(len(part), device=score_BK.device).index_add(
                    0, row_P, (predicted_P != target_P).float()
                )
                right.extend((wrong_B == 0).tolist())
            found = retrieval_utility(score_BK[:, :hits], logp_BKM[:, :hits], batch.mask_BM)
            utility += found.item() * len(row_P)
            pieces += len(row_P)
            null += score_BK[:, :hits].softmax(dim=1)[:, 0].sum().item()
            gain_BK = passage_utility(logp_BKM, batch.mask_BM).tolist()
            for row, query in enumerate(part):
                for number, gain in zip(chosen.number_BK[row], gain_BK[row], strict=True):
                    if number != NULL_PASSAGE:
                        gains[holds(tokens.body.row(number), query.targets)].append(gain)
            bar.update(len(part))
    return {
        "span_accuracy": 100 * _mean(right_with),
        "span_accuracy_without": 100 * _mean(right_without),
        "retrieval_utility": utility / max(1, pieces),
        "null_probability": null / max(1, len(queries)),
        "positive_gap": _mean(gains[True]) - _mean(gains[False]),
    }


def open_for_probe(kb: KnowledgeBase, model_path: str, device: str) -> tuple[Model, PassageIndex, SpanIndex]:
    """The model on its device, its index, and the salient spans of the knowledge base.

    Raises:
        InputError: the model and the knowledge base do not belong together, or there is no index.
    """
    model = load_model(model_path)
    kb.check_tokenizer(model.tokenizer, model_path)
    kb.agree_on_held_out(model.held_out, model_path)
    model.to(choose_device(device))
    return model, complete_index(kb, model, model_path).index, SpanIndex(kb.tokens)


def probe(
    kb: KnowledgeBase, model_path: str, config: ProbeConfig, method: Literal["dense", "bm25"] = "dense"
) -> ProbeReport:
    """Runs the probe on a model and a knowledge base with an index of this model; `method` ranks the passages for recall.

    Raises:
        InputError: the model and the knowledge base do not belong together, there is no index, or there is no probe query.
    """
    model, index, spans = open_for_probe(kb, model_path, config.device)
    queries = held_out_queries(kb, model.lengths.query - 2, config.queries, spans)
    if not queries:
        raise InputError(
            f"none of the {len(kb)} passages can be probed: no held-out passage has a salient span that another passage "
            f"contains; held_out is {kb.config.held_out:g}: build a knowledge base from more text, or with a larger share "
            "(`realm kb build ... --set held_out=SHARE`), and train a model on this knowledge base"
        )
    with autocast(model.device, config.precision):
        query_BD = embed_queries(model, queries)
        depth = max(RECALL_AT)
        ranks = (
            first_positives_by("bm25", queries, Retriever(kb), kb, depth=depth)
            if method == "bm25"
            else first_positives(queries, query_BD, index, kb.tokens, depth)
        )
        reading = read_queries(
            model, queries[: config.read], query_BD[: config.read], index, kb.tokens, spans
        )
    passages = [kb.ids[query.passage] for query in queries]
    return ProbeReport(len(queries), {k: recall_at(ranks, k) for k in RANKS}, reading, ranks, passages)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
