"""What people have in a folder: what can be read becomes documents, all else is listed by reason."""

import json
import os
from pathlib import Path

import pytest

from realm.documents import sources
from realm.documents.reading import ReadingReport, read_documents
from realm.errors import InputError
from realm.text.corpus import Document


def read(*sources: Path, most: int = 1_000_000) -> tuple[list[Document], ReadingReport]:
    report = ReadingReport()
    return list(read_documents(list(map(str, sources)), most, report)), report


def lines(*titles: str) -> str:
    return "".join(json.dumps({"title": title, "text": f"Text of {title}."}) + "\n" for title in titles)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "deeper" / "a.txt").write_text("A town.")
    (folder / "deep" / "loop").symlink_to(folder)
    (folder / "circle.txt").symlink_to(folder / "circle.txt")
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "~$report.docx").write_bytes(b"\x05user")
    (folder / "Makefile").write_text("all:")
    (folder / "wiki-multistream-index1.txt").write_text("568:10:AccessibleComputing\n")
    (folder / "empty.md").write_bytes(b"")
    (folder / "blank.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("Köln ist schön.".encode("latin-1"))
    (folder / "notepad.txt").write_bytes("Zürich.".encode("utf-16"))
    (folder / "program.txt").write_bytes(b"\x7fELF\0\0")
    (folder / "long.txt").write_text("word " * 300)
    (folder / "page.html").write_text("<title>Only a title</title>")
    (folder / "table.parquet").write_bytes(b"PAR1")
    (folder / "bad\nname.md").write_bytes(b"")
    (folder / os.fsdecode(b"\xff.txt")).write_text("A town.")
    os.mkfifo(folder / "pipe.txt")
    records = lines("B", "C").splitlines()
    half = json.dumps({"id": "\ud800", "title": "E", "text": "e"})
    (folder / "lines.jsonl").write_text("\n".join([records[0], '{"title": "D', "[1]", half, records[1]]))
    return folder


def test_many_problems_of_one_reason_leave_room_for_those_of_others_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadingReport, "MOST", 3)
    docs = tmp_path / "docs"
    docs.mkdir()
    for number in range(5):
        (docs / f"{number}.txt").write_bytes(b"")
    (docs / "9.pdf").write_bytes(b"%PDF-1.7 cut")
    (docs / "a.txt").write_text("A town.")
    _, report = read(docs)
    assert [Path(one.where).name for one in report.left_out] == ["0.txt", "1.txt", "2.txt", "9.pdf"]
    assert report.reasons == {"empty": 5, "damaged": 1}
    assert report.keep(tmp_path)[-1].startswith(
        f"{tmp_path}/left_out.jsonl lists the first 3 of each reason ("
    )
    (docs / "4.txt").unlink()
    (docs / "3.txt").unlink()
    assert "lists all that was left out" in read(docs)[1].keep(tmp_path)[-1]


def test_what_cannot_be_read_is_left_out_by_reason_and_the_rest_is_read(folder: Path) -> None:
    documents, report = read(folder, most=1_000)
    assert [d.text for d in documents] == [
        "Köln ist schön.",
        "Text of B.",
        "Text of C.",
        "Zürich.",
        "A town.",
    ]
    found = {(Path(one.where).name, one.reason) for one in report.left_out}
    assert found == {
        ("loop", "links to folders"),
        ("circle.txt", "that cannot be opened"),
        ("picture.png", "of a type that is not read"),
        ("~$report.docx", "of a type that is not read"),
        ("Makefile", "of a type that is not read"),
        ("wiki-multistream-index1.txt", "of a type that is not read"),
        ("empty.md", "empty"),
        ("bad\\nname.md", "empty"),
        ("blank.txt", "empty"),
        ("program.txt", "binary"),
        ("long.txt", "too long"),
        ("page.html", "without text"),
        ("table.parquet", "damaged"),
        ("\\udcff.txt", "with a name that is not UTF-8"),
        ("pipe.txt", "that cannot be opened"),
        ("lines.jsonl:2", "not JSON"),
        ("lines.jsonl:3", "without a usable title, text or id"),
        ("lines.jsonl:4", "without a usable title, text or id"),
    }
    assert report.reasons.total() == len(report.left_out) == len(found)
    assert report.lines()[0].startswith("left out: 4 ")
    assert list(report.assumed) == [f"{folder}/latin.txt"]
    assert all(line.isprintable() and len(line) < 500 for line in report.lines())
    for one in report.left_out:
        assert (
            one.problem.isprintable()
            and Path(one.where.rpartition(":")[0] or one.where).stem[:2] in one.problem
        )


