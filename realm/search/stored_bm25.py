"""Stores the BM25 index of a knowledge base on disk, so that only the first process has to build the index.

    KB/words/NAME/    the files of bm25s, and checksums; NAME identifies the passages and the rules of `Bm25Index`

The index is computed from the passages alone. So if the index is missing or damaged, or was made from other passages, it is
built again.
"""

import contextlib
import hashlib
import shutil
import uuid
from pathlib import Path

from realm.checksums import CHECKSUMS, check_folder, record_checksums
from realm.errors import RealmError
from realm.search.bm25 import RULES, Bm25Index
from realm.store.knowledge_base import KnowledgeBase

WORDS = "words"


def load_or_build_bm25(kb: KnowledgeBase) -> Bm25Index:
    """The BM25 index, mapped into memory from disk; if no valid index is on disk, it is built in memory and written to disk."""
    folder = kb.folder / WORDS / _name(kb)
    if (folder / CHECKSUMS).is_file():
        with contextlib.suppress(RealmError, OSError, ValueError, LookupError, TypeError):
            check_folder(folder)
            return Bm25Index.load(folder, len(kb))
    made = Bm25Index(kb.titles, kb.texts())
    if made.has_words:
        with contextlib.suppress(OSError):  # if the folder is read-only, the index exists only in memory
            _write(made, folder)
    return made


def _name(kb: KnowledgeBase) -> str:
    return f"{kb.fingerprint}-{hashlib.sha256(RULES.encode()).hexdigest()[:8]}"


def _write(made: Bm25Index, folder: Path) -> None:
    """Writes the index under a temporary name, renames it, and removes indexes of other passages or rules."""
    folder.parent.mkdir(exist_ok=True)
    aside = folder.with_name(f".making-{uuid.uuid4().hex}")
    aside.mkdir()
    try:
        made.save(aside)
        record_checksums(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
