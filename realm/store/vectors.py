"""Vectors of passages on disk: a folder per model. Each index build makes a new version with one atomic commit.

    KB/indexes/<fingerprint>/vectors.lance    the vectors that one model computed, keyed by passage id
    KB/indexes/<fingerprint>/SHA256SUMS       digests of the files (`realm.store.tables.digests`)

The schema metadata of a version has the fingerprint of the model, and more about the build (`VectorsInfo`). Vectors are keyed
by passage id, not by row, so vectors are not rewritten when passages are added or deleted. Readers ignore the vectors of
deleted passages, and the next build leaves these vectors out.

`read` needs memory for one [N, D] array of float16 (3.4 GB for 13.35 M passages of 128 numbers; float32 for some released
vectors), and 25 bytes per passage. `mapped` leaves the array on disk, in a separate file:

    KB/indexes/<fingerprint>/mapped-<version>-<ids>.npy    the vectors of a version in the order of the passages

`realm.search.approximate` has its own tables in `KB/indexes/<fingerprint>/approximate/`.

Axis letters: N passages, D embedding.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance import LanceOperation

from realm.errors import InputError, RealmError
from realm.folders import TABLE_KEY, VERSIONS, one_writer, remove
from realm.keys import Lookup
from realm.settings import config_from
from realm.store.tables.table import (
    commit,
    newest_version,
    open_table,
    reading,
    refuse_changed_data,
    uncommitted,
    was_committed,
    write_rows,
)
from realm.store.upkeep import Removed, forget_after, remove_versions, tidy

TABLE = "vectors.lance"
MAPPED = "mapped"
APPROXIMATE = "approximate"
"""Folder beside the table with the tables of `realm.search.approximate`, each named after the version of its vectors."""
_ROWS_PER_BATCH = 8192
_DTYPES: dict[int, np.dtype[Any]] = {16: np.dtype(np.float16), 32: np.dtype(np.float32)}


@dataclass(frozen=True)
class VectorsInfo:
    """Origin of the vectors of a version."""

    model: str
    """Fingerprint of the model."""
    model_path: str
    """Folder of the model at the time of the build."""
    step: int
    """Training step of the model."""
    dim: int
    """Length of a vector."""
    created: str
    """Time of the build, ISO 8601."""
    corpus: str
    """Fingerprint of the knowledge base."""
    bits: int = 16
    """Bits per number: 16, or 32 for released vectors in float32."""


class Vectors(NamedTuple):
    """The vectors of a version in the order of the current passages."""

    array: np.ndarray
    """[N, D] float16 or float32; zeros for passages without a vector."""
    missing: np.ndarray
    """Numbers of the passages without a vector, ascending."""
    info: VectorsInfo
    version: int
    left_over: int
    """Number of vectors of deleted passages."""


def folder_of(kb: Path, model: str) -> Path:
    """Folder of the vectors of the model with this fingerprint."""
    return kb / "indexes" / model


def first_commit_of(kb: Path, model: str) -> Path:
    """Folder that exists as soon as vectors of the model with this fingerprint were committed."""
    return folder_of(kb, model) / TABLE / VERSIONS


def folders(kb: Path) -> list[Path]:
    """All folders of vectors, including folders whose vectors were lost."""
    return sorted(folder for folder in folder_of(kb, "").glob("*") if was_committed(folder / TABLE))


def publish(folder: Path, ids_N: np.ndarray, vectors_ND: np.ndarray, info: VectorsInfo) -> int:
    """Writes a new version with exactly these vectors, in `info.bits` bits per number -> number of the version.

    Raises:
        InputError: the array does not have the shape [N, info.dim], is not float16 or float32, or has numbers that are not
            finite in `info.bits` bits.
    """
    _check(ids_N, vectors_ND, info)
    schema = schema_of(info)
    with uncommitted(folder / TABLE):
        fragments = write_rows(folder / TABLE, record_batches(ids_N, vectors_ND, info), schema, new=True)
        return int(commit(folder / TABLE, LanceOperation.Overwrite(schema, fragments)).version)


def append(
    folder: Path, version: int, ids_N: np.ndarray, vectors_ND: np.ndarray, model: str, corpus: str
) -> int:
    """Writes a version with all vectors of the newest version and these vectors -> number of the new version.

    `version` is the number of the newest version. `corpus` is the fingerprint of the knowledge base, for the `VectorsInfo` of
    the new version.

    Raises:
        InputError: see `publish`; or `version` does not exist, or has vectors of another model.
        ChangedMeanwhile: there is a newer version than `version`.
    """
    table = open_table(folder / TABLE, version)
    info = dataclasses.replace(_info(table, folder), corpus=corpus)
    if info.model != model:
        raise InputError(
            f"{folder} has vectors of model {info.model} ({info.model_path}), not {model}: run `realm index`"
        )
    _check(ids_N, vectors_ND, info)
    schema = schema_of(info)
    old = [fragment.metadata for fragment in table.get_fragments()]
    with uncommitted(folder / TABLE):
        new = write_rows(folder / TABLE, record_batches(ids_N, vectors_ND, info), schema)
        # The operation is an overwrite with the old and the new files, because an append cannot change the metadata.
        table = commit(folder / TABLE, LanceOperation.Overwrite(schema, old + new), table)
    return int(tidy(folder / TABLE, table).version)


def read(folder: Path, ids_N: np.ndarray, version: int | None = None) -> Vectors | None:
    """The vectors of a version, by default the newest; row n belongs to the passage `ids_N[n]`. None if there is no version.

    If a passage has several vectors, the last vector counts.
    """
    if newest_version(folder / TABLE) is None:
        return None
    table = open_table(folder / TABLE, version)
    info = _info(table, folder)
    refuse_changed_data(table, folder / TABLE)
    return _read(table, info, ids_N, np.zeros((len(ids_N), info.dim), dtype=_DTYPES[info.bits]))


def mapped_file(folder: Path, ids_N: np.ndarray) -> Path:
    """The file that `mapped` maps; it is written now if it does not exist.

    Raises:
        InputError: there is no version with a vector of each passage.
    """
    found = mapped(folder, ids_N)
    if found is None or len(found.missing):
        raise InputError(f"{folder} has no vectors of these passages: run `realm index`")
    return _mapped_name(folder, found.version, ids_N)


def _mapped_name(folder: Path, version: int, ids_N: np.ndarray) -> Path:
    ids = hashlib.sha256(ids_N.tobytes()).hexdigest()[:16]
    return folder / f"{MAPPED}-{version}-{ids}.npy"


def mapped(folder: Path, ids_N: np.ndarray) -> Vectors | None:
    """The vectors of the newest version, as `read` returns them, but in an array that is mapped from a file beside the table.

    The first call writes the file, and removes the files of other versions or of other passages. If a passage has no vector,
    the file is removed as soon as the array is mapped: the caller can fill in the array, and a later call writes a new file.
    """
    if newest_version(folder / TABLE) is None:
        return None
    table = open_table(folder / TABLE)
    info = _info(table, folder)
    file = _mapped_name(folder, int(table.version), ids_N)
    left_over = 0
    if not file.exists():
        with one_writer(folder):
            if not file.exists():  # another process can have written the file meanwhile
                found = _write_mapped(file, table, info, ids_N)
                if len(found.missing):
                    return found
                left_over = found.left_over
    nothing = np.zeros(0, dtype=np.int64)
    return Vectors(np.load(file, mmap_mode="c"), nothing, info, int(table.version), left_over)


def _write_mapped(file: Path, table: lance.LanceDataset, info: VectorsInfo, ids_N: np.ndarray) -> Vectors:
    """Replaces all files of mapped vectors in the folder by `file`, unless a passage has no vector -> the vectors."""
    folder = file.parent
    for left in folder.glob(f".{MAPPED}-*"):  # of a process that was killed
        left.unlink(missing_ok=True)
    aside = folder / f".{file.name}.{os.getpid()}"
    try:
        array_ND = np.lib.format.open_memmap(
            aside, "w+", dtype=_DTYPES[info.bits], shape=(len(ids_N), info.dim)
        )
        refuse_changed_data(table, folder / TABLE)
        found = _read(table, info, ids_N, array_ND)
        if not len(found.missing):
            array_ND.flush()
            for old in folder.glob(f"{MAPPED}-*.npy"):
                old.unlink(missing_ok=True)
            aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    return found


def _read(table: lance.LanceDataset, info: VectorsInfo, ids_N: np.ndarray, vectors_ND: np.ndarray) -> Vectors:
    """Copies the vectors of the table into the array, which must be all zeros."""
    found_N = np.zeros(len(ids_N), dtype=bool)
    lookup: Lookup | None = None
    row = left_over = 0
    with reading(table):
        for batch in table.to_batches(columns=["id", "vector"]):
            ids = batch.column("id").to_numpy()
            vectors = batch.column("vector").flatten().to_numpy().reshape(-1, info.dim)
            if np.array_equal(ids, ids_N[row : row + len(ids)]):  # no passage was added or deleted
                vectors_ND[row : row + len(ids)] = vectors
                found_N[row : row + len(ids)] = True
            else:
                lookup = lookup or Lookup(ids_N)
                numbers, known = lookup.find(ids)
                vectors_ND[numbers[known]] = vectors[known]
                found_N[numbers[known]] = True
                left_over += int((~known).sum())
            row += len(ids)
    return Vectors(vectors_ND, np.flatnonzero(~found_N), info, int(table.version), left_over)


def info_of(folder: Path, version: int | None = None) -> VectorsInfo | None:
    """The `VectorsInfo` of a version, by default the newest; None if there is no version."""
    if newest_version(folder / TABLE) is None:
        return None
    return _info(open_table(folder / TABLE, version), folder)


def newest(folder: Path) -> int | None:
    """Number of the newest version; None if there is no version."""
    return newest_version(folder / TABLE)


def keep_versions(folder: Path, count: int, in_use: int | None = None) -> int:
    """Removes old versions -> the number of removed versions.

    The newest `count` versions stay. If `in_use` is given, version `in_use` and all later versions stay too.
    """
    if count < 1:
        raise InputError(
            f"{count} versions cannot be kept: the newest version always stays, so give 1 or more"
        )
    last = newest(folder)
    if last is None:
        return 0
    if in_use is not None:
        count = max(count, last - in_use + 1)
    return remove_versions(folder / TABLE, count).versions


def compact(folder: Path, ids_N: np.ndarray) -> Removed:
    """Rewrites the newest version with the vectors of these passages only, and removes all earlier versions.

    Raises:
        ChangedMeanwhile: another process published a version.
    """
    known = read(folder, ids_N)
    if known is None:
        return Removed(0, 0)
    table = open_table(folder / TABLE, known.version)
    if known.left_over or len(table.get_fragments()) > 1:
        there_N = np.ones(len(ids_N), dtype=bool)
        there_N[known.missing] = False
        schema = schema_of(known.info)
        rows = record_batches(ids_N[there_N], known.array[there_N], known.info)
        with uncommitted(folder / TABLE):
            fragments = write_rows(folder / TABLE, rows, schema, new=True)
            table = commit(folder / TABLE, LanceOperation.Overwrite(schema, fragments), table)
    for file in folder.glob(f"{MAPPED}-*.npy"):
        file.unlink()
    if (folder / APPROXIMATE).exists():
        with one_writer(folder / APPROXIMATE):
            remove_approximate(folder)
    return remove_versions(folder / TABLE, 1)


def remove_approximate(folder: Path, keep: Path | None = None) -> None:
    """Removes the tables of approximate search, except `keep` and the tables that a process has open."""
    for table in (folder / APPROXIMATE).iterdir():
        if not table.is_dir() or table == keep:
            continue
        lease = os.open(table, os.O_RDONLY)
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(table)
        except BlockingIOError:
            continue
        finally:
            os.close(lease)


def go_back(folder: Path, version: int) -> None:
    """Makes an existing version the newest: removes later versions and the files of killed builds.

    No other process may be writing.
    """
    forget_after(folder / TABLE, version)


def not_finite(vectors_ND: np.ndarray) -> np.ndarray:
    """Numbers of the rows with a NaN or an infinity."""
    return np.flatnonzero(~np.isfinite(vectors_ND).all(axis=1))


def _info(table: lance.LanceDataset, folder: Path) -> VectorsInfo:
    try:
        return config_from(VectorsInfo, json.loads(table.schema.metadata[TABLE_KEY]), str(folder / TABLE))
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, RealmError):
            raise
        raise InputError(f"{folder / TABLE} has no description of the model: run `realm index`") from None


def _check(ids_N: np.ndarray, vectors_ND: np.ndarray, info: VectorsInfo) -> None:
    if info.bits not in _DTYPES:
        raise InputError(f"vectors have {info.bits} bits per number: 16 and 32 are supported")
    if vectors_ND.dtype not in _DTYPES.values():
        raise InputError(f"vectors are {vectors_ND.dtype}: they must be float16 or float32")
    if vectors_ND.shape != (len(ids_N), info.dim):
        raise InputError(f"vectors have the shape {vectors_ND.shape}: {(len(ids_N), info.dim)} is expected")
    for start in range(0, len(vectors_ND), _ROWS_PER_BATCH):
        bad = not_finite(_in_bits(vectors_ND[start : start + _ROWS_PER_BATCH], info))
        if len(bad):
            raise InputError(
                f"vector {start + bad[0]} has a NaN or an infinity: the model is damaged, or a number is too large for "
                f"{info.bits} bits"
            )


def schema_of(info: VectorsInfo) -> pa.Schema:
    """Schema of a table of vectors."""
    number = pa.float16() if info.bits == 16 else pa.float32()
    fields = [("id", pa.uint64()), ("vector", pa.list_(number, info.dim))]
    return pa.schema(fields, metadata={TABLE_KEY: json.dumps(dataclasses.asdict(info)).encode()})


def record_batches(ids_N: np.ndarray, vectors_ND: np.ndarray, info: VectorsInfo) -> Iterator[pa.RecordBatch]:
    """The arrays as record batches, which are views if an array is contiguous and has the right type."""
    for start in range(0, len(ids_N), _ROWS_PER_BATCH):
        rows = slice(start, start + _ROWS_PER_BATCH)
        flat = pa.array(_in_bits(vectors_ND[rows], info).reshape(-1))
        vectors = pa.FixedSizeListArray.from_arrays(flat, vectors_ND.shape[1])
        yield pa.record_batch([pa.array(ids_N[rows]), vectors], schema=schema_of(info))


def _in_bits(vectors_ND: np.ndarray, info: VectorsInfo) -> np.ndarray:
    # Numbers too large for float16 become infinite, and `_check` finds these.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(vectors_ND, dtype=_DTYPES[info.bits])
