import gzip
import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import xlsxwriter
from hypothesis import given, settings
from hypothesis import strategies as st

from realm.cli import main
from realm.documents import sources
from realm.documents.reading import ReadingReport, read_documents, stamp
from realm.errors import InputError
from realm.text.corpus import Document
from realm.text.fields import FieldNames

pytestmark = pytest.mark.usefixtures("one_child")


def read(*sources: Path | str, **options: Any) -> list[Document]:
    return list(read_documents([str(source) for source in sources], **options))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# --- JSON Lines -----------------------------------------------------------------------------------


def test_json_lines_give_title_text_and_id(tmp_path: Path) -> None:
    content = lines(
        {"id": 7, "title": "A", "text": "One.", "url": "x"}, {"id": "b", "title": "B", "text": "Two."}
    )
    file = write(tmp_path / "corpus.jsonl", content)
    assert read(file) == [Document("A", "One.", "7", None, {"url": "x"}), Document("B", "Two.", "b")]


def test_title_is_the_id_where_there_is_none_and_repeats_are_numbered(tmp_path: Path) -> None:
    records = [{"title": title, "text": "."} for title in ("A", "B", "A", "A (2)", "A", "")]
    file = write(tmp_path / "corpus.jsonl", lines(*records))
    assert [d.id for d in read(file)] == ["A", "B", "A (2)", "A (2) (2)", "A (3)", f"{file}:6"]


