"""Which encoding bytes are in: a mark, a declaration, UTF-8, Windows-1252 where it looks like text."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.documents.formats.encodings import decode
from realm.documents.reading import LeftOut, ReadingReport, read_documents
from realm.errors import InputError
from realm.text.corpus import Document

TEXT = "Café “Zum Löwen” – 3 € für Fräulein Müller.\nSecond line."


def read(path: Path, content: bytes) -> tuple[list[Document], ReadingReport]:
    path.write_bytes(content)
    report = ReadingReport()
    return list(read_documents([str(path)], report=report)), report


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_marked_file_and_utf8_are_read_without_an_assumption(encoding: str, tmp_path: Path) -> None:
    (document,), report = read(tmp_path / "a.txt", TEXT.replace("\n", "\r\n").encode(encoding))
    assert document.text == TEXT and not report.assumed
    line = json.dumps({"title": "T", "text": TEXT}, ensure_ascii=False)
    documents, report = read(tmp_path / "a.jsonl", f"{line}\r\n{line}".encode(encoding))
    assert [d.text for d in documents] == [TEXT, TEXT] and not report.assumed


@pytest.mark.parametrize("suffix", [".txt", ".md", ".html", ".jsonl"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        *(
            ("\ufeff".encode(e), "contains only a byte-order mark")
            for e in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le")
        ),
        *((text.encode("utf-16"), "contains only white space") for text in (" ", "\r\n\t\n")),
        (b" \n\n", "contains only white space"),
        (b"\xef\xbb\xbf\n", "contains only white space"),
    ],
)
def test_a_file_without_text_is_empty_and_the_message_names_its_content(
    content: bytes, says: str, suffix: str, tmp_path: Path
) -> None:
    (tmp_path / "b.txt").write_text("Words.")
    (tmp_path / f"a{suffix}").write_bytes(content)
    report = ReadingReport()
    assert [one.text for one in read_documents([str(tmp_path)], report=report)] == ["Words."]
    path = tmp_path / f"a{suffix}"
    assert report.left_out == [LeftOut(str(path), "empty", f"{path} {says}")]


def test_windows_1252_is_read_with_a_message(tmp_path: Path) -> None:
    (document,), report = read(tmp_path / "a.txt", TEXT.encode("cp1252"))
    assert document.text == TEXT
    assert report.lines() == [f"not UTF-8, so read as Windows-1252: 1: {tmp_path}/a.txt"]
    line = json.dumps({"title": "T", "text": TEXT}, ensure_ascii=False)
    (document,), report = read(tmp_path / "a.jsonl", line.encode("cp1252"))
    assert document.text == TEXT and report.assumed == {f"{tmp_path}/a.jsonl:1": "cp1252"}


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode() + b"\xff",  # UTF-8 with a damaged byte
        TEXT.encode()[:-20] + b"\xc3",  # cut inside a character
        "Москва — столица России".encode("cp1251"),
        "東京は日本の首都".encode("shift_jis"),
        "Zürich".encode("cp1252") + b"\x01\x02",
        "Zürich".encode("utf-16-le"),
        bytes(range(256)),
    ],
)
def test_what_is_no_text_in_a_known_encoding_is_refused(content: bytes) -> None:
    with pytest.raises(InputError, match=r"^a[:0-9]*: "):
        decode(content, "a")


@given(st.binary(max_size=200))
def test_any_bytes_are_text_or_refused(content: bytes) -> None:
    try:
        text, _ = decode(content, "a")
    except InputError:
        return
    text.encode()  # no half characters


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ('<meta charset="windows-1251">', "cp1251"),
        ("<meta http-equiv='Content-Type' content='text/html; charset=Shift_JIS'>", "cp932"),
        ('<?xml version="1.0" encoding="KOI8-R"?>', "koi8-r"),
        ("<meta charset=gb2312>", "gb18030"),
        ("<meta charset='iso-8859-1'>", "cp1252"),
        (
            "<meta charset=utf-16>",
            "utf-8",
        ),  # what browsers make of it: a file that says so is in ASCII's family
        ("<meta charset=utf-8>", "cp1252"),  # not true of this file
    ],
)
def test_the_encoding_that_a_page_declares_is_used(head: str, encoding: str, tmp_path: Path) -> None:
    text = {"cp1251": "Москва", "koi8-r": "Москва", "cp932": "東京", "gb18030": "北京"}.get(
        encoding, "Köln – 3 €"
    )
    (document,), _ = read(tmp_path / "a.html", f"<html>{head}<p>{text}".encode(encoding))
    assert document.text == text


@pytest.mark.parametrize("name", ["rot13", "zlib", "unicode_escape", "idna", "hex", "x-unknown", "cp999"])
def test_a_declared_name_that_is_no_encoding_of_text_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"declares the encoding .*, which is not known|is not UTF-8"):
        read(tmp_path / "a.html", f"<meta charset={name}><p>text \xff\xff\xff".encode("latin-1") * 2)
