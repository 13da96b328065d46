"""PDF and Word files that a build has read are not read again after a kill."""

import importlib
import json
import multiprocessing
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import lance
import pytest

from realm.cli import main
from realm.documents import kept_records
from realm.documents.child_process import ReaderProcess
from realm.documents.formats.records import Limits, Record, Unreadable
from realm.documents.kept_records import KeepingReader
from realm.documents.reading import ReadingReport, read_documents
from tests.documents.writers import empty_word, paragraphs, pdf, word


def letter(path: Path, text: str) -> Path:
    document = empty_word()
    document.add_heading("A letter", 1)
    document.add_paragraph(text)
    document.save(str(path))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files that are kept, and files that are not."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    pdf(folder / "manual.pdf", ["# Manual", *paragraphs(4)])
    word(folder / "Towns.docx")
    letter(folder / "letter.docx", "Ann came in May 1990.")
    (folder / "damaged.pdf").write_bytes(b"%PDF-1.7 no more")
    pdf(folder / "secret.pdf", ["Secret."], owner_password="a", user_password="b")
    (folder / "note.txt").write_text("A note.")
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that a child process was asked to read."""
    names: list[str] = []
    read = ReaderProcess.read

    def noted(self: ReaderProcess, path: Path, *rest: Any) -> Iterator[Record | Unreadable]:
        names.append(path.name)
        return read(self, path, *rest)

    monkeypatch.setattr(ReaderProcess, "read", noted)
    return names


def documents(folder: Path, kept: Path | None, headings: bool = False) -> list[object]:
    report = ReadingReport()
    found = list(read_documents([str(folder)], report=report, kept=kept, headings=headings))
    assert len(found) == 4
    return [*found, *report.left_out]


def test_kept_files_are_not_read_again(corpus: Path, tmp_path: Path, asked: list[str]) -> None:
    kept = tmp_path / "work" / "parsed.sqlite"
    expected = documents(corpus, None)
    assert documents(corpus, kept) == expected
    asked.clear()
    assert documents(corpus, kept) == expected
    assert asked == ["damaged.pdf", "secret.pdf"]  # with problems
    # the text depends on how headings are read
    asked.clear()
    with_headings = documents(corpus, kept, headings=True)
    assert documents(corpus, None, headings=True) == with_headings != expected
    assert set(asked) == {"damaged.pdf", "letter.docx", "manual.pdf", "secret.pdf", "Towns.docx"}


def test_a_changed_file_is_read_again_and_a_moved_file_has_its_new_path(
    corpus: Path, tmp_path: Path, asked: list[str]
) -> None:
    kept = tmp_path / "parsed.sqlite"
    documents(corpus, kept)
    asked.clear()
    moved = corpus.rename(tmp_path / "moved")
    letter(moved / "letter.docx", "Ann came in June 1990.")
    # the title of a PDF can be the name of the file
    (moved / "manual.pdf").rename(moved / "other.pdf")
    found = documents(moved, kept)
    assert asked == ["damaged.pdf", "letter.docx", "other.pdf", "secret.pdf"]
    assert found == documents(moved, None)
    assert "June" in str(found) and str(corpus) not in str(found)


@pytest.fixture
def changed() -> Iterator[None]:
    """Forgets the versions and the code of the readers before and after a test that changes them."""
    kept_records._reader.cache_clear()
    yield
    kept_records._reader.cache_clear()


@pytest.mark.usefixtures("changed")
def test_a_file_is_read_again_if_code_of_its_reader_has_changed(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = ["documents.child_process", "documents.formats.pdf", "documents.formats.word"]
    code = f"import sys, realm.{', realm.'.join(readers)}\nfor name in sys.modules: print(name)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # no text depends on messages, progress, limits of memory and the end of the process
    others = {"realm", "realm.text", "realm.errors", "realm.progress", "realm.orphans", "realm.documents"}
    names = {one for one in loaded.split() if one.partition(".")[0] == "realm"} - others
    names.remove("realm.documents.child_limits")
    assert len(names) > 8
    path, code_of = letter(tmp_path / "a.docx", "Ann came in May 1990."), Path.read_bytes
    with KeepingReader(tmp_path / "parsed.sqlite") as reader:
        list(reader.read(path, Limits()))
        assert list(reader.read(path, Limits())) and len(asked) == 1
        for number, name in enumerate(sorted(names), start=2):
            file = str(importlib.import_module(name).__file__)
            monkeypatch.setattr(
                Path, "read_bytes", lambda own, file=file: code_of(own) + b"#" * (str(own) == file)
            )
            kept_records._reader.cache_clear()
            list(reader.read(path, Limits()))
            assert len(asked) == number, name


@pytest.mark.usefixtures("changed")
def test_a_file_is_read_again_if_a_library_of_its_reader_has_another_version(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    letter(tmp_path / "a.docx", "Ann came in May 1990.")
    pdf(tmp_path / "b.pdf", ["# Manual", *paragraphs(2)])
    libraries = {"mammoth": ["a.docx"], "lxml": ["a.docx"], "pypdfium2": ["b.pdf"]}
    with KeepingReader(tmp_path / "parsed.sqlite") as reader:
        for library in ("none", *libraries):
            monkeypatch.setattr(
                kept_records, "version", lambda one, library=library: "2" if one == library else "1"
            )
            kept_records._reader.cache_clear()
            asked.clear()
            for path in sorted(tmp_path.glob("[ab].*")):
                list(reader.read(path, Limits()))
            assert asked == libraries.get(library, ["a.docx", "b.pdf"])


def test_a_file_that_is_replaced_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = (letter(tmp_path / one, f"Ann came in {one}.") for one in ("a.docx", "b.docx"))
    read = ReaderProcess.read

    def replaced(self: ReaderProcess, path: Path, *rest: Any) -> Iterator[Record | Unreadable]:
        path.rename(tmp_path / "former")
        other.rename(path)
        return read(self, path, *rest)

    with KeepingReader(tmp_path / "parsed.sqlite") as reader:
        with monkeypatch.context() as patch:
            patch.setattr(ReaderProcess, "read", replaced)
            (found,) = reader.read(path, Limits())
        assert "in b.docx" in str(found)
        (tmp_path / "former").rename(path)
        (found,) = reader.read(path, Limits())
        assert "in a.docx" in str(found)


def cut(value: bytes) -> bytes:
    return value[:9]


def too_long(value: bytes) -> bytes:
    """The same JSON with more white space than the limit of a file."""
    return zlib.compress(zlib.decompress(value) + b" " * Limits().file_bytes)


FOREIGN = [
    "[" * 100_000,
    '[1, [["w", "t", "x"]]]',
    '["a", [[1, "t", "x"]]]',
    '["a", [["w", "t", 5]]]',
    '["", [["w", "t", "x"]]]',
    '["PATH", []]',
    '["PATH", [["PATH", "t", ""]]]',
    '["PATH", [["PATH", "t", "x", 1]]]',
    '["PATH", [["PATH", "t", "x", 0]]]',
    '["PATH", [["PATH", "t", "x", null, 1]]]',
    '["PATH", [["PATH", "t", "x", null, null, [[0, 1]]]]]',
    '["PATH", [["PATH", "t", "x", null, null, null, 7]]]',
    '["PATH", [["PATH", "t", "x", null, null, null, {}, [["0", "t"]]]]]',
    '["PATH", [["PATH", "t", "x", null, null, null, {}, [[9, "t"]]]]]',
    '["PATH", [["PATH", "t", "\\ud800"]]]',
]
"""JSON that `KeepingReader` does not write; PATH is the path of the file."""


@pytest.mark.parametrize("damage", [cut, too_long])
def test_a_damaged_database_costs_only_time(damage, corpus: Path, tmp_path: Path, asked: list[str]) -> None:
    kept = tmp_path / "parsed.sqlite"
    expected = documents(corpus, kept)
    asked.clear()
    with sqlite3.connect(kept) as database:
        database.create_function("damage", 1, damage)
        database.execute("UPDATE files SET value = damage(value)")
    assert documents(corpus, kept) == expected
    assert len(asked) == 5


def test_foreign_values_cost_only_time(tmp_path: Path, asked: list[str]) -> None:
    kept = tmp_path / "parsed.sqlite"
    paths = [letter(tmp_path / f"{n}.docx", f"Ann came in {1990 + n}.") for n in range(len(FOREIGN))]

    def records(reader: KeepingReader) -> list[list[Record | Unreadable]]:
        return [list(reader.read(path, Limits())) for path in paths]

    with KeepingReader(kept) as reader:
        expected = records(reader)
        assert records(reader) == expected and asked == [path.name for path in paths]
    with sqlite3.connect(kept) as database:
        for number, (path, value) in enumerate(zip(paths, FOREIGN, strict=True), start=1):
            foreign = zlib.compress(value.replace("PATH", str(path)).encode())
            database.execute("UPDATE files SET value = ? WHERE rowid = ?", [foreign, number])
    with KeepingReader(kept) as reader:
        assert records(reader) == expected
        assert records(reader) == expected
    assert asked == [path.name for path in paths] * 2  # the foreign values are replaced


def test_a_file_that_is_not_there_is_reported_by_its_reader(tmp_path: Path) -> None:
    with KeepingReader(tmp_path / "parsed.sqlite") as reader:
        (problem,) = reader.read(tmp_path / "gone.pdf", Limits())
    assert "No such file" in str(problem)


def number_of(kept: Path) -> int:
    """Number of files in a database."""
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(kept)) as database:
        return int(database.execute("SELECT count(*) FROM files").fetchone()[0])
    return 0  # there is no table yet, or another process is writing


def build_until(name: str, command: list[str]) -> None:
    """A build that waits for ever before the file with this name is read."""
    read = ReaderProcess.read

    def held(self: ReaderProcess, path: Path, *rest: Any) -> Iterator[Record | Unreadable]:
        while path.name == name:
            time.sleep(60)
        return read(self, path, *rest)

    ReaderProcess.read = held  # type: ignore[method-assign]
    main(command)


@pytest.mark.slow
def test_a_killed_build_reads_only_files_that_are_not_kept(
    tmp_path: Path, asked: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    for number in range(12):
        letter(tmp_path / "docs" / f"{number:02}.docx", f"Letter {number} came in May 1990. " * 9)
    # With several processes, `asked` would not see what they read.
    command = [
        "kb",
        "build",
        str(tmp_path / "docs"),
        "--tagger",
        "rules",
        "--processes",
        "1",
        "--json",
        "--out",
    ]
    assert main([*command, str(tmp_path / "whole")]) == 0
    expected = json.loads(capfd.readouterr().out)
    killed = multiprocessing.get_context("fork").Process(
        target=build_until, args=("05.docx", [*command, str(tmp_path / "kb")])
    )
    killed.start()
    kept, end = tmp_path / "kb.building" / "parsed.sqlite", time.monotonic() + 300
    try:
        while number_of(kept) < 5:
            assert killed.is_alive() and time.monotonic() < end
            time.sleep(0.02)
    finally:
        killed.kill()
        killed.join()
    assert number_of(kept) == 5 and not (tmp_path / "kb").exists()
    asked.clear()
    assert main([*command, str(tmp_path / "kb")]) == 0
    assert json.loads(capfd.readouterr().out) == expected
    assert asked == [f"{number:02}.docx" for number in range(5, 12)]
    one, other = (lance.dataset(tmp_path / kb / "passages.lance").to_table() for kb in ("whole", "kb"))
    assert one.equals(other) and not list((tmp_path / "kb").glob("parsed*"))
