"""Documents on S3: commands that speak its protocol with a server on loopback, moto, which keeps the files in memory.

`tests/interop/object_storage` and `test_remote.py` have more cases, with fsspec's file system in memory in place of S3.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realm.cli import main
from realm.documents import remote
from realm.interop.object_storage.copying import pull, push
from realm.store.knowledge_base import KnowledgeBase
from tests.interop.object_storage.conftest import add

pytestmark = pytest.mark.slow

BUCKET = "s3://bucket"
ROWS = [
    {"id": f"r{number}", "title": f"Row {number}", "text": f"Ann met Bob in Arden in {1900 + number}."}
    for number in range(6)
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that speaks the protocol of S3."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def store(server: str, monkeypatch) -> Iterator[Any]:
    """s3fs with an empty bucket, `BUCKET`. Environment variables have the address of the server."""
    from s3fs import S3FileSystem

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    S3FileSystem.clear_instance_cache()
    system = S3FileSystem()
    system.mkdir(BUCKET)
    yield system
    try:
        system.invalidate_cache()
        system.rm(BUCKET, recursive=True)
    finally:
        S3FileSystem.clear_instance_cache()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with files of three formats, and one that cannot be read."""
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    (folder / "a 1.jsonl").write_text("\n".join(map(json.dumps, ROWS[:2])))
    pq.write_table(pa.Table.from_pylist(ROWS[2:4]), folder / "more" / "b.parquet")
    lance.write_dataset(pa.Table.from_pylist(ROWS[4:]), folder / "t.lance")
    (folder / "more" / "z.parquet").write_bytes(b"PAR1 damaged")
    return folder


def built(source: object, out: Path, *more: str) -> list[tuple[str, str]]:
    """The titles and texts of the passages of a knowledge base that is built from a source, sorted."""
    words = ["kb", "build", str(source), "--out", str(out), "--config", "tables", "--tagger", "rules", *more]
    assert main(words) == 0
    return passages_of(out)


def passages_of(kb: Path) -> list[tuple[str, str]]:
    return sorted((passage.title, passage.text) for passage in KnowledgeBase.open(kb))


def test_a_folder_on_s3_gives_the_passages_of_a_local_folder(
    store: Any, files: Path, tmp_path: Path, capsys
) -> None:
    store.put(f"{files}/", f"{BUCKET}/corpus/", recursive=True)
    here = built(files, tmp_path / "here")
    capsys.readouterr()
    there = built(f"{BUCKET}/corpus/", tmp_path / "there", "--json")
    assert there == here and len(there) == len(ROWS)
    assert json.loads(capsys.readouterr().out)["left_out"] == {"damaged": 1}


@pytest.mark.parametrize("name", ["documents.jsonl", "documents.parquet", "documents.lance"])
def test_documents_that_are_exported_to_s3_give_the_same_passages(
    store: Any, files: Path, tmp_path: Path, name: str
) -> None:
    passages = built(files, tmp_path / "kb")
    assert main(["kb", "export", "--kb", str(tmp_path / "kb"), "--out", f"{BUCKET}/{name}"]) == 0
    assert built(f"{BUCKET}/{name}", tmp_path / "again") == passages


def test_a_pulled_knowledge_base_follows_the_pushed_one(
    store: Any, rules_kb: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    first = push(rules_kb, f"{BUCKET}/kb")
    assert pull(f"{BUCKET}/kb", copy)["copied_files"] == first["copied_files"] > 0
    add(rules_kb, tiny_model_folder, "Sudbury")
    second = push(rules_kb, f"{BUCKET}/kb")
    assert 0 < second["copied_files"] < second["files"]
    pull(f"{BUCKET}/kb", copy)
    assert list(KnowledgeBase.open(copy)) == list(KnowledgeBase.open(rules_kb))
    assert main(["kb", "verify", "--kb", str(copy)]) == 0


def test_a_file_that_is_sent_in_several_parts_comes_back_whole(store: Any, tmp_path: Path) -> None:
    size = 2 * store.default_block_size + (1 << 20)
    (tmp_path / "large").write_bytes(os.urandom(size))
    sent, received = [], []
    folder = remote.RemoteFolder(f"{BUCKET}/folder")
    folder.put(tmp_path / "large", "large", sent.append)
    assert "-" in store.info(f"{BUCKET}/folder/large")["ETag"]  # S3 marks files of several parts so
    folder.get("large", tmp_path / "back", received.append)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()
    assert sum(sent) == sum(received) == size


def test_a_bucket_or_a_server_that_does_not_exist_is_one_line(
    store: Any, rules_kb: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "WAITS", ())
    out = tmp_path / "new"
    build = ["kb", "build", "--out", str(out)]
    assert main([*build, "s3://gone/a.jsonl"]) == 2
    assert capsys.readouterr().err == "realm: s3://gone/a.jsonl: no such file or folder\n"
    assert main(["push", str(rules_kb), "s3://gone/kb"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "realm: s3://gone/kb: no such bucket"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store.clear_instance_cache()
    assert main([*build, f"{BUCKET}/a.jsonl"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("realm: s3://bucket/a.jsonl cannot be read: ") and error.count("\n") == 1
    assert not out.exists()
