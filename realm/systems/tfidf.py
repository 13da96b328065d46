"""TF-IDF of articles with hashed unigrams and bigrams, the retriever of DrQA (Chen et al. 2017, section 3.1).

    weight of n-gram g in document d     log(1 + tf(g, d)) * idf(g)
    idf(g)                               log((D - df(g) + 0.5) / (df(g) + 0.5)), at least 0
    score of d for a question q          sum over g in q of weight(g, q) * weight(g, d)

An article consists of the passages of one document. N-grams are hashed into 2**24 bins by CRC-32 (published: MurmurHash3).

Axis letters: D documents, E entries of the matrix, G n-grams of the corpus, N passages.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self
from zlib import crc32

import numpy as np

from realm.folders import make_once
from realm.progress import progress
from realm.search.bm25 import STOP_WORDS, highest
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.articles import Articles

BINS = 1 << 24
_WORD = re.compile(r"\w+|[^\w\s]")
_STOPPED = frozenset(STOP_WORDS)
FILE = "tfidf.json"


class Token(NamedTuple):
    """A word or a punctuation mark, with the positions of its characters: [start, end)."""

    text: str
    start: int
    end: int


def tokens_of(text: str) -> list[Token]:
    """Sequences of letters and digits, and all other characters one by one, as in the simple tokenizer of DrQA."""
    return [Token(match.group(), match.start(), match.end()) for match in _WORD.finditer(text)]


def ngrams(text: str) -> Iterator[int]:
    """The bins of all unigrams and bigrams of a text that contain neither a stop word nor a punctuation mark."""
    words = [token.text.lower() for token in tokens_of(text)]
    keep = [word not in _STOPPED and any(map(str.isalnum, word)) for word in words]
    for place, word in enumerate(words):
        if keep[place]:
            yield crc32(word.encode()) % BINS
            if place + 1 < len(words) and keep[place + 1]:
                yield crc32(f"{word} {words[place + 1]}".encode()) % BINS


class Tfidf(NamedTuple):
    """The sparse matrix of weights, ordered by n-gram."""

    bin_G: np.ndarray
    """Bins of the n-grams that occur in the corpus, in ascending order."""
    first_G: np.ndarray
    """First entry of each n-gram; the last element is the number of entries: [G + 1]."""
    document_E: np.ndarray
    weight_E: np.ndarray
    idf_G: np.ndarray

    @classmethod
    def of(cls, kb: KnowledgeBase, articles: Articles) -> Self:
        """Counts the n-grams of all passages. The needed memory grows with the number of distinct n-grams in each document."""
        documents = articles.count
        entries, counts = [], []
        for number, passage in enumerate(progress(kb, total=len(kb), description="tf-idf", unit="passage")):
            found = Counter(ngrams(f"{passage.title}\n{passage.text}"))
            keys = np.fromiter(found.keys(), dtype=np.int64, count=len(found))
            entries.append(keys * documents + articles.document_N[number])
            counts.append(np.fromiter(found.values(), dtype=np.float32, count=len(found)))
        entry_E, place = np.unique(np.concatenate(entries), return_inverse=True)
        tf_E = np.bincount(place, weights=np.concatenate(counts), minlength=len(entry_E))
        bin_E, document_E = entry_E // documents, (entry_E % documents).astype(np.int32)
        bin_G, first_G, df_G = np.unique(bin_E, return_index=True, return_counts=True)
        idf_G = np.log((documents - df_G + 0.5) / (df_G + 0.5)).clip(min=0).astype(np.float32)
        weight_E = (np.log1p(tf_E) * np.repeat(idf_G, df_G)).astype(np.float32)
        return cls(bin_G, np.append(first_G, len(entry_E)), document_E, weight_E, idf_G)

    def best(self, question: str, count: int, documents: int) -> np.ndarray:
        """The `count` documents with the highest scores, best first.

        Documents with a score of 0 are left out. Documents with the same score are in ascending order. `documents` is the
        number of documents in the corpus.
        """
        score_D = np.zeros(documents, dtype=np.float32)
        for ngram, tf in Counter(ngrams(question)).items():
            place = int(np.searchsorted(self.bin_G, ngram))
            if place < len(self.bin_G) and self.bin_G[place] == ngram:
                entries = slice(self.first_G[place], self.first_G[place + 1])
                score_D[self.document_E[entries]] += np.log1p(tf) * self.idf_G[place] * self.weight_E[entries]
        return highest(score_D, count)


def open_tfidf(kb: KnowledgeBase, articles: Articles, folder: Path) -> Tfidf:
    """The matrix of a knowledge base, mapped into memory. It is made in `folder`, unless the folder already contains it."""

    def make(aside: Path) -> None:
        for name, array in Tfidf.of(kb, articles)._asdict().items():
            np.save(aside / f"{name}.npy", array)

    make_once(folder, FILE, {"kb": kb.fingerprint, "documents": kb.documents_digest}, make)
    return Tfidf(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Tfidf._fields))


@dataclass(frozen=True)
class Ranking:
    """Ranks the articles of a knowledge base, and lists their passages."""

    index: Tfidf
    articles: Articles

    @classmethod
    def open(cls, kb: KnowledgeBase, system: Path) -> Self:
        """The ranking with the matrix in SYSTEM.tfidf, beside the folder of the system.

        If the matrix is missing, or if it was made from other passages or documents, it is made again.
        """
        articles = Articles.of(kb)
        return cls(open_tfidf(kb, articles, system.with_name(system.name + ".tfidf")), articles)

    def best(self, question: str, articles: int) -> np.ndarray:
        """Numbers of the best articles, best first."""
        return self.index.best(question, articles, self.articles.count)

    def passages(self, question: str, articles: int) -> np.ndarray:
        """Numbers of all passages of the best articles, best article first."""
        return self.articles.passages(self.best(question, articles))
