"""Parquet and Arrow files that are damaged, or stand for far more than their size."""

import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realm.documents.reading import ReadingReport, read_documents
from realm.errors import InputError

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


BOMB = """
import sys
from realm.documents.reading import ReadingReport, read_documents
from tests.peak_memory import peak_kilobytes
import pyarrow.parquet, pyarrow.ipc
before = peak_kilobytes()
report = ReadingReport()
try:
    print(sum(1 for _ in read_documents([sys.argv[1]], report=report)), end=" ")
except ValueError as error:
    print(str(error)[:300], end=" ")
print(sum(report.reasons.values()), (peak_kilobytes() - before) >> 10)
"""


def documents_and_megabytes(path: Path) -> tuple[str, int]:
    run = subprocess.run([sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True)
    said, _, megabytes = run.stdout.strip().rpartition(" ")
    return said, int(megabytes)


def test_a_long_text_that_every_row_repeats_takes_the_memory_of_one(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = repeated("x" * 20_000_000, 50)
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 10_000
    said, megabytes = documents_and_megabytes(path)
    assert "50 too long" in said and megabytes < 200
    write_arrow(tmp_path / "b.arrow", table, "zstd")
    said, megabytes = documents_and_megabytes(tmp_path / "b.arrow")
    assert "50 too long" in said and megabytes < 200


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
