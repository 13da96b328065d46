"""Vectors: aligned with the passages of today; a version is whole or not there."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm.errors import DamagedError, InputError
from realm.store import vectors as vectors_module
from realm.store.tables.table import ChangedMeanwhile
from realm.store.vectors import (
    Vectors,
    VectorsInfo,
    append,
    folder_of,
    folders,
    info_of,
    keep_versions,
    mapped,
    publish,
    read,
)

DIM = 4
INFO = VectorsInfo("m1", model_path="models/realm", step=7, dim=DIM, created="2026-01-01", corpus="c1")
IDS = np.random.default_rng(0).integers(0, 2**64, size=40, dtype=np.uint64)
NEW = np.array([3, 2**64 - 1], dtype=np.uint64)


def vectors_of(ids: np.ndarray, dim: int = DIM) -> np.ndarray:
    """Vectors that follow from the passage's id, so that each is known wherever it turns up."""
    rows = [np.random.default_rng(int(key)).normal(size=dim) for key in ids]
    return np.array(rows, dtype=np.float16).reshape(len(ids), dim)


def newest(folder: Path, ids: np.ndarray = IDS, version: int | None = None) -> Vectors:
    vectors = read(folder, ids, version)
    assert vectors is not None
    return vectors


def assert_aligned(folder: Path, ids: np.ndarray, missing: set[int]) -> None:
    vectors = newest(folder, ids)
    have = np.setdiff1d(np.arange(len(ids)), vectors.missing)
    assert set(vectors.missing.tolist()) == missing
    assert vectors.array.dtype == np.float16 and vectors.array.shape == (len(ids), DIM)
    assert (vectors.array[have] == vectors_of(ids[have])).all()
    assert not vectors.array[vectors.missing].any()


def test_without_an_index_there_are_no_vectors(tmp_path: Path) -> None:
    assert read(tmp_path, IDS) is None
    assert info_of(tmp_path) is None
    assert keep_versions(tmp_path, 1) == 0


def test_what_is_published_is_read_with_its_description(tmp_path: Path) -> None:
    version = publish(tmp_path, IDS, vectors_of(IDS), INFO)
    assert_aligned(tmp_path, IDS, missing=set())
    assert newest(tmp_path).version == version
    assert newest(tmp_path).info == info_of(tmp_path) == INFO


def test_a_knowledge_base_has_a_folder_for_the_vectors_of_each_model(tmp_path: Path) -> None:
    assert folders(tmp_path) == []
    for model in ("m2", "m1", "begun"):
        folder_of(tmp_path, model).mkdir(parents=True)
    for model in ("m2", "m1"):
        publish(folder_of(tmp_path, model), IDS, vectors_of(IDS), dataclasses.replace(INFO, model=model))
    assert folders(tmp_path) == [folder_of(tmp_path, "m1"), folder_of(tmp_path, "m2")]


def test_every_version_can_be_read_until_it_is_removed(tmp_path: Path) -> None:
    versions = [
        publish(tmp_path, IDS, vectors_of(IDS) * np.float16(step), dataclasses.replace(INFO, step=step))
        for step in (1, 2, 3, 4)
    ]
    wide = publish(tmp_path, IDS, vectors_of(IDS, dim=9), dataclasses.replace(INFO, dim=9))
    assert [newest(tmp_path, version=v).info.step for v in versions] == [1, 2, 3, 4]
    assert (newest(tmp_path, version=versions[1]).array == vectors_of(IDS) * np.float16(2)).all()
    assert newest(tmp_path).array.shape[1] == 9
    size = disk(tmp_path)
    assert keep_versions(tmp_path, 2) == 3
    assert disk(tmp_path) < size
    assert newest(tmp_path).version == wide and newest(tmp_path, version=versions[3]).info.step == 4
    with pytest.raises(InputError, match=f"no version {versions[0]}: the newest is {wide}"):
        read(tmp_path, IDS, versions[0])
    assert keep_versions(tmp_path, 1) == 1
    assert newest(tmp_path).version == wide
    with pytest.raises(InputError, match="the newest version always stays"):
        keep_versions(tmp_path, 0)


def disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "vectors.lance" / "data").iterdir())


def test_new_passages_get_vectors_beside_those_that_are_there(tmp_path: Path) -> None:
    publish(tmp_path, IDS, vectors_of(IDS), INFO)
    today = np.concatenate([NEW[:1], np.delete(IDS, [3, 7]), NEW[1:]])
    assert_aligned(tmp_path, today, missing={0, 39})
    before = newest(tmp_path, today)
    assert before.left_over == 2
    version = append(tmp_path, before.version, NEW, vectors_of(NEW), "m1", "c2")
    assert_aligned(tmp_path, today, missing=set())
    assert newest(tmp_path).version == version > before.version
    assert newest(tmp_path).info == dataclasses.replace(INFO, corpus="c2")
    again = newest(tmp_path, today, before.version)
    assert again.info == INFO and again.missing.tolist() == [0, 39]
    publish(tmp_path, today, vectors_of(today), INFO)
    assert newest(tmp_path, today).left_over == 0


