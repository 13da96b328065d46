"""Exact maximum inner product search: finds the passages whose vectors have the largest inner products with a query vector.

Vectors are stored in float16; scores are float32. There are two ways to search:

- A small index on a CPU has a float32 copy of its vectors. A search for a few queries is one matrix product and `topk`.
- All other searches score the passages in chunks, so that the whole matrix [B, N] is never in memory. On a CPU with int8
  dot-product instructions, the int8 prefilter (`int8_prefilter.py`) excludes most passages of a chunk before their vectors
  are read.

Axis letters: B queries, K hits per query, N passages, D embedding, C survivors of all queries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.model.scores import scores
from realm.search import int8_prefilter, threshold
from realm.search.int8_prefilter import Int8Vectors, QuantizedQueries, Survivors, round_up
from realm.search.threshold import above_threshold, scratch_buffer

QUERIES = 256
"""Queries that a CPU searches together."""
SCORES = 1 << 22
"""Scores that a CPU ranks at a time: 16 MB, about the size of the last-level cache."""
CHUNK = 1 << 18
"""Largest number of passages that are scored at a time."""
BLOCK = 1 << 12
"""Passages that a CPU converts to float32 at a time. The block has 2 MB if D is 128, so it is still in the cache when it is
multiplied."""
FLOAT32_NUMBERS = 1 << 21
"""Largest number of vector components for which a CPU keeps a float32 copy: 8 MB."""
FEW_SCORES = 1 << 18
"""Largest number of scores (queries x passages) for which one matrix product and `topk` are faster than the int8 prefilter."""
MIN_PASSAGES = 1 << 12
"""Smallest number of passages for which the int8 prefilter is faster than scoring all passages."""
WARM_UP = 32
"""Number of queries after which a CPU prepares the index for faster searches. For fewer queries the preparation takes longer
than the searches."""


class Hits(NamedTuple):
    """The best passages per query, best first; passages with equal scores stand in any order."""

    score_BK: Tensor
    number_BK: Tensor


class MipsIndex:
    """Vectors of all passages on one device; the row is the passage number."""

    def __init__(self, vectors_ND: np.ndarray | Tensor, device: torch.device | None = None):
        self._vectors_ND = torch.as_tensor(vectors_ND).to(device or torch.device("cpu"))
        self._float32_ND: Tensor | None = None
        self._int8: Int8Vectors | None = None
        self._queries_seen = 0

    def __len__(self) -> int:
        return self._vectors_ND.shape[0]

    @property
    def device(self) -> torch.device:
        return self._vectors_ND.device

    def rows(self, numbers: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Vectors of the given passages -> [n, D] float32."""
        number_n = torch.as_tensor(numbers, dtype=torch.int64, device=self.device)
        return self._vectors_ND.index_select(0, number_n).float()

    def prepare(self) -> None:
        """Makes the float32 copy or the int8 vectors now. If `prepare` is not called, `search` makes them after
        `WARM_UP` queries."""
        passages, dim = self._vectors_ND.shape
        if self.device.type != "cpu":
            return
        if self._float32_ND is None and self._vectors_ND.numel() <= FLOAT32_NUMBERS:
            self._float32_ND = self._vectors_ND.float()
        if self._int8 is None and passages >= MIN_PASSAGES and dim >= 8 and int8_prefilter.is_fast():
            self._int8 = Int8Vectors(self._vectors_ND)

    @torch.no_grad()
    def search(self, query_BD: Tensor, k: int) -> Hits:
        """The k passages with the largest inner products; k is cut to the size of the index."""
        query_BD = query_BD.detach().float().to(self.device)
        self._queries_seen += len(query_BD)
        if self._queries_seen > WARM_UP:
            self.prepare()
        if self._float32_ND is not None and len(query_BD) * len(self) <= FEW_SCORES:
            # MKL multiplies a tall matrix by a narrow one; the other way round, 4 to 30 queries take four times as long.
            top = scores(self._float32_ND, query_BD).T.topk(min(k, len(self)), dim=1)
            return Hits(top.values, top.indices)
        parts = query_BD.split(QUERIES) if self.device.type == "cpu" else [query_BD]
        return Hits(*map(torch.cat, zip(*(self._search(part_BD, k) for part_BD in parts), strict=True)))

    def rest_logsumexp(self, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> Tensor:
        """logsumexp of each query's scores over all passages except those that the query leaves out -> [B].

        The gradient reaches the queries; the index is constant. Costs one [B, N] matrix: for indexes up to about 100,000.
        """
        score_BN = scores(query_BD, self._vectors_ND)
        rows = np.concatenate([np.full(len(numbers), row) for row, numbers in enumerate(left_out)])
        columns = np.concatenate([np.asarray(numbers) for numbers in left_out])
        out = torch.zeros_like(score_BN, dtype=torch.bool)
        out[torch.as_tensor(rows, dtype=torch.int64), torch.as_tensor(columns, dtype=torch.int64)] = True
        return score_BN.masked_fill(out, -torch.inf).logsumexp(dim=1)

    def _search(self, query_BD: Tensor, k: int) -> Hits:
        queries = query_BD.shape[0]
        best = Hits(query_BD.new_empty(queries, 0), query_BD.new_empty((queries, 0), dtype=torch.int64))
        quantized = self._quantized(query_BD) if queries and k else None
        vectors_ND = self._vectors_ND if self._float32_ND is None else self._float32_ND
        size = CHUNK
        if self.device.type == "cpu":
            size = min(CHUNK, round_up(SCORES // max(1, queries)))
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            floor_B = best.score_BK[:, -1] if best.score_BK.shape[1] >= k > 0 else None
            found = quantized.survivors(start, stop, floor_B, k) if quantized else None
            if found is not None:
                more = self._scored(query_BD, found)
            else:
                more = _scored_chunk(query_BD, vectors_ND[start:stop], floor_B, k)
                more = Hits(more.score_BK, more.number_BK + start)
            best = _best([best, more], k)
        return best

    def _quantized(self, query_BD: Tensor) -> QuantizedQueries | None:
        """The queries for the prefilter; None if there are no int8 vectors, or if a vector is not finite."""
        usable = self._int8 is not None and self._int8.finite and bool(query_BD.isfinite().all())
        return QuantizedQueries(self._int8, query_BD) if self._int8 is not None and usable else None

    def _scored(self, query_BD: Tensor, found: Survivors) -> Hits:
        """Exact scores of the survivors, one row per query; short rows are filled with scores of minus infinity."""
        query_C, number_C = torch.from_numpy(found.query_C), torch.from_numpy(found.number_C)
        if query_BD.shape[0] == 1:
            return Hits(scores(query_BD, self.rows(number_C)), number_C[None])
        parts = zip(query_C.split(BLOCK // 2), number_C.split(BLOCK // 2), strict=True)
        score_C = torch.cat([self.rows(n).mul_(query_BD.index_select(0, q)).sum(1) for q, n in parts])
        return _in_rows(found, score_C, query_BD.shape[0])


def _scored_chunk(query_BD: Tensor, vectors_ND: Tensor, floor_B: Tensor | None, k: int) -> Hits:
    """The k best passages of a chunk, and possibly others; without passages whose score is below `floor_B`, a score that k
    earlier passages reach."""
    if query_BD.device.type != "cpu":
        return _top(scores(query_BD, vectors_ND), k)
    passages = len(vectors_ND)
    width = -(-passages // threshold.GROUP) * threshold.GROUP
    # int32 because the prefilter's scores use the same buffer.
    score_BN = scratch_buffer("scores", len(query_BD), width, torch.int32).view(torch.float32)
    score_BN[:, passages:] = -torch.inf
    _fill(score_BN, query_BD, vectors_ND)
    place_C = above_threshold(score_BN, k, None if floor_B is None else floor_B.numpy(), 0.0)
    if place_C is None:
        return _top(score_BN[:, :passages], k)
    query_C = place_C // width
    score_C = torch.from_numpy(score_BN.view(-1).numpy().take(place_C))
    return _in_rows(Survivors(query_C, place_C - query_C * width), score_C, len(query_BD))


def _fill(score_BN: Tensor, query_BD: Tensor, vectors_ND: Tensor) -> None:
    """Writes the scores of a chunk."""
    if vectors_ND.dtype == torch.float32:
        scores(query_BD, vectors_ND, score_BN[:, : len(vectors_ND)])
        return
    for start in range(0, len(vectors_ND), BLOCK):
        block_ND = vectors_ND[start : start + BLOCK]
        float32_ND = scratch_buffer("block", len(block_ND), block_ND.shape[1], torch.float32).copy_(block_ND)
        scores(query_BD, float32_ND, score_BN[:, start : start + len(block_ND)])


def _in_rows(found: Survivors, score_C: Tensor, queries: int) -> Hits:
    """The survivors and their scores, one row per query; short rows are filled with scores of minus infinity."""
    number_C = torch.from_numpy(found.number_C)
    if queries == 1:
        return Hits(score_C[None], number_C[None])
    count_B = np.bincount(found.query_C, minlength=queries)
    width = int(count_B.max())
    place_C = np.arange(len(number_C)) - (count_B.cumsum() - count_B - width * np.arange(queries)).take(
        found.query_C
    )
    hits = Hits(score_C.new_full((queries, width), -torch.inf), number_C.new_zeros((queries, width)))
    for rows, values in zip(hits, (score_C, number_C), strict=True):
        rows.view(-1)[torch.from_numpy(place_C)] = values
    return hits


def _best(found: Sequence[Hits], k: int) -> Hits:
    """The k best hits of several searches; all hits where there are fewer."""
    score_BN, number_BN = (torch.cat(rows, dim=1) for rows in zip(*found, strict=True))
    top = score_BN.topk(min(k, score_BN.shape[1]), dim=1)
    return Hits(top.values, number_BN.gather(1, top.indices))


def _top(score_BN: Tensor, k: int) -> Hits:
    """The k largest scores and their columns; k is cut to N."""
    return Hits(*score_BN.topk(min(k, score_BN.shape[1]), dim=1))