def test_byte_order_mark_blank_lines_and_windows_line_ends_are_no_matter(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + b'{"title": "A", "text": "1"}\r\n\r\n{"title": "B", "text": "2"}'
    assert [d.title for d in read(write(tmp_path / "corpus.jsonl", content))] == ["A", "B"]


characters = st.text(st.characters(codec="utf-8"), max_size=30)


@pytest.mark.parametrize("kind", [".jsonl", ".tsv", ".parquet"])
def test_names_that_data_sets_give_their_fields_are_read(tmp_path: Path, kind: str) -> None:
    beir = {"_id": "doc7", "title": "A", "text": "One.", "metadata": "{}"}
    news = {"maintext": "Two.", "title": "B", "url": "https://news.example/b"}
    found = []
    for name, fields in (("beir", beir), ("news", news)):
        file = tmp_path / f"{name}{kind}"
        if kind == ".parquet":
            pq.write_table(pa.Table.from_pylist([fields]), file)
        elif kind == ".tsv":
            write(file, "\t".join(fields) + "\n" + "\t".join(fields.values()) + "\n")
        else:
            write(file, lines(fields))
        found += read(file)
    assert [one[:3] for one in found] == [("A", "One.", "doc7"), ("B", "Two.", "B")]


def test_usual_names_win_over_those_of_data_sets(tmp_path: Path) -> None:
    file = write(
        tmp_path / "both.jsonl", lines({"_id": 1, "id": 2, "title": "A", "text": "x", "maintext": "y"})
    )
    assert read(file) == [Document("A", "x", "2")]


@given(st.lists(st.tuples(characters, characters), min_size=1, max_size=5), st.booleans())
def test_json_lines_come_back_as_written(
    tmp_path_factory, pairs: list[tuple[str, str]], escaped: bool
) -> None:
    written = [Document(title, text, str(number)) for number, (title, text) in enumerate(pairs)]
    content = "\n".join(
        json.dumps({"title": d.title, "text": d.text, "id": d.id}, ensure_ascii=escaped) for d in written
    )
    file = write(tmp_path_factory.getbasetemp() / "round_trip.jsonl", content)
    assert read(file) == written


any_bytes = st.binary(max_size=60) | st.text("<>/abhrp1 \n&;#-|`*[]{}()!:\"'\\é", max_size=60).map(str.encode)


@given(any_bytes)
def test_any_bytes_are_documents_or_bad_input(tmp_path_factory, content: bytes) -> None:
    for suffix in (".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".html"):
        file = write(tmp_path_factory.getbasetemp() / f"any{suffix}", content)
        with suppress(InputError):
            read(file)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@given(st.lists(any_bytes, min_size=10, max_size=20))
@settings(max_examples=5)
def test_any_bytes_in_a_file_of_columns_are_documents_or_bad_input(
    tmp_path_factory, suffix: str, contents: list[bytes]
) -> None:
    """One child process reads all files of an example; the last file can be read."""
    folder = tmp_path_factory.mktemp("any")
    for number, content in enumerate(contents):
        write(folder / f"{number}{suffix}", content)
    write(folder / "last.txt", "A text.")
    report = ReadingReport()
    documents = list(read_documents([str(folder)], report=report))
    assert documents[-1].text == "A text."
    assert len(documents) + len(report.left_out) >= len(contents) + 1


BAD_LINES = {
    '{"title": "A", "te': r":2: not JSON \(Unterminated string starting at\); the file ends in this line",
    '{"title": "A", "te\n': r":2: not JSON \(Unterminated string starting at\)$",
    "[1, 2]": r":2: the line is \[1, 2\], and must be an object",
    '{"title": "A"}': r""":2: no "text" \(fields: 'title'\)""",
    '{"title": "A", "text": null}': ':2: "text" is None, and must be a string',
    '{"title": ["A"], "text": "a"}': ":2: \"title\" is \\['A'\\], and must be a string",
    '{"id": 1.5, "title": "A", "text": "a"}': ':2: "id" is 1.5',
    '{"id": true, "title": "A", "text": "a"}': ':2: "id" is True',
    '{"title": "A", "text": "\\ud800"}': ':2: "text" holds half of a character',
    '{"id": "first", "title": "A", "text": "a"}': ":2: a second document with the id 'first'",
    "[" * 100_000: ":2: not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "corpus.jsonl", lines({"id": "first", "title": "A", "text": "a"}) + line)
    with pytest.raises(InputError, match=f"corpus.jsonl{BAD_LINES[line]}") as caught:
        read(file)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_bytes_in_an_unknown_encoding_are_named_with_their_line(tmp_path: Path) -> None:
    good, russian = lines({"title": "A", "text": "a"}).encode(), "Москва — столица".encode("cp1251")
    with pytest.raises(InputError, match=r"a\.jsonl:2: byte 0xcc is not UTF-8"):
        read(write(tmp_path / "a.jsonl", good + russian))
    with pytest.raises(InputError, match=r"a\.txt:3: byte 0xcc is not UTF-8"):
        read(write(tmp_path / "a.txt", b"one\n\n" + russian))
    with pytest.raises(InputError, match=r"b\.txt: byte 0xff is not UTF-8"):  # damaged, and no Windows-1252
        read(write(tmp_path / "b.txt", "café, thé, été\xff".encode()[:-2] + b"\xff"))


# --- files, folders, limits -----------------------------------------------------------------------


def test_folder_is_walked_in_order_without_hidden_and_foreign_files(tmp_path: Path, caplog) -> None:
    for name in ("b.txt", "a/z.md", "a/B.TXT", "c.jsonl", ".git/x.txt", ".hidden.txt", "picture.png"):
        write(tmp_path / "docs" / name, lines({"title": "c", "text": "c"}) if name == "c.jsonl" else "text")
    with caplog.at_level(logging.WARNING):
        found = [d.id for d in read(f"{tmp_path}/docs/")]
    folder = f"{tmp_path}/docs"
    assert found == [f"{folder}/b.txt", "c", f"{folder}/a/B.TXT", f"{folder}/a/z.md"]
    assert f"left out: 1 of a type that is not read: {folder}/picture.png" in caplog.text


def test_file_has_the_same_id_alone_as_in_its_folder(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "docs" / "a.txt", "text")
    monkeypatch.chdir(tmp_path)
    assert [d.id for d in read("docs")] == [d.id for d in read("./docs/a.txt")] == ["docs/a.txt"]


def test_same_file_twice_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "text")
    with pytest.raises(InputError, match="a second document with the id"):
        read(file, tmp_path)


def test_sources_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.txt: no such file or folder"):
        read_documents([str(write(tmp_path / "here.txt", "text")), str(tmp_path / "gone.txt")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.doc", b"text", r"a\.doc: cannot read \.doc files, only \.jsonl, \.json, \.txt"),
        ("Makefile", b"all:", "Makefile: cannot read files without an extension"),
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.jsonl", b"", r"a\.jsonl is empty"),
        ("a.txt", b" \n", r"a\.txt contains only white space"),
        ("a.jsonl", b"\n\n", r"a\.jsonl contains only white space"),
        ("a.html", b"<title>Only a title</title><script>x</script>", r"a\.html has no text"),
        ("a.md", b"# Only a title", r"a\.md has no text"),
        ("a.txt", b"PAR1\0\0", r"a\.txt: binary data, or UTF-16"),
        ("a.txt", "text".encode("utf-16-le"), r"a\.txt: binary data, or UTF-16"),
        ("a.txt", b"\xff\xfe\x00\xd8a\x00", r"a\.txt: UTF-16 with damage"),
        ("a.parquet", b"no parquet", r"a\.parquet is not Parquet: "),
        ("a.parquet", b"", r"a\.parquet is empty"),
        ("a.arrow", b"no arrow file", r"a\.arrow is not Arrow: "),
    ],
)
def test_bad_file_is_one_line_of_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message) as caught:
        read(file)
    assert "\n" not in str(caught.value)


def test_folder_without_documents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "pictures" / "a.png", b"")
    with pytest.raises(
        InputError, match=r"empty: this folder is empty, and needs one or more files of these types: \.jsonl"
    ):
        read(tmp_path / "empty")
    with pytest.raises(InputError, match=r"pictures: this folder has 1 \.png, and no \.jsonl"):
        read(tmp_path / "pictures")


