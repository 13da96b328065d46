"""An index divided over ranks: each rank holds the vectors of some passages, and searches them for the queries of all ranks.

Queries go to all ranks, and each rank's hits come back to the rank that asked, which merges them. The softmax over all
passages is a sum over the ranks' parts. Results are those of a single `MipsIndex`, up to rounding.

Axis letters: B queries of this rank, K hits per query, N passages of this rank, D embedding, P pairs of a query and a passage.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realm import distributed
from realm.search.exact import Hits, MipsIndex, PassageIndex, Rest, add_rests, merge_hits, with_gradient
from realm.tokens.layouts import NULL_PASSAGE


def own_passages(count: int) -> slice:
    """The passages, of `count`, whose vectors this rank holds."""
    first, stop = distributed.bounds(count)[distributed.rank() :][:2].tolist()
    return slice(first, stop)


def divided_index(own_ND: np.ndarray | Tensor, count: int, device: torch.device) -> PassageIndex:
    """The index of `count` passages, of which each rank holds the vectors of its `own_passages`."""
    own = MipsIndex(own_ND, device)
    return own if distributed.world_size() == 1 else ShardedIndex(own, count)


class ShardedIndex:
    """The same methods as those of `MipsIndex`, each called by all ranks at once, with queries of their own or with none."""

    def __init__(self, own: MipsIndex, count: int):
        self._own, self._count = own, count
        self._bounds = distributed.bounds(count)
        self._first = int(self._bounds[distributed.rank()])

    def __len__(self) -> int:
        return self._count

    @property
    def device(self) -> torch.device:
        return self._own.device

    def prepare(self) -> None:
        """As `MipsIndex.prepare`."""
        self._own.prepare()

    @torch.no_grad()
    def rows(self, numbers: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """As `MipsIndex.rows`."""
        number_n = torch.as_tensor(numbers, dtype=torch.int64).cpu()
        place_n = torch.from_numpy(np.argsort(self._owners(number_n.numpy()), kind="stable"))
        asked = distributed.exchange(self._by_owner(number_n, number_n.numpy()))
        found_nD = torch.cat(distributed.exchange([self._own.rows(part - self._first) for part in asked]))
        return torch.empty_like(found_nD).index_copy_(0, place_n.to(self.device), found_nD)

    @torch.no_grad()
    def search(self, query_BD: Tensor, k: int) -> Hits:
        """As `MipsIndex.search`."""
        queries = self._everyones(query_BD)
        return self._merged(self._own.search(torch.cat(queries), k), queries, k, min(k, len(self)))

    @torch.no_grad()
    def search_among(self, query_BD: Tensor, among: Sequence[np.ndarray], k: int) -> Hits:
        """As `MipsIndex.search_among`."""
        queries = self._everyones(query_BD)
        hits = self._own.search_among(torch.cat(queries), self._of_own_passages(among, queries), k)
        return self._merged(hits, queries, k, k)

    def rest_logsumexp(self, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> Tensor:
        """As `MipsIndex.rest_logsumexp`."""
        with torch.no_grad():
            queries = self._everyones(query_BD)
            own = self._own.rest(torch.cat(queries), self._of_own_passages(left_out, queries))
            parts = zip(*(_given_back(values, queries) for values in own), strict=True)
            rest = add_rests([Rest(*part) for part in parts])
        return with_gradient(query_BD, rest)

    def _everyones(self, query_BD: Tensor) -> list[Tensor]:
        """The queries of each rank."""
        return distributed.exchange([query_BD.detach().float().to(self.device)] * distributed.world_size())

    def _merged(self, hits: Hits, queries: Sequence[Tensor], width: int, k: int) -> Hits:
        """The k best hits of this rank's queries, from this rank's `hits` for the queries of all; ranks send `width` each."""
        missing = width - hits.score_BK.shape[1]
        number_BK = torch.where(hits.number_BK == NULL_PASSAGE, NULL_PASSAGE, hits.number_BK + self._first)
        sent = (
            F.pad(hits.score_BK, (0, missing), value=-torch.inf),
            F.pad(number_BK, (0, missing), value=NULL_PASSAGE),
        )
        parts = zip(*(_given_back(values, queries) for values in sent), strict=True)
        return merge_hits([Hits(*part) for part in parts], k)

    def _of_own_passages(self, numbers: Sequence[np.ndarray], queries: Sequence[Tensor]) -> list[np.ndarray]:
        """The given passages that this rank holds, counted from its first, per query of all ranks."""
        row_P = np.repeat(np.arange(len(numbers)), [len(part) for part in numbers])
        number_P = np.concatenate([np.zeros(0, dtype=np.int64), *numbers])
        pairs_P2 = torch.from_numpy(np.stack([row_P, number_P], axis=1))
        lists = []
        for part_P2, query_BD in zip(
            distributed.exchange(self._by_owner(pairs_P2, number_P)), queries, strict=True
        ):
            row_p, number_p = part_P2.numpy().T
            ends = np.bincount(row_p, minlength=len(query_BD)).cumsum()
            lists += np.split(number_p - self._first, ends)[:-1]  # rows are in rising order
        return lists

    def _by_owner(self, values: Tensor, number_n: np.ndarray) -> list[Tensor]:
        """The rows that belong to passages of each rank."""
        owner_n = self._owners(number_n)
        return [values[torch.from_numpy(owner_n == rank)] for rank in range(distributed.world_size())]

    def _owners(self, number_n: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._bounds, number_n, side="right") - 1


def _given_back(values: Tensor, queries: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's results for this rank's queries, from this rank's results for the queries of all."""
    return distributed.exchange(values.split([len(query_BD) for query_BD in queries]))
