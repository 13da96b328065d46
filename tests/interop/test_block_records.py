"""block_records.npy: NumPy's own files come out as NumPy reads them, and nothing else comes out of any file."""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.errors import InputError
from realm.interop import block_records
from realm.interop.block_records import BlockRecords, write_records


def array_of(records: list[Any]) -> np.ndarray:
    array = np.empty(len(records), dtype=object)
    array[:] = records
    return array


def write(path: Path, records: list[Any], protocol: int = 4, numpy1: bool = False) -> Path:
    array = array_of(records)
    dumped = pickle.dumps(array, protocol=protocol)
    if numpy1:
        dumped = dumped.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    return write_raw(path, dumped, len(array))


def write_raw(path: Path, dumped: bytes, count: int) -> Path:
    with path.open("wb") as file:
        header = {"descr": "|O", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(dumped)
    return path


@given(st.lists(st.text(max_size=400), max_size=40), st.sampled_from([3, 4, 5]), st.booleans())
def test_texts_come_back_whatever_wrote_them(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], protocol: int, numpy1: bool
) -> None:
    path = tmp_path_factory.mktemp("records") / "r.npy"
    write(path, [text.encode("utf-8", "ignore") for text in texts], protocol, numpy1)
    records = BlockRecords(path)
    wanted = [record.decode() for record in np.load(path, allow_pickle=True)]
    assert len(records) == len(wanted)
    assert list(records) == wanted == list(records)  # and again


def test_what_numpy_saves_is_read(tmp_path: Path) -> None:
    texts = [
        f"block {number} é" * (number % 300) for number in range(2500)
    ]  # more than two runs of a thousand
    np.save(tmp_path / "r.npy", array_of([text.encode() for text in texts]))
    assert list(BlockRecords(tmp_path / "r.npy")) == texts


def test_one_object_in_several_rows_is_read_in_each(tmp_path: Path) -> None:
    """The pickle writes it once and refers to it afterwards."""
    long, short = b"the same words " * 30, b"twice"
    rows = [b"first", long, b"", short, long, b"", b"between", short, long, b"last"]
    for protocol in (3, 4):
        path = write(tmp_path / f"{protocol}.npy", rows, protocol)
        assert list(BlockRecords(path)) == [row.decode() for row in rows]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_rows_that_were_given_are_not_kept(tmp_path: Path, protocol: int) -> None:
    """NumPy's pickle memoizes every row, in case that it comes again."""
    path = write(tmp_path / "r.npy", [b"block %d" % number for number in range(3000)], protocol)
    records = BlockRecords(path)
    with path.open("rb") as file:
        file.seek(records._start)
        machine = block_records._Machine(file, path, len(records))
        assert sum(1 for _ in machine.rows()) == 3000
    assert len(machine._memo) < 50 and len(machine._offsets) == 3000


def test_numpy_reads_what_we_write(tmp_path: Path) -> None:
    texts = [f"block {number} é" for number in range(2345)] + [""]
    write_records(tmp_path / "r.npy", texts, len(texts))
    loaded = np.load(tmp_path / "r.npy", allow_pickle=True)
    assert loaded.dtype == object and loaded.tolist() == [text.encode() for text in texts]
    assert list(BlockRecords(tmp_path / "r.npy")) == texts


class Harmful:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path, protocol: int) -> None:
    harm = str(tmp_path / "harm")
    for rows in ([b"text", Harmful(harm)], [Harmful(harm)] * 1500):
        path = write(tmp_path / "r.npy", rows, protocol)
        with pytest.raises(InputError, match="safe to read"):
            list(BlockRecords(path))
    with pytest.raises(InputError, match="safe to read"):
        list(BlockRecords(write_raw(tmp_path / "s.npy", pickle.dumps(Harmful(harm), protocol), 1)))
    assert not Path(harm).exists()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([b"fine", "a str"], "record 1 is not bytes but str"),
        ([b"fine", 7], "record 1 is not bytes but int"),
        ([b"fine", None], "record 1 is not bytes but NoneType"),
        ([b"fine", [b"list"]], "safe to read"),
        ([b"fine", np.int64(3)], r"refers to numpy\._core\.multiarray\.scalar"),
        ([b"fine", b"\xff\xfe"], "record 1 is not UTF-8"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, rows: list[Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        list(BlockRecords(write(tmp_path / "r.npy", rows)))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.npy", [b"some text"] * 20).read_bytes()
    for end in range(len(whole) - 1, 60, -7):
        (tmp_path / "cut.npy").write_bytes(whole[:end])
        with pytest.raises(InputError):
            list(BlockRecords(tmp_path / "cut.npy"))
    with pytest.raises(InputError, match="20 records were found, but the header has 21"):
        list(BlockRecords(write_raw(tmp_path / "r.npy", pickle.dumps(array_of([b"x"] * 20)), 21)))


@given(st.binary(max_size=80))
def test_random_bytes_are_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = write_raw(tmp_path_factory.mktemp("noise") / "r.npy", b"\x80\x04" + noise, 3)
    with pytest.raises(InputError) as error:
        list(BlockRecords(path))
    assert "\n" not in str(error.value)


def test_other_arrays_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(InputError, match="a list of texts was expected"):
        BlockRecords(tmp_path / "floats.npy")
    np.save(tmp_path / "square.npy", array_of([b"a", b"b"]).reshape(1, 2))
    with pytest.raises(InputError, match="a list of texts was expected"):
        BlockRecords(tmp_path / "square.npy")
    (tmp_path / "none.npy").write_bytes(b"nothing")
    with pytest.raises(InputError, match="is not a NumPy file"):
        BlockRecords(tmp_path / "none.npy")
    with pytest.raises(InputError, match="the checkpoint has no texts"):
        BlockRecords(tmp_path / "absent.npy")


def test_a_record_of_absurd_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    dumped = b"\x80\x04]B" + struct.pack("<I", block_records.LONGEST + 1)
    with pytest.raises(InputError, match="a record has 16777217 bytes"):
        list(BlockRecords(write_raw(tmp_path / "r.npy", dumped, 1)))


@pytest.mark.parametrize("shape", ["(-5,)", "(1e400,)", "({[]},)", "((" * 3000, f"({2**64},)"])
def test_an_impossible_number_of_records_is_one_line(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '|O', 'fortran_order': False, 'shape': {shape}, }}".encode() + b"\n"
    (tmp_path / "r.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    with pytest.raises(InputError) as error:
        len(BlockRecords(tmp_path / "r.npy"))
    assert "\n" not in str(error.value)
