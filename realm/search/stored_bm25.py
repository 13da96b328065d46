"""The BM25 index of a knowledge base on disk, so that not every process makes it anew.

    KB/words/NAME/    what bm25s saves, and checksums; NAME says which passages, and which rules for words

It holds nothing that the passages do not: where it is missing, damaged or of other passages, it is made from them.
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


def words_of(kb: KnowledgeBase) -> Bm25Index:
    """The index on disk, mapped into memory; or one made now, in memory, which the next process finds on disk."""
    folder = kb.folder / WORDS / _name(kb)
    if (folder / CHECKSUMS).is_file():
        with contextlib.suppress(RealmError, OSError, ValueError, LookupError, TypeError):
            check_folder(folder)
            return Bm25Index.load(folder, len(kb))
    made = Bm25Index(kb.titles, kb.texts())
    if made.knows_words:
        with contextlib.suppress(OSError):  # nothing can be written here: it stays in memory alone
            _keep(made, folder)
    return made


def _name(kb: KnowledgeBase) -> str:
    return f"{kb.fingerprint}-{hashlib.sha256(RULES.encode()).hexdigest()[:8]}"


def _keep(made: Bm25Index, folder: Path) -> None:
    """Writes the index aside and renames it in; those of other passages go."""
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