def test_document_over_the_limit_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", lines({"title": "A", "text": "four"}))
    assert len(read(file, max_document_chars=4)) == 1
    with pytest.raises(InputError, match=r"a\.jsonl:1: 4 characters, over the limit of 3"):
        read(file, max_document_chars=3)


# --- text, Markdown, HTML -------------------------------------------------------------------------


def test_short_first_line_before_a_blank_line_is_the_title_of_a_text(tmp_path: Path) -> None:
    titled = write(tmp_path / "titled.txt", "\n The title \r\n\r\nFirst.\r\nSecond.\n")
    assert [one[:3] for one in read(titled)] == [("The title", "First.\nSecond.", str(titled))]
    for content in ("No blank line\nafter it.", "One line.", "long " * 30 + "\n\nText."):
        (document,) = read(write(tmp_path / "notes.txt", content))
        assert document.title == "notes" and document.text == content.strip()


def test_markdown_loses_its_markup_and_keeps_its_text(tmp_path: Path) -> None:
    source = (
        "# The *title*\n\nA [link](http://x) with `code`,\nand **more**.\n\n## Part\n\n- one\n- two\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```\nx = 1\n\ny\n```\n\n<b>bold</b> &amp; ![picture](p.png)\n"
    )
    (document,) = read(write(tmp_path / "a.md", source))
    assert document.title == "The title"
    assert document.text.split("\n\n") == [
        "A link with code, and more.",
        *("Part", "one", "two", "a: 1; b: 2.", "x = 1", "y"),
        "bold &",
    ]


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("# Chalk\n\nText.\n\n## Use\n\nText.", "Chalk"),
        ("A badge.\n\n# Chalk\n\nText.\n\n## Use\n\nText.", "Chalk"),
        ("# Chalk\n\nText.\n\n# Use\n\nText.", "colours"),
        ("## chalk 2.11\n\nText.\n\n## chalk 2.10\n\nText.", "colours"),
        ("### 2.11\n\nText.\n\n# Chalk\n\nText.", "Chalk"),
        ("### Chalk\n\nText.\n\n#### Use\n\nText.", "Chalk"),
        ("A badge.\n\n## Contents\n\nText.\n\n## Use\n\nText.", "colours"),
        ("A note.\n\n### Sponsors\n\nText.\n\n## Contents\n\nText.\n\n## Use\n\nText.", "colours"),
    ],
)
def test_the_title_of_markdown_is_the_heading_of_the_whole_text_and_not_of_a_part(
    source: str, title: str, tmp_path: Path
) -> None:
    (tmp_path / "colours").mkdir()
    for name in ("README.md", "colours.md", "index.md"):
        (document,) = read(write(tmp_path / "colours" / name, source))
        assert document.title == title


def test_the_stamp_follows_the_files_but_not_the_targets_of_links_to_folders(tmp_path: Path) -> None:
    docs, other = tmp_path / "docs", tmp_path / "other.txt"
    docs.mkdir()
    other.write_text("One.")
    (docs / "a.txt").write_text("One.")
    (docs / "up").symlink_to("..")
    (docs / "b.txt").symlink_to(other)
    before = stamp([str(docs)])
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "c.txt").write_text("One.")
    assert stamp([str(docs)]) == before
    other.write_text("Two words.")
    assert stamp([str(docs)]) != before


