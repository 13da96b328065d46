"""Exact maximum inner product search: vectors in, the best passage numbers out. Knows nothing of text or networks.

Vectors are in 16 bits, those of small indexes on a CPU in 32 too; products and comparisons are float32. A chunk of the index
is scored at a time, so of a large one the [B, N] matrix never exists in `search`. On a CPU that multiplies 8-bit numbers fast,
only the passages are scored that their codes (`codes.py`) do not rule out; which scores can be among the best, `ranking.py`
tells.

Letters: B queries, K hits per query, N passages, D embedding, G groups of passages, C that remain of all queries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.model.cpu.threads import share_out
from realm.model.scores import scores
from realm.search import int8_prefilter as codes
from realm.search import ranking
from realm.search.int8_prefilter import Codes, Remaining, RoundedQueries
from realm.search.ranking import reaching, space

QUERIES = 256
"""Queries that a CPU searches for together."""
SCORES = 1 << 22
"""Scores that a thread of a CPU ranks at a time: 16 MB, about what its last cache holds."""
CHUNK = 1 << 18
"""Passages whose scores are ranked at a time, at most."""
BLOCK = 1 << 12
"""Passages that a CPU turns into float32 at a time: 2 MB at D = 128, so that they are multiplied while in its cache."""
CACHED = 1 << 24
"""Numbers of an index whose codes a core's share of the cache holds: there each thread searches for queries of its own."""
ALONE = 1 << 7
"""Queries for each thread at least: fewer are sooner found by threads that share each product."""
SHARED = 1 << 16
"""Passages without codes from which on threads each search a part of them, half as many at least."""
WIDE = 1 << 21
"""Numbers of an index that a CPU keeps in float32 too: 8 MB."""
CHEAP = 1 << 18
"""Scores, all at once, that such an index gives and torch ranks sooner than anything else is asked."""
SMALL = 1 << 12
"""Passages that are scored sooner than their codes are asked."""
FEW = 32
"""Queries whose scores cost less than the codes of all passages do."""
TOP_GROUP = 64
"""Passages of which the best score is ranked first, on a GPU and where a bound rules out too little."""


class Hits(NamedTuple):
    """The best passages per query, best first; equal scores in no particular order."""

    score_BK: Tensor
    number_BK: Tensor


