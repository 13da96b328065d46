"""All passages ranked for questions: by vectors, by words, or by both.

Letters: B questions, K passages retrieved, N passages.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from realm.model.calibration import Method
from realm.model.scores import scores
from realm.search.bm25 import Bm25Index, highest
from realm.search.exact import MipsIndex
from realm.search.hybrid import Scored, fuse
from realm.search.stored_bm25 import words_of
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE

FUSION_DEPTH = 100
"""Passages of either side whose scores "hybrid" adds up, at least: the best few are the same however many are asked for."""


class Retriever:
    """Ranks all passages for questions by vectors, by words, or by both; without an index, by words alone."""

    def __init__(self, kb: KnowledgeBase, index: MipsIndex | None = None):
        self._kb, self._index = kb, index

    @cached_property
    def words(self) -> Bm25Index:
        """Opened when first asked for; where it has to be made, every passage is read, in memory at once."""
        return words_of(self._kb)

    @property
    def has_words(self) -> bool:
        """Whether `words` is there already."""
        return "words" in self.__dict__

    def search(
        self, questions: Sequence[str], k: int, method: Method, query_BD: Tensor | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and passage numbers, best first -> two of [B, k], rows with fewer end in `NULL_PASSAGE`.

        A hybrid score is that of `fuse`. Only "bm25" does without the questions' vectors.
        """
        if method == "bm25":
            ranking = self.words.search(questions, k)
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
        """For each question the best `depth` passages of either side, with both scores of each."""
        assert self._index is not None
        hits = self._index.search(query_BD, depth)
        for row, bm25_N in enumerate(self.words.scores(questions)):
            number_n = np.union1d(hits.number_BK[row].cpu().numpy(), highest(bm25_N, depth))
            query_D = query_BD[row : row + 1].float().to(self._index.device)
            dense_n = scores(query_D, self._index.rows(number_n))[0].cpu().numpy()
            yield Scored(number_n, dense_n, bm25_N[number_n])
