"""Folders and addresses that `realm push` and `realm pull` refuse, and damaged copies."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from realm.cli import main
from realm.errors import DamagedError, InputError
from realm.interop.object_storage.copying import pull, push
from tests.interop.object_storage.conftest import AT


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


def test_a_damaged_model_is_not_pushed(tiny_model_folder: Path, tmp_path: Path, store: Any) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    weights = bytearray((folder / "embedder.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "embedder.safetensors").write_bytes(weights)
    with pytest.raises(DamagedError, match="differs from its checksum"):
        push(folder, AT)
    assert not store.exists("/bucket/kb/copy.json")


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


def test_files_that_are_not_what_the_list_says_become_no_folder(
    rules_kb: Path, tmp_path: Path, store: Any
) -> None:
    push(rules_kb, AT)
    listing = json.loads(store.cat("/bucket/kb/copy.json"))
    for changed, says in (
        ({"files": []}, "the files at memory://bucket/kb are not a knowledge base"),
        ({"files": listing["files"][:3]}, "the files at memory://bucket/kb are not a knowledge base"),
        ({"kind": "model"}, "the files at memory://bucket/kb are not a model"),
        ({"files": [*listing["files"], listing["files"][0]]}, r"copy\.json is damaged"),
    ):
        store.pipe_file("/bucket/kb/copy.json", json.dumps(listing | changed).encode())
        with pytest.raises(DamagedError, match=says):
            pull(AT, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
    store.pipe_file("/bucket/kb/copy.json", json.dumps(listing).encode())
    assert pull(AT, tmp_path / "copy")["kind"] == "knowledge base"


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


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", '{"format": 1, "kind": "model", "files": [{}], "replaced": []}']
)
def test_a_damaged_record_of_the_last_pull_is_one_line(content: str, copy: Path, capsys) -> None:
    (copy / "pulled.json").write_text(content)
    assert main(["pull", AT, str(copy)]) == 2
    said = capsys.readouterr().err
    assert "pulled.json is damaged" in said and said.count("\n") == 1


def test_the_errors_of_other_commands_name_a_way_to_use_an_address(tmp_path: Path, capsys) -> None:
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
            "gone is not a knowledge base",
        ),
    ):
        assert main(words) == 2
        assert problem in capsys.readouterr().err
