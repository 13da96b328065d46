"""Several processes on one knowledge base: writers in step, readers of older versions, many small additions.

More of it: `python -m pytest -m slow tests/store/test_writers.py -k many_additions --trials 10000 -s`.
"""

import multiprocessing
import shutil
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from realm.store import vectors
from realm.store.ingest import TABLE
from realm.store.knowledge_base import KnowledgeBase, changed
from realm.store.tables import table
from realm.store.upkeep import forget_after
from realm.store.vectors import VectorsInfo
from realm.text.corpus import Document
from tests.conftest import Trials
from tests.store.tiny import DOCUMENTS, TinyTagger, make


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "kb").folder


@pytest.fixture
def kb(made: Path, tmp_path: Path) -> KnowledgeBase:
    shutil.copytree(made, tmp_path / "kb")
    return KnowledgeBase.open(tmp_path / "kb")


def document(number: int, text: str = "") -> Document:
    return Document(
        f"Town {number}", text or f"Town {number} is in Ruritania. It has {number} inns.", f"n{number}"
    )


def add_in_step(folder: Path, rounds: int, together: Barrier | threading.Barrier) -> None:
    """A writer: adds a document at the same moment as its twin, again and again."""
    for number in range(rounds):
        together.wait()
        changed(folder, lambda kb, number=number: kb.add([document(number)], TinyTagger()))  # type: ignore[misc]


def check_two_writers(kb: KnowledgeBase, before: int, rounds: int) -> None:
    assert kb.verify() == []
    assert len(kb) == before + rounds
    assert {entry.id for entry in kb.documents()} == {d.id for d in DOCUMENTS} | {
        f"n{i}" for i in range(rounds)
    }


