"""Parquet and Arrow files and Lance datasets that are damaged, or stand for far more than their size."""

import shutil
from contextlib import suppress
from itertools import product
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realm.documents.reading import ReadingReport, read_documents, stamp
from realm.documents.sources import state_of
from realm.errors import InputError
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from tests.documents.reading_memory import documents_and_megabytes

pytestmark = pytest.mark.usefixtures("one_child")

TABLE = pa.table({"title": ["A", "B", "C"], "text": ["One.", "Two.", "Three."]})


def read(path: Path) -> tuple[list[str], ReadingReport]:
    report = ReadingReport()
    return [d.text for d in read_documents([str(path)], report=report)], report


def write_arrow(path: Path, table: pa.Table, compression: str | None = None, stream: bool = False) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def repeated(text: str, rows: int) -> pa.Table:
    numbers = pa.array([0] * rows, pa.int32())
    values = pa.DictionaryArray.from_arrays(numbers, pa.array([text]))
    return pa.table({"title": ["A"] * rows, "text": values})


def test_every_way_to_write_strings_is_read(tmp_path: Path) -> None:
    """One child process reads all files."""
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
    files = []
    for number, kind in enumerate(kinds):
        table = TABLE.set_column(1, "text", TABLE["text"].cast(pa.string()).dictionary_encode().cast(kind))
        for stream, compression in product([False, True], [None, "lz4", "zstd"]):
            file = tmp_path / f"{number}-{stream}-{compression}.arrow"
            files.append(write_arrow(file, table, compression, stream))
        files.append(tmp_path / f"{number}.parquet")
        pq.write_table(table, files[-1])
    texts = [document.text for document in read_documents([str(file) for file in files])]
    for number, file in enumerate(files):
        assert texts[3 * number :][:3] == ["One.", "Two.", "Three."], file.name
    assert len(files) == 21 and len(texts) == 63


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_times_that_python_does_not_have_cost_no_row(name: str, tmp_path: Path) -> None:
    seconds = [
        -62135596800,
        10**11,
        10**12,
    ]  # the second is in the year 5138, the third is not in the calendar
    table = TABLE.append_column("fine", pa.array([1, 1_001, None], pa.timestamp("ns", "UTC")))
    table = table.append_column("far", pa.array(seconds, pa.timestamp("s", "Asia/Tokyo")))
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        write_arrow(tmp_path / name, table)
    report = ReadingReport()
    documents = list(read_documents([str(tmp_path / name)], report=report))
    assert [dict(one.fields) for one in documents] == [
        {"fine": "1970-01-01T00:00:00Z", "far": "0001-01-01T00:00:00Z"},
        {"fine": "1970-01-01T00:00:00.000001Z", "far": "5138-11-16T09:46:40Z"},
        {},
    ]
    assert report.fields_left_out == {"far": 1}