def test_the_line_about_long_files_has_the_limit_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A town.")
    (tmp_path / "b.txt").write_text("words\n" * 250)
    (line,) = read(tmp_path, most=1_000)[1].lines()
    way_out = "1,499 characters, over the limit of 1,000: split it, or raise max_document_chars"
    assert line == f"left out: 1 too long: {tmp_path}/b.txt ({way_out})"


def test_the_line_about_files_of_other_types_has_their_extensions(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A town.")
    for name in ("a.yaml", "b.yaml", "c.yaml", "d.zip", "e.zip", "Makefile"):
        (tmp_path / name).write_text("a: 1")
    assert read(tmp_path)[1].lines() == [
        "left out: 6 of a type that is not read: 3 .yaml, 2 .zip, 1 Makefile"
    ]


def test_half_a_character_in_a_title_or_a_page_of_a_dump_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text('---\ntitle: "A\\ud83d"\n---\n# A\n\nText.\n')
    (tmp_path / "b.xml").write_text(
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo/><page><title>B</title><ns>0</ns><id>1</id>'
        "<revision><text>A town &amp;#xD800; by [[C|a river]].</text></revision></page></mediawiki>"
    )
    documents, report = read(tmp_path)
    assert [(one.title, one.text) for one in documents] == [
        ("A\ufffd", "A\n\nText."),
        ("B", "A town \ufffd by a river."),
    ]
    assert not report.left_out


def test_markdown_that_the_parser_could_not_hold_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A town.")
    (tmp_path / "b.md").write_text("a\n\n" * 20_000)
    (tmp_path / "c.md").write_text(f"+++\n{'.'.join('a' * 40_000)}=1\n+++\nText.\n")
    documents, report = read(tmp_path, most=20_000)
    assert [one.text for one in documents] == ["A town."]
    assert report.reasons == {"too long": 2}
    assert "raise max_document_chars" in report.lines()[0]
    (documents, report) = read(tmp_path / "c.md", most=200_000)
    assert "Text." in documents[0].text and "a" not in documents[0].fields


def test_a_workspace_a_knowledge_base_and_a_model_in_a_folder_are_left_out_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A town.")
    for made, inside in (("ws", "kb/passages.lance"), ("old", "passages.lance"), ("m", "encoder")):
        (tmp_path / made / inside).mkdir(parents=True)
        (tmp_path / made / "README.md").write_text("A model.")
    (tmp_path / "m" / "realm.json").write_text("{}")
    (tmp_path / "ws" / "documents.json").write_text("{}")
    (tmp_path / "own" / "kb" / "passages.lance").mkdir(parents=True)
    (tmp_path / "own" / "b.txt").write_text("A river.")
    documents, report = read(tmp_path)
    assert [d.text for d in documents] == ["A town.", "A river."]
    assert [one.problem for one in report.left_out] == [
        f"{tmp_path}/m is a model",
        f"{tmp_path}/old is a knowledge base",
        f"{tmp_path}/ws is a workspace",
        f"{tmp_path}/own/kb is a knowledge base",
    ]


def test_installed_packages_in_a_folder_are_left_out_unless_they_are_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A town.")
    inside = [
        tmp_path / "web" / "node_modules" / "x" / "node_modules",
        tmp_path / "env" / "lib" / "site-packages",
    ]
    for folder in inside:
        folder.mkdir(parents=True)
        (folder / "b.md").write_text(f"{folder.name} of others.")
    (tmp_path / "env" / "pyvenv.cfg").write_text("home = /usr/bin")
    documents, report = read(tmp_path)
    assert [one.text for one in documents] == ["A town."]
    assert [(one.where, one.reason) for one in report.left_out] == [
        (f"{tmp_path}/env", "folders of installed packages"),
        (f"{tmp_path}/web/node_modules", "folders of installed packages"),
    ]
    named = read(tmp_path / "env", tmp_path / "web" / "node_modules")[0]
    assert [one.text for one in named] == ["site-packages of others.", "node_modules of others."]
    with pytest.raises(InputError, match="this folder has 1 node_modules, and no"):
        read(tmp_path / "web")


def test_a_folder_that_cannot_be_opened_hides_no_other_file(tmp_path: Path, monkeypatch) -> None:
    def closed(folder: Path) -> str:
        raise PermissionError(13, "Permission denied", str(folder))

    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("A town.")
    monkeypatch.setattr(sources, "what_it_is", closed)
    assert [one.text for one in read(tmp_path)[0]] == ["A town."]


@pytest.mark.parametrize(
    "name", ["lines.jsonl", "empty.md", "program.txt", "page.html", "table.parquet", "circle.txt"]
)
def test_without_a_report_the_first_problem_is_an_error(name: str, folder: Path) -> None:
    file = folder / name
    if name == "circle.txt":
        (folder / "only").mkdir()
        file = file.rename(folder / "only" / name).parent
    with pytest.raises(InputError, match=Path(name).stem):
        list(read_documents([str(file)]))


def test_where_nothing_can_be_read_it_is_an_error_with_the_reason(folder: Path) -> None:
    with pytest.raises(InputError, match=r"empty\.md is empty$"):
        read(folder / "empty.md")
    with pytest.raises(
        InputError,
        match=r"nothing could be read; left out: 2 empty: .*; left out: 1 binary: .*; the first problem: .*empty\.md is empty$",
    ):
        read(folder / "empty.md", folder / "program.txt", folder / "blank.txt")


def test_a_file_of_another_type_is_not_the_problem_that_the_message_shows(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("Free.")
    (tmp_path / "towns.jsonl").write_text('{"content": "A town."}\n')
    with pytest.raises(
        InputError,
        match=r"the first problem: .*:1: no \"text\" \(fields: 'content'\): name the key .* text_field$",
    ):
        list(read_documents([str(tmp_path)], report=ReadingReport()))


def test_a_source_that_is_not_there_is_an_error_at_once(folder: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        read(folder, folder / "gone.txt")


def test_a_file_given_twice_is_read_once_with_a_message(folder: Path) -> None:
    file = folder / "latin.txt"
    documents, report = read(file, file)
    assert len(documents) == 1
    assert [one.reason for one in report.left_out] == ["with an id that an earlier document has"]


def test_a_line_without_end_is_left_out_and_the_next_one_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("realm.documents.formats.records.Limits.file_bytes", 100)
    file = tmp_path / "a.jsonl"
    for end in ("\n" + lines("B"), ""):
        file.write_text(lines("A") + "x" * 1_000 + end)
        documents, report = read(file)
        assert [d.title for d in documents] == ["A", "B"][: 1 + bool(end)]
        assert [(one.where, one.reason) for one in report.left_out] == [(f"{file}:2", "too long")]
    big = tmp_path / "a.txt"
    big.write_text("x" * 101)
    with pytest.raises(InputError, match=r"a\.txt: over 100 bytes"):
        read(big)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_opened_is_listed(folder: Path) -> None:
    (folder / "deep").chmod(0)
    _, report = read(folder)
    (folder / "deep").chmod(0o700)
    assert (f"{folder}/deep", "that cannot be opened") in [(one.where, one.reason) for one in report.left_out]


def test_whatever_a_library_raises_names_the_file(folder: Path, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise SystemError("returned NULL\nwithout setting an exception")

    monkeypatch.setattr("realm.documents.formats.text_files.page_in", broken)
    _, report = read(folder / "page.html", folder / "latin.txt")
    assert report.left_out[0].problem == f"{folder}/page.html cannot be read (returned NULL)"
