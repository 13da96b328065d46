"""Files that a Ray cluster of two nodes on this machine reads: the documents of one process, whatever dies."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realm.cli import main
from realm.documents import parallel_reading
from realm.documents.file_records import records_of_file
from realm.documents.formats.records import Limits, Record, Unreadable
from realm.documents.parallel_reading import Block, prepare_reading
from realm.documents.reading import ReadingReport, read_documents
from realm.documents.sources import State, files_of, state_of
from realm.documents.wikipedia import multistream
from realm.ray_actors import EngineConfig
from realm.refusals import Refused
from realm.store.ingest import cut_documents
from realm.text.corpus import Document
from tests.documents.test_remote import serving
from tests.documents.writers import page, word, write_dump, write_multistream
from tests.test_ray import kill_node, killed_workers

PART_BYTES, BLOCK_BYTES = 3000, 2000
"""Limits so small that the files of the tests are split."""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch) -> list[str]:
    """Files of many formats, of which some cannot be read, with relative paths; all large ones are split."""
    monkeypatch.setattr(multistream, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(parallel_reading, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    for number in range(6):
        (folder / f"note {number}.txt").write_text(
            f"Ann met Bob on {number + 1} May 1990 in Arden. " * (number + 1)
        )
        rows = [
            {
                "title": f"Row {number % 2}",
                "text": f"Row {n} of {number}: since {1900 + n}, all was new.",
                "year": n,
            }
            for n in range(2200 if number == 3 else 5)
        ]
        lines = "\n".join(map(json.dumps, rows)) + "\nno JSON\n"
        (folder / "more" / f"rows {number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(
        pa.Table.from_pylist([{"id": n, "title": f"T{n}", "text": f"X {n}"} for n in range(600)]),
        folder / "t.parquet",
    )
    (folder / "again.txt").write_text("Ann met Bob on 1 May 1990 in Arden. ")
    (folder / "empty.txt").touch()
    (folder / "odd.bin").write_bytes(b"odd")
    (folder / "page.html").write_text("<h1>A page</h1><p>It was made in June 2001.</p>")
    (folder / "z.parquet").write_bytes(b"PAR1 damaged")
    word(folder / "letter.docx", "Letter")
    pages = [
        page(f"Page {n}", f"#REDIRECT [[Page {n + 3}]]", redirect=f"Page {n + 3}")
        if n % 5 == 0
        else page(
            f"Page {n}", f"On {n % 28 + 1} May, [[Page {n // 5 * 5}]] began. {Random(n).getrandbits(999)}"
        )
        for n in range(60)
    ]
    write_multistream(folder / "wiki.xml.bz2", pages)
    cut = write_multistream(folder / "cut.xml.bz2", pages)
    data = bytearray(cut.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    cut.write_bytes(data)
    write_dump(folder / "whole.xml", pages[:12])
    (folder / "wiki_00").write_text(json.dumps({"title": "Brack", "text": "Brack\n\nBrack is old."}))
    return ["corpus/more", "corpus"]


@pytest.mark.slow
def test_cluster_builds_the_knowledge_base_of_one_process(cluster, sources, monkeypatch, capsys) -> None:
    command = ["kb", "build", *sources, "--tagger", "rules", "--json", "--out"]
    assert main([*command, "local", "--processes", "1"]) == 0
    expected = json.loads(capsys.readouterr().out)
    read_here: list[str] = []

    def noted(file: Any, *others: Any) -> Any:
        read_here.append("" if isinstance(file, Unreadable) else file[1].name)
        return records_of_file(file, *others)

    monkeypatch.setattr(parallel_reading, "records_of_file", noted)
    assert main([*command, "cluster", "--engine", "ray", "--ray-address", cluster.address]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert sum(expected["left_out"].values()) > 10 and expected["documents"] > 2900
    assert set(read_here) == {"whole.xml"}
    one, other = (lance.dataset(Path(kb, "passages.lance")).to_table() for kb in ("local", "cluster"))
    assert one.equals(other) and len(one) > 2800
    for name in ("left_out.jsonl", "merged.jsonl"):
        lines, others = (
            [json.loads(line) for line in Path(kb, name).read_text().splitlines()]
            for kb in ("local", "cluster")
        )
        for one in lines + others:  # line numbers of damage differ, because each part is parsed alone
            if one.get("where") == "corpus/cut.xml.bz2":
                one["problem"] = ""
        assert lines == others and lines


@pytest.mark.slow
def test_killed_build_on_a_cluster_continues_after_its_last_commit(
    cluster, sources, monkeypatch, capsys
) -> None:
    cut: list[str] = []

    def noted(documents: Iterable[Document], *others: Any) -> Any:
        def noting() -> Iterator[Document]:
            for document in documents:
                cut.append(document.id)
                yield document

        return cut_documents(noting(), *others)

    monkeypatch.setattr("realm.store.ingest.cut_documents", noted)
    words = ["kb", "build", *sources, "--tagger", "rules", "--set", "commit_every=100", "--json", "--out"]
    assert main([*words, "local", "--processes", "1"]) == 0
    expected = json.loads(capsys.readouterr().out)
    every = cut.copy()
    command = [*words, "killed", "--engine", "ray", "--ray-address", cluster.address]
    killed = started(command)
    end = time.monotonic() + 300
    while committed() < 500:
        assert killed.poll() is None and time.monotonic() < end, Path("killed.log").read_text()
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert not Path("killed").exists() and committed() < expected["passages"]
    cut.clear()
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert cut and len(cut) <= len(every) - 400 and cut == every[-len(cut) :]
    one, other = (lance.dataset(Path(kb, "passages.lance")).to_table() for kb in ("local", "killed"))
    assert one.equals(other)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["processes", "node"])
def test_killed_processes_or_a_killed_node_of_a_cluster_do_not_change_a_build(
    what, mortal_cluster, sources, capsys
) -> None:
    words = ["kb", "build", *sources, "--tagger", "rules", "--set", "commit_every=100", "--json", "--out"]
    assert main([*words, "local", "--processes", "1"]) == 0
    expected = json.loads(capsys.readouterr().out)
    command = [*words, "killed", "--engine", "ray", "--ray-address", mortal_cluster.address]
    running = started(command)
    end = time.monotonic() + 300
    while committed() < 300:
        assert running.poll() is None and time.monotonic() < end, Path("killed.log").read_text()
        time.sleep(0.01)
    if what == "node":
        assert len(kill_node(mortal_cluster)) == 2  # one that reads and one that tags
    else:
        assert killed_workers() > 0  # those that read and those that tag
    assert running.wait() == 0, Path("killed.log").read_text()
    said = {"processes": "was killed", "node": "Raylet is terminated"}[what]
    assert said in Path("killed.log").read_text()  # a message of Ray
    assert json.loads(Path("killed.json").read_text()) == expected
    one, other = (lance.dataset(Path(kb, "passages.lance")).to_table() for kb in ("local", "killed"))
    assert one.equals(other)


STARTED = f"""
import sys
from realm.cli import main
from realm.documents import parallel_reading
from realm.documents.wikipedia import multistream
multistream.PART_BYTES, parallel_reading.BLOCK_BYTES = {PART_BYTES}, {BLOCK_BYTES}
sys.exit(main(sys.argv[1:]))
"""


def started(command: list[str]) -> "subprocess.Popen[bytes]":
    """A command in another process with the same small limits, which writes into killed.json and killed.log."""
    with Path("killed.json").open("wb") as out, Path("killed.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", STARTED, *command], stdout=out, stderr=log)


def committed() -> int:
    """Number of passages of the unfinished knowledge base `killed`."""
    try:
        return int(lance.dataset(Path("killed.building", "passages.lance")).count_rows())
    except (ValueError, OSError):  # there is no commit yet
        return 0


@pytest.mark.slow
def test_remote_files_are_read_by_the_cluster(cluster, sources, tmp_path, monkeypatch) -> None:
    names = [
        "more/rows 2.jsonl.gz",
        "t.parquet",
        "letter.docx",
        "z.parquet",
        "more/rows 3.jsonl.gz",
        "empty.txt",
        "page.html",
    ]
    with serving(tmp_path / "corpus") as url:
        addresses = [f"{url}/{quote(name)}" for name in names]
        here, there = ReadingReport(), ReadingReport()
        expected = list(read_documents(addresses, report=here))
        monkeypatch.setattr("realm.documents.file_records.copied", None)  # nothing is copied to this process
        engine = EngineConfig("ray", cluster.address)
        assert list(read_documents(addresses, report=there, engine=engine)) == expected
        assert here.reasons == there.reasons and expected


@pytest.mark.slow
def test_files_of_a_killed_process_are_read_by_others(cluster, sources, tmp_path) -> None:
    expected = list(read_documents(sources, report=ReadingReport()))
    documents = read_documents(sources, report=ReadingReport(), engine=EngineConfig("ray", cluster.address))
    found = [next(documents)]
    end = time.monotonic() + 60
    while len(readers := readers_in(tmp_path)) < 2:  # the second one may still be starting
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(readers[0], signal.SIGKILL)
    assert [*found, *documents] == expected


def readers_in(folder: Path) -> list[int]:
    """Processes of the cluster whose current folder is `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # the process has ended
            is_worker = b"_Worker" in (path.parent / "cmdline").read_bytes()
            found += [int(path.parent.name)] if is_worker and os.path.realpath(path) == str(folder) else []
    return found


def test_worker_refuses_files_that_it_does_not_see(sources, tmp_path) -> None:
    path = Path("corpus/page.html")
    state, source = state_of(path), files_of("corpus/page.html")[0]
    (found,) = prepare_reading(tmp_path, Limits())(Block([(source, state)]))
    assert [type(one) for one in found.records] == [Record]
    for folder, seen in ((tmp_path, State(1, 1)), (tmp_path / "gone", state)):
        with pytest.raises(Refused, match=r"does not see corpus/page\.html"):
            list(prepare_reading(folder, Limits())(Block([(source, seen)])))
