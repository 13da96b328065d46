"""Ranks the passages of a knowledge base for questions: by vectors (dense), by words (BM25), or by both (hybrid).

Axis letters: B questions, K passages retrieved, N passages.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from realm.model.calibration import Method
from realm.model.scores import scores
from realm.search.bm25 import Bm25Index, highest
from realm.search.exact import PassageIndex
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
        self, questions: Sequence[str], k: int, method: Method, query_BD: Tensor | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores [B, K] and passage numbers [B, K], best first; K is k, or the number of passages if that is smaller.

        A row with fewer than K passages is filled with `NULL_PASSAGE`. Hybrid scores are the scores that `fuse` computes.
        `query_BD` has the vectors of the questions; it may be None only with the method "bm25".
        """
        if method == "bm25":
            ranking = self.load_bm25().search(questions, k)
            return ranking.score_BK, ranking.number_BK
        assert self._index is not None and query_BD is not None
        if method == "dense":
            hits = self._index.search(query_BD, k)
            return hits.score_BK.cpu().numpy(), hits.number_BK.cpu().numpy()
        k = min(k, len(self._kb))
        score_BK = np.zeros((len(questions), k), dtype=np.float32)
        number_BK = np.full((len(questions), k), NULL_PASSAGE, dtype=np.int64)
        for row, scored in enumerate(self._scored(questions, max(k, FUSION_DEPTH), query_BD)):
            score_N, number_N = fuse(scored)
            score_BK[row, : len(score_N)] = score_N[:k]
            number_BK[row, : len(number_N)] = number_N[:k]
        return score_BK, number_BK

    def _scored(self, questions: Sequence[str], depth: int, query_BD: Tensor) -> Iterator[Scored]:
        """Yields for each question the best `depth` passages of dense search and of BM25, each passage with both scores."""
        assert self._index is not None
        hits = self._index.search(query_BD, depth)
        for row, bm25_N in enumerate(self.load_bm25().scores(questions)):
            number_n = np.union1d(hits.number_BK[row].cpu().numpy(), highest(bm25_N, depth))
            query_D = query_BD[row : row + 1].float().to(self._index.device)
            dense_n = scores(query_D, self._index.rows(number_n))[0].cpu().numpy()
            yield Scored(number_n, dense_n, bm25_N[number_n])
