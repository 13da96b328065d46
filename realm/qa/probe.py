"""The probe: a health check of a model on held-out masked facts of its corpus, without labels.

A probe query is a masked sentence of a held-out passage, which no training query comes from; its span also occurs in another
passage. Retrieval is right at k if one of the top k *other* passages holds the span. Reading is right if the reader predicts
the span.

Axis letters: B queries, K candidates with the null passage, M masked tokens, D embedding, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from realm.errors import InputError
from realm.index.versions import load_index
from realm.masking.candidates import choose_candidates, read_inputs
from realm.masking.masked_queries import MaskedQuery, SpanIndex, draw_queries, held_out, holds, repeats_text
from realm.model.device import Precision, autocast, choose_device
from realm.model.folder import Model, load_model
from realm.model.losses import passage_utility, retrieval_utility
from realm.model.modes import evaluating
from realm.progress import progress
from realm.qa.metrics import recall_at
from realm.search.bm25 import Bm25Index
from realm.search.exact import PassageIndex
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.tokens.layouts import NULL_PASSAGE, query_inputs

RANKS = (1, 5, 20)
PROBE_SEED = 20_200_210
"""Fixed, so that every run draws the same queries, and results of different models and dates are comparable."""


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of the probe."""

    queries: int = 2000
    """Largest number of probe queries for recall."""
    read: int = 256
    """Number of these queries that the reader reads."""
    device: str = "auto"
    """"auto": a GPU when there is one, else the CPU; or any torch device."""
    precision: Precision = "auto"
    """Precision of matrix products."""


@dataclass(frozen=True)
class ReadingReport:
    """Quality of reading with retrieved passages, over the `n` probe queries read."""

    n: int
    span_accuracy: float
    """Percentage of spans with every wordpiece predicted, marginalised over the candidates."""
    span_accuracy_without: float
    """The same with the null passage as the only candidate."""
    retrieval_utility: float
    """Gain in log-likelihood over the null passage, in nats per masked wordpiece."""
    null_probability: float
    """Mean p(z|x) of the null passage among the candidates."""
    positive_gap: float
    """Mean utility of candidates that hold the span minus that of the remaining candidates, in nats per span."""


class ProbeJson(TypedDict):
    """The output of `realm probe`: the number of queries, recall in percent, and the fields of `ReadingReport` except `n`."""

    n: int
    recall: dict[str, float]
    span_accuracy: float
    span_accuracy_without: float
    retrieval_utility: float
    null_probability: float
    positive_gap: float


class ProbeOutcome(TypedDict):
    """The outcome of one query: the id of its passage, and the rank of the first positive, from 1, 0 for none."""

    passage: str
    rank: int


class ProbeFile(ProbeJson):
    """The file that `realm probe --out` writes."""

    outcomes: list[ProbeOutcome]


@dataclass(frozen=True)
class ProbeReport:
    """`recall` in percent; `reading` in the units of its fields."""

    n: int
    recall: dict[int, float]
    reading: ReadingReport
    ranks: np.ndarray
    """Rank of each query's first positive, as `first_positives` returns it, for paired tests."""
    passages: list[str]
    """Ids of the passages that the queries come from."""

    def as_dict(self) -> ProbeJson:
        """The report, rounded."""
        reading = self.reading
        return {
            "n": self.n,
            "recall": {str(k): round(v, 2) for k, v in self.recall.items()},
            "span_accuracy": round(reading.span_accuracy, 3),
            "span_accuracy_without": round(reading.span_accuracy_without, 3),
            "retrieval_utility": round(reading.retrieval_utility, 3),
            "null_probability": round(reading.null_probability, 3),
            "positive_gap": round(reading.positive_gap, 3),
        }

    def outcomes(self) -> list[ProbeOutcome]:
        """The outcome of each query, in the order of the probe."""
        rows = zip(self.passages, self.ranks, strict=True)
        return [{"passage": passage, "rank": int(rank)} for passage, rank in rows]


def held_out_queries(
    kb: KnowledgeBase, max_tokens: int, count: int, spans: SpanIndex | None = None
) -> list[MaskedQuery]:
    """The queries of the probe: masked spans of held-out passages that another passage also holds.

    Every repeat of the span in the query is masked. At most one query per passage, and fewer than `count` if the corpus has
    no more.
    """
    spans = spans or SpanIndex(kb.tokens)
    rng = np.random.default_rng(PROBE_SEED)
    queries = []
    for passage in rng.permutation(np.flatnonzero(held_out(kb.ids, kb.config.held_out))):
        drawn = draw_queries(
            kb.tokens, np.array([passage]), 1, rng, kb.tokenizer.mask_id, max_tokens, repeats=True
        )
        if drawn and len(spans.passages(drawn[0].targets)) > 1:
            queries += drawn
            if len(queries) == count:
                break
    return queries


@torch.no_grad()
def embed_queries(model: Model, queries: Sequence[MaskedQuery], at_once: int = 128) -> Tensor:
    """Vectors of masked queries, without dropout -> [B, D]."""
    with evaluating(model.embedder):
        return torch.cat(
            [
                model.embedder.query(
                    query_inputs([q.ids for q in part], model.tokenizer, model.lengths).to(model.device)
                )
                for part in (queries[i : i + at_once] for i in range(0, len(queries), at_once))
            ]
        )


def first_positives(
    queries: Sequence[MaskedQuery],
    query_BD: Tensor,
    index: PassageIndex,
    tokens: PassageTokens,
    depth: int = max(RANKS),
) -> np.ndarray:
    """Rank, from 1, of the first other passage that holds the masked span; 0 if none of the top `depth` does -> [B]."""
    return _ranks(queries, index.search(query_BD, depth + 8).number_BK.cpu().numpy(), tokens, depth)