def test_a_long_text_that_every_row_repeats_takes_the_memory_of_one(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = repeated("x" * 20_000_000, 20)
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 10_000
    said, megabytes = documents_and_megabytes(path)
    assert "20 too long" in said and megabytes < 200
    write_arrow(tmp_path / "b.arrow", table, "zstd")
    said, megabytes = documents_and_megabytes(tmp_path / "b.arrow")
    assert "20 too long" in said and megabytes < 200
    text = pa.field("text", pa.string(), metadata={"lance-encoding:compression": "zstd"})
    plain = pa.table([["A"] * 20, ["x" * 20_000_000] * 20], pa.schema([("title", pa.string()), text]))
    lance.write_dataset(plain, tmp_path / "c.lance", data_storage_version="2.1")
    assert sum(file.stat().st_size for file in (tmp_path / "c.lance").rglob("*")) < 100_000
    said, megabytes = documents_and_megabytes(tmp_path / "c.lance")
    assert "20 too long" in said and megabytes < 200


@pytest.mark.parametrize("kind", ["data", "dictionary"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_page_header_that_declares_another_size_than_its_column_is_one_line(
    kind: str, version: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"title": ["A"] * 3, "text": ["x" * 30_000] * 3})
    pq.write_table(
        table, path, compression="zstd", use_dictionary=kind == "dictionary", data_page_version=version
    )
    assert len(read(path)[0]) == 3
    column = pq.read_metadata(path).row_group(0).column(1)
    start = column.dictionary_page_offset if kind == "dictionary" else column.data_page_offset
    content = bytearray(path.read_bytes())
    assert (
        content[start] == content[start + 2] == 0x15
    )  # the page's type, and the size of three bytes behind it
    assert content[start + 3] & content[start + 4] & 0x80 and not content[start + 5] & 0x80
    content[start + 3 : start + 6] = b"\xfe\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_metadata_of_a_column_that_contradict_its_schema_are_one_line(tmp_path: Path) -> None:
    """The schema has no nulls in the column, and the column's metadata count them: pyarrow may end the process."""
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path)
    content = path.read_bytes()
    nullable, required = b"\x25\x02\x18\x05title", b"\x25\x00\x18\x05title"
    assert content.count(nullable) == 1
    path.write_bytes(content.replace(nullable, required))
    with pytest.raises(InputError, match=r"a\.parquet"):
        read(path)


def test_more_rows_than_the_size_of_the_file_allows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"title": [""] * 2_000_000, "text": [""] * 2_000_000}), path)
    with pytest.raises(InputError, match="2,000,000 rows are too many for a file of this size"):
        read(path)
    lance.write_dataset(pq.read_table(path), tmp_path / "b.lance")
    with pytest.raises(InputError, match="2,000,000 rows are too many for a file of this size"):
        read(tmp_path / "b.lance")


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array([["a"], ["b"], []]), r"the column text holds 'list<.*', and must hold strings"),
        (pa.nulls(3), "the column text holds 'null', and must hold strings"),
        (pa.array([1, 2, 3]), "the column text holds 'int64', and must hold strings"),
    ],
)
def test_columns_of_other_types_are_refused(column: pa.Array, says: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"title": ["A"] * 3, "text": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=says):
        read(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=says):
        read(write_arrow(tmp_path / "a.arrow", pa.table({"title": ["A"] * 3, "text": column})))


def test_ids_that_are_no_whole_numbers_are_refused_with_what_ids_can_be(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "id": [1.5]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="id holds 'double', and must hold strings or whole numbers"):
        read(tmp_path / "a.parquet")


def test_a_bad_row_is_left_out_alone(tmp_path: Path) -> None:
    bad = pa.array([b"One.", b"\xff", None], pa.binary())
    text = pa.StringArray.from_buffers(
        3, bad.buffers()[1], bad.buffers()[2], bad.buffers()[0], bad.null_count
    )
    pq.write_table(TABLE.set_column(1, "text", text), tmp_path / "a.parquet")
    texts, report = read(tmp_path / "a.parquet")
    assert texts == ["One."]
    assert [one.problem.split(": ", 1)[1] for one in report.left_out] == [
        "a text is not UTF-8",
        '"text" is None, and must be a string',
    ]


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_arrow_file_is_documents_or_named(
    stream: bool, compression: str | None, tmp_path: Path
) -> None:
    content = write_arrow(tmp_path / "a.arrow", TABLE, compression, stream).read_bytes()
    (tmp_path / "damaged").mkdir()
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        (tmp_path / "damaged" / f"{place}.arrow").write_bytes(damaged)
    report = ReadingReport()
    with suppress(InputError):
        texts = [one.text for one in read_documents([str(tmp_path / "damaged")], report=report)]
        assert len(texts) <= 3 * len(list((tmp_path / "damaged").iterdir()))
    assert all(".arrow" in one.problem for one in report.left_out)


# --- Lance ----------------------------------------------------------------------------------------


def write_towns(path: Path) -> Path:
    """A dataset of two files, of which a row is deleted, with an older version."""
    rows = {"title": [f"T{n}" for n in range(40)], "text": [f"Town {n}. " * 30 for n in range(40)]}
    table = pa.table({**rows, "year": range(40), "og:url": [f"u{n}" for n in range(40)]})
    lance.write_dataset(table.slice(0, 30), path)
    lance.write_dataset(table.slice(30), path, mode="append")
    lance.dataset(path).delete("year = 3")
    return path


def test_a_lance_dataset_gives_the_rows_of_its_newest_version_in_order(tmp_path: Path) -> None:
    path = write_towns(tmp_path / "a #1 50%25?.lance")
    expected = [
        Document(
            row["title"], row["text"], row["title"], None, {"year": row["year"], "og_url": row["og:url"]}
        )
        for row in lance.dataset(path).to_table().to_pylist()
    ]
    assert list(read_documents([str(path)])) == expected and len(expected) == 39


