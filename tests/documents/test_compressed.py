"""Compressed text files: read as the file that was compressed, in bounded memory; damage loses what follows it."""

import bz2
import gzip
import json
import lzma
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from realm.documents.formats import compressed
from realm.documents.reading import ReadingReport, read_documents
from realm.errors import InputError
from realm.text.corpus import Document
from tests.documents.writers import page, write_dump


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def streams(data: bytes) -> bytes:
    """Several bzip2 streams, as pbzip2 and the multistream dumps of Wikipedia have."""
    size = 1 << 16
    return b"".join(bz2.compress(data[at : at + size]) for at in range(0, max(1, len(data)), size))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": streams,
    ".xz": lzma.compress,
    ".zst": zstd,
}
each = pytest.mark.parametrize("ending", COMPRESS)
CONTENTS = {
    "lines.jsonl": b'{"title": "A", "text": "One."}\n{"title": "B", "text": "Two."}\n',
    "notes.txt": "The Rhine.\n".encode("utf-16"),
    "page.HTML": "<title>Köln</title><p>A town.".encode(),
    "read.me.md": b"Text without a heading.",
}


def read(path: Path) -> tuple[list[Document], ReadingReport]:
    report = ReadingReport()
    return list(read_documents([str(path)], report=report)), report


def lines(count: int) -> bytes:
    return b"".join(
        json.dumps({"title": f"T{n}", "text": f"Text {n * n}."}).encode() + b"\n" for n in range(count)
    )


@each
def test_a_compressed_file_gives_the_documents_of_the_file_in_it(tmp_path: Path, ending: str) -> None:
    for folder in ("plain", "small"):
        (tmp_path / folder).mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / "plain" / name).write_bytes(content)
        (tmp_path / "small" / f"{name}{ending.upper()}").write_bytes(COMPRESS[ending](content))
    plain, _ = read(tmp_path / "plain")
    small, report = read(tmp_path / "small")
    assert [d[:2] for d in small] == [d[:2] for d in plain] and not report.left_out
    assert small[-1].id == f"{tmp_path}/small/read.me.md{ending.upper()}" and small[-1].title == "read.me"


def test_files_that_the_usual_programs_write_are_read(tmp_path: Path) -> None:
    for program in ("gzip", "xz", "zstd"):
        if shutil.which(program):
            plain = tmp_path / f"{program}.jsonl"
            plain.write_bytes(lines(2_000))
            subprocess.run([program, "-q", str(plain)], check=True)
            plain.unlink(missing_ok=True)
    documents, report = read(tmp_path)
    assert len(documents) >= 2_000 and len(documents) % 2_000 == 0 and not report.left_out


@each
def test_parts_that_were_joined_are_read_on(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a.jsonl{ending}"
    half = len(lines(30)) // 2
    file.write_bytes(COMPRESS[ending](lines(30)[:half]) + COMPRESS[ending](lines(30)[half:]))
    assert [d.title for d in read(file)[0]] == [f"T{n}" for n in range(30)]


def test_json_lines_that_are_named_json_are_read_where_they_are_compressed(tmp_path: Path) -> None:
    file = tmp_path / "c4-train.json.gz"
    file.write_bytes(gzip.compress(lines(3)))
    assert len(read(file)[0]) == 3


@each
def test_what_comes_before_the_damage_is_read(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(COMPRESS[ending](lines(5_000))[:-50])
    documents, report = read(file)
    assert 1_000 < len(documents) < 5_000 and documents[999].title == "T999"
    assert [(one.where, one.reason) for one in report.left_out][-1] == (str(file), "damaged")
    assert f"{file} cannot be decompressed (" in report.left_out[-1].problem


@each
def test_what_is_not_compressed_or_empty_is_left_out_with_its_name(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a.txt{ending}"
    for content, message in ((b"plain text", "cannot be decompressed"), (b"", "is empty")):
        file.write_bytes(content)
        with pytest.raises(InputError, match=rf"a\.txt{ending} {message}"):
            read(file)
    file.write_bytes(COMPRESS[ending](b""))
    with pytest.raises(InputError, match=rf"a\.txt{ending} is empty"):
        read(file)


@each
def test_a_few_bytes_that_stand_for_very_many_are_refused(tmp_path: Path, ending: str, monkeypatch) -> None:
    monkeypatch.setattr(compressed, "_SMALL", 1 << 17)
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(COMPRESS[ending](lines(1) + b"\n" * (4 << 17)))
    documents, report = read(file)
    assert len(documents) == 1
    assert [one.reason for one in report.left_out] == ["too long"]
    assert "decompress to over 131,072" in report.left_out[0].problem


def test_a_few_bytes_of_a_dump_that_stand_for_very_many_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compressed, "_SMALL", 1 << 17)
    file = write_dump(tmp_path / "a.xml.bz2", [page("Arden", "A town."), " " * (4 << 17)])
    documents, report = read(file)
    assert [one.title for one in documents] == ["Arden"]
    assert [one.reason for one in report.left_out] == ["too long"]
    assert "decompress to over 131,072" in report.left_out[0].problem


def test_other_things_that_are_compressed_are_of_a_type_that_is_not_read(tmp_path: Path) -> None:
    for name in ("archive.tar.gz", "notes.gz", "table.parquet.gz", "photo.jpg"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(
            InputError, match=r"cannot read .* files, only \.jsonl, .*, and \.gz, \.bz2, \.xz, \.zst of"
        ):
            read(tmp_path / name)
    with pytest.raises(
        InputError, match=r"this folder has 1 \.tar\.gz, 1 \.gz, 1 \.jpg, 1 \.parquet\.gz, and no"
    ):
        read(tmp_path)
