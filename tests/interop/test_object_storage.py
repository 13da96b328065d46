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
from realm.interop.object_storage import copying
from realm.interop.object_storage.copying import pull, push
from realm.interop.object_storage.folder import local_files
from realm.interop.object_storage.listing import ListingJson
from realm.model.folder import load_model
from realm.qa.pipeline import AnswerConfig
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from realm.text.salient_spans import load_tagger
from realm.workspace.living import LivingKnowledge
from tests.qa.conftest import qa_folder, towns
from tests.schemas import assert_holds

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
            "memory://bucket is not a folder on object storage: give an address such as",
        ),
        (
            ["push", str(rules_kb), "https://a.b/kb"],
            "https://a.b/kb is not a folder on object storage: give an address such as",
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
    "path",
    [
        "../evil",
        "/tmp/evil",
        "a/../../evil",
        "a//b",
        "./a",
        "",
        "a\\b",
        "pulled.json",
        "Pulled.json",
        "a\0b",
        "a\nb",
        "\udcff",
        ".lock",
        "a/.b",
        7,
    ],
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
def test_a_damaged_list_is_one_line_and_is_replaced_by_a_push(
    content: bytes, rules_kb: Path, tmp_path: Path, store: Any
) -> None:
    store.pipe_file("/bucket/kb/copy.json", content)
    with pytest.raises(
        DamagedError, match=r"memory://bucket/kb/copy\.json is damaged: push the folder again"
    ):
        pull(AT, tmp_path / "copy")
    push(rules_kb, AT)
    assert pull(AT, tmp_path / "copy")["kind"] == "knowledge base"
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
    with pytest.raises(
        DamagedError, match=f"{path} is damaged, because its SHA-256 differs: remove it, and push"
    ):
        pull(AT, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    store.rm_file(path)
    push(rules_kb, AT)
    assert pull(AT, tmp_path / "copy")["kind"] == "knowledge base"


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


def test_a_change_during_a_pull_is_not_lost(
    rules_kb: Path, tiny_model_folder: Path, copy: Path, monkeypatch
) -> None:
    add(rules_kb, tiny_model_folder, "Tetbury")
    push(rules_kb, AT)
    get = remote.RemoteFolder.get

    def changing(self: remote.RemoteFolder, *given: Any) -> None:
        monkeypatch.setattr(remote.RemoteFolder, "get", get)
        add(copy, tiny_model_folder, "Sudbury")
        get(self, *given)

    monkeypatch.setattr(remote.RemoteFolder, "get", changing)
    with pytest.raises(ConflictError, match="copy was changed after it was pulled"):
        pull(AT, copy)
    assert any("Sudbury" in one.text for one in KnowledgeBase.open(copy))


def test_a_commit_for_the_replaced_folder_is_refused(
    rules_kb: Path, tiny_model_folder: Path, copy: Path
) -> None:
    opened = KnowledgeBase.open(copy)
    rewritten = rules_kb / "tokenizer" / "tokenizer.json"
    rewritten.write_bytes(rewritten.read_bytes() + b"\n")  # the tables do not change
    push(rules_kb, AT)
    pull(AT, copy)
    with pytest.raises(ConflictError):
        opened.add([Document("Sudbury", "Sudbury lies on the river Ouse.", "s")], load_tagger("rules"))
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


def test_files_of_the_user_in_a_copy_of_a_workspace_are_changes(towns: Path, tmp_path: Path) -> None:
    original = shutil.copytree(towns, tmp_path / "towns")
    push(original, AT)
    pull(AT, tmp_path / "there")
    (tmp_path / "there" / "runs").mkdir()
    (tmp_path / "there" / "runs" / "q.tsv").write_text("who?")
    (original / "report.json").write_text("{}")
    push(original, AT)
    with pytest.raises(ConflictError, match=r"there was changed after it was pulled \(runs/q\.tsv\)"):
        pull(AT, tmp_path / "there")
    shutil.rmtree(tmp_path / "there" / "runs")
    pull(AT, tmp_path / "there")
    assert (tmp_path / "there" / "report.json").read_text() == "{}"


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


def test_a_folder_that_is_a_link_is_not_left_out_silently(rules_kb: Path, tmp_path: Path, capsys) -> None:
    (rules_kb / "indexes").rename(tmp_path / "disk")
    (rules_kb / "indexes").symlink_to(tmp_path / "disk")
    assert main(["push", str(rules_kb), AT]) == 2
    assert "indexes is a link to a folder, which is not copied: replace it" in capsys.readouterr().err


def test_a_copy_of_another_kind_is_not_replaced(
    rules_kb: Path, tiny_model_folder: Path, copy: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"has a copy of a knowledge base, and .* is a model: give another address"
    ):
        push(tiny_model_folder, AT)
    push(tiny_model_folder, "memory://bucket/model")
    with pytest.raises(
        InputError, match="copy has a knowledge base, and the copy is a model: give another folder"
    ):
        pull("memory://bucket/model", copy)


def test_of_two_pushes_at_the_same_time_one_is_refused(
    rules_kb: Path, tiny_model_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    other = shutil.copytree(rules_kb, tmp_path / "other")
    add(other, tiny_model_folder, "Sudbury")
    write = remote.RemoteFolder.put

    def both(self: remote.RemoteFolder, *given: Any) -> None:
        monkeypatch.setattr(remote.RemoteFolder, "put", write)
        push(other, AT)
        write(self, *given)

    monkeypatch.setattr(remote.RemoteFolder, "put", both)
    with pytest.raises(ConflictError, match="another push has written to memory://bucket/kb meanwhile"):
        push(rules_kb, AT)
    pull(AT, tmp_path / "copy")
    assert any("Sudbury" in one.text for one in KnowledgeBase.open(tmp_path / "copy"))


def test_two_pulls_into_a_folder_do_not_run_at_the_same_time(
    rules_kb: Path, tmp_path: Path, monkeypatch
) -> None:
    push(rules_kb, AT)
    get = remote.RemoteFolder.get

    def again(self: remote.RemoteFolder, *given: Any) -> None:
        with pytest.raises(ConflictError, match=r"another process pulls into .*copy"):
            pull(AT, tmp_path / "copy")
        get(self, *given)

    monkeypatch.setattr(remote.RemoteFolder, "get", again)
    pull(AT, tmp_path / "copy")
    assert list(KnowledgeBase.open(tmp_path / "copy")) == list(KnowledgeBase.open(rules_kb))


def test_a_copy_that_is_replaced_twice_during_a_pull_is_one_line(
    rules_kb: Path, tiny_model_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    push(rules_kb, AT)
    get = remote.RemoteFolder.get

    def after_two(self: remote.RemoteFolder, *given: Any) -> None:
        monkeypatch.setattr(remote.RemoteFolder, "get", get)
        for town in ("Sudbury", "Tetbury"):
            add(rules_kb, tiny_model_folder, town)
            push(rules_kb, AT)
        get(self, *given)

    monkeypatch.setattr(remote.RemoteFolder, "get", after_two)
    with pytest.raises(
        ConflictError, match="memory://bucket/kb was replaced while it was read: repeat the command"
    ):
        pull(AT, tmp_path / "copy")
    pull(AT, tmp_path / "copy")
    assert list(KnowledgeBase.open(tmp_path / "copy")) == list(KnowledgeBase.open(rules_kb))


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


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", '{"format": 1, "kind": "model", "files": [{}], "replaced": []}']
)
def test_a_damaged_record_of_the_last_pull_is_one_line(content: str, copy: Path, capsys) -> None:
    (copy / "pulled.json").write_text(content)
    assert main(["pull", AT, str(copy)]) == 2
    said = capsys.readouterr().err
    assert "pulled.json is damaged" in said and said.count("\n") == 1


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
