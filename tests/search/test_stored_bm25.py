"""The stored BM25 index: used while it is intact and of the same passages, else built again."""

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from realm.checksums import check_folder
from realm.folders import LOCK
from realm.search import stored_bm25 as words
from realm.search.bm25 import Bm25Index
from realm.search.stored_bm25 import WORDS, load_or_build_bm25
from realm.store.knowledge_base import KnowledgeBase, changed
from realm.text.corpus import Document
from realm.text.salient_spans import load_tagger

ASKED = ["on which river lies Arden?", "zzz", "Bexley founded"]


@pytest.fixture
def kb(tiny_kb, tmp_path) -> KnowledgeBase:
    """A knowledge base without a stored BM25 index."""
    shutil.copytree(tiny_kb.folder, tmp_path / "kb", ignore=shutil.ignore_patterns(WORDS))
    return KnowledgeBase.open(tmp_path / "kb")


def saved(kb: KnowledgeBase) -> Path:
    (folder,) = (one for one in (kb.folder / WORDS).iterdir() if one.name != LOCK)
    return folder


def assert_ranks_as_one_made_now(found: Bm25Index, kb: KnowledgeBase) -> None:
    made = Bm25Index(kb.titles, kb.texts()).search(ASKED, 5)
    for mine, expected in zip(found.search(ASKED, 5), made, strict=True):
        assert np.array_equal(mine, expected)


def test_the_second_process_reads_no_passage(kb, monkeypatch) -> None:
    assert_ranks_as_one_made_now(load_or_build_bm25(kb), kb)
    again = KnowledgeBase.open(kb.folder)
    monkeypatch.setattr(words, "Bm25Index", type("Loaded", (Bm25Index,), {"__init__": _only_empty}))
    assert_ranks_as_one_made_now(load_or_build_bm25(again), kb)


def _only_empty(self: Bm25Index, titles: list[str], texts: list[str]) -> None:
    assert not titles and not texts
    Bm25Index.__init__(self, titles, texts)


@pytest.mark.parametrize("harm", ["a byte", "half", "a file", "checksums"])
def test_a_damaged_index_is_made_anew(kb, harm) -> None:
    load_or_build_bm25(kb)
    file = saved(kb) / ("checksums.json" if harm == "checksums" else "indices.csc.index.npy")
    content = file.read_bytes()
    if harm == "a file":
        file.unlink()
    elif harm == "a byte":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        file.write_bytes(content[: len(content) // 2])
    assert_ranks_as_one_made_now(load_or_build_bm25(kb), kb)
    assert {one.name for one in saved(kb).iterdir()} >= {"checksums.json", "indices.csc.index.npy"}
    check_folder(saved(kb))


def test_a_changed_knowledge_base_has_its_own_and_the_old_one_goes(kb) -> None:
    load_or_build_bm25(kb)
    before = saved(kb)
    (kb.folder / WORDS / f"{before.name}.writing").mkdir()  # of a killed process
    changed(
        kb.folder, lambda opened: opened.add([Document("zzz", "Zzz", "Zzz is a town.")], load_tagger("rules"))
    )
    later = KnowledgeBase.open(kb.folder)
    assert_ranks_as_one_made_now(load_or_build_bm25(later), later)
    assert saved(later) != before
    assert load_or_build_bm25(later).search(["zzz"], 1).number_BK[0, 0] >= 0


def test_other_rules_for_words_have_their_own_index(kb, monkeypatch) -> None:
    load_or_build_bm25(kb)
    before = saved(kb)
    monkeypatch.setattr(words, "RULES", "other rules")
    load_or_build_bm25(kb)
    assert saved(kb) != before


def test_a_folder_that_cannot_be_written_costs_only_the_copy_on_disk(kb) -> None:
    (kb.folder / WORDS).write_text("in the way")
    assert_ranks_as_one_made_now(load_or_build_bm25(kb), kb)


def test_an_index_without_words_is_stored_too(kb, monkeypatch) -> None:
    monkeypatch.setattr(KnowledgeBase, "titles", [""])
    monkeypatch.setattr(KnowledgeBase, "texts", lambda self: ["..."])
    for _ in range(2):
        found = load_or_build_bm25(kb)
        assert (found.search(["river"], 3).number_BK == -1).all()


def test_processes_that_start_together_build_one_index(kb, monkeypatch) -> None:
    built = []

    class Slow(Bm25Index):
        def __init__(self, titles: list[str], texts: list[str]):
            if titles:
                built.append(1)
                time.sleep(0.2)
            super().__init__(titles, texts)

    monkeypatch.setattr(words, "Bm25Index", Slow)
    found: list[Bm25Index] = []
    threads = [
        threading.Thread(target=lambda: found.append(load_or_build_bm25(KnowledgeBase.open(kb.folder))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(found) == 3
    for one in found:
        assert_ranks_as_one_made_now(one, kb)
