"""Exact maximum inner product search: finds the passages whose vectors have the largest inner products with a query vector.

Vectors are stored in float16; scores are float32. There are three ways to search:

- A small index on a CPU has a float32 copy of its vectors. A search for a few queries is one matrix product and `topk`.
- On a GPU, a prefilter (`group_prefilter.py`) excludes most groups of passages of a large index by int8 scores.
- All other searches score the passages in chunks, so that the whole matrix [B, N] is never in memory. On a CPU with int8
  dot-product instructions, the int8 prefilter (`int8_prefilter.py`) excludes most passages of a chunk before their vectors
  are read.

Passages with equal scores are ordered by passage number, also where a hit list ends. Therefore an index can be divided into any
parts: the hits of the parts, merged by `merge_hits`, are the hits of the whole index, and `add_rests` does the same for the
softmax.

Axis letters: B queries, K hits per query, N passages, D embedding, C survivors of all queries, R parts of an index, M
candidates, b some of the queries.
"""

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from realm.errors import InputError
from realm.model.scores import scores, weighted_sums
from realm.search import group_operations, group_prefilter, int8_prefilter, threshold
from realm.search.group_prefilter import Int8Groups
from realm.search.int8_prefilter import Int8Vectors, QuantizedQueries, Survivors, round_up
from realm.search.threshold import above_threshold, scratch_buffer
from realm.tokens.layouts import NULL_PASSAGE

QUERIES = 256
"""Queries that are searched together, which limits the memory for scores."""
SCORES = 1 << 22
"""Scores that a CPU ranks at a time: 16 MB, about the size of the last-level cache."""
CHUNK = 1 << 18
"""Largest number of passages that are scored at a time, except on a GPU."""
GPU_SHARE = 1 / 64
"""Share of the memory of a GPU for the vectors, and for the scores, that it computes at a time. Ranking and the softmax need up
to four times as much. With many small chunks, a GPU waits for the CPU, which starts them."""
BLOCK = 1 << 12
"""Passages that a CPU converts to float32 at a time. The block has 2 MB if D is 128, so it is still in the cache when it is
multiplied."""
FLOAT32_NUMBERS = 1 << 21
"""Largest number of vector components for which a CPU keeps a float32 copy: 8 MB."""
FEW_SCORES = 1 << 18
"""Largest number of scores (queries x passages) for which one matrix product and `topk` are faster than the int8 prefilter."""
MIN_PASSAGES = 1 << 12
"""Smallest number of passages for which the int8 prefilter is faster than scoring all passages."""
USUAL_HITS = 20
"""Number of hits with which the kernels of a GPU are compiled before the first search. Those for 2 to 20 hits are the same."""
MORE_CANDIDATES = 8
"""Factor of the number of candidates for queries for which a GPU had too few of them."""
WARM_UP = 32
"""Number of queries after which a CPU prepares the index for faster searches. For fewer queries the preparation takes longer
than the searches."""

TRAINING_IS_EXACT = (
    "training searches exactly: the setting `search` is for answers, and training has no such setting"
)


class Hits(NamedTuple):
    """The best passages per query, best first. Passages with equal scores are ordered by passage number."""

    score_BK: Tensor
    number_BK: Tensor


class Rest(NamedTuple):
    """The softmax of each query's scores over some passages, as far as a loss needs it."""

    logsumexp_B: Tensor
    """Logarithm of the sum of exp(score)."""
    mean_BD: Tensor
    """Mean of the passages' vectors, weighted by the softmax; it is the gradient of `logsumexp_B` with respect to the query."""


