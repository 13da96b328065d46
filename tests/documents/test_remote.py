"""Sources that are addresses, compared with the same files in a folder: fsspec's file system in memory, and a web server."""

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realm.cli import main
from realm.documents import remote
from realm.documents.file_records import records_of
from realm.documents.formats.records import Limits, Record
from realm.documents.parallel_reading import REMOTE, Block, prepare_reading
from realm.documents.reading import ReadingReport, read_documents
from realm.documents.sources import RemoteFile, remote_files_of
from realm.documents.wikipedia.dumps import dump
from realm.errors import InputError
from realm.refusals import Refused
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from tests.interop.local_hub import Repository, local_hub

ROWS = [
    {"id": f"r{number}", "title": f"Row {number}", "text": f"Text {number}.", "year": number}
    for number in range(5)
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with shards and other files."""
    folder = tmp_path / "corpus"
    (folder / "more" / ".hidden").mkdir(parents=True)
    (folder / "a.jsonl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, ROWS[:2])).encode() + b"\nno JSON\n")
    )
    pq.write_table(pa.Table.from_pylist(ROWS[2:]), folder / "more" / "b 1.parquet")
    (folder / "more" / "notes.md").write_text("---\nmodified: 2020-01-01\n---\n# Notes\n\nA note.")
    (folder / "more" / ".hidden" / "c.txt").write_text("Hidden.")
    (folder / "more" / "loader.py").write_text("raise SystemExit('this code was run')")
    (folder / "z.parquet").write_bytes(b"PAR1 damaged")
    return folder


@pytest.fixture
def memory(files: Path, monkeypatch) -> str:
    """The same files in fsspec's file system in memory."""
    monkeypatch.setattr(remote, "SCHEMES", (*remote.SCHEMES, "memory"))
    system = fsspec.filesystem("memory")
    system.put(f"{files}/", f"/{files.parent.name}/corpus/", recursive=True)
    return f"memory://{files.parent.name}/corpus"


def read(*sources: object) -> tuple[list[Document], dict[str, int], list[str]]:
    report = ReadingReport()
    documents = list(read_documents([str(one) for one in sources], report=report))
    return documents, dict(report.reasons), [one.problem for one in report.left_out]


def test_a_pattern_in_a_hidden_folder_that_is_named_finds_its_files(memory: str) -> None:
    documents, _, _ = read(f"{memory}/more/.hidden/*.txt")
    assert [one.text for one in documents] == ["Hidden."]
    with pytest.raises(InputError, match="no such file or folder"):
        read(f"{memory}/more/*/c.txt")


def test_a_remote_folder_gives_the_documents_of_a_local_folder(files: Path, memory: str) -> None:
    (here, reasons, problems), (there, others, remote_problems) = read(files), read(memory)
    root = fsspec.core.url_to_fs(memory)[0].unstrip_protocol(fsspec.core.url_to_fs(memory)[1])
    expected = [
        one._replace(
            id=one.id.replace(str(files), root),
            fields={
                name: str(value).replace(str(files), root) if name == "path" else value
                for name, value in one.fields.items()
            },
        )
        for one in here
    ]
    assert there == expected and len(there) == 6
    assert others == reasons == {"not JSON": 1, "damaged": 1, "of a type that is not read": 1}
    assert sorted(one.replace(root, str(files)) for one in remote_problems) == sorted(problems)


def test_a_pattern_and_a_single_file_name_their_files(files: Path, memory: str) -> None:
    assert [one.id for one in read(f"{memory}/**/*.parquet")[0]] == ["r2", "r3", "r4"]
    assert [one.id for one in read(f"{memory}/a.jsonl.gz")[0]] == ["r0", "r1"]
    for nothing in (f"{memory}/gone", f"{memory}/gone*.jsonl", "memory://gone"):
        with pytest.raises(InputError, match="no such file or folder"):
            read(nothing)
    with pytest.raises(InputError, match=r"loader\.py: \.py cannot be read"):
        read(f"{memory}/more/loader.py")


def test_a_remote_lance_dataset_gives_the_rows_of_its_newest_version(files: Path, memory: str) -> None:
    for name in ("more/t [1].LANCE", "more/z.lance"):
        rows = pa.Table.from_pylist([{**row, "id": f"{name} {row['id']}"} for row in ROWS])
        lance.write_dataset(rows.slice(0, 3), files / name)
        lance.write_dataset(rows.slice(3), files / name, mode="append")
        lance.dataset(files / name).delete("year = 1")
        for one in (files / name).rglob("*"):
            if one.is_file():  # `put` would take the name for a pattern
                fsspec.filesystem("memory").pipe_file(f"{memory}/{one.relative_to(files)}", one.read_bytes())
    (here, reasons, _), (there, others, _) = read(files / "more"), read(f"{memory}/more")
    assert [(one.title, one.text, one.fields.get("year")) for one in there] == [
        (one.title, one.text, one.fields.get("year")) for one in here
    ]
    assert [one.id for one in there if one.id.startswith("more/")] == [
        f"{name} r{number}" for name in ("more/t [1].LANCE", "more/z.lance") for number in (0, 2, 3, 4)
    ]
    assert others == reasons == {"of a type that is not read": 1}
    for named in (
        f"{memory}/more/z.lance",
        f"{memory}/*/z*.lance",
        f"{memory}/more/?.lance",
        f"{memory}/more/z*",
    ):
        assert [one.text for one in read(named)[0]] == [row["text"] for row in ROWS if row["year"] != 1]
    fsspec.filesystem("memory").rm(f"{memory}/more/z.lance/_versions", recursive=True)
    fsspec.filesystem("memory").rm(f"{memory}/more/z.lance/_transactions", recursive=True)
    with pytest.raises(
        InputError, match=r"\.lance is not a Lance dataset, which is a folder with a folder _versions$"
    ):
        read(f"{memory}/more/z.lance")


@pytest.mark.parametrize("name", ["/../../out", "//out", "/a/../../../out"])
def test_a_name_in_a_remote_folder_that_leads_out_of_it_is_not_copied(
    memory: str, name: str, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        pytest.raises(InputError, match="out: a file of this name cannot be copied"),
        remote.copied(f"{memory}/t.lance", [f"{memory}/t.lance{name}"]),
    ):
        pass
    assert not list(tmp_path.rglob("*out*"))


def test_an_export_to_a_remote_lance_dataset_is_complete_before_its_version_and_replaces_none(
    rules_kb: Path, memory: str, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "STORES", ("memory",))
    system = fsspec.filesystem("memory")
    put, written = system.put_file, []

    def recorded(file: str, path: str, **arguments: Any) -> None:
        written.append(path.removeprefix(f"{system._strip_protocol(memory)}/out.lance/").split("/")[0])
        put(file, path, **arguments)

    monkeypatch.setattr(type(system), "put_file", staticmethod(recorded))
    export = ["kb", "export", "--kb", str(rules_kb), "--out", f"{memory}/out.lance"]
    assert main(export) == 0
    assert list(dict.fromkeys(written)) == ["data", "_transactions", "_versions"]
    documents, *_ = read(f"{memory}/out.lance")
    assert {one.id for one in documents} == {one.document_id for one in KnowledgeBase.open(rules_kb)}
    capsys.readouterr()
    assert main(export) == 2
    assert capsys.readouterr().err == f"realm: {memory}/out.lance exists: remove it, or give another name\n"


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder. The first answers for names with "slow" are cut off, names like "status-403" have this status, and the
    answers for names with "no-length" have no size."""

    failures = 0
    requests = 0

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        type(self).requests += 1
        if "status-" in self.path:
            self.send_error(int(self.path.partition("status-")[2][:3]))
            return
        if "no-length" in self.path:
            self.send_response(200)
            self.end_headers()
            return
        super().do_HEAD()

    def do_GET(self) -> None:
        if "status-" in self.path:
            self.do_HEAD()
            return
        if "no-length" in self.path:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(Path(self.directory, Path(self.path).name).read_bytes())
            self.close_connection = True
            return
        if "slow" in self.path and type(self).failures:
            type(self).failures -= 1
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True
            return
        super().do_GET()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_worker_of_a_cluster_reads_remote_files_and_refuses_those_that_it_cannot_copy(
    files: Path, memory: str, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "WAITS", ())
    asked = [one for one in remote_files_of(memory) if isinstance(one, RemoteFile)]
    read = prepare_reading(Path.cwd(), Limits())
    found = [one for file in asked for result in read(Block([(file, REMOTE)])) for one in result.records]
    here = list(records_of(asked, Limits()))
    assert list(map(str, found)) == list(map(str, here)) and any(isinstance(one, Record) for one in found)
    gone = asked[0]._replace(address=f"{memory}/gone.jsonl")
    with pytest.raises(Refused, match=r"gone\.jsonl: no such file or folder"):
        list(read(Block([(gone, REMOTE)])))


def test_files_of_a_web_server_are_read_and_their_passwords_and_queries_are_not_stored(files: Path) -> None:
    with serving(files) as url:
        secret = url.replace("://", "://me:secret@")
        documents, reasons, _ = read(
            f"{secret}/a.jsonl.gz?key=secret",
            f"{secret}/more/b%201.parquet",
            f"{secret}/more/notes.md?key=secret",
        )
        assert [one.id for one in documents] == [*(row["id"] for row in ROWS), f"{url}/more/notes.md"]
        assert documents[-1].fields["path"] == f"{url}/more/notes.md" and documents[-1].title == "Notes"
        assert reasons == {"not JSON": 1}
        with pytest.raises(InputError, match=r"gone\.jsonl: no such file") as error:
            read(f"{secret}/gone.jsonl?key=secret")
        assert "secret" not in str(error.value)


def test_a_copy_that_is_cut_off_is_repeated_and_never_read_in_part(files: Path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    (files / "slow.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    with serving(files) as url:
        monkeypatch.setattr(Handler, "failures", 2)
        assert [one.id for one in read(f"{url}/slow.jsonl")[0]] == [row["id"] for row in ROWS]
        monkeypatch.setattr(Handler, "failures", 100)
        with pytest.raises(InputError, match=r"slow\.jsonl cannot be read"):
            read(f"{url}/slow.jsonl")


@pytest.mark.parametrize(("status", "attempts"), [(404, 1), (403, 1), (503, 3)])
def test_a_status_is_named_and_only_failures_that_can_pass_are_repeated(
    files: Path, monkeypatch, caplog, status: int, attempts: int
) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(Handler, "requests", 0)
    with serving(files) as url:
        with pytest.raises(InputError) as error:
            read(f"{url.replace('://', '://me:secret@')}/status-{status}.md?key=sec%2Fret")
        problem = "no such file or folder" if status == 404 else f"cannot be read: HTTP status {status}"
        assert str(error.value).removeprefix(f"{url}/status-{status}.md").lstrip(": ") == problem
        assert Handler.requests == 2 * attempts  # fsspec asks for the size, and then for the file
        assert caplog.messages == [f"{error.value}. The next attempt is in 0 s."] * (attempts - 1)


def test_a_server_that_cannot_be_reached_is_not_a_missing_file(files: Path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "WAITS", ())
    with serving(files) as url:
        pass
    with pytest.raises(InputError, match=r"notes\.md cannot be read: Cannot connect to host"):
        read(f"{url}/notes.md")


def test_a_file_that_the_disk_has_no_room_for_is_not_copied(files: Path, memory: str, monkeypatch) -> None:
    (files / "large.txt").write_text("words " * 1000)
    fsspec.filesystem("memory").put(str(files / "large.txt"), f"/{files.parent.name}/corpus/large.txt")
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10_000, 5_000, 5_000))
    with serving(files) as url:
        for source in (f"{memory}/large.txt", f"{url}/large.txt", f"{url}/no-length/large.txt"):
            with pytest.raises(
                InputError, match=r"large\.txt has over 4,500 bytes, .*: set TMPDIR to a folder"
            ):
                read(source)
        assert len(read(f"{url}/more/notes.md")[0]) == 1


def test_copies_that_killed_processes_left_are_removed_and_no_others(
    memory: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own, kept = f"realm-copy-{socket.gethostname()}-", tmp_path / "kept"
    left, new, of_another_machine, other = (
        tmp_path / name for name in (f"{own}left", f"{own}new", "realm-copy-elsewhere-a", "realm-d")
    )
    for folder in (left, new, of_another_machine, other, kept):
        folder.mkdir()
        (folder / "corpus.jsonl").touch()
        os.utime(folder, (0, time.time() if folder == new else 0))
    (tmp_path / f"{own}link").symlink_to(kept)
    with remote.copied(f"{memory}/z.parquet") as path:
        assert not left.exists() and path.parent.parent == tmp_path
        os.utime(path.parent, (0, 0))  # the reading takes long
        with remote.copied(f"{memory}/z.parquet") as second:
            assert path.read_bytes() == second.read_bytes() == b"PAR1 damaged"
    assert not path.parent.exists() and not second.parent.exists()
    assert all((one / "corpus.jsonl").exists() for one in (new, of_another_machine, other, kept))


def test_a_worker_tries_no_server_twice_that_it_could_not_reach(files: Path, monkeypatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waited.append)
    read = prepare_reading(Path.cwd(), Limits())
    gone = "http://127.0.0.1:1"
    for name, waits in (("a.jsonl", 3), ("b.jsonl", 0)):
        waited.clear()
        with pytest.raises(Refused, match="cannot be read"):
            list(read(Block([(RemoteFile(None, f"{gone}/{name}"), REMOTE)])))
        assert len(waited) == waits
    with serving(files) as url, pytest.raises(Refused, match="no such file"):
        list(read(Block([(RemoteFile(None, f"{url}/gone.jsonl"), REMOTE)])))
    with serving(files) as url:
        (file,) = remote_files_of(f"{url}/a.jsonl.gz")
        assert list(read(Block([(file, REMOTE)])))


def test_a_proxy_of_the_environment_is_used(files: Path, monkeypatch) -> None:
    (files / "http:" / "data.example").mkdir(parents=True)
    (files / "http:" / "data.example" / "notes.md").write_text("# Notes\n\nA note.")
    with serving(files) as proxy:  # a request to a proxy has the whole address in the place of the path
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", "")
        assert [one.title for one in read("http://data.example/notes.md")[0]] == ["Notes"]


def test_a_name_with_two_colons_is_one_file(files: Path) -> None:
    (files / "a::b.md").write_text("# Colons\n\nA note.")
    with serving(files) as url:
        assert [one.title for one in read(f"{url}/a::b.md")[0]] == ["Colons"]


def test_an_address_that_is_not_valid_is_refused_in_one_line_without_its_password(
    tmp_path: Path, capsys
) -> None:
    assert main(["kb", "build", "https://me:secret@[::1/a.md", "--out", str(tmp_path / "kb")]) == 2
    error = capsys.readouterr().err
    assert error == "realm: a source that begins with https:// is not a valid address\n"


def test_a_transfer_has_no_limit_of_time_while_data_arrives() -> None:
    system, _ = remote._opened_system("https://a.b/c.jsonl")
    assert (system.client_kwargs["timeout"].total, system.client_kwargs["timeout"].sock_read) == (None, 300)


def test_a_build_from_a_remote_folder_makes_the_knowledge_base_of_the_local_folder(
    files: Path, memory: str, tmp_path: Path
) -> None:
    (files / "more" / "notes.md").unlink()
    fsspec.filesystem("memory").rm(f"/{files.parent.name}/corpus/more/notes.md")
    kbs = []
    for number, source in enumerate((str(files), memory)):
        out = tmp_path / f"kb{number}"
        assert main(["kb", "build", source, "--out", str(out), "--tagger", "rules", "--processes", "1"]) == 0
        kbs.append(KnowledgeBase.open(out))
    assert list(kbs[0]) == list(kbs[1]) and kbs[0].fingerprint == kbs[1].fingerprint
    assert kbs[1].config.sources == (memory,)


def test_export_to_an_object_store_writes_the_file_of_a_local_export(
    tiny_kb: KnowledgeBase, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(remote, "SCHEMES", (*remote.SCHEMES, "memory"))
    export = ["kb", "export", "--kb", str(tiny_kb.folder), "--out"]
    assert main([*export, str(tmp_path / "a.jsonl")]) == 0
    assert main([*export, "memory://bucket/a.jsonl"]) == 2
    assert "memory://bucket/a.jsonl cannot be written: give the address" in capsys.readouterr().err
    monkeypatch.setattr(remote, "STORES", ("memory",))
    for other in ("https://me:secret@a.b/c.jsonl.gz", "ftp://me:secret@a.b/c.jsonl", "gcs://bucket/a.jsonl"):
        assert main([*export, other]) == 2
        said = capsys.readouterr().err
        assert "cannot be written: give the address" in said and "secret" not in said
    for name in (str(tmp_path / "a.jsonl.gz"), "memory://bucket/a.jsonl.zst"):
        assert main([*export, name]) == 2
    assert capsys.readouterr().err.count("give a name that ends in .jsonl, .parquet or .lance") == 2
    for folder in ("memory://bucket", "memory://bucket/", "memory://bucket/a/"):
        assert main([*export, folder]) == 2
    assert capsys.readouterr().err.count("cannot be written: give the address of a file") == 3
    system = fsspec.filesystem("memory")
    tried = []

    def fails_twice(path: str, inside: str) -> None:
        tried.append(path)
        if len(tried) < 3:
            raise OSError("connection reset")
        type(system).put_file(system, path, inside)

    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(system, "put_file", fails_twice)
    assert main([*export, "memory://bucket/a.jsonl"]) == 0
    assert system.cat("/bucket/a.jsonl") == (tmp_path / "a.jsonl").read_bytes()
    tried.clear()
    monkeypatch.setattr(remote, "WAITS", ())
    assert main([*export, "memory://bucket/b.jsonl"]) == 2
    assert capsys.readouterr().err.endswith(
        "realm: memory://bucket/b.jsonl cannot be written: connection reset\n"
    )
    assert not system.exists("/bucket/b.jsonl")


@pytest.mark.parametrize("source", ["s3://bucket/a.jsonl", "https://me:secret@a.b/c.jsonl?key=secret"])
def test_the_errors_of_other_commands_name_the_commands_that_read_remote_files(
    source: str, tmp_path: Path, capsys
) -> None:
    assert main(["fit", source, "--out", str(tmp_path / "manual")]) == 2
    address = source.replace("me:secret@", "").replace("?key=secret", "")
    expected = f"realm: {address}: only `realm kb build`, `kb add` and `kb preview` read remote files\n"
    assert capsys.readouterr().err == expected


def test_a_data_set_of_the_hub_gives_its_files_and_its_code_is_not_run(files: Path, tmp_path: Path) -> None:
    with local_hub() as hub:
        data_set = hub.repositories["me/rows"] = Repository(private=False)
        names = ("a.jsonl.gz", "more/b 1.parquet", "more/loader.py")
        data_set.commit({name: (files / name).read_bytes() for name in names})
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        for source, expected in (
            ("hf://datasets/me/rows", ROWS),
            ("hf://datasets/me/rows/more/*.parquet", ROWS[2:]),
        ):
            command = [sys.executable, "-m", "realm", "kb", "preview", source, "--tagger", "rules", "--json"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found = [json.loads(line) for line in done.stdout.splitlines()]
            assert [(one["document"], one["text"]) for one in found] == [
                (row["id"], row["text"]) for row in expected
            ]


def test_parts_of_a_dump_are_read_and_its_index_is_not() -> None:
    (part,) = remote_files_of("https://host/enwiki-pages-articles1.xml-p1p41242.bz2")
    assert isinstance(part, RemoteFile) and part.reader is dump
    with pytest.raises(InputError, match="lists the places of pages in a dump"):
        remote_files_of("https://host/enwiki-pages-articles-multistream-index.txt.bz2")
