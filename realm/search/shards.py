"""An index that is divided among ranks: each rank holds the vectors of a range of passages (its part of the index).

To search, each rank sends its queries to all ranks. Every rank searches its part for the queries of all ranks, and sends the
hits back to the ranks that asked. Each rank then merges the hits of its queries. The softmax over all passages is computed in
the same way: the ranks send back sums over their parts, which are added. The results are the same as with one `MipsIndex` of
all passages, up to rounding.

Axis letters: B queries of this rank, K hits per query, N passages of this rank, D embedding, n some passages, P pairs of a
query and a passage.
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
    """The numbers of the passages whose vectors this rank holds, if the index has `count` passages."""
    first, stop = distributed.bounds(count)[distributed.rank() :][:2].tolist()
    return slice(first, stop)


def divided_index(own_ND: np.ndarray | Tensor, count: int, device: torch.device) -> PassageIndex:
    """An index of `count` passages. `own_ND` has the vectors of this rank's `own_passages`."""
    own = MipsIndex(own_ND, device)
    return own if distributed.world_size() == 1 else ShardedIndex(own, count)


class ShardedIndex:
    """An index with the methods of `MipsIndex`, divided among the ranks.

    If one rank calls a method that searches or reads vectors, all ranks must call this method, because each rank needs the
    results of all other ranks. Each rank passes its own queries, or none.
    """

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

    def search_subset(self, query_BD: Tensor, number_n: np.ndarray, k: int) -> Hits:
        """As `MipsIndex.search_subset`."""
        return self.search_among(query_BD, [number_n] * len(query_BD), min(k, len(number_n)))

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
        """The queries of all ranks, one tensor per rank."""
        return distributed.exchange([query_BD.detach().float().to(self.device)] * distributed.world_size())

    def _merged(self, hits: Hits, queries: Sequence[Tensor], width: int, k: int) -> Hits:
        """Exchanges hits between the ranks -> the k best hits of this rank's queries.

        `hits` are those of this rank's passages, for the queries of all ranks. They are padded to `width` hits per query,
        because all ranks must send the same number.
        """
        missing = width - hits.score_BK.shape[1]
        number_BK = torch.where(hits.number_BK == NULL_PASSAGE, NULL_PASSAGE, hits.number_BK + self._first)
        sent = (
            F.pad(hits.score_BK, (0, missing), value=-torch.inf),
            F.pad(number_BK, (0, missing), value=NULL_PASSAGE),
        )
        parts = zip(*(_given_back(values, queries) for values in sent), strict=True)
        return merge_hits([Hits(*part) for part in parts], k)

    def _of_own_passages(self, numbers: Sequence[np.ndarray], queries: Sequence[Tensor]) -> list[np.ndarray]:
        """Exchanges lists of passages between the ranks -> the lists of this rank's passages, for the queries of all ranks.

        `numbers` has one list for each query of this rank. In the result a passage is numbered from this rank's first passage.
        """
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
        """The rows of `values` for each rank: those of passages that the rank holds. `number_n` has the passage of each row."""
        owner_n = self._owners(number_n)
        return [values[torch.from_numpy(owner_n == rank)] for rank in range(distributed.world_size())]

    def _owners(self, number_n: np.ndarray) -> np.ndarray:
        """The rank that holds each passage."""
        return np.searchsorted(self._bounds, number_n, side="right") - 1


def _given_back(values: Tensor, queries: Sequence[Tensor]) -> list[Tensor]:
    """Sends results back to the ranks that asked -> the results for this rank's queries, one tensor per rank.

    `values` has a row for each query of all ranks: the results from this rank's passages.
    """
    return distributed.exchange(values.split([len(query_BD) for query_BD in queries]))