class PassageIndex(Protocol):
    """Search over the vectors of all passages: in this process (`MipsIndex`), or divided over ranks (`realm.search.shards`).

    For answers the search can also be approximate (`realm.search.approximate`), on a Ray cluster (`realm.search.ray_index`) or
    in a database (`realm.search.postgres`)."""

    def __len__(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def rows(self, numbers: Sequence[int] | np.ndarray | Tensor) -> Tensor: ...

    def prepare(self) -> None: ...

    def search(self, query_BD: Tensor, k: int) -> Hits: ...

    def search_subset(self, query_BD: Tensor, number_n: np.ndarray, k: int) -> Hits: ...

    def search_among(self, query_BD: Tensor, among: Sequence[np.ndarray], k: int) -> Hits: ...

    def rest_logsumexp(self, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> Tensor: ...


class SearchOnly:
    """The methods of `PassageIndex` that only training calls, for an index that training cannot use."""

    def search_among(self, query_BD: Tensor, among: Sequence[np.ndarray], k: int) -> Hits:
        """Raises InputError."""
        raise InputError(TRAINING_IS_EXACT)

    def rest_logsumexp(self, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> Tensor:
        """Raises InputError."""
        raise InputError(TRAINING_IS_EXACT)


class MipsIndex:
    """Vectors of all passages on one device. The row number of a vector is the passage number."""

    def __init__(self, vectors_ND: np.ndarray | Tensor, device: torch.device | None = None):
        self._vectors_ND = torch.as_tensor(vectors_ND).to(device or torch.device("cpu")).contiguous()
        self._float32_ND: Tensor | None = None
        self._int8: Int8Vectors | None = None
        self._groups: Int8Groups | None = None
        self._compiled = False
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
        """Makes the float32 copy or the int8 vectors now, and compiles the kernels of a GPU. If `prepare` is not called,
        `search` does this after `WARM_UP` queries, and on a GPU when it first needs the int8 vectors."""
        passages, dim = self._vectors_ND.shape
        if not self._compiled and self._has_group_prefilter(1):
            self._compiled = True
            k = USUAL_HITS if self._has_group_prefilter(USUAL_HITS) else 1
            # Triton compiles the kernels for one query, for multiples of 16, and for all other numbers.
            for queries in (1, 17, 16):
                query_BD = torch.ones(queries, dim, device=self.device)
                self._search_groups(query_BD, k, group_prefilter.chosen_groups(k))
        if self.device.type != "cpu":
            return
        if self._float32_ND is None and self._vectors_ND.numel() <= FLOAT32_NUMBERS:
            self._float32_ND = self._vectors_ND.float()
        if self._int8 is None and passages >= MIN_PASSAGES and dim >= 8 and int8_prefilter.is_fast():
            self._int8 = Int8Vectors(self._vectors_ND)

    @torch.no_grad()
    def search(self, query_BD: Tensor, k: int) -> Hits:
        """The k passages with the largest inner products; all passages, if the index has fewer than k."""
        query_BD = query_BD.detach().float().to(self.device)
        self._queries_seen += len(query_BD)
        if self._queries_seen > WARM_UP:
            self.prepare()
        if self._float32_ND is not None and len(query_BD) * len(self) <= FEW_SCORES:
            # MKL multiplies a tall matrix by a narrow matrix; in the other order, searches with few queries are slower.
            return ranked(scores(self._float32_ND, query_BD).T, k)
        if self._has_group_prefilter(k):
            return self._search_groups(query_BD, k, group_prefilter.chosen_groups(k))
        return self._search_all(query_BD, k)

    @torch.no_grad()
    def search_subset(self, query_BD: Tensor, number_n: np.ndarray, k: int) -> Hits:
        """For each query, the k best passages among the passages `number_n`, whose numbers must be in rising order.

        The result has all these passages, if there are fewer than k.
        """
        query_BD = query_BD.detach().float().to(self.device)
        best = Hits(
            query_BD.new_empty(len(query_BD), 0), query_BD.new_empty((len(query_BD), 0), dtype=torch.int64)
        )
        size = self._chunk_size(max(query_BD.shape))  # here a CPU converts all vectors of a chunk at once
        for start in range(0, len(number_n), size):
            part_n = torch.as_tensor(number_n[start : start + size], device=self.device)
            more = ranked(scores(query_BD, self.rows(part_n)), k)
            best = merge_hits([best, Hits(more.score_BK, part_n[more.number_BK])], k)
        return best

    @torch.no_grad()
    def search_among(self, query_BD: Tensor, among: Sequence[np.ndarray], k: int) -> Hits:
        """For each query, the k best passages among the passages `among[query]`, whose numbers must be in rising order.

        A row with fewer than k passages is filled with `NULL_PASSAGE` and scores of minus infinity.
        """
        query_BD = query_BD.detach().float().to(self.device)
        hits = Hits(
            query_BD.new_full((len(query_BD), k), -torch.inf),
            torch.full((len(query_BD), k), NULL_PASSAGE, device=self.device),
        )
        for row, number_n in enumerate(among):
            best = self.search_subset(query_BD[row : row + 1], number_n, k)
            width = best.score_BK.shape[1]
            hits.score_BK[row, :width] = best.score_BK[0]
            hits.number_BK[row, :width] = best.number_BK[0]
        return hits

    def rest_logsumexp(self, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> Tensor:
        """For each query, the logsumexp of the scores of all passages except `left_out[query]` -> [B].

        Gradients flow to the queries; the vectors of the index are constants.
        """
        return with_gradient(query_BD, self.rest(query_BD, left_out))

    @torch.no_grad()
    def rest(self, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> Rest:
        """For each query, the softmax of the scores of all passages except `left_out[query]`."""
        query_BD = query_BD.detach().float().to(self.device)
        row_P = np.repeat(np.arange(len(left_out)), [len(numbers) for numbers in left_out])
        number_P = np.concatenate([np.zeros(0, dtype=np.int64), *left_out])
        nothing = Rest(query_BD.new_full((len(query_BD),), -torch.inf), torch.zeros_like(query_BD))

        def parts() -> Iterator[Rest]:
            for start, stop in self._chunks(len(query_BD)):
                vectors_ND = self._vectors_ND[start:stop].float()
                score_BN = scores(query_BD, vectors_ND)
                inside_P = (number_P >= start) & (number_P < stop)
                score_BN[
                    torch.from_numpy(row_P[inside_P]), torch.from_numpy(number_P[inside_P] - start)
                ] = -torch.inf
                logsumexp_B = score_BN.logsumexp(dim=1)
                weight_BN = score_BN.sub_(_finite(logsumexp_B)[:, None]).exp_()
                yield Rest(logsumexp_B, weighted_sums(weight_BN, vectors_ND))

        return reduce(lambda one, other: add_rests([one, other]), parts(), nothing)

    def _chunks(self, queries: int) -> Iterator[tuple[int, int]]:
        """Start and end of each chunk of passages."""
        size = self._chunk_size(queries)
        for start in range(0, len(self), size):
            yield start, min(start + size, len(self))

    def _chunk_size(self, queries: int) -> int:
        """Number of passages that are scored at a time; with more queries, the chunks are smaller."""
        if self.device.type == "cpu":
            return min(CHUNK, round_up(SCORES // max(1, queries)))
        if self.device.type != "cuda":
            return CHUNK
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return max(
            group_operations.GROUP, int(GPU_SHARE * memory) // (4 * max(queries, self._vectors_ND.shape[1]))
        )

    def _has_group_prefilter(self, k: int) -> bool:
        passages, dim = self._vectors_ND.shape
        return (
            k > 0
            and group_prefilter.is_fast(self.device)
            and group_prefilter.is_worthwhile(passages, group_prefilter.chosen_groups(k))
            and group_prefilter.is_possible(self.device, dim)
        )

    def _search_groups(self, query_BD: Tensor, k: int, chosen: int) -> Hits:
        """Searches with the prefilter of a GPU, and `chosen` groups of candidates. The few queries for which it cannot exclude
        all other passages are searched with more candidates, and then without it."""
        if self._groups is None:
            self._groups = Int8Groups(self._vectors_ND)
        if not self._groups.finite or not group_prefilter.is_worthwhile(len(self), chosen):
            return self._search_all(query_BD, k)
        at_a_time = self._queries_at_a_time(chosen)
        if len(query_BD) > at_a_time:
            parts = [self._search_groups(part_bD, k, chosen) for part_bD in query_BD.split(at_a_time)]
            return Hits(*map(torch.cat, zip(*parts, strict=True)))
        number_BM, bound_B = group_prefilter.candidates(query_BD, self._groups, len(self), chosen)
        using = group_prefilter.operations(self.device, query_BD.shape[1])
        place = ranked(using.gathered_scores(query_BD, self._vectors_ND, number_BM), k)
        best = Hits(place.score_BK, number_BM.gather(1, place.number_BK))
        sure_B = best.score_BK[:, -1] > bound_B
        if not sure_B.all():
            doubtful_b = sure_B.logical_not().nonzero().squeeze(1)
            again = self._search_groups(query_BD[doubtful_b], k, MORE_CANDIDATES * chosen)
            for rows, values in zip(best, again, strict=True):
                rows[doubtful_b] = values
        return best

    def _queries_at_a_time(self, chosen: int) -> int:
        """Number of queries whose candidates may be in the memory of a GPU at a time."""
        if self.device.type != "cuda":
            return QUERIES
        passages, dim = self._vectors_ND.shape
        memory = group_prefilter.memory_of_query(passages, dim, chosen, self.device)
        return max(1, int(GPU_SHARE * torch.cuda.get_device_properties(self.device).total_memory) // memory)

    def _search_all(self, query_BD: Tensor, k: int) -> Hits:
        """Searches without the prefilter of a GPU."""
        parts = map(partial(self._search, k=k), query_BD.split(QUERIES))
        return Hits(*map(torch.cat, zip(*parts, strict=True)))

    def _search(self, query_BD: Tensor, k: int) -> Hits:
        queries = query_BD.shape[0]
        best = Hits(query_BD.new_empty(queries, 0), query_BD.new_empty((queries, 0), dtype=torch.int64))
        quantized = self._quantized(query_BD) if queries and k else None
        vectors_ND = self._vectors_ND if self._float32_ND is None else self._float32_ND
        for start, stop in self._chunks(queries):
            floor_B = best.score_BK[:, -1] if best.score_BK.shape[1] >= k > 0 else None
            found = quantized.survivors(start, stop, floor_B, k) if quantized else None
            if found is not None:
                more = self._scored(query_BD, found)
            else:
                more = _scored_chunk(query_BD, vectors_ND[start:stop], floor_B, k)
                more = Hits(more.score_BK, more.number_BK + start)
            best = merge_hits([best, more], k)
        return best

    def _quantized(self, query_BD: Tensor) -> QuantizedQueries | None:
        """The queries for the prefilter; None if there are no int8 vectors, or if a query or a passage vector is not finite."""
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
    """The k best passages of a chunk, and possibly other passages.

    `floor_B` is a score that k passages of earlier chunks reach or exceed; passages of this chunk with a lower score may be
    left out.
    """
    if query_BD.device.type != "cpu":
        return ranked(scores(query_BD, vectors_ND), k)
    passages = len(vectors_ND)
    width = -(-passages // threshold.GROUP) * threshold.GROUP
    # int32 because the prefilter's scores use the same buffer.
    score_BN = scratch_buffer("scores", len(query_BD), width, torch.int32).view(torch.float32)
    score_BN[:, passages:] = -torch.inf
    _fill(score_BN, query_BD, vectors_ND)
    place_C = above_threshold(score_BN, k, None if floor_B is None else floor_B.numpy(), 0.0)
    if place_C is None:
        return ranked(score_BN[:, :passages], k)
    query_C = place_C // width
    score_C = torch.from_numpy(score_BN.view(-1).numpy().take(place_C))
    return _in_rows(Survivors(query_C, place_C - query_C * width), score_C, len(query_BD))


def _fill(score_BN: Tensor, query_BD: Tensor, vectors_ND: Tensor) -> None:
    """Writes the scores of a chunk into `score_BN`."""
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


def merge_hits(found: Sequence[Hits], k: int) -> Hits:
    """The k best hits among the hits of several parts of an index; all hits, if there are fewer than k.

    The parts must be in the order of their passage numbers.
    """
    score_BN, number_BN = (torch.cat(rows, dim=1) for rows in zip(*found, strict=True))
    best = ranked(score_BN, k)  # columns with equal scores are in the order of the passage numbers
    return Hits(best.score_BK, number_BN.gather(1, best.number_BK))


def ranked(score_BN: Tensor, k: int) -> Hits:
    """The k largest scores of each row, and their columns; all columns, if there are fewer than k.

    Columns with equal scores are in rising order. If only some of these columns are among the k, the lowest columns are kept.
    """
    count = score_BN.shape[1]
    k = min(k, count)
    if score_BN.device.type != "cpu":
        return Hits(*group_prefilter.operations(score_BN.device).best_columns(score_BN, k))
    # One score more than k shows whether the first score that is left out equals the last score that is kept.
    top = score_BN.topk(min(k + 1, count), dim=1)
    column_BK, equal_BK = top.indices[:, :k], top.values[:, 1:] == top.values[:, :-1]
    if not equal_BK.any():
        return Hits(top.values[:, :k], column_BK)
    if 0 < k < count:
        column_BK = column_BK.clone()
        for row in equal_BK[:, k - 1].nonzero().squeeze(1).tolist():
            last = top.values[row, k - 1]
            better = (score_BN[row] > last).nonzero().squeeze(1)
            equal = (score_BN[row] == last).nonzero().squeeze(1)
            column_BK[row] = torch.cat([better, equal[: k - len(better)]])
    column_BK = column_BK.sort(dim=1).values
    sorted_BK = score_BN.gather(1, column_BK).sort(dim=1, descending=True, stable=True)
    return Hits(sorted_BK.values, column_BK.gather(1, sorted_BK.indices))


def add_rests(parts: Sequence[Rest]) -> Rest:
    """The softmax over all passages, from the softmax over each part of the index."""
    logsumexp_RB = torch.stack([part.logsumexp_B for part in parts])
    total_B = logsumexp_RB.logsumexp(dim=0)
    share_RB = (logsumexp_RB - _finite(total_B)).exp()
    mean_RBD = torch.stack([part.mean_BD for part in parts])
    return Rest(total_B, (share_RB[:, :, None] * mean_RBD).sum(dim=0))


def with_gradient(query_BD: Tensor, rest: Rest) -> Tensor:
    """`rest.logsumexp_B` as a function of the queries, so that gradients flow to the queries -> [B]."""
    zero_BD = query_BD - query_BD.detach()
    return rest.logsumexp_B.to(query_BD.device) + (zero_BD * rest.mean_BD.to(query_BD.device)).sum(dim=1)


def _finite(logsumexp_B: Tensor) -> Tensor:
    """`logsumexp_B`, with 0 in place of minus infinity (the logsumexp over no passages)."""
    return logsumexp_B.masked_fill(logsumexp_B == -torch.inf, 0.0)
