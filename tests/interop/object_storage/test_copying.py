"""What `realm push` and `realm pull` copy, and what they continue."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import realm
from realm.cli import main
from realm.documents import remote
from realm.errors import InputError
from realm.interop.object_storage import copying
from realm.interop.object_storage.copying import pull, push
from realm.interop.object_storage.folder import local_files
from realm.interop.object_storage.listing import ListingJson
from realm.qa.pipeline import AnswerConfig
from realm.store.knowledge_base import KnowledgeBase
from realm.workspace.living import LivingKnowledge
from tests.interop.object_storage.conftest import AT, add, names
from tests.qa.conftest import qa_folder, towns
from tests.schemas import assert_holds

__all__ = ["qa_folder", "towns"]


def test_a_pulled_knowledge_base_has_the_passages_and_vectors_of_the_pushed_one(
    rules_kb: Path, tiny_model_folder: Path, copy: Path, capsys
) -> None:
    original, pulled = KnowledgeBase.open(rules_kb), KnowledgeBase.open(copy)
    assert list(pulled) == list(original) and pulled.fingerprint == original.fingerprint
    asked = ["retrieve", "--model", str(tiny_model_folder), "--questions", str(copy.parent / "q.jsonl")]
    (copy.parent / "q.jsonl").write_text('{"question": "who built a tower in Arden?"}\n')
    found = []
    for kb in (rules_kb, copy):
        out = copy.parent / f"{kb.name}.hits"
        assert main([*asked, "--kb", str(kb), "--out", str(out)]) == 0
        found.append(out.read_text())
    assert found[0] == found[1]
    assert main(["kb", "verify", "--kb", str(copy)]) == 0, capsys.readouterr()


def test_the_lists_of_files_have_their_types(copy: Path, store: Any) -> None:
    assert_holds(ListingJson, json.loads(store.cat("/bucket/kb/copy.json")))
    assert_holds(ListingJson, json.loads((copy / "pulled.json").read_text()))


def test_a_workspace_and_a_model_can_be_copied(towns: Path, tmp_path: Path) -> None:
    question = "who built a tower in Arden?"
    push(towns, AT)
    assert pull(AT, tmp_path / "there")["kind"] == "workspace"
    assert realm.load(tmp_path / "there").answer(question) == realm.load(towns).answer(question)
    push(towns / "model", "memory://bucket/model")
    assert pull("memory://bucket/model", tmp_path / "model")["kind"] == "model"
    wanted = {file.name: file.read_bytes() for file in (towns / "model").iterdir() if file.is_file()}
    assert (
        wanted.items()
        <= {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir() if file.is_file()}.items()
    )


def test_a_second_push_and_pull_copy_only_what_changed(
    rules_kb: Path, tiny_model_folder: Path, copy: Path, store: Any
) -> None:
    assert push(rules_kb, AT)["copied_files"] == 0 == pull(AT, copy)["copied_files"]
    before = names(store)
    add(rules_kb, tiny_model_folder, "Sudbury")
    pushed = push(rules_kb, AT)
    assert 0 < pushed["copied_files"] < pushed["files"]
    assert pull(AT, copy)["copied_files"] <= pushed["copied_files"]
    assert list(KnowledgeBase.open(copy)) == list(KnowledgeBase.open(rules_kb))
    assert before - {"copy.json"} <= names(store)  # a pull of the version before can still end
    add(rules_kb, tiny_model_folder, "Tetbury")
    push(rules_kb, AT)
    now = {hashlib.sha256(file.read_bytes()).hexdigest() for file in rules_kb.rglob("*") if file.is_file()}
    contents = {name.removeprefix("files/") for name in names(store) - {"copy.json"}}
    listing = json.loads(store.cat("/bucket/kb/copy.json"))
    assert contents == {one["sha256"] for one in listing["files"]} | set(listing["replaced"])
    assert contents - set(listing["replaced"]) <= now


def test_a_push_without_changes_keeps_the_version_before(
    rules_kb: Path, tiny_model_folder: Path, copy: Path, store: Any
) -> None:
    add(rules_kb, tiny_model_folder, "Sudbury")
    push(rules_kb, AT)
    stored = dict(store.store)
    push(rules_kb, AT)
    assert store.store.keys() == stored.keys()
    assert json.loads(store.cat("/bucket/kb/copy.json"))["replaced"]


def test_an_open_knowledge_base_answers_while_its_folder_is_replaced_and_then_follows(
    rules_kb: Path, tiny_model_folder: Path, copy: Path
) -> None:
    living = LivingKnowledge(str(copy), str(tiny_model_folder), AnswerConfig(device="cpu"))
    texts = [one.text for one in living.current.kb]
    for number, town in enumerate(("Sudbury", "Tetbury", "Oakham")):
        add(rules_kb, tiny_model_folder, town)
        push(rules_kb, AT)
        pull(AT, copy)
        old = living.current
        assert [one.text for one in old.kb.passages(range(len(old.kb)))] == texts
        assert living.refresh() and living.problem is None
        texts = [one.text for one in living.current.kb]
        assert any(town in text for text in texts) and living.current.stamp != old.stamp, number
    assert pull(AT, copy)["copied_files"] == 0  # to follow the copy has not changed it


def test_an_interrupted_push_and_pull_are_continued(
    rules_kb: Path, tmp_path: Path, store: Any, monkeypatch
) -> None:
    put, get = remote.RemoteFolder.put, remote.RemoteFolder.get
    done: list[str] = []

    def stops_after(calls: int, method: Any) -> Any:
        def stopping(self: remote.RemoteFolder, *given: Any) -> None:
            if len(done) == calls:
                raise KeyboardInterrupt
            done.append(str(given[0]))
            method(self, *given)

        return stopping

    files = len(local_files(rules_kb, "knowledge base"))
    with monkeypatch.context() as patch:
        patch.setattr(remote.RemoteFolder, "put", stops_after(3, put))
        with pytest.raises(KeyboardInterrupt):
            push(rules_kb, AT)
    assert "copy.json" not in names(store)
    with pytest.raises(InputError, match="has no copy"):
        pull(AT, tmp_path / "copy")
    assert push(rules_kb, AT)["copied_files"] <= files - 3

    done.clear()
    with monkeypatch.context() as patch:
        patch.setattr(remote.RemoteFolder, "get", stops_after(4, get))
        with pytest.raises(KeyboardInterrupt):
            pull(AT, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    aside = tmp_path / ".copy.pull" / "new"
    left = next(file for file in aside.rglob("*") if file.is_file())
    left.write_bytes(b"half")
    (aside / "other" / "empty").mkdir(parents=True)
    assert 0 < pull(AT, tmp_path / "copy")["copied_files"] <= files - 3
    assert list(KnowledgeBase.open(tmp_path / "copy")) == list(KnowledgeBase.open(rules_kb))
    assert not (tmp_path / "copy" / "other").exists() and not (tmp_path / ".copy.pull").exists()


def test_files_that_commands_make_again_are_not_copied_and_are_no_change(
    rules_kb: Path, copy: Path, store: Any
) -> None:
    for made in ("words/a", "mapped/b"):
        for folder in (rules_kb, copy):
            (folder / made).parent.mkdir(exist_ok=True)
            (folder / made).touch()
    assert push(rules_kb, AT)["copied_files"] == 0 == pull(AT, copy)["copied_files"]
    assert not any(
        path in one["path"]
        for one in json.loads(store.cat("/bucket/kb/copy.json"))["files"]
        for path in ("words", "mapped", ".lock")
    )


def test_a_rebuilt_knowledge_base_replaces_a_copy_with_more_versions(
    rules_kb: Path, tiny_model_folder: Path, copy: Path, tiny_kb: KnowledgeBase
) -> None:
    for town in ("Sudbury", "Tetbury"):
        add(rules_kb, tiny_model_folder, town)
    push(rules_kb, AT)
    pull(AT, copy)
    assert KnowledgeBase.open(copy).table.version > tiny_kb.table.version
    shutil.rmtree(rules_kb)
    shutil.copytree(tiny_kb.folder, rules_kb)
    push(rules_kb, AT)
    pull(AT, copy)
    assert list(KnowledgeBase.open(copy)) == list(tiny_kb)
    assert main(["kb", "verify", "--kb", str(copy)]) == 0


def test_an_index_that_was_removed_leaves_nothing_in_a_copy(rules_kb: Path, copy: Path) -> None:
    shutil.rmtree(rules_kb / "indexes")
    push(rules_kb, AT)
    pull(AT, copy)
    assert not (copy / "indexes").exists()
    assert main(["kb", "verify", "--kb", str(copy)]) == 0


def test_folders_beside_the_copy_are_left_alone(rules_kb: Path, tmp_path: Path) -> None:
    push(rules_kb, AT)
    for name in ("copy.writing", "copy.building"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("Mine.")
    (tmp_path / ".copy.pull").symlink_to(tmp_path / "copy.writing")
    with pytest.raises(InputError, match=r"\.copy\.pull is a link, and a pull needs a folder with this name"):
        pull(AT, tmp_path / "copy")
    (tmp_path / ".copy.pull").unlink()
    pull(AT, tmp_path / "copy")
    assert (tmp_path / "copy.writing" / "thesis.txt").read_text() == "Mine."
    assert (tmp_path / "copy.building" / "thesis.txt").read_text() == "Mine."


def test_a_link_to_the_folder_and_the_current_folder_are_followed(
    rules_kb: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "copy").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(rules_kb)
    push(Path("."), AT)
    pull(AT, tmp_path / "copy")
    assert (tmp_path / "copy").is_symlink() and (tmp_path / "disk" / "passages.lance").is_dir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pull(AT, Path("."))
    assert list(KnowledgeBase.open(tmp_path / "here")) == list(KnowledgeBase.open(rules_kb))
    monkeypatch.setattr(copying.os.path, "ismount", lambda _: True)
    with pytest.raises(InputError, match=r"is a mount point, which cannot be replaced: give a folder in it"):
        pull(AT, tmp_path / "mounted")


def test_temporary_files_and_files_of_no_version_are_not_copied_and_are_no_change(
    rules_kb: Path, copy: Path
) -> None:
    for folder in (rules_kb, copy):
        (index,) = (folder / "indexes").iterdir()
        (index / ".mapped-1-ab.npy.77").touch()
        (index / "vectors.lance" / "data" / "half.lance").write_bytes(b"half")
    assert push(rules_kb, AT)["copied_files"] == 0 == pull(AT, copy)["copied_files"]


def test_a_connection_that_fails_once_is_tried_again(
    rules_kb: Path, tmp_path: Path, store: Any, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))  # copying a file opens it, so it fails twice
    failed: set[str] = set()

    def once(name: str) -> None:
        method = getattr(type(store), name)

        def failing(*given: Any, **named: Any) -> Any:
            if name not in failed:
                failed.add(name)
                raise OSError("connection reset")
            return method(store, *given, **named)

        monkeypatch.setattr(store, name, failing)

    names = ("find", "size", "cat_file", "put_file", "pipe_file", "open")
    for name in names:
        once(name)
    push(rules_kb, AT)
    pull(AT, tmp_path / "copy")
    push(rules_kb, AT)
    assert failed == set(names)


def test_contents_that_cannot_be_removed_are_a_warning(
    rules_kb: Path, tiny_model_folder: Path, store: Any, monkeypatch, caplog
) -> None:
    push(rules_kb, AT)
    for town in ("Sudbury", "Tetbury"):
        add(rules_kb, tiny_model_folder, town)
        monkeypatch.setattr(
            store, "rm_file", lambda path: (_ for _ in ()).throw(PermissionError("Access Denied"))
        )
        push(rules_kb, AT)
    assert "the copy is complete, but contents that it no longer needs stay" in caplog.text


def test_progress_counts_the_bytes_of_a_copy(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(bytes(3_000_000))
    folder, sent, received = remote.RemoteFolder(AT), [], []
    folder.put(tmp_path / "there", "a", sent.append)
    folder.get("a", tmp_path / "back", received.append)
    assert sum(sent) == sum(received) == 3_000_000 and len(received) > 1