def test_the_last_vector_of_a_passage_counts(tmp_path: Path) -> None:
    publish(tmp_path, IDS, vectors_of(IDS) * np.float16(2), INFO)
    append(tmp_path, 1, IDS[5:], vectors_of(IDS[5:]), "m1", "c1")
    assert (newest(tmp_path).array[5:] == vectors_of(IDS[5:])).all()
    assert (newest(tmp_path).array[:5] == vectors_of(IDS[:5]) * np.float16(2)).all()


@settings(max_examples=10)
@given(have=st.lists(st.integers(0, 39), unique=True), gone=st.sets(st.integers(0, 39)))
def test_vectors_stay_with_their_passages_through_deletions(
    tmp_path_factory: pytest.TempPathFactory, have: list[int], gone: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("index")
    publish(folder, IDS[have], vectors_of(IDS[have]), INFO)
    left = np.array([n for n in range(40) if n not in gone], dtype=np.int64)
    assert_aligned(folder, IDS[left], missing={row for row, n in enumerate(left) if n not in have})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda v: v.astype(np.float64), "float64: they must be float16 or float32"),
        (lambda v: v[:, :3], r"3\): \(\d+, 4\) is expected"),
        (lambda v: v[1:], r"shape \(\d+, 4\): \(\d+, 4\) is expected"),
        (lambda v: np.where(np.arange(len(v))[:, None] == 5, np.float16("nan"), v), "vector 5 has a NaN"),
        (lambda v: v * np.float16(65504) * np.float16(65504), "infinity"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow")
def test_vectors_that_cannot_be_searched_are_refused(tmp_path: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        publish(tmp_path, IDS, spoil(vectors_of(IDS)), INFO)
    assert read(tmp_path, IDS) is None
    publish(tmp_path, IDS, vectors_of(IDS), INFO)
    with pytest.raises(InputError, match=message):
        append(tmp_path, 1, IDS, spoil(vectors_of(IDS)), "m1", "c1")


def test_vectors_come_behind_the_newest_version_only(tmp_path: Path) -> None:
    first = publish(tmp_path, IDS, vectors_of(IDS), INFO)
    append(tmp_path, first, NEW[:1], vectors_of(NEW[:1]), "m1", "c1")
    files = sorted((tmp_path / "vectors.lance" / "data").iterdir())
    with pytest.raises(ChangedMeanwhile):
        append(tmp_path, first, NEW[1:], vectors_of(NEW[1:]), "m1", "c1")
    assert newest(tmp_path).version == first + 1
    assert sorted((tmp_path / "vectors.lance" / "data").iterdir()) == files


def test_vectors_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no table"):
        append(tmp_path, 1, NEW, vectors_of(NEW), "m1", "c1")
    publish(tmp_path, IDS, vectors_of(IDS), INFO)
    with pytest.raises(InputError, match=r"vectors of model m1 \(models/realm\), not m2"):
        append(tmp_path, 1, NEW, vectors_of(NEW), "m2", "c1")


@pytest.mark.parametrize("begun", [False, True])
def test_a_half_written_version_is_never_seen(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if begun:
        publish(tmp_path, IDS, vectors_of(IDS), INFO)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vectors_module, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, IDS, vectors_of(IDS) * np.float16(2), dataclasses.replace(INFO, step=8))
    if begun:
        assert_aligned(tmp_path, IDS, missing=set())
        assert newest(tmp_path).info.step == INFO.step
    else:
        assert read(tmp_path, IDS) is None
    publish(tmp_path, IDS, vectors_of(IDS), INFO)
    assert_aligned(tmp_path, IDS, missing=set())


@pytest.mark.parametrize("load", [read, mapped])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_changed_byte_is_refused_before_lance_decodes_it(
    tmp_path: Path, load: Callable[..., Any], share: float
) -> None:
    """Lance aborts the process at some of these bytes, and reads another vector at the others."""
    publish(tmp_path, IDS, vectors_of(IDS), INFO)
    (data,) = (tmp_path / "vectors.lance" / "data").iterdir()
    content = bytearray(data.read_bytes())
    content[round(share * (len(content) - 1))] ^= 1
    data.write_bytes(content)
    with pytest.raises(DamagedError, match="has changed since it was written"):
        load(tmp_path, IDS)


def test_no_passages_have_no_vectors_and_later_ones_miss_theirs(tmp_path: Path) -> None:
    publish(tmp_path, IDS, vectors_of(IDS), INFO)
    assert newest(tmp_path, IDS[:0]).array.shape == (0, DIM)
    publish(tmp_path, IDS[:0], vectors_of(IDS[:0]), INFO)
    assert newest(tmp_path, IDS[:0]).array.shape == (0, DIM) and newest(tmp_path, IDS[:0]).left_over == 0
    assert_aligned(tmp_path, NEW, missing={0, 1})