def test_front_matter_is_no_text_and_may_hold_the_title(tmp_path: Path) -> None:
    (document,) = read(write(tmp_path / "a.md", '---\ndate: 1\ntitle: "The: title"\n---\n# Heading\n\nText.'))
    assert (document.title, document.text) == ("The: title", "Heading\n\nText.")
    (document,) = read(write(tmp_path / "b.md", "---\n---\nText."))
    assert (document.title, document.text) == ("b", "Text.")


def test_html_gives_what_a_reader_sees(tmp_path: Path) -> None:
    source = """<!doctype html><html><head><title> A &amp; B\n </title><style>p {}</style>
        <script>if (a < b) alert("<p>no</p>")</script></head><body><nav><ul><li>Home</nav>
        <h1>A &amp; B</h1><p>One &lt;two&gt;\n   three<br>four.<p>Five <i>si</i>x.<!-- no -->
        <svg><title>no</title></svg><table><tr><th>a<th>b<tr><td>1<td>2</table><pre>x\n  y</pre></html>"""
    (document,) = read(write(tmp_path / "a.html", source))
    assert document.title == "A & B"
    assert document.text.split("\n\n") == ["One <two> three\nfour.", "Five six.", "a: 1; b: 2.", "x\n  y"]


def test_html_title_falls_back_to_the_main_heading_then_to_the_file_name(tmp_path: Path) -> None:
    (document,) = read(write(tmp_path / "a.htm", "<h1>First</h1><p>Text.</p><h2>Second</h2>"))
    assert (document.title, document.text) == ("First", "Text.\n\nSecond")
    (document,) = read(write(tmp_path / "b.html", "Text."))
    assert (document.title, document.text) == ("b", "Text.")


# --- Parquet, Arrow -------------------------------------------------------------------------------

TABLE = pa.table({"other": [1, 2], "text": ["One.", "Two."], "title": ["A", "A"]})


def test_parquet_and_both_arrow_formats_give_the_same_documents(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=1)
    for name, new_writer in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, new_writer(sink, TABLE.schema) as writer:
            writer.write_table(TABLE)
    expected = [
        Document("A", "One.", "A", None, {"other": 1}),
        Document("A", "Two.", "A (2)", None, {"other": 2}),
    ]
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert read(tmp_path / name) == expected


def test_id_column_is_used_and_may_hold_numbers(tmp_path: Path) -> None:
    pq.write_table(TABLE.append_column("id", pa.array([10, 11])), tmp_path / "a.parquet")
    assert [d.id for d in read(tmp_path / "a.parquet")] == ["10", "11"]


