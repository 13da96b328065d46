"""BM25 search over the titles and texts of passages, with the library bm25s.

BM25 is the lexical baseline, and one of the two rankings that hybrid search fuses.

Axis letters: B queries, K passages per query, N passages.
"""

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from realm.tokens.layouts import NULL_PASSAGE

# If JAX is installed, bm25s imports it and computes something, and JAX then takes three quarters of the memory of each GPU.
# With None in place of the module, `import jax` fails, and bm25s uses NumPy.
_WITHOUT_JAX = "jax" not in sys.modules
if _WITHOUT_JAX:
    sys.modules["jax"] = None  # type: ignore[assignment]
try:
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN
finally:
    if _WITHOUT_JAX:
        del sys.modules["jax"]

QUESTION_WORDS = "who whom whose what which when where why how do does did were has have had".split()
STOP_WORDS = [*STOPWORDS_EN, *QUESTION_WORDS]
"""Lucene's English stop words, and question words. Question words carry no information about the subject of a passage, and
are not answers."""

K1, B = 1.2, 0.3
"""The constants of BM25, which were chosen with training questions about Wikipedia (docs/experiments/2026-11-28.md)."""

_PATTERN = r"(?u)\b\w+\b"
RULES = f"lucene k1={K1} b={B}, {_PATTERN}, lower case, no accents, without {' '.join(STOP_WORDS)}"
"""The rules of `Bm25Index`, as text. An index that was made by other rules may have other words or scores."""


class Ranking(NamedTuple):
    """The best passages of each query, best first. A row with fewer than K passages ends with `NULL_PASSAGE` and score 0."""

    score_BK: np.ndarray
    number_BK: np.ndarray


class Bm25Index:
    """A BM25 index of passages, which are numbered in the given order (Robertson and Zaragoza 2009, with Lucene's idf).

    A word is a run of letters, digits and underscores, in lower case and without accents. Stop words are left out, and words
    are not stemmed.
    """

    def __init__(self, titles: Sequence[str], texts: Sequence[str], *, k1: float = K1, b: float = B):
        words = _words([f"{title} {text}" for title, text in zip(titles, texts, strict=True)])
        self._count = len(words)
        self._bm25: bm25s.BM25 | None = None
        if any(words):  # bm25s divides by the mean length, which must not be 0
            self._bm25 = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
            self._bm25.index(words, show_progress=False)

    def __len__(self) -> int:
        return self._count

    def save(self, folder: Path) -> None:
        """Writes the index into a folder; an index without words has no files."""
        if self._bm25 is not None:
            self._bm25.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path, count: int) -> Self:
        """Maps into memory an index that `save` wrote; `count` is the number of passages of this index."""
        loaded = cls([], [])
        loaded._count = count
        if any(folder.glob("*.npy")):
            loaded._bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        return loaded

    def search(self, questions: Sequence[str], k: int, match_N: np.ndarray | None = None) -> Ranking:
        """The k passages with the highest scores for each question; equal scores are ordered by passage number.

        With `match_N`, only the passages for which `match_N` is true are searched. If fewer than k passages are searched, k is
        their number. Only passages that contain a word of the question are ranked. The weights of words are those of the whole
        index.
        """
        k = min(k, len(self) if match_N is None else int(match_N.sum()))
        score_BK = np.zeros((len(questions), k), dtype=np.float32)
        number_BK = np.full((len(questions), k), NULL_PASSAGE, dtype=np.int64)
        for row, score_N in enumerate(self.scores(questions, match_N)):
            best = highest(score_N, k)
            score_BK[row, : len(best)] = score_N[best]
            number_BK[row, : len(best)] = best
        return Ranking(score_BK, number_BK)

    def scores(self, questions: Sequence[str], match_N: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yields the scores of all passages for each question -> [N] per question.

        With `match_N`, the score is 0 for each passage for which `match_N` is false.
        """
        for words in _words(questions):
            known = self._bm25.get_tokens_ids(words) if self._bm25 is not None else []
            if self._bm25 is not None and known:
                score_N = self._bm25.get_scores_from_ids(known)
                yield score_N if match_N is None else np.where(match_N, score_N, np.float32(0))
            else:
                yield np.zeros(len(self), dtype=np.float32)


def _words(texts: Sequence[str]) -> list[list[str]]:
    return bm25s.tokenize(
        [text if text.isascii() else _without_accents(text) for text in texts],
        stopwords=STOP_WORDS,
        token_pattern=_PATTERN,
        return_ids=False,
        show_progress=False,
    )


def _without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def highest(score_N: np.ndarray, k: int) -> np.ndarray:
    """Passage numbers of the k highest scores above 0, best first; equal scores are ordered by passage number."""
    number = np.flatnonzero(score_N)
    if len(number) > k:
        bound = np.partition(score_N[number], len(number) - k)[len(number) - k]
        number = np.flatnonzero(score_N >= bound)
    return number[np.argsort(-score_N[number], kind="stable")][:k]
