"""Chooses the candidates of masked queries from search results, and makes the tensors of a pre-training step.

Two rules apply. The null passage is always candidate 0. The passage from which the query was cut, and every passage that
repeats the text of the query, is never a candidate, unless `exclude_own` is False. If a sentence is in so many passages that
too few others are found, such as a notice below every text, null passages take their places. In addition, positives can be
injected: passages in which the masked span was tagged become candidates. Injected positives are for readers and batches that
are too small to find positives by chance. Passages that BM25 finds can be candidates too.

Axis letters: B queries, K candidates including the null passage, M masked tokens, U distinct passages, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm import distributed
from realm.errors import InputError
from realm.masking.masked_queries import MaskedQuery, SpanIndex, repeats_text
from realm.model.folder import Model
from realm.model.modes import evaluating
from realm.search.exact import PassageIndex
from realm.store.knowledge_base import PassageTokens
from realm.tokens.layouts import NULL_PASSAGE, Lengths, Tokens, joint_inputs, passage_inputs, query_inputs
from realm.tokens.tokenizer import Tokenizer

CANDIDATES = 8
"""Number of passages that a model reads for a query in measurements, including the null passage, as in pre-training."""
DEEPEST = 1024
"""Largest number of hits that are looked at for a query whose text most of its hits repeat."""


class Candidates(NamedTuple):
    """The candidates of each query, and the excluded passages."""

    number_BK: np.ndarray
    """Passage numbers. Column 0 is the null passage, which also takes the columns for which a query has too few passages."""
    excluded: list[np.ndarray]
    """Per query, the passage of the query and the retrieved passages that repeat the text of the query."""

    def not_in_rest(self) -> list[np.ndarray]:
        """Per query, its candidates and its excluded passages: all other passages are the unretrieved ones."""
        return [
            np.union1d(out, row[row != NULL_PASSAGE])
            for out, row in zip(self.excluded, self.number_BK, strict=True)
        ]


class RetrievalBatch(NamedTuple):
    """The inputs of one training step."""

    queries: Tokens
    passages: Tokens
    """Each distinct candidate once -> [U, T]."""
    place_BK: Tensor
    """Row of each candidate in `passages`."""
    joint: Tokens
    """Each query with each of its candidates -> [B * K, T]; the rows of the first query come first."""
    position_BM: Tensor
    """Masked positions, which are the same in `queries` and in `joint`."""
    target_BM: Tensor
    mask_BM: Tensor
    """1.0 at real masked tokens, 0.0 at padding."""

    def to(self, device: torch.device) -> "RetrievalBatch":
        return RetrievalBatch._make(
            part.to(device, non_blocking=True) if isinstance(part, Tensor) else part.to(device)
            for part in self
        )


@dataclass(frozen=True)
class CandidateRule:
    """How the candidates of a query are chosen."""

    count: int
    """Candidates per query, including the null passage."""
    same_corpus: bool
    """Whether the queries were cut from the passages of the knowledge corpus."""
    injected: int = 0
    """Number of injected positives: the positives of the masked span with the best scores that are not among the other
    candidates. If there are fewer positives, more hits become candidates."""
    exclude_own: bool = True
    """If False, no passage is excluded."""
    bm25: int = 0
    """Number of candidates from BM25 that are not among the other candidates."""


def choose_candidates(
    queries: Sequence[MaskedQuery],
    query_BD: Tensor,
    index: PassageIndex,
    knowledge: PassageTokens,
    rule: CandidateRule,
    spans: SpanIndex | None = None,
    bm25_BK: np.ndarray | None = None,
) -> Candidates:
    """The candidates of each query: the null passage, the best hits, injected positives of the span, and hits of BM25.

    `spans` finds the positives; if `spans` is None, no positive is injected. `bm25_BK` has the hits of BM25, best first; it is
    needed if `rule.bm25` is not 0.

    Raises:
        InputError: the corpus is too small to give every query its candidates.
    """
    wanted, kept = rule.count - 1, rule.count - 1 - rule.injected - rule.bm25
    if len(index) - int(rule.same_corpus and rule.exclude_own) < wanted:
        raise InputError(f"{len(index)} passages are too few: {rule.count} candidates per query need more")
    found: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))] * len(
        queries
    )
    short, depth = list(range(len(queries))), wanted + 8
    while True:
        number_BK = index.search(query_BD[short], depth).number_BK.cpu().numpy()
        for place, row in enumerate(short):
            found[row] = _allowed(queries[row], number_BK[place], knowledge, rule)
        short = [row for row in short if len(found[row][0]) < wanted]
        if depth >= min(len(index), DEEPEST) or not distributed.any_rank(bool(short)):
            break
        # Many hits repeat the text of a query, so more hits are needed. All ranks search, because they may share an index.
        depth = min(4 * depth, DEEPEST)
    numbers = [hit[:wanted] for hit, _ in found]
    excluded = [out for _, out in found]
    more: list[tuple[np.ndarray, int]] = []
    if rule.injected and spans is not None:
        positives = [
            np.setdiff1d(spans.passages(query.targets), np.concatenate([out, chosen[:kept]]))
            for query, chosen, out in zip(queries, numbers, excluded, strict=True)
        ]
        best_BK = index.search_among(query_BD, positives, rule.injected * 2).number_BK.cpu().numpy()
        more.append((best_BK, rule.injected))
    if rule.bm25:
        assert bm25_BK is not None
        more.append((bm25_BK, rule.bm25))
    for row, (query, hits) in enumerate(zip(queries, numbers, strict=True) if more else ()):
        chosen = hits[:kept].tolist()
        chosen += [NULL_PASSAGE] * (kept - len(chosen))  # positives do not take the places of hits
        for found_BK, most in more:
            allowed, _ = _allowed(query, found_BK[row][found_BK[row] != NULL_PASSAGE], knowledge, rule)
            chosen += [n for n in allowed.tolist() if n not in chosen][:most]
        fill = [n for n in hits[kept:].tolist() if n not in chosen]
        numbers[row] = np.array([*chosen, *fill][:wanted], dtype=np.int64)
    chosen_BK = np.full((len(queries), rule.count), NULL_PASSAGE, dtype=np.int64)
    for row, chosen in enumerate(numbers):
        chosen_BK[row, 1 : 1 + len(chosen)] = chosen
    return Candidates(chosen_BK, excluded)


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


def read_inputs(
    queries: Sequence[MaskedQuery],
    number_BK: np.ndarray,
    knowledge: PassageTokens,
    tokenizer: Tokenizer,
    lengths: Lengths,
) -> RetrievalBatch:
    """The tensors of a training step: queries, distinct passages, and each query with each of its candidates."""
    distinct, place = np.unique(number_BK, return_inverse=True)
    position_BM, target_BM, mask_BM = _targets(queries)
    nothing = np.zeros(0, dtype=np.int64)
    body = {int(n): knowledge.body.row(n) if n != NULL_PASSAGE else nothing for n in distinct}
    title = [knowledge.title.row(n) if n != NULL_PASSAGE else nothing for n in distinct]
    return RetrievalBatch(
        query_inputs([q.ids for q in queries], tokenizer, lengths),
        passage_inputs(title, list(body.values()), tokenizer, lengths),
        torch.from_numpy(place.reshape(number_BK.shape)),
        joint_inputs(
            [q.ids for q in queries for _ in range(number_BK.shape[1])],
            [body[int(n)] for n in number_BK.ravel()],
            tokenizer,
            lengths,
        ),
        position_BM,
        target_BM,
        mask_BM,
    )


def _targets(queries: Sequence[MaskedQuery]) -> tuple[Tensor, Tensor, Tensor]:
    """Masked positions (with [CLS] at position 0), target ids and mask, padded to the longest span -> three tensors [B, M]."""
    most = max(len(q.positions) for q in queries)
    position_BM = np.zeros((len(queries), most), dtype=np.int64)
    target_BM = np.zeros((len(queries), most), dtype=np.int64)
    mask_BM = np.zeros((len(queries), most), dtype=np.float32)
    for row, query in enumerate(queries):
        count = len(query.positions)
        position_BM[row, :count] = query.positions + 1
        target_BM[row, :count] = query.targets
        mask_BM[row, :count] = 1
    return torch.from_numpy(position_BM), torch.from_numpy(target_BM), torch.from_numpy(mask_BM)


def _allowed(
    query: MaskedQuery, numbers: np.ndarray, knowledge: PassageTokens, rule: CandidateRule
) -> tuple[np.ndarray, np.ndarray]:
    """The allowed hits of a query, and the excluded passages: its own, and the hits that repeat the text of the query."""
    if not rule.exclude_own:
        return numbers, numbers[:0]
    own = np.array([query.passage] if rule.same_corpus else [], dtype=np.int64)
    repeats = np.array([n in own or _repeats(query, n, knowledge) for n in numbers], dtype=bool)
    return numbers[~repeats], np.union1d(numbers[repeats], own)


def _repeats(query: MaskedQuery, number: int, knowledge: PassageTokens) -> bool:
    return repeats_text(query.original, knowledge.body.row(number))
