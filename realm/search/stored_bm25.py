"""Stores the BM25 index of a knowledge base on disk, so that only the first process has to build the index.

KB/words/NAME/    the files of bm25s, and checksums; NAME identifies the passages and the rules of `Bm25Index`
"""

import hashlib

from realm.search.bm25 import RULES, Bm25Index
from realm.store.computed import computed
from realm.store.knowledge_base import KnowledgeBase

WORDS = "words"


def load_or_build_bm25(kb: KnowledgeBase) -> Bm25Index:
    """The BM25 index, mapped into memory from disk, where the first process writes it (`computed`)."""
    folder = kb.folder / WORDS / f"{kb.fingerprint}-{hashlib.sha256(RULES.encode()).hexdigest()[:8]}"

    def make() -> Bm25Index:
        return Bm25Index(kb.titles, kb.texts())

    return computed(folder, folder, lambda found: Bm25Index.load(found, len(kb)), make, Bm25Index.save)