def test_two_threads_that_add_the_same_documents_in_step_add_them_once(kb: KnowledgeBase) -> None:
    together = threading.Barrier(2)
    threads = [threading.Thread(target=add_in_step, args=(kb.folder, 8, together)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_two_writers(KnowledgeBase.open(kb.folder), len(kb), 8)


@pytest.mark.slow
def test_two_processes_that_add_the_same_documents_in_step_add_them_once(
    kb: KnowledgeBase, trials: Trials
) -> None:
    rounds = trials.count(60)
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(2)
    children = [context.Process(target=add_in_step, args=(kb.folder, rounds, together)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    check_two_writers(KnowledgeBase.open(kb.folder), len(kb), rounds)


def test_change_that_meets_commit_after_commit_of_others_succeeds_in_the_end(kb: KnowledgeBase) -> None:
    tries = []

    def change(mine: KnowledgeBase) -> int:
        tries.append(mine.table.version)
        if len(tries) < table.TRIES:
            KnowledgeBase.open(kb.folder).add([document(len(tries))], TinyTagger())
        return mine.delete(["d4"])

    assert changed(kb.folder, change) > 0
    assert len(tries) == table.TRIES
    assert "d4" not in {entry.id for entry in KnowledgeBase.open(kb.folder).documents()}


def test_change_of_a_knowledge_base_that_was_replaced_is_made_anew(kb: KnowledgeBase, made: Path) -> None:
    shutil.rmtree(kb.folder)
    shutil.copytree(made, kb.folder)
    with pytest.raises(table.ChangedMeanwhile):
        kb.delete(["d4"])
    assert len(KnowledgeBase.open(kb.folder)) == len(kb)


# --- compaction ---------------------------------------------------------------------------------------------


def publish(kb: KnowledgeBase) -> Path:
    folder = vectors.folder_of(kb.folder, "m")
    folder.mkdir(parents=True, exist_ok=True)
    info = VectorsInfo("m", "models/m", 1, 2, "2026", kb.fingerprint)
    vectors.publish(folder, kb.keys_N, vectors_of(kb.keys_N), info)
    return folder


def vectors_of(keys_N: np.ndarray) -> np.ndarray:
    return np.stack([keys_N % 97, keys_N % 89], axis=1).astype(np.float16)


def files_with(text: str, folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def test_deleted_text_is_gone_from_disk_after_compaction_and_the_rest_is_as_it_was(kb: KnowledgeBase) -> None:
    kb.add([Document("Secret", "Zanzibar is in town.", "s"), document(1), document(2)], TinyTagger())
    folder = publish(kb)
    kb.delete(["s", "d7"])
    kb.add([document(3)], TinyTagger())
    before, fingerprint = list(kb), kb.fingerprint
    assert files_with("Zanzibar", kb.folder)
    result = kb.compact()
    assert files_with("Zanzibar", kb.folder) == []
    assert result.versions_in_use == 0
    assert result.versions_removed > 3
    assert result.bytes_after < result.bytes_before
    for again in (kb, KnowledgeBase.open(kb.folder)):
        assert list(again) == before
        assert again.fingerprint == fingerprint
        assert again.verify() == []
        assert len(again.lagging()) == 1
    read = vectors.read(folder, kb.keys_N)
    assert read is not None
    assert (read.left_over, read.missing.tolist()) == (0, [len(kb) - 1])
    assert np.array_equal(read.array[:-1], vectors_of(kb.keys_N[:-1]))
    assert kb.compact()._replace(bytes_before=0, bytes_after=0) == (0, 0, 0, 0)


def leave_behind(kb: KnowledgeBase) -> None:
    """Writes all rows once more, as a writer does that is killed before its commit."""
    table.write_rows(kb.folder / TABLE, kb.table.to_batches(), kb.table.schema)


def data_files(kb: KnowledgeBase) -> set[str]:
    return {file.name for file in (kb.folder / TABLE / "data").iterdir()}


def named_files(kb: KnowledgeBase) -> set[str]:
    newest = KnowledgeBase.open(kb.folder).table
    return {file.path for fragment in newest.get_fragments() for file in fragment.data_files()}


def test_compaction_removes_what_a_killed_writer_left_and_nothing_of_one_that_still_writes(
    kb: KnowledgeBase,
) -> None:
    with table.uncommitted(kb.folder / TABLE):
        leave_behind(kb)
        kb.compact()
        assert len(data_files(kb) - named_files(kb)) == 1
    kb.compact()
    assert data_files(kb) == named_files(kb)
    assert kb.verify() == []


def test_change_that_is_refused_leaves_no_files(kb: KnowledgeBase) -> None:
    late = KnowledgeBase.open(kb.folder)
    kb.add([document(0)], TinyTagger())
    before = data_files(kb)
    with pytest.raises(table.ChangedMeanwhile):
        late.add([document(1)], TinyTagger())
    assert data_files(kb) == before


def test_a_version_that_is_committed_while_a_reader_opens_the_one_before_is_not_reported_as_lost(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions_of, commits = table.versions_of, 0

    def and_then_another(path: Path) -> list[int]:
        nonlocal commits
        found = versions_of(path)
        if path.name == TABLE and commits < 3:
            commits += 1
            with monkeypatch.context() as patch:  # the writer is not disturbed
                patch.setattr(table, "versions_of", versions_of)
                changed(kb.folder, lambda kb: kb.add([document(commits)], TinyTagger()))
        return found

    monkeypatch.setattr(table, "versions_of", and_then_another)
    reader = table.open_table(kb.folder / TABLE)
    assert commits > 1 and table.open_table(kb.folder / TABLE).version > reader.version


def test_a_version_that_is_taken_back_while_a_reader_opens_the_table_is_not_reported_as_lost(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, before = table.recorded_digests, table.newest_version(kb.folder / TABLE)
    assert before is not None
    changed(kb.folder, lambda kb: kb.add([document(0)], TinyTagger()))

    def and_then_taken_back(path: Path) -> dict[str, str]:
        found = digests(path)
        monkeypatch.setattr(table, "recorded_digests", digests)
        forget_after(kb.folder / TABLE, before)
        return found

    monkeypatch.setattr(table, "recorded_digests", and_then_taken_back)
    assert table.open_table(kb.folder / TABLE, before).version == before


def test_interruption_right_after_a_commit_takes_nothing_of_it_back(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path, version: int) -> int:
        raise KeyboardInterrupt

    kb.add([document(0)], TinyTagger())
    before = len(kb)
    with monkeypatch.context() as patch:
        patch.setattr(table, "_lease", interrupt)
        with pytest.raises(KeyboardInterrupt):
            kb.compact()
    kb = KnowledgeBase.open(kb.folder)
    assert len(kb) == before
    assert kb.verify() == []


def test_reader_of_an_older_version_goes_on_through_compaction_and_frees_it_when_it_ends(
    kb: KnowledgeBase,
) -> None:
    reader = KnowledgeBase.open(kb.folder)
    rows = iter(reader)
    next(rows)
    kb.delete(["d7"])
    expected = list(reader)
    assert kb.compact().versions_in_use == 1
    assert list(reader) == expected
    assert len(list(rows)) == len(expected) - 1
    assert "d7" in {passage.document_id for passage in reader}
    assert files_with("Town 7 ", kb.folder)
    del reader, rows
    assert kb.compact().versions_in_use == 0
    assert files_with("Town 7 ", kb.folder) == []


def test_old_versions_and_small_files_go_by_themselves(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realm.store.upkeep.TIDY_EVERY", 4)
    folder = publish(kb)
    for number in range(24):
        kb.add([document(number)], TinyTagger())
        read = vectors.read(folder, kb.keys_N)
        assert read is not None
        vectors.append(folder, read.version, kb.keys_N[-1:], vectors_of(kb.keys_N[-1:]), "m", kb.fingerprint)
        for path in (kb.folder / TABLE, folder / vectors.TABLE):
            assert len(list((path / "_versions").glob("*.manifest"))) <= 6
            assert len(table.open_table(path).get_fragments()) <= 10
    assert [entry.id for entry in kb.documents()][-24:] == [f"n{i}" for i in range(24)]
    assert KnowledgeBase.open(kb.folder).verify() == []
    read = vectors.read(folder, kb.keys_N)
    assert read is not None
    assert np.array_equal(read.array, vectors_of(kb.keys_N))


@pytest.mark.slow
def test_many_additions_cost_as_much_each_as_few(kb: KnowledgeBase, trials: Trials) -> None:
    seconds, sizes, additions = [], [], trials.count(1000)
    for number in range(additions):
        start = time.perf_counter()
        changed(kb.folder, lambda kb, number=number: kb.add([document(number)], TinyTagger()))  # type: ignore[misc]
        seconds.append(time.perf_counter() - start)
        if number + 1 == 100 or (number + 1) % (additions // 10) == 0:
            size = sum(file.stat().st_size for file in kb.folder.rglob("*") if file.is_file())
            sizes.append(size / (number + 1))
            print(f"{number + 1} additions: {1000 * np.mean(seconds[-100:]):.0f} ms each, {size} bytes")
    assert np.median(seconds[-100:]) < 3 * np.median(seconds[:100])
    assert sizes[-1] < 1.5 * sizes[0]
    assert KnowledgeBase.open(kb.folder).verify() == []
