"""Several processes of this machine read parts of dumps, PDF and Word files: the records of one process, whatever is killed."""

import io
import multiprocessing
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from zlib import compress

import lance
import pytest
from libzim.writer import Creator

from realm.cli import main
from realm.documents import kept_blocks, parallel_reading
from realm.documents.child_process import ReaderProcess
from realm.documents.formats.records import Clusters
from realm.documents.reading import ReadingReport, read_documents
from realm.documents.wikipedia import dumps, multistream, zim
from realm.errors import InputError
from realm.ray_actors import EngineConfig
from realm.refusals import OwnWork, Refused
from realm.text.corpus import Document
from tests.documents.writers import (
    ZimPage,
    page,
    pages_with_redirects,
    pdf,
    with_checksum,
    word,
    write_dump,
    write_multistream,
)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Dumps that can and cannot be split, a damaged dump, and other files between them; two dumps are listed twice."""
    monkeypatch.setattr(multistream, "PART_BYTES", 3000)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_multistream(folder / "a.xml.bz2", pages_with_redirects(60))
    (folder / "b.txt").write_text("A note.")
    (folder / "c.bin").write_bytes(b"odd")
    cut = write_multistream(folder / "d.xml.bz2", pages_with_redirects(70)[1:])
    data = bytearray(cut.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    cut.write_bytes(data)
    (folder / "e.txt").write_text("A note.")
    write_dump(folder / "f.xml", pages_with_redirects(12))
    (folder / "g.html").write_text("<h1>A page</h1><p>It was made in June 2001.</p>")
    return ["corpus", "corpus/a.xml.bz2", "corpus/d.xml.bz2"]


def read(sources: list[str], processes: int, kept: Path | None = None) -> tuple[list[Document], list[str]]:
    """The documents, and what was left out; the line number of the damage of a dump depends on the part."""
    report = ReadingReport()
    documents = list(read_documents(sources, report=report, kept=kept, processes=processes))
    return documents, [f"{one.where}: {one.reason}" for one in report.left_out]


@pytest.mark.parametrize("processes", [3])
def test_several_processes_read_the_documents_of_one(processes: int, sources: list[str]) -> None:
    expected = read(sources, 1)
    assert len(expected[0]) > 100 and len(expected[1]) > 20
    assert expected[1].count("corpus/d.xml.bz2: damaged") == 2
    assert read(sources, processes) == expected
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_damaged_place_of_a_dump_costs_only_the_pages_of_some_streams(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 60_000)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(900))
    whole, _ = read([str(path)], processes)
    data = bytearray(path.read_bytes())
    places = [len(data) // 5, len(data) // 2]
    for place in places:
        data[place : place + 40] = bytes(40)
    path.write_bytes(data)
    report = ReadingReport()
    found = list(read_documents([str(path)], report=report, processes=processes))
    lost = [number for number, one in enumerate(whole) if one not in found]
    assert found == [one for number, one in enumerate(whole) if number not in lost]
    assert report.reasons["damaged"] == 2 and f"left out: 2 damaged: {path}" in report.lines()
    # bz2 reads 8 kB, or 128 kB since Python 3.14, ahead of the damage
    ahead = 2 + -(-io.DEFAULT_BUFFER_SIZE // (len(data) // 90))
    assert 2 <= len(lost) <= 2 * 8 * ahead
    assert lost[0] == pytest.approx(len(whole) // 5, abs=10)
    assert lost[-1] < len(whole) // 2 + 8 * ahead
    assert [
        one.problem.count("of the file, are left out") for one in report.left_out if one.reason == "damaged"
    ] == [1, 1]


def test_a_dump_whose_first_lines_are_damaged_is_one_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 3000)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(60))
    assert len(multistream.parts_of(path)) > 1
    data = bytearray(path.read_bytes())
    data[20:60] = bytes(40)
    path.write_bytes(data)
    (tmp_path / "note.txt").write_text("A note.")
    assert multistream.parts_of(path) == []
    report = ReadingReport()
    assert [one.text for one in read_documents([str(tmp_path)], report=report, processes=2)] == ["A note."]
    assert report.lines() == [f"left out: 1 damaged: {path}"]


def test_a_dump_with_a_part_that_is_too_large_for_memory_is_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 3000)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(300), per_stream=150)
    expected = read([str(path)], 2)
    parts = multistream.parts_of(path)
    monkeypatch.setattr(multistream, "MOST_PART_BYTES", max(one.end - one.start for one in parts) - 1)
    assert parts and multistream.parts_of(path) == []
    assert read([str(path)], 2) == expected


def test_damaged_first_pages_leave_the_later_parts_of_a_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 30_000)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(600))
    parts, whole = multistream.parts_of(path), read([str(path)], 1)[0]
    data = bytearray(path.read_bytes())
    head = parts[0].head
    data[head : head + 40] = bytes(40)
    path.write_bytes(data)
    assert multistream.parts_of(path) == parts
    found, left_out = read([str(path)], 1)
    assert found == whole[-len(found) :] and len(found) > 0.8 * len(whole)
    assert left_out.count(f"{path}: damaged") == 1


@pytest.mark.skipif(
    io.DEFAULT_BUFFER_SIZE > 8192, reason="bz2 would read over several damaged places at once"
)
def test_after_many_damaged_places_the_next_part_of_a_dump_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 60_000)
    monkeypatch.setattr(multistream, "MOST_DAMAGES", 2)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(900))
    end = multistream.parts_of(path)[0].end
    whole, _ = read([str(path)], 1)
    data = bytearray(path.read_bytes())
    for place in range(15_000, end - 1000, 15_000):
        data[place : place + 40] = bytes(40)
    path.write_bytes(data)
    found, left_out = read([str(path)], 1)
    assert left_out.count(f"{path}: damaged") == 2
    assert found[-1] == whole[-1] and 0.5 * len(whole) < len(found) < 0.9 * len(whole)


def office(folder: Path) -> list[str]:
    """PDF and Word files between other files; one file is damaged."""
    folder.mkdir()
    for number in range(3):
        word(folder / f"{number} letter.docx", f"Letter {number}")
        pdf(folder / f"{number} report.pdf", [f"The Arden flows to sea {number}."])
        (folder / f"{number} note.txt").write_text(f"Ann has lived in Arden for {number} years.")
    (folder / "1 cut.pdf").write_bytes((folder / "1 report.pdf").read_bytes()[:200])
    return [str(folder)]


def test_several_processes_read_pdf_and_word_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sources = office(tmp_path / "office")
    expected = read(sources, 1)
    assert len(expected[0]) == 9 and len(expected[1]) == 1
    documents = read_documents(sources, report=ReadingReport(), processes=3)
    found = [next(documents)]
    assert len(multiprocessing.active_children()) == 3
    multiprocessing.active_children()[0].kill()
    assert [*found, *documents] == expected[0]
    assert read(sources, 3) == expected
    assert not multiprocessing.active_children() and capfd.readouterr().err == ""


def test_the_text_of_pdf_and_word_files_is_kept_by_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, kept = office(tmp_path / "office"), tmp_path / "parsed.sqlite"
    expected = read(sources, 2, kept)
    with closing(sqlite3.connect(kept)) as database:
        assert database.execute("SELECT count(*) FROM files").fetchone() == (6,)
    (tmp_path / "office" / "1 cut.pdf").unlink()
    monkeypatch.setattr("realm.documents.child_process._start", no_parser)
    assert read(sources, 2, kept)[0] == read(sources, 1, kept)[0] == expected[0]


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ZIM archive of 60 pages in about 15 clusters, with redirects and a page that is no article."""
    monkeypatch.setattr(zim, "PART_BYTES", 5000)
    random, path = Random(0), tmp_path / "wiki.zim"
    numbers = random.sample(range(60), 60)
    with Creator(str(path)).config_clustersize(2000) as creator:
        creator.add_item(ZimPage("list", "List of towns", "<p>Arden.</p>"))
        for number in numbers:
            link = f'<a href="{numbers[number]:02}">Another</a>'
            text = f"<p>Town {number}. {link} town: {random.randbytes(200).hex()}.</p>"
            creator.add_item(ZimPage(f"{number:02}", f"Town {number}", text))
            creator.add_redirection(f"to-{number}", "", f"{number:02}", {})
    return path


