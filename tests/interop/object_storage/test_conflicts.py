"""Copies that change while or after they are pushed or pulled."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from realm.cli import main
from realm.documents import remote
from realm.errors import ConflictError
from realm.interop.object_storage.copying import pull, push
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from realm.text.salient_spans import load_tagger
from tests.interop.object_storage.conftest import AT, add, names
from tests.qa.conftest import qa_folder, towns

__all__ = ["qa_folder", "towns"]


def test_a_changed_copy_is_not_overwritten(rules_kb: Path, tiny_model_folder: Path, copy: Path) -> None:
    add(copy, tiny_model_folder, "Sudbury")
    add(rules_kb, tiny_model_folder, "Tetbury")
    push(rules_kb, AT)
    with pytest.raises(
        ConflictError, match=r"copy was changed after it was pulled \(.*\), and a pull would undo"
    ):
        pull(AT, copy)
    assert any("Sudbury" in one.text for one in KnowledgeBase.open(copy))


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