def test_a_dataset_in_a_folder_is_one_file_of_the_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "sub/c.txt", "z.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    for name in ("b.lance", "sub/d.lance", ".hidden.lance"):
        lance.write_dataset(pa.table({"text": [name]}), tmp_path / name)
    Path("link.lance").symlink_to(tmp_path / "b.lance")
    report = ReadingReport()
    found = [one.text for one in read_documents(["."], report=report)]
    assert found == ["a.txt", "b.lance", "b.lance", "z.txt", "sub/c.txt", "sub/d.lance"]
    assert not report.reasons
    assert [one.id for one in read_documents(["sub/d.lance"])] == ["sub/d.lance row 1"]


def test_a_new_version_of_a_dataset_is_a_change_of_the_source(tmp_path: Path) -> None:
    path = write_towns(tmp_path / "a.lance")
    before = stamp([str(tmp_path)]), state_of(path)
    assert before == (stamp([str(tmp_path)]), state_of(path))
    lance.dataset(path).delete("year = 4")
    after = stamp([str(tmp_path)]), state_of(path)
    assert before[0] != after[0] and before[1] != after[1]


def test_what_is_no_dataset_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.lance").write_bytes(b"PAR1")
    with pytest.raises(
        InputError, match=r"a\.lance is not a Lance dataset, which is a folder with a folder _versions$"
    ):
        read(tmp_path / "a.lance")
    shutil.rmtree(write_towns(tmp_path / "b.lance") / "_versions")
    with pytest.raises(InputError, match=r"b\.lance is not Lance: "):
        read(tmp_path / "b.lance")
    (tmp_path / "c.lance" / "_versions").mkdir(parents=True)
    with pytest.raises(InputError, match=r"c\.lance is not Lance: "):
        read(tmp_path / "c.lance")
    lance.write_dataset(pa.table({"title": ["A"]}), tmp_path / "d.lance")
    with pytest.raises(
        InputError, match=r"d\.lance: no column text \(columns: title\): name .* with text_field$"
    ):
        read(tmp_path / "d.lance")
    lance.write_dataset(pa.table({"title": ["A"], "text": [["One."]]}), tmp_path / "e.lance")
    with pytest.raises(InputError, match=r"e\.lance: the column text holds 'list<.*', and must hold strings"):
        read(tmp_path / "e.lance")
    lance.write_dataset(TABLE.slice(0, 0), tmp_path / "f.lance")
    with pytest.raises(InputError, match=r"f\.lance is empty$"):
        read(tmp_path / "f.lance")


def test_a_dataset_with_files_in_other_places_is_not_read(tmp_path: Path) -> None:
    original = lance.dataset(write_towns(tmp_path / "a.lance"))
    original.tags.create("now", original.version)
    original.shallow_clone(str(tmp_path / "b.lance"), "now")
    with pytest.raises(InputError, match=r"b\.lance has files outside of its folder: copy them into it$"):
        read(tmp_path / "b.lance")


def test_the_tables_of_a_knowledge_base_are_no_documents(tiny_kb: KnowledgeBase, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="is a table of a knowledge base: `realm kb export` writes its documents"
    ):
        read(tiny_kb.folder / "passages.lance")
    shutil.copytree(tiny_kb.folder / "passages.lance", tmp_path / "passages.lance")
    (tmp_path / "a.txt").write_text("A text.")
    assert [one.text for one in read_documents([str(tmp_path)])] == [
        "A text."
    ]  # with --strict, it is no error


def test_a_damaged_dataset_is_documents_or_named(tmp_path: Path) -> None:
    whole = write_towns(tmp_path / "whole.lance")
    count = 0
    for file in sorted(one.relative_to(whole) for one in whole.rglob("*") if one.is_file()):
        content = (whole / file).read_bytes()
        changed = [content[:place] + b"\xff" + content[place + 1 :] for place in range(0, len(content), 199)]
        for damaged in (None, b"", content[: len(content) // 2], *changed):
            copied = shutil.copytree(whole, tmp_path / "damaged" / f"{count}.lance") / file
            count += 1
            copied.unlink()
            if damaged is not None:
                copied.write_bytes(damaged)
    (tmp_path / "damaged" / "last.txt").write_text("A text.")
    report = ReadingReport()
    *others, last = read_documents([str(tmp_path / "damaged")], report=report)
    assert last.text == "A text." and len(others) <= 40 * count
    assert 10 < sum(report.reasons.values()) <= count
    assert all(".lance" in one.problem and "\n" not in one.problem for one in report.left_out)