def test_several_processes_read_the_parts_of_a_zim_archive(archive: Path) -> None:
    expected = read([str(archive)], 1)
    assert len(expected[0]) == 60 and all(one.links for one in expected[0])
    assert expected[1] == [f"{archive}: list: lists, indexes and outlines"]
    assert len(zim.parts_of(archive)) > 2
    documents = read_documents([str(archive)], report=ReadingReport(), processes=2)
    found = [next(documents)]
    assert len(multiprocessing.active_children()) == 2
    multiprocessing.active_children()[0].kill()
    assert [*found, *documents] == expected[0]
    assert read([str(archive)], 2) == expected
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_cluster_that_cannot_be_decompressed_costs_only_its_pages(processes: int, archive: Path) -> None:
    whole = read([str(archive)], 1)[0]
    data = bytearray(archive.read_bytes())
    (count,), (places,) = struct.unpack_from("<I", data, 28), struct.unpack_from("<Q", data, 48)
    (place,) = struct.unpack_from("<Q", data, places + 8 * (count // 2))
    data[place : place + 200] = bytes(200)
    archive.write_bytes(with_checksum(data))
    found, left_out = read([str(archive)], processes)
    lost = len(whole) - len(found)
    assert sum(one.endswith(": damaged") for one in left_out) == lost
    assert 1 <= lost < 15 and found == [one for one in whole if one in found]


def test_an_archive_that_libzim_refuses_is_one_problem(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[56:64] = struct.pack("<Q", len(data) * 2)  # the place of the list of types
    archive.write_bytes(with_checksum(data))
    assert len(zim.parts_of(archive)) > 2
    for processes in (1, 2):
        with pytest.raises(InputError, match=r"^\S+wiki\.zim is not a ZIM archive"):
            read([str(archive)], processes)


def test_a_zim_archive_that_was_replaced_after_it_was_divided_is_left_out(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "note.txt").write_text("A note.")
    parts_of = zim.parts_of

    def then_replaced(path: Path) -> list[Clusters]:
        parts = parts_of(path)
        (tmp_path / "new.zim").write_bytes(path.read_bytes())
        os.utime(tmp_path / "new.zim", ns=(0, 0))
        (tmp_path / "new.zim").rename(path)
        return parts

    monkeypatch.setattr(zim, "parts_of", then_replaced)
    report = ReadingReport()
    sources = [str(archive), str(tmp_path / "note.txt")]
    found = list(read_documents(sources, report=report, processes=2))
    assert [one.text for one in found] == ["A note."]
    assert [one.problem for one in report.left_out] == [f"{archive} was changed while it was read"]


def test_a_cluster_reads_the_parts_of_a_zim_archive(archive: Path, reading: list[object]) -> None:
    expected, parts = read([str(archive)], 1), zim.parts_of(archive)
    assert on_ray([str(archive)], None) == expected
    assert len(parts) > 2 and reading == parts


def test_a_small_or_a_cut_zim_archive_is_not_divided(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, data = zim.parts_of(archive), archive.read_bytes()
    assert parts[0].first == 0 and parts[-1].last == (1 << 32) - 1
    assert [one.last + 1 for one in parts[:-1]] == [one.first for one in parts[1:]]
    archive.write_bytes(data[:-1000])
    assert zim.parts_of(archive) == []
    archive.write_bytes(b"odd")
    assert zim.parts_of(archive) == []
    archive.write_bytes(data)
    monkeypatch.setattr(zim, "PART_BYTES", len(data) // 2 + 1)
    assert zim.parts_of(archive) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_links_follow_redirects_in_other_files_of_the_dump_but_not_in_other_dumps(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 3000)
    pages = pages_with_redirects(120)
    redirects = [one for one in pages if "<redirect" in one]
    articles = [one for one in pages if "<redirect" not in one]
    expected = [one.links for one in read([str(write_dump(tmp_path / "all.xml", pages))], 1)[0]]
    folder = tmp_path / "parts"
    folder.mkdir()
    name = "townwiki-20260101-pages-articles{}.xml-p{}"
    write_multistream(folder / (name.format(1, "1p60") + ".bz2"), articles[:60])
    write_dump(folder / name.format(2, "61p90"), articles[60:90])
    write_dump(folder / (name.format(3, "91p120") + ".bz2"), [*articles[90:], *redirects])
    elsewhere = [page(f"Page {n}", "", redirect="Elsewhere") for n in range(0, 120, 5)]
    write_dump(folder / "otherwiki-20260101-pages-articles.xml", elsewhere)
    assert [one.links for one in read([str(folder)], processes)[0]] == expected


def test_without_a_dump_that_can_be_split_no_process_starts(tmp_path: Path) -> None:
    write_dump(tmp_path / "f.xml", pages_with_redirects(12))
    documents = read_documents([str(tmp_path)], report=ReadingReport(), processes=4)
    next(documents)
    assert not multiprocessing.active_children()
    list(documents)


def test_parts_of_a_killed_process_are_read_by_others(sources: list[str]) -> None:
    expected = read(sources[1:], 1)[0]
    documents = read_documents(sources[1:], report=ReadingReport(), processes=2)
    found = [next(documents)]
    multiprocessing.active_children()[0].kill()
    assert [*found, *documents] == expected


def test_an_early_end_leaves_no_process(sources: list[str]) -> None:
    documents = read_documents(sources[1:], report=ReadingReport(), processes=2)
    next(documents)
    assert len(multiprocessing.active_children()) == 2
    with closing(documents):  # type: ignore[type-var]
        pass
    assert not multiprocessing.active_children()


def test_all_processes_keep_their_pages_and_parse_none_again(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "work" / "parsed.sqlite"
    expected = read(sources, 2, kept)
    count = number_of(kept)
    # the pages after the damage of a dump are parsed too, if their part is read
    assert count >= len({one.title + one.text for one in expected[0] if "Number" in one.text})
    monkeypatch.setattr("realm.documents.wikipedia.dumps._start", no_parser)
    assert read(sources, 2, kept) == read(sources, 1, kept) == expected
    assert number_of(kept) == count


def no_parser() -> None:
    raise AssertionError("a page is parsed again")


def number_of(kept: Path) -> int:
    """Number of pages in a database of parsed pages."""
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(kept)) as database:
        return int(database.execute("SELECT count(*) FROM pages").fetchone()[0])
    return 0  # there is no table yet, or another process is writing


@pytest.fixture
def long_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(multistream, "PART_BYTES", 20_000)
    monkeypatch.setattr("realm.kept_values.AT_ONCE", 16)
    return write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(1500))


@pytest.mark.slow
def test_a_killed_build_parses_only_pages_that_are_not_kept(
    long_dump: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["kb", "build", str(long_dump), "--tagger", "rules", "--json"]
    assert main([*command, "--processes", "1", "--out", str(tmp_path / "whole")]) == 0
    expected = capfd.readouterr().out
    command += ["--processes", "2", "--out", str(tmp_path / "kb")]
    # the limits of the parts are set in the process that is forked
    killed = multiprocessing.get_context("fork").Process(target=leading, args=(command,))
    killed.start()
    kept, end = tmp_path / "kb.building" / "parsed.sqlite", time.monotonic() + 300
    try:
        while number_of(kept) < 100:
            assert killed.is_alive() and time.monotonic() < end
            time.sleep(0.02)
    finally:
        killed.kill()
        killed.join()
    assert killed.pid is not None
    while processes_of(killed.pid):
        assert time.monotonic() < end
        time.sleep(0.05)
    known = number_of(kept)
    assert 100 <= known < 1200 and not (tmp_path / "kb").exists()
    assert main(command) == 0
    assert capfd.readouterr().out == expected
    one, other = (lance.dataset(tmp_path / kb / "passages.lance").to_table() for kb in ("whole", "kb"))
    assert one.equals(other) and not (tmp_path / "kb" / "parsed.sqlite").exists()


def leading(command: list[str]) -> None:
    """A build whose processes wait for ever before a page in the middle of the dump is parsed."""
    os.setpgrp()
    submit = dumps._Workers.submit

    def held(self: dumps._Workers, where: str, page: dumps.Page, dropped: list[str]) -> Callable[[], Any]:
        while page.title == "Page 601":
            time.sleep(60)
        return submit(self, where, page, dropped)

    dumps._Workers.submit = held  # type: ignore[method-assign]
    main(command)


def processes_of(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, own = path.read_text().rpartition(")")[2].split()[:3]
            found += [int(path.parent.name)] if int(own) == group and state != "Z" else []
    return found


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The parts that a cluster reads. This process takes the place of the cluster."""
    read: list[object] = []

    def here(
        prepare: Callable[[], Any],
        items: Iterable[Any],
        address: str,
        cores_each: float,
        own: OwnWork[Any, Any],
    ) -> Iterator[Any]:
        work = prepare()
        for item in items:
            read.extend([item.part] if getattr(item, "part", None) and not item.known else [])
            files = (file for file, _ in getattr(item, "files", ()) if isinstance(file, tuple))
            read.extend(file[0] for file in files if isinstance(file[0], Clusters))
            done = 0
            if not own.only(item):
                with suppress(Refused):
                    for result in work(item):
                        yield result
                        done += 1
                    continue
            yield from islice(own.function(item), done, None)

    monkeypatch.setattr("realm.documents.parallel_reading.map_on_ray", here)
    return read


def on_ray(sources: list[str], kept: Path | None) -> tuple[list[Document], list[str]]:
    report = ReadingReport()
    documents = list(read_documents(sources, report=report, kept=kept, engine=EngineConfig("ray")))
    return documents, [f"{one.where}: {one.reason}" for one in report.left_out]


@pytest.mark.slow
def test_a_cluster_does_not_read_the_parts_of_a_dump_again(
    sources: list[str], tmp_path: Path, reading: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "parsed.sqlite"
    expected, whole = read(sources, 1), read(sources[1:2], 1)
    assert on_ray(sources, kept) == expected
    assert len(reading) > 4
    reading.clear()
    with monkeypatch.context() as patch:
        patch.setattr("realm.documents.wikipedia.dumps._start", no_parser)
        assert on_ray(sources[1:2], kept) == whole
    assert not reading
    assert on_ray(sources, kept) == expected
    (damaged,) = set(reading)  # another reading may succeed
    assert damaged.path.name == "d.xml.bz2"
    reading.clear()
    os.utime("corpus/a.xml.bz2", ns=(0, 0))  # perhaps the dump is another one
    assert on_ray(sources[1:2], kept) == whole
    assert {part.path.name for part in reading} == {"a.xml.bz2"}


def test_a_cluster_does_not_read_pdf_and_word_files_again(
    tmp_path: Path, reading: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, kept = Path("files"), tmp_path / "parsed.sqlite"
    folder.mkdir()
    word(folder / "letter.docx", "Letter")
    pdf(folder / "report.pdf", ["The Arden flows to the sea."])
    (folder / "cut.pdf").write_bytes(Path(folder, "report.pdf").read_bytes()[:200])
    (folder / "note.txt").write_text("Ann lives in Arden.")
    expected = read([str(folder)], 1)
    asked: list[str] = []
    child = ReaderProcess.read
    monkeypatch.setattr(
        ReaderProcess, "read", lambda self, path, *rest: asked.append(path.name) or child(self, path, *rest)
    )
    assert on_ray([str(folder)], kept) == expected and len(expected[0]) == 3
    assert asked == ["cut.pdf", "letter.docx", "report.pdf"]
    os.utime(folder / "letter.docx")  # perhaps the file is another one
    expected = read([str(folder)], 1)
    asked.clear()
    assert on_ray([str(folder)], kept) == expected
    assert asked == ["cut.pdf", "letter.docx"]


def test_a_file_that_changes_before_it_is_read_is_not_kept(
    tmp_path: Path, reading: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, kept, with_keys = Path("letter.docx"), tmp_path / "parsed.sqlite", parallel_reading._with_keys
    word(path, "Letter")
    whole, before = path.read_bytes(), path.stat()
    expected = read([str(path)], 1)

    def and_then_changed(*given: Any) -> Iterator[Any]:
        for block in with_keys(*given):
            word(path, "Another letter")
            yield block

    with monkeypatch.context() as patch:
        patch.setattr(parallel_reading, "_with_keys", and_then_changed)
        ((document,), _) = on_ray([str(path)], kept)  # the worker refuses the file
    assert document.title == "Another letter"
    path.write_bytes(whole)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert on_ray([str(path)], kept) == expected


def test_a_part_that_a_cluster_once_could_not_read_is_read_again(
    sources: list[str], tmp_path: Path, reading: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "parsed.sqlite"
    monkeypatch.setattr("realm.documents.parallel_reading.RESULT_RECORDS", 3)
    submit = dumps._Workers.submit

    def failing(self: dumps._Workers, where: str, page: dumps.Page, dropped: list[str]) -> Callable[[], Any]:
        if page.title == "Page 40":
            raise OSError("no process can be started")
        return submit(self, where, page, dropped)

    with monkeypatch.context() as patch:
        patch.setattr(dumps._Workers, "submit", failing)
        _, left_out = on_ray(sources[1:2], kept)
    assert "corpus/a.xml.bz2: that cannot be opened" in left_out
    assert on_ray(sources[1:2], kept) == read(sources[1:2], 1)


@pytest.mark.slow
def test_after_a_kill_a_cluster_reads_only_parts_that_are_not_kept(
    sources: list[str], tmp_path: Path, reading: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "parsed.sqlite"
    monkeypatch.setattr("realm.documents.parallel_reading.RESULT_RECORDS", 3)
    documents = read_documents(sources[1:], report=ReadingReport(), kept=kept, engine=EngineConfig("ray"))
    for _ in range(30):
        next(documents)
    documents.close()  # type: ignore[attr-defined]
    before = list(reading)
    reading.clear()
    assert on_ray(sources[1:], kept) == read(sources[1:], 1)
    assert len(before) > 1 and reading[0] == before[-1]  # the part that was read when the reading ended


def test_damaged_values_of_a_part_are_read_again(
    sources: list[str], tmp_path: Path, reading: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "parsed.sqlite"
    monkeypatch.setattr("realm.documents.parallel_reading.RESULT_RECORDS", 3)
    expected = on_ray(sources[1:2], kept)
    with closing(sqlite3.connect(kept)) as database, database:
        rows = database.execute(
            "SELECT key, value FROM blocks WHERE length(key) > 16 ORDER BY key"
        ).fetchall()
        record = b'[["record", "a", "b", "c", null, null, [[-5, "d"]]]]'
        for number, (key, value) in enumerate(rows):
            broken = (b"", value[:-9], compress(b"[[1, 2]]"), compress(record), value)[number % 5]
            database.execute("UPDATE blocks SET value = ? WHERE key = ?", (broken, key))
    reading.clear()
    assert on_ray(sources[1:2], kept) == expected
    assert not reading  # the process of the command reads these parts


@pytest.mark.parametrize("count", [None, b"", b"1", compress(b"0"), compress(b"-1"), compress(b"[1]")])
def test_a_part_whose_number_of_values_is_damaged_is_read_again(
    count: bytes | None, sources: list[str], tmp_path: Path, reading: list[object]
) -> None:
    kept = tmp_path / "parsed.sqlite"
    expected = on_ray(sources[1:2], kept)
    with closing(sqlite3.connect(kept)) as database, database:
        change = "DELETE FROM blocks" if count is None else "UPDATE blocks SET value = :count"
        database.execute(f"{change} WHERE length(key) = 16", {"count": count})
    reading.clear()
    assert on_ray(sources[1:2], kept) == expected
    assert reading


def test_a_part_whose_values_vanish_while_the_cluster_works_is_read_here(
    sources: list[str], tmp_path: Path, reading: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "parsed.sqlite"
    expected = on_ray(sources[1:2], kept)
    monkeypatch.setattr(kept_blocks.KeptBlocks, "_count", lambda self, key: None)
    monkeypatch.setattr(kept_blocks.KeptBlocks, "has", lambda self, key: True)
    reading.clear()
    assert on_ray(sources[1:2], kept) == expected
    assert not reading