class MipsIndex:
    """All passages' vectors on one device, row = passage number."""

    def __init__(self, vectors_ND: np.ndarray | Tensor, device: torch.device | None = None):
        self._vectors_ND = torch.as_tensor(vectors_ND).to(device or torch.device("cpu"))
        self._written_N: Tensor | None = None
        self._codes: Codes | None = None
        self._wide_ND: Tensor | None = None
        self._asked = 0
        """Queries since there were no codes."""

    def __len__(self) -> int:
        return self._vectors_ND.shape[0]

    @property
    def device(self) -> torch.device:
        return self._vectors_ND.device

    def rows(self, numbers: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Vectors of the given passages -> [n, D] float32."""
        number_n = torch.as_tensor(numbers, dtype=torch.int64, device=self.device)
        return self._vectors_ND.index_select(0, number_n).float()

    def write(self, numbers: np.ndarray | Tensor, vectors_UD: Tensor) -> None:
        """Replaces the vectors of some passages, in memory only."""
        number_U = torch.as_tensor(numbers, device=self.device)
        if self._written_N is None:
            self._written_N = torch.zeros(len(self), dtype=torch.bool, device=self.device)
        self._written_N[number_U] = True
        self._vectors_ND[number_U] = vectors_UD.to(self.device, self._vectors_ND.dtype)
        if self._wide_ND is not None:
            self._wide_ND[number_U] = self._vectors_ND[number_U].float()
        if self._codes is not None:
            before = self._codes.error
            self._codes.write(number_U, self._vectors_ND[number_U])
            if not self._codes.error <= 2 * before:  # made for shorter vectors, they rule out too little now
                self._codes, self._asked = None, 0

    def written(self) -> tuple[Tensor, Tensor] | None:
        """Numbers and vectors of what was replaced, for `write`; none where nothing was."""
        if self._written_N is None:
            return None
        number_U = self._written_N.nonzero().squeeze(1)
        return number_U, self._vectors_ND[number_U]

    def prepare(self) -> None:
        """Makes what a CPU searches faster with now, which search does after `FEW` queries: no question waits for it then."""
        passages, dim = self._vectors_ND.shape
        if self.device.type != "cpu":
            return
        with torch.inference_mode(False):  # `write` may come outside of it
            if self._wide_ND is None and self._vectors_ND.numel() <= WIDE:
                self._wide_ND = self._vectors_ND.float()
            if self._codes is None and passages >= SMALL and dim >= 8 and codes.are_fast():
                self._codes = Codes(self._vectors_ND)

    @torch.no_grad()
    def search(self, query_BD: Tensor, k: int) -> Hits:
        """The k passages with the largest inner product; k is cut to the size of the index."""
        query_BD = query_BD.detach().float().to(self.device)
        self._asked += len(query_BD)
        if self._codes is None and self._asked > FEW:
            self.prepare()
        if self.device.type != "cpu":
            return self._search(query_BD, range(len(self)), k)
        if self._wide_ND is not None and len(query_BD) * len(self) <= CHEAP:
            # MKL multiplies a tall matrix by a narrow one: the other way round, 4 to 30 rows took it four times as long.
            top = scores(self._wide_ND, query_BD).T.topk(min(k, len(self)), dim=1)
            return Hits(top.values, top.indices)
        threads, everything = torch.get_num_threads(), range(len(self))
        parts = min(len(query_BD) // ALONE, threads * -(-len(query_BD) // (threads * QUERIES)))
        if self._sound_codes is not None and self._vectors_ND.numel() <= CACHED and parts > 1:
            found = share_out(
                lambda part_BD: self._search(part_BD, everything, k), query_BD.tensor_split(parts)
            )
        else:
            found = [self._search_shares(part_BD, k) for part_BD in query_BD.split(QUERIES)]
        return Hits(*map(torch.cat, zip(*found, strict=True)))

    def rest_logsumexp(self, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> Tensor:
        """logsumexp of each query's scores over all passages but those it leaves out -> [B].

        The gradient reaches the queries; the index is constant. Costs one [B, N] matrix: for indexes up to about 100,000.
        """
        score_BN = scores(query_BD, self._vectors_ND)
        rows = np.concatenate([np.full(len(numbers), row) for row, numbers in enumerate(left_out)])
        columns = np.concatenate([np.asarray(numbers) for numbers in left_out])
        out = torch.zeros_like(score_BN, dtype=torch.bool)
        out[torch.as_tensor(rows, dtype=torch.int64), torch.as_tensor(columns, dtype=torch.int64)] = True
        return score_BN.masked_fill(out, -torch.inf).logsumexp(dim=1)

    @property
    def _sound_codes(self) -> Codes | None:
        """Those that say something: of vectors that are all finite."""
        return self._codes if self._codes is not None and self._codes.sound else None

    def _search_shares(self, query_BD: Tensor, k: int) -> Hits:
        """Where passages are many and codes say nothing, each thread searches a share: torch's share a product of codes."""
        everything = range(len(self))
        if len(self) < SHARED or self._sound_codes is not None:
            return self._search(query_BD, everything, k)
        size = codes.even(max(SHARED // 2, -(-len(self) // torch.get_num_threads())))
        shares = [everything[start : start + size] for start in range(0, len(self), size)]
        return _best(share_out(lambda share: self._search(query_BD, share, k), shares), k)

    def _search(self, query_BD: Tensor, share: range, k: int) -> Hits:
        """The best of some passages."""
        queries = query_BD.shape[0]
        best = Hits(query_BD.new_empty(queries, 0), query_BD.new_empty((queries, 0), dtype=torch.int64))
        rounded = self._rounded(query_BD) if queries and k else None
        vectors_ND = self._vectors_ND if self._wide_ND is None else self._wide_ND
        size = CHUNK
        if self.device.type == "cpu":
            size = min(CHUNK, codes.even(SCORES // max(1, queries)))
        for part in (share[start : start + size] for start in range(0, len(share), size)):
            floor_B = best.score_BK[:, -1] if best.score_BK.shape[1] >= k > 0 else None
            found = rounded.remaining(part.start, part.stop, floor_B, k) if rounded else None
            if found is not None:
                more = self._scored(query_BD, found)
            else:
                more = _ranked(query_BD, vectors_ND[part.start : part.stop], floor_B, k)
                more = Hits(more.score_BK, more.number_BK + part.start)
            best = _best([best, more], k)
        return best

    def _rounded(self, query_BD: Tensor) -> RoundedQueries | None:
        """The queries as the codes are asked; none where scoring everything is faster."""
        sound = self._sound_codes
        return sound.ask(query_BD) if sound is not None and query_BD.isfinite().all() else None

    def _scored(self, query_BD: Tensor, found: Remaining) -> Hits:
        """What remains with its scores, a row for each query, filled up with minus infinity."""
        query_C, number_C = torch.from_numpy(found.query_C), torch.from_numpy(found.number_C)
        if query_BD.shape[0] == 1:
            return Hits(scores(query_BD, self.rows(number_C)), number_C[None])
        parts = zip(query_C.split(BLOCK // 2), number_C.split(BLOCK // 2), strict=True)
        score_C = torch.cat([self.rows(n).mul_(query_BD.index_select(0, q)).sum(1) for q, n in parts])
        return _in_rows(found, score_C, query_BD.shape[0])


def _ranked(query_BD: Tensor, vectors_ND: Tensor, floor_B: Tensor | None, k: int) -> Hits:
    """The k best of some passages, and perhaps more; without those under `floor_B`, which k others reach."""
    if query_BD.device.type != "cpu":
        return _top(scores(query_BD, vectors_ND), k)
    passages = len(vectors_ND)
    width = -(-passages // ranking.GROUP) * ranking.GROUP
    score_BN = space("scores", len(query_BD), width, torch.int32).view(torch.float32)  # the room of codes
    score_BN[:, passages:] = -torch.inf
    _fill(score_BN, query_BD, vectors_ND)
    place_C = reaching(score_BN, k, None if floor_B is None else floor_B.numpy(), 0.0)
    if place_C is None:
        return _top(score_BN[:, :passages], k)
    query_C = place_C // width
    score_C = torch.from_numpy(score_BN.view(-1).numpy().take(place_C))
    return _in_rows(Remaining(query_C, place_C - query_C * width), score_C, len(query_BD))


def _fill(score_BN: Tensor, query_BD: Tensor, vectors_ND: Tensor) -> None:
    """Writes the scores of some passages."""
    if vectors_ND.dtype == torch.float32:
        scores(query_BD, vectors_ND, score_BN[:, : len(vectors_ND)])
        return
    for start in range(0, len(vectors_ND), BLOCK):
        block_ND = vectors_ND[start : start + BLOCK]
        wide_ND = space("block", len(block_ND), block_ND.shape[1], torch.float32).copy_(block_ND)
        scores(query_BD, wide_ND, score_BN[:, start : start + len(block_ND)])


def _in_rows(found: Remaining, score_C: Tensor, queries: int) -> Hits:
    """What remains, a row for each query, filled up with minus infinity."""
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
    """The k largest of several searches' hits; all of them where they are fewer."""
    score_BN, number_BN = (torch.cat(rows, dim=1) for rows in zip(*found, strict=True))
    top = score_BN.topk(min(k, score_BN.shape[1]), dim=1)
    return Hits(top.values, number_BN.gather(1, top.indices))


def _top(score_BN: Tensor, k: int) -> Hits:
    """The k largest scores, k being cut to N, and their columns.

    They stand in the k groups whose best are largest: ranking those first is several times faster than ranking all.
    """
    queries, passages = score_BN.shape
    groups = passages // TOP_GROUP
    if groups < 4 * k:
        return Hits(*score_BN.topk(min(k, passages), dim=1))
    # A group's passages stand `groups` apart.
    score_BGN = score_BN[:, : TOP_GROUP * groups].unflatten(1, (TOP_GROUP, groups))
    group_BK = score_BGN.amax(1).topk(k, dim=1).indices
    place = group_BK[:, None, :] + groups * torch.arange(TOP_GROUP, device=score_BN.device)[:, None]
    rest = torch.arange(TOP_GROUP * groups, passages, device=score_BN.device).expand(queries, -1)
    number_BN = torch.cat([place.flatten(1), rest], dim=1)
    top = score_BN.gather(1, number_BN).topk(k, dim=1)
    return Hits(top.values, number_BN.gather(1, top.indices))