def test_bad_table_is_named_with_its_columns_or_row(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(TABLE.drop_columns(["text"]), file)
    with pytest.raises(InputError, match=r"a\.parquet: no column text \(columns: other, title\)"):
        read(file)
    pq.write_table(pa.table({"title": ["A", "B"], "text": ["a", None]}), file)
    with pytest.raises(InputError, match=r'a\.parquet row 2: "text" is None'):
        read(file)
    pq.write_table(TABLE.slice(0, 0), file)
    with pytest.raises(InputError, match=r"a\.parquet is empty"):
        read(file)


# --- records without a title, and with other names --------------------------------------------------


TABLES = (".parquet", ".arrow", ".lance", ".csv", ".tsv", ".xlsx")
RECORDS = (*TABLES, ".jsonl", ".json")


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes records in the format of the file's name."""
    table = pa.Table.from_pylist(rows)
    match file.suffix:
        case ".parquet":
            pq.write_table(table, file)
        case ".arrow":
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        case ".lance":
            lance.write_dataset(table, file)
        case ".xlsx":
            with xlsxwriter.Workbook(file) as book:
                sheet = book.add_worksheet()
                for number, row in enumerate([table.schema.names, *(one.values() for one in rows)]):
                    sheet.write_row(number, 0, row)
        case ".csv" | ".tsv":
            options = pa.csv.WriteOptions(delimiter="," if file.suffix == ".csv" else "\t")
            pa.csv.write_csv(table, file, options)
        case _:
            write(file, lines(*rows))
    return file


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_without_a_title_has_its_address_or_its_place_as_its_id(tmp_path: Path, kind: str) -> None:
    web = [{"text": f"Text {n}.", "url": f"https://example.org/{n % 2}"} for n in range(3)]
    assert read(write_rows(tmp_path / f"web{kind}", web)) == [
        Document("", "Text 0.", "https://example.org/0", None, {"url": "https://example.org/0"}),
        Document("", "Text 1.", "https://example.org/1", None, {"url": "https://example.org/1"}),
        Document("", "Text 2.", "https://example.org/0 (2)", None, {"url": "https://example.org/0"}),
    ]
    plain = write_rows(tmp_path / f"plain{kind}", [{"text": "One."}, {"text": "Two."}])
    found = read(plain)
    assert [(one.title, one.text) for one in found] == [("", "One."), ("", "Two.")]
    assert all(one.id.startswith(str(plain)) for one in found) and len({one.id for one in found}) == 2
    own = write_rows(tmp_path / f"own{kind}", [{"text": "One.", "id": 7, "url": "x"}])
    assert [one.id for one in read(own)] == ["7"]


@pytest.mark.parametrize("kind", [".parquet", ".arrow", ".lance", ".jsonl", ".json"])
def test_a_null_title_is_no_title(tmp_path: Path, kind: str) -> None:
    rows = [{"title": title, "text": f"About {title}.", "id": None, "url": "u"} for title in (None, "A")]
    assert [one[:3] for one in read(write_rows(tmp_path / f"some{kind}", rows))] == [
        ("", "About None.", "u"),
        ("A", "About A.", "A"),
    ]
    assert [one.id for one in read(write_rows(tmp_path / f"none{kind}", rows[:1]))] == ["u"]


@pytest.mark.parametrize("kind", RECORDS)
def test_settings_name_the_keys_and_columns_of_a_document(tmp_path: Path, kind: str) -> None:
    rows = [
        {"Headline": f"H{n}", "content": f"Text {n}.", "nr": n, "title": "T", "text": "X", "year": 2000}
        for n in (1, 2)
    ]
    file = write_rows(tmp_path / f"news{kind}", rows)
    names = FieldNames(title="Headline", text="content", id="nr")
    assert read(file, names=names) == [
        Document(row["Headline"], row["content"], str(row["nr"]), None, {"year": 2000}) for row in rows
    ]
    usual = read(file, names=FieldNames(text="content"))
    assert [one[:3] for one in usual] == [("T", "Text 1.", "T"), ("T", "Text 2.", "T (2)")]
    assert [one.fields["Headline"] for one in usual] == ["H1", "H2"]


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("names", [FieldNames(text="body"), FieldNames(title="body"), FieldNames(id="body")])
def test_a_table_without_a_named_column_is_one_line(tmp_path: Path, kind: str, names: FieldNames) -> None:
    file = write_rows(tmp_path / f"a{kind}", [{"title": "A", "text": "One."}, {"title": "B", "text": "Two."}])
    with pytest.raises(InputError, match=r"a\..*: no column body \(columns: title, text\)$"):
        read(file, names=names)


@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_an_object_without_a_named_key_is_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    rows = [{"content": "One.", "headline": None}, {"content": "Two."}, {"headline": "C", "text": "Three."}]
    file, report = write_rows(tmp_path / f"a{kind}", rows), ReadingReport()
    assert [one.text for one in read(file, names=FieldNames("headline", "content"), report=report)] == [
        "One."
    ]
    assert report.reasons == {"without a usable title, text or id": 2}
    assert [one.problem.partition(": ")[2] for one in report.left_out] == [
        "no \"headline\" (fields: 'content')",
        "no \"content\" (fields: 'headline', 'text')",
    ]


def test_other_formats_are_read_as_without_names(tmp_path: Path) -> None:
    write(tmp_path / "a.md", "# A\n\nOne.")
    write(tmp_path / "wiki_00", lines({"id": "1", "url": "u", "title": "B", "text": "B\n\nTwo."}))
    assert read(tmp_path, names=FieldNames("headline", "content", "nr")) == read(tmp_path)


def test_help_of_a_command_that_reads_documents_names_every_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["kb", "build", "--help"]) == 0
    text = capsys.readouterr().out
    assert {ending for ending in sources._FORMATS if ending != ".htm"} <= set(re.findall(r"\.[a-z]+\b", text))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.text", "Arden\n\nA town."),
        ("a.log.gz", "Arden\n\nA town."),
        ("a.markdown", "# Arden\n\nA *town*."),
        ("a.mdx", "# Arden\n\nA *town*."),
        ("a.XHTML", '<?xml version="1.0"?><html><title>Arden</title><p>A <b>town</b>.</p></html>'),
    ],
)
def test_extensions_of_one_format_are_read_alike(name: str, content: str, tmp_path: Path) -> None:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (found,) = read_documents([str(tmp_path)])
    assert (found.title, found.text) == ("Arden", "A town.")
