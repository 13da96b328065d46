"""Ranks the passages of a knowledge base for questions: by vectors (dense), by words (BM25), or by both (hybrid).

Axis letters: B questions, K passages retrieved, N passages.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import get_args

import numpy as np
from torch import Tensor

from realm.errors import InputError, shown
from realm.model.calibration import Method
from realm.model.scores import scores
from realm.search.bm25 import Bm25Index, highest
from realm.search.exact import Hits, PassageIndex
from realm.search.hybrid import Scored, fuse
from realm.search.stored_bm25 import load_or_build_bm25
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE

FUSION_DEPTH = 100
"""Dense search and BM25 each contribute at least this number of passages to the fusion, so that the best passages are the same
for every smaller k."""


class Retriever:
    """Ranks passages for questions. If `index` is None, the only possible method is "bm25"."""

    def __init__(self, kb: KnowledgeBase, index: PassageIndex | None = None):
        self._kb, self._index = kb, index
        self._bm25: Bm25Index | None = None

    def load_bm25(self) -> Bm25Index:
        """The BM25 index. The first call loads the index from disk, or builds and saves the index if it is not on disk.

        To build the index, all passages are read into memory.
        """
        if self._bm25 is None:
            self._bm25 = load_or_build_bm25(self._kb)
        return self._bm25

    @property
    def bm25_loaded(self) -> bool:
        """Whether `load_bm25` was called."""
        return self._bm25 is not None

    def search(
        self,
        questions: Sequence[str],
        k: int,
        method: Method,
        query_BD: Tensor | None,
        where: str | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores [B, K] and passage numbers [B, K], best first; K is k, or the number of passages if that is smaller.

        With a filter `where` (`realm.store.fields.filters`), only the passages that match the filter are ranked. A row with
        fewer than K passages is filled with `NULL_PASSAGE`. Hybrid scores are the scores that `fuse` computes. `query_BD` has
        the vectors of the questions; it may be None only with the method "bm25".

        Raises:
            InputError: the method is unknown, k is below 1, or the filter cannot be used.
        """
        if k < 1:
            raise InputError(f"top_k is {k}: it must be 1 or more")
        if method not in get_args(Method):
            raise InputError(f"method is {shown(method)}: it must be dense, bm25 or hybrid")
        match_N = None if where is None else self._kb.matching(where)
        if method == "bm25":
            ranking = self.load_bm25().search(questions, k, match_N)
            return ranking.score_BK, ranking.number_BK
        assert self._index is not None and query_BD is not None
        if method == "dense":
            hits = self._dense(query_BD, k, match_N)
            return hits.score_BK.cpu().numpy(), hits.number_BK.cpu().numpy()
        k = min(k, len(self._kb) if match_N is None else int(match_N.sum()))
        score_BK = np.zeros((len(questions), k), dtype=np.float32)
        number_BK = np.full((len(questions), k), NULL_PASSAGE, dtype=np.int64)
        depth = max(k, FUSION_DEPTH)
        pools = repeat(None) if match_N is None else self._scored(questions, depth, query_BD, None)
        ranked = self._scored(questions, depth, query_BD, match_N)
        for row, (scored, pool) in enumerate(zip(ranked, pools, strict=False)):
            score_N, number_N = fuse(scored, pool)
            score_BK[row, : len(score_N)] = score_N[:k]
            number_BK[row, : len(number_N)] = number_N[:k]
        return score_BK, number_BK

    def _dense(self, query_BD: Tensor, k: int, match_N: np.ndarray | None) -> Hits:
        assert self._index is not None
        if match_N is None:
            return self._index.search(query_BD, k)
        return self._index.search_subset(query_BD, np.flatnonzero(match_N), k)

    def _scored(
        self, questions: Sequence[str], depth: int, query_BD: Tensor, match_N: np.ndarray | None
    ) -> Iterator[Scored]:
        """Yields for each question the best `depth` passages of dense search and of BM25, each passage with both scores."""
        assert self._index is not None
        hits = self._dense(query_BD, depth, match_N)
        for row, bm25_N in enumerate(self.load_bm25().scores(questions, match_N)):
            number_n = np.union1d(hits.number_BK[row].cpu().numpy(), highest(bm25_N, depth))
            query_D = query_BD[row : row + 1].float().to(self._index.device)
            dense_n = scores(query_D, self._index.rows(number_n))[0].cpu().numpy()
            yield Scored(number_n, dense_n, bm25_N[number_n])
