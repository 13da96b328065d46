"""`realm push` and `realm pull`, with fsspec's file system in memory as the object store."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

import realm
from realm.cli import main
from realm.documents import remote
from realm.errors import ConflictError, DamagedError, InputError
from realm.index.versions import complete_index
from realm.interop import object_storage
from realm.interop.object_storage import pull, push
from realm.model.folder import load_model
from realm.qa.pipeline import AnswerConfig
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from realm.text.salient_spans import load_tagger
from realm.workspace.living import LivingKnowledge
from tests.qa.conftest import qa_folder, towns

__all__ = ["qa_folder", "towns"]
AT = "memory://bucket/kb"


@pytest.fixture(autouse=True)
def store(monkeypatch) -> Any:
    """An empty store. `store.store` has the contents by path."""
    monkeypatch.setattr(remote, "SCHEMES", (*remote.SCHEMES, "memory"))
    monkeypatch.setattr(remote, "STORES", ("memory",))
    monkeypatch.setattr(remote, "WAITS", ())
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.fixture
def copy(rules_kb: Path, tmp_path: Path) -> Path:
    """A pulled copy of the knowledge base `rules_kb`."""
    push(rules_kb, AT)
    pull(AT, tmp_path / "copy")
    return tmp_path / "copy"


def add(kb: Path, model: Path, title: str) -> None:
    """Adds a document and its vectors."""
    text = f"{title} lies on the river Ouse. Alaric built a tower in {title} in 1492."
    opened = KnowledgeBase.open(kb)
    opened.add([Document(title, text, title)], load_tagger("rules"))
    complete_index(opened, load_model(model), str(model))


def names(store: Any) -> set[str]:
    return {path.removeprefix("/bucket/kb/") for path in store.store}


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

    files = len(object_storage._local_files(rules_kb))
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
    left = next(file for file in (tmp_path / "copy.writing").rglob("*") if file.is_file())
    left.write_bytes(b"half")
    (tmp_path / "copy.writing" / "other").touch()
    assert 0 < pull(AT, tmp_path / "copy")["copied_files"] <= files - 3
    assert list(KnowledgeBase.open(tmp_path / "copy")) == list(KnowledgeBase.open(rules_kb))
    assert not (tmp_path / "copy" / "other").exists() and not (tmp_path / "copy.writing").exists()


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


def test_a_changed_copy_is_not_overwritten(rules_kb: Path, tiny_model_folder: Path, copy: Path) -> None:
    add(copy, tiny_model_folder, "Sudbury")
    add(rules_kb, tiny_model_folder, "Tetbury")
    push(rules_kb, AT)
    with pytest.raises(
        ConflictError, match=r"copy was changed after it was pulled \(.*\), and a pull would undo"
    ):
        pull(AT, copy)
    assert any("Sudbury" in one.text for one in KnowledgeBase.open(copy))


def test_folders_and_addresses_of_others_are_refused(
    rules_kb: Path, tmp_path: Path, store: Any, capsys
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("Mine.")
    push(rules_kb, AT)
    for words, problem in (
        (["push", str(tmp_path / "mine"), AT], "mine is not a knowledge base, a model or a workspace"),
        (["push", str(tmp_path / "gone"), AT], "gone is not a knowledge base, a model or a workspace"),
        (
            ["push", str(rules_kb), "memory://bucket"],
            "memory://bucket cannot be written: give the address of a folder",
        ),
        (
            ["push", str(rules_kb), "https://a.b/kb"],
            "https://a.b/kb cannot be written: give the address of a folder",
        ),
        (
            ["pull", AT, str(tmp_path / "mine")],
            "mine exists, and was not made by `realm pull`: give another folder",
        ),
        (
            ["pull", AT, str(tmp_path / "mine" / "thesis.txt")],
            "thesis.txt exists, and was not made by `realm pull`",
        ),
        (
            ["pull", "memory://bucket/gone", str(tmp_path / "new")],
            "memory://bucket/gone has no copy: make it with",
        ),
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("realm: ") and problem in said and said.count("\n") == 1
    store.pipe_file("/bucket/kb/files/report.txt", b"Theirs.")
    assert main(["push", str(rules_kb), AT]) == 2
    assert (
        "memory://bucket/kb has files that `realm push` did not write, such as files/report.txt"
        in capsys.readouterr().err
    )
    assert store.cat("/bucket/kb/files/report.txt") == b"Theirs."
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "Mine." and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "path", ["../evil", "/tmp/evil", "a/../../evil", "a//b", "./a", "", "a\\b", "pulled.json", "a\0b", 7]
)
def test_a_path_outside_the_folder_is_refused(path: object, tmp_path: Path, store: Any) -> None:
    record = {"path": path, "bytes": 4, "sha256": hashlib.sha256(b"evil").hexdigest()}
    store.pipe_file(f"/bucket/kb/files/{record['sha256']}", b"evil")
    listing = {"format": 1, "kind": "model", "files": [record], "replaced": []}
    store.pipe_file("/bucket/kb/copy.json", json.dumps(listing).encode())
    with pytest.raises(DamagedError, match=r"copy\.json is damaged"):
        pull(AT, tmp_path / "in" / "copy")
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 1}',
        b"[" * 100_000,
        b'{"format": 1, "kind": 3, "files": [], "replaced": []}',
    ],
)
def test_a_damaged_list_is_one_line(content: bytes, tmp_path: Path, store: Any) -> None:
    store.pipe_file("/bucket/kb/copy.json", content)
    with pytest.raises(DamagedError, match=r"memory://bucket/kb/copy\.json is damaged: push the copy again"):
        pull(AT, tmp_path / "copy")
    store.pipe_file("/bucket/kb/copy.json", b'{"format": 2}')
    with pytest.raises(InputError, match="has format 2, which this version of realm cannot read"):
        pull(AT, tmp_path / "copy")


def test_a_content_that_was_changed_in_the_store_is_refused(
    rules_kb: Path, tmp_path: Path, store: Any
) -> None:
    push(rules_kb, AT)
    path = max(store.store, key=lambda one: len(store.cat(one)))
    content = bytearray(store.cat(path))
    content[len(content) // 2] ^= 1
    store.pipe_file(path, bytes(content))
    with pytest.raises(DamagedError, match="is damaged: its SHA-256 differs"):
        pull(AT, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_file_that_changes_while_it_is_uploaded_is_not_kept(
    rules_kb: Path, store: Any, monkeypatch
) -> None:
    put = remote.RemoteFolder.put

    def changes(self: remote.RemoteFolder, file: Path, *rest: Any) -> None:
        put(self, file, *rest)
        if file.name == "SHA256SUMS":
            os.utime(file, ns=(0, 0))

    monkeypatch.setattr(remote.RemoteFolder, "put", changes)
    with pytest.raises(ConflictError, match="SHA256SUMS was changed while it was copied: repeat the command"):
        push(rules_kb, AT)
    sums = hashlib.sha256((rules_kb / "SHA256SUMS").read_bytes()).hexdigest()
    assert f"files/{sums}" not in names(store) and "copy.json" not in names(store)


def test_a_rebuilt_knowledge_base_replaces_the_copy(
    rules_kb: Path, copy: Path, tiny_kb: KnowledgeBase
) -> None:
    shutil.rmtree(rules_kb)
    shutil.copytree(tiny_kb.folder, rules_kb)
    push(rules_kb, AT)
    pull(AT, copy)
    assert list(KnowledgeBase.open(copy)) == list(tiny_kb)


def test_other_commands_say_how_to_use_an_address(tmp_path: Path, capsys) -> None:
    pull_it = "copy it to a folder with `realm pull ADDRESS FOLDER`"
    for words, problem in (
        (
            ["answer", "who?", "--kb", "s3://b/kb", "--model", "m"],
            f"--kb s3://b/kb must be on this machine: {pull_it}",
        ),
        (["answer", "who?", "--in", "gs://b/w"], f"--in gs://b/w must be on this machine: {pull_it}"),
        (
            ["kb", "build", "docs", "--out", "s3://b/kb"],
            "--out s3://b/kb must be on this machine: `realm push FOLDER ADDRESS` copies a folder there",
        ),
        (
            ["kb", "export", "--kb", str(tmp_path / "gone"), "--out", "s3://b/a.jsonl"],
            "gone is no knowledge base",
        ),
    ):
        assert main(words) == 2
        assert problem in capsys.readouterr().err


def test_progress_counts_the_bytes_of_a_copy(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(bytes(3_000_000))
    folder, sent, received = remote.RemoteFolder(AT), [], []
    folder.put(tmp_path / "there", "a", sent.append)
    folder.get("a", tmp_path / "back", received.append)
    assert sum(sent) == sum(received) == 3_000_000 and len(received) > 1