def first_positives_bm25(
    queries: Sequence[MaskedQuery], kb: KnowledgeBase, depth: int = max(RANKS)
) -> np.ndarray:
    """The same ranks for a BM25 search with the unmasked words of each query -> [B]."""
    visible = [kb.tokenizer.decode(q.ids[q.ids != kb.tokenizer.mask_id]) for q in queries]
    number_BK = Bm25Index(kb.titles, kb.texts()).search(visible, depth + 8).number_BK
    return _ranks(queries, number_BK, kb.tokens, depth)


def _ranks(
    queries: Sequence[MaskedQuery], number_BK: np.ndarray, tokens: PassageTokens, depth: int
) -> np.ndarray:
    ranks = np.zeros(len(queries), dtype=np.int64)
    for row, query in enumerate(queries):
        rank = 0
        for number in number_BK[row][number_BK[row] != NULL_PASSAGE].tolist():
            body = tokens.body.row(number)
            if number == query.passage or repeats_text(query.original, body):
                continue
            rank += 1
            if rank > depth:
                break
            if holds(body, query.targets):
                ranks[row] = rank
                break
    return ranks


@torch.no_grad()
def read_queries(
    model: Model,
    queries: Sequence[MaskedQuery],
    query_BD: Tensor,
    index: PassageIndex,
    tokens: PassageTokens,
    spans: SpanIndex,
    *,
    candidates: int = 8,
    at_once: int = 16,
) -> ReadingReport:
    """Reads each query with its candidates, which include up to two injected positives, and with the null passage alone."""
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
            chosen = choose_candidates(
                part, query_BD[start : start + at_once], index, tokens, candidates, True, 2, spans
            )
            batch = read_inputs(part, chosen.number_BK, tokens, model.tokenizer, model.lengths).to(
                model.device
            )
            _, score_BK = model.embedder.score(batch.queries, batch.passages, batch.place_BK)
            logp_PKV = model.reader.vocabulary_logp(batch.joint, batch.position_BM, batch.mask_BM)
            row_P, masked_P = batch.mask_BM.nonzero(as_tuple=True)
            target_P = batch.target_BM[row_P, masked_P]
            logp_BKM = torch.zeros(*score_BK.shape, batch.mask_BM.shape[1], device=score_BK.device)
            logp_BKM[row_P, :, masked_P] = logp_PKV[torch.arange(len(row_P)), :, target_P]
            marginal_PV = (score_BK.log_softmax(dim=1)[row_P][:, :, None] + logp_PKV).logsumexp(dim=1)
            for predicted_P, right in (
                (marginal_PV.argmax(dim=1), right_with),
                (logp_PKV[:, 0].argmax(dim=1), right_without),
            ):
                wrong_B = torch.zeros(len(part), device=score_BK.device).index_add(
                    0, row_P, (predicted_P != target_P).float()
                )
                right.extend((wrong_B == 0).tolist())
            utility += retrieval_utility(score_BK, logp_BKM, batch.mask_BM).item() * len(row_P)
            pieces += len(row_P)
            null += score_BK.softmax(dim=1)[:, 0].sum().item()
            gain_BK = passage_utility(logp_BKM, batch.mask_BM).tolist()
            for row, query in enumerate(part):
                for column, number in enumerate(chosen.number_BK[row][1:], start=1):
                    gains[holds(tokens.body.row(number), query.targets)].append(gain_BK[row][column])
            bar.update(len(part))
    count = max(1, len(queries))
    return ReadingReport(
        n=len(queries),
        span_accuracy=100 * _mean(right_with),
        span_accuracy_without=100 * _mean(right_without),
        retrieval_utility=utility / max(1, pieces),
        null_probability=null / count,
        positive_gap=_mean(gains[True]) - _mean(gains[False]),
    )


def probe(
    kb: KnowledgeBase, model_path: str, config: ProbeConfig, method: Literal["dense", "bm25"] = "dense"
) -> ProbeReport:
    """Runs the probe on a model folder and a knowledge base with the model's index; `method` ranks the passages for recall.

    Raises:
        InputError: the parts do not belong together, the index is missing, or no passage can be probed.
    """
    model = load_model(model_path)
    kb.check_tokenizer(model.tokenizer, model_path)
    kb.agree_on_held_out(model.held_out, model_path)
    model.to(choose_device(config.device))
    index, spans = load_index(kb, model, model_path).index, SpanIndex(kb.tokens)
    queries = held_out_queries(kb, model.lengths.query - 2, config.queries, spans)
    if not queries:
        raise InputError(
            f"none of the {len(kb)} passages can be probed: no held-out passage has a salient span that another passage holds; "
            f"held_out is {kb.config.held_out:g}: build a knowledge base of more text, or with a larger share "
            "(`realm kb build ... --set held_out=SHARE`), and train on it"
        )
    with autocast(model.device, config.precision):
        query_BD = embed_queries(model, queries)
        by_words = method == "bm25"
        ranks = (
            first_positives_bm25(queries, kb)
            if by_words
            else first_positives(queries, query_BD, index, kb.tokens)
        )
        reading = read_queries(
            model, queries[: config.read], query_BD[: config.read], index, kb.tokens, spans
        )
    passages = [kb.ids[query.passage] for query in queries]
    return ProbeReport(len(queries), {k: recall_at(ranks, k) for k in RANKS}, reading, ranks, passages)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
