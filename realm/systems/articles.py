"""The documents of a knowledge base with numbers, and the passages of each document.

Axis letters: D documents, N passages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from realm.store.knowledge_base import KnowledgeBase


@dataclass(frozen=True)
class Articles:
    """Assignment of passages to documents."""

    document_N: np.ndarray
    """Document of each passage."""
    passage_N: np.ndarray
    """Passage numbers, ordered by document, and in ascending order within each document."""
    start_D: np.ndarray
    """Position in `passage_N` of the first passage of each document; the last element is the number of passages: [D + 1]."""

    @classmethod
    def of(cls, kb: KnowledgeBase) -> Self:
        _, document_N = np.unique(kb.document_keys_N, return_inverse=True)
        start_D = np.concatenate([[0], np.cumsum(np.bincount(document_N))])
        return cls(document_N, np.argsort(document_N, kind="stable"), start_D)

    @property
    def count(self) -> int:
        """Number of documents."""
        return len(self.start_D) - 1

    def passages(self, documents: Sequence[int] | np.ndarray) -> np.ndarray:
        """Numbers of all passages of the given documents, in the order of these documents."""
        parts = [self.passage_N[self.start_D[one] : self.start_D[one + 1]] for one in documents]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def lead(self, document: int) -> int:
        """Number of the first passage of a document."""
        return int(self.passage_N[self.start_D[document]])
