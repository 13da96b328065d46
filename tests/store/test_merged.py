"""Documents with the same title and text: the text is kept once, and stays until the last of them is deleted."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import pytest

from realm.errors import RealmError
from realm.store import knowledge_base, upkeep
from realm.store.ingest import TABLE
from realm.store.knowledge_base import KnowledgeBase, build, changed
from realm.store.merged import MERGED, handed_over
from realm.store.tables import table
from realm.store.tables.digests import CHECKSUMS
from realm.store.tables.table import history
from realm.store.upkeep import tidy
from realm.text.corpus import Document
from tests.store.test_build import Stopped, stop
from tests.store.tiny import CONFIG, TOKENIZER, TinyTagger, make

TEXT = "One is a town. Two is in Ruritania. It has inns."
SAME = [Document("A", TEXT, f"{name}.txt") for name in "abc"]
OTHER = Document("B", TEXT, "d.txt")


def content(folder: Path) -> list[tuple[str, str]]:
    return sorted((passage.document_id, passage.text) for passage in KnowledgeBase.open(folder))


@pytest.fixture
def kb(tmp_path: Path) -> KnowledgeBase:
    return make(tmp_path / "kb", [*SAME, OTHER])


def test_a_build_lists_which_documents_were_merged_into_which(tmp_path: Path) -> None:
    result = build(tmp_path / "kb", [*SAME, OTHER], CONFIG, TOKENIZER, TinyTagger())
    assert result.merged == {"b.txt": "a.txt", "c.txt": "a.txt"}
    assert KnowledgeBase.open(tmp_path / "kb").merged() == result.merged


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_a_text_stays_until_the_last_of_its_documents_is_deleted(order: str, kb: KnowledgeBase) -> None:
    others = [one for one in content(kb.folder) if one[0] == "d.txt"]
    texts = [text for _, text in others]
    for n, name in enumerate(order):
        removed = KnowledgeBase.open(kb.folder).delete([f"{name}.txt"])
        assert removed == (len(texts) if n == 2 else 0)
        left = [one for one in content(kb.folder) if one not in others]
        assert [text for _, text in left] == (texts if n < 2 else [])
        assert {document for document, _ in left} <= {f"{other}.txt" for other in order[n + 1 :]}
        with pytest.raises(RealmError, match="no document"):
            KnowledgeBase.open(kb.folder).delete([f"{name}.txt"])
    assert KnowledgeBase.open(kb.folder).verify() == []


@pytest.mark.parametrize("names", [["a.txt", "b.txt", "c.txt"], ["A"], ["A", "b.txt"]])
def test_all_of_them_can_be_deleted_at_once_and_by_title(names: list[str], kb: KnowledgeBase) -> None:
    removed = [one for one in content(kb.folder) if one[0] != "d.txt"]
    assert kb.delete(names) == len(removed)
    assert {document for document, _ in content(kb.folder)} == {"d.txt"}
    assert kb.merged() == {}


def test_documents_that_are_added_later_are_merged_too(tmp_path: Path) -> None:
    kb = make(tmp_path / "kb", [SAME[0], OTHER])
    result = kb.add(SAME, TinyTagger())
    assert result.merged == {"b.txt": "a.txt", "c.txt": "a.txt"} == kb.merged()
    size = (tmp_path / "kb" / MERGED).stat().st_size
    assert kb.add(SAME, TinyTagger()).merged == result.merged
    assert (tmp_path / "kb" / MERGED).stat().st_size == size  # what is known is not written again
    kb.add([SAME[1]._replace(text="Other words.")], TinyTagger())
    assert kb.merged() == {"c.txt": "a.txt"}
    assert kb.delete(["b.txt"]) == 1


@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
def test_a_text_stays_until_the_last_of_its_documents_is_replaced(order: str, kb: KnowledgeBase) -> None:
    texts = [text for document, text in content(kb.folder) if document == "a.txt"]
    versions = len(history(kb.folder / TABLE, 100))
    for n, name in enumerate(order, start=1):
        other = Document("A", f"It is town {name}.", f"{name}.txt")
        result = KnowledgeBase.open(kb.folder).add([other], TinyTagger())
        assert result.passages_removed == (len(texts) if n == 3 else 0)
        assert len(history(kb.folder / TABLE, 100)) == versions + n  # one commit each
        left = [one for one in content(kb.folder) if one[1] in texts and one[0] != "d.txt"]
        assert [text for _, text in left] == (texts if n < 3 else [])
        assert {document for document, _ in left} <= {f"{other}.txt" for other in order[n:]}
        assert (f"{name}.txt", other.text) in content(kb.folder)
    assert KnowledgeBase.open(kb.folder).verify() == []


@pytest.mark.parametrize("first", ["the copy", "the replacement"])
def test_a_copy_that_comes_with_the_replacement_keeps_the_text(first: str, tmp_path: Path) -> None:
    kb = make(tmp_path / "kb", [SAME[0], OTHER])
    before = content(kb.folder)
    documents = [SAME[1], SAME[0]._replace(text="Other words.")]
    kb.add(documents if first == "the copy" else documents[::-1], TinyTagger())
    renamed = [(one.replace("a.txt", "b.txt"), text) for one, text in before]
    assert content(kb.folder) == sorted([*renamed, ("a.txt", "Other words.")])
    assert kb.merged() == {}


def test_what_the_new_text_has_too_stays_with_it(kb: KnowledgeBase) -> None:
    before = {text for _, text in content(kb.folder)}
    kb.add([SAME[0]._replace(text=f"{TEXT} Two has inns. One is a capital. It is in town.")], TinyTagger())
    assert before <= {text for _, text in content(kb.folder)}
    assert KnowledgeBase.open(kb.folder).verify() == []


@pytest.mark.parametrize("text", ["", "One is in town. Two has inns."])
def test_a_merged_document_that_gets_another_text_is_merged_no_longer(text: str, kb: KnowledgeBase) -> None:
    texts = [passage.text for passage in kb if passage.document_id == "a.txt"]
    kb.add([SAME[1]._replace(text=text)], TinyTagger())
    assert kb.merged() == {"c.txt": "a.txt"}
    kb.delete(["c.txt"])
    assert kb.delete(["a.txt"]) == len(texts)


def test_a_line_that_a_full_disk_cut_short_is_passed_over(kb: KnowledgeBase) -> None:
    with (kb.folder / MERGED).open("a") as file:
        file.write('{"document": "x", "st')
    assert kb.merged() == {"b.txt": "a.txt", "c.txt": "a.txt"}
    kb.delete(["b.txt"])
    assert kb.merged() == {"c.txt": "a.txt"}


def test_an_interrupted_build_merges_what_it_had_read_before(tmp_path: Path) -> None:
    def stop(read: int) -> None:
        if read == 30:
            raise KeyboardInterrupt

    documents = [*SAME, *(Document(f"T{n}", f"One has {n} inns.", f"t{n}") for n in range(40))]
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "kb", documents, CONFIG, TOKENIZER, TinyTagger(stop))
    assert make(tmp_path / "kb", documents).merged() == {"b.txt": "a.txt", "c.txt": "a.txt"}


def test_a_document_that_gets_the_text_of_another_is_merged_with_it_at_once(kb: KnowledgeBase) -> None:
    result = kb.add([Document("A", TEXT, "d.txt")], TinyTagger())
    assert result.replaced == 1
    assert result.merged == {"d.txt": "a.txt"}
    assert kb.merged() == {"b.txt": "a.txt", "c.txt": "a.txt", "d.txt": "a.txt"}
    assert kb.delete(["a.txt", "b.txt", "c.txt"]) == 0
    assert {passage.document_id for passage in kb} == {"d.txt"}


def test_an_id_may_hold_any_line_end(tmp_path: Path) -> None:
    names = [f"b{end}.txt" for end in "\n\r\x0b\x0c\x1c\x85\u2028"]
    kb = make(tmp_path / "kb", [SAME[0], *(SAME[1]._replace(id=name) for name in names)])
    assert kb.merged() == dict.fromkeys(names, "a.txt")
    kb.delete(names[2:])
    assert kb.merged() == dict.fromkeys(names[:2], "a.txt")


def test_compaction_forgets_the_ids_that_are_merged_no_longer(kb: KnowledgeBase) -> None:
    kb.delete(["b.txt"])
    kb.compact()
    assert kb.merged() == {"c.txt": "a.txt"}
    assert "b.txt" not in (kb.folder / MERGED).read_text()
    kb.delete(["a.txt"])
    kb.compact()
    assert not (kb.folder / MERGED).exists()


# --- beside other writers, and killed -----------------------------------------------------------------------


def take_away(kb: KnowledgeBase, change: str) -> None:
    if change == "delete":
        kb.delete(["a.txt"])
    else:
        kb.add([SAME[0]._replace(text="Other words.")], TinyTagger())


@pytest.mark.parametrize("change", ["delete", "replace"])
@pytest.mark.parametrize("moment", ["while it reads", "before it writes"])
def test_a_copy_that_is_added_while_another_writer_takes_the_text_away_keeps_the_text(
    moment: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "kb", [SAME[0], OTHER]).folder
    texts = [text for document, text in content(folder) if document == "a.txt"]
    other = threading.Thread(target=lambda: changed(folder, lambda kb: take_away(kb, change)))

    def start_other() -> None:
        if other.ident is None:
            other.start()
            other.join(0.5)  # it ends, or waits for the addition

    def documents() -> Iterator[Document]:
        yield SAME[1]
        if moment == "while it reads":
            start_other()

    def then_start_other(*values: Any) -> Any:
        if moment == "before it writes" and threading.current_thread() is not other:
            start_other()
        return handed_over(*values)

    monkeypatch.setattr("realm.store.add.handed_over", then_start_other)
    changed(folder, lambda kb: kb.add(documents(), TinyTagger()))
    other.join()
    assert [text for document, text in content(folder) if document == "b.txt"] == texts


CHANGES: dict[str, Callable[[KnowledgeBase], object]] = {
    "deletes a positive and a merged one": lambda kb: kb.delete(["a.txt", "b.txt"]),
    "replaces the positive": lambda kb: kb.add([SAME[0]._replace(text="Other words.")], TinyTagger()),
    "gives a merged one its own text": lambda kb: kb.add([SAME[1]._replace(text="Its own.")], TinyTagger()),
    "merges one, adds another": lambda kb: kb.add(
        [SAME[0]._replace(id="e.txt"), Document("C", "It is new.", "f.txt")], TinyTagger()
    ),
}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_that_is_killed_around_its_commit_is_whole_or_leaves_nothing(
    change: Callable[[KnowledgeBase], object],
    moment: str,
    kb: KnowledgeBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Killed(BaseException):
        pass

    def die(*values: Any) -> Any:
        if moment == "after":
            commit(*values)
        raise Killed

    commit = table.commit
    with monkeypatch.context() as patch:
        patch.setattr(table, "commit", die)
        with pytest.raises(Killed):
            change(KnowledgeBase.open(kb.folder))
    expected = make(tmp_path / "expected", [*SAME, OTHER])
    if moment == "after":
        change(expected)
    for later in (
        None,
        lambda kb: kb.add([Document("D", "It is later.", "g.txt")], TinyTagger()),
        KnowledgeBase.compact,
    ):
        if later is not None:
            later(KnowledgeBase.open(kb.folder))
            later(expected)
        assert content(kb.folder) == content(expected.folder)
        assert KnowledgeBase.open(kb.folder).merged() == expected.merged()
    assert KnowledgeBase.open(kb.folder).verify() == []


def test_columns_of_a_later_document_do_not_complete_a_change_that_was_killed_before_its_commit(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, merged = content(kb.folder), kb.merged()
    with monkeypatch.context() as patch:
        patch.setattr(table, "commit", stop)
        with pytest.raises(Stopped):
            KnowledgeBase.open(kb.folder).delete(["a.txt"])
    later = Document("D", "It is later.", "g.txt", fields={"year": 2020})
    kb.add([later], TinyTagger())
    assert kb.merged() == merged
    assert content(kb.folder) == [*before, ("g.txt", "It is later.")]
    assert kb.verify() == []


def test_upkeep_does_not_complete_a_change_that_was_killed_before_its_commit(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tidy_after_a_killed_change(path: Path, table: lance.LanceDataset) -> lance.LanceDataset:
        with monkeypatch.context() as patch:
            patch.setattr("realm.store.tables.table.commit", stop)
            with pytest.raises(Stopped):
                KnowledgeBase.open(kb.folder).delete(["a.txt"])
        tidied = tidy(path, table)
        assert tidied.version == table.version + 1
        return tidied

    kb.add([Document("D", "It is later.", "g.txt")], TinyTagger())
    before, merged = content(kb.folder), kb.merged()
    monkeypatch.setattr(upkeep, "TIDY_EVERY", 1)
    monkeypatch.setattr(knowledge_base, "tidy", tidy_after_a_killed_change)
    kb.add([Document("E", "It is last.", "h.txt")], TinyTagger())
    assert kb.merged() == merged
    assert content(kb.folder) == [*before, ("h.txt", "It is last.")]
    assert kb.verify() == []


# --- damaged ------------------------------------------------------------------------------------------------


def damages(content: bytes) -> "dict[str, bytes | None]":
    flipped = {
        f"bit {n} flipped": content[:n] + bytes([content[n] ^ 16]) + content[n + 1 :]
        for n in range(0, len(content), 29)
    }
    last = content.rindex(b"\n", 0, -1)
    return {
        **flipped,
        "a line cut off": content[: last + 1],
        "empty": b"",
        "gone": None,
        "binary": bytes(range(256)),
    }


def test_a_damaged_list_of_merged_documents_is_found_and_never_believed(kb: KnowledgeBase) -> None:
    kb.add([OTHER._replace(id="e.txt")], TinyTagger())
    file = kb.folder / MERGED
    whole, before = file.read_bytes(), content(kb.folder)
    for name, damaged in damages(whole).items():
        file.write_bytes(damaged) if damaged is not None else file.unlink()
        again = KnowledgeBase.open(kb.folder)
        uses = (
            KnowledgeBase.merged,
            lambda kb: kb.delete(["b.txt"]),
            lambda kb: kb.add(SAME[:1], TinyTagger()),
        )
        for use in uses:
            with pytest.raises(
                RealmError, match=rf"\A{kb.folder} is damaged: {MERGED} (has changed|is missing)[^\n]*\Z"
            ):
                use(again)
        (found,) = again.verify()
        assert found.startswith(MERGED), name
        assert content(kb.folder) == before
    file.write_bytes(whole)
    assert kb.verify() == []


def test_lines_of_a_writer_that_was_killed_before_their_checksum_count(kb: KnowledgeBase) -> None:
    before = kb.merged()
    with (kb.folder / MERGED).open("a") as file:
        file.write('\n{"document": "c.txt", "state": null}\n\n{"document": "b.t')
    assert kb.merged() == {"b.txt": "a.txt"}
    assert kb.verify() == []
    kb.add([SAME[2]], TinyTagger())
    assert kb.merged() == before
    assert kb.verify() == []


def test_a_list_that_was_written_without_a_checksum_is_read_and_gets_one_with_its_next_line(
    kb: KnowledgeBase,
) -> None:
    listed = kb.folder / CHECKSUMS
    lines = listed.read_text().splitlines(keepends=True)
    listed.write_text("".join(line for line in lines if MERGED not in line))
    assert len(kb.merged()) == 2
    assert kb.verify() == []
    kb.delete(["b.txt"])
    assert MERGED in listed.read_text()
    assert kb.merged() == {"c.txt": "a.txt"}
    assert kb.verify() == []
