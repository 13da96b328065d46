"""Tables (Lance datasets) with atomic commits by one process at a time, locks on versions that are read, and checksums.

A change has two parts. First, rows and lists of deleted rows are written to files that belong to no version; then `commit`
makes a new version with these files. If the process is killed before the commit, the table is unchanged, and the files of the
change are removed together with old versions. A writer holds a shared lock on the folder of the table until the commit
(`uncommitted`), and no process removes the files of the change before the commit. Only one process commits at a time, and a
change is committed only if the newest version is the version that the change was made for.

An open table keeps the manifest of its version open, with a shared lock on the manifest. No process removes a locked version,
so a version stays until all processes that read the version have closed the table or ended.

`digests.py` records a digest of every file. `open_table` compares the sizes of all files and the digests of small
files, and refuses a table whose newest recorded version is missing; `damaged_files` compares the digests of all files.
"""

import errno
import fcntl
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import lance
import numpy as np
import pyarrow as pa
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata, LanceFragment, write_fragments
from lance.schema import LanceSchema

from realm.errors import ConflictError, DamagedError, InputError, RealmError, WriteFailed, reason, writing
from realm.folders import PASSAGES as PASSAGES
from realm.folders import VERSIONS, one_writer
from realm.progress import progress
from realm.store.tables.digests import changed_files, record, recorded_digests, refuse_damaged

T = TypeVar("T")
_log = logging.getLogger(__name__)
TRIES = 5
"""Largest number of attempts at a change, if other processes change the same tables at the same time."""
_COLUMN_BUFFER, _BUFFER = 8 << 20, 32 << 20
"""Most bytes of a column, and of all columns, that wait in memory until they fill a page of a data file. By default, Lance
limits only the bytes of a column, and a table of passages has at least 20 columns."""
_LAST = 2**64 - 1
"""The file name of the manifest of version v is this number minus v."""

_in_use: "weakref.WeakKeyDictionary[lance.LanceDataset, int]" = weakref.WeakKeyDictionary()
"""Open table -> file descriptor of the locked manifest; the lock prevents the removal of the version."""


class ChangedMeanwhile(ConflictError):
    """Another process changed the table before the commit; a new attempt at the change can succeed."""


def made_anew(folder: Path, change: Callable[[], T]) -> T:
    """Runs `change()`, which changes tables in a folder, and runs it again if another process changed the tables meanwhile.

    The last attempt holds the lock of the folder from the beginning, so no other process can change the tables.
    """
    for _ in range(TRIES - 1):
        try:
            return change()
        except ChangedMeanwhile:
            continue
    with one_writer(folder):
        return change()


def newest_version(path: Path) -> int | None:
    """Number of the newest version, read from file names only; None before the first commit."""
    return max(versions_of(path), default=None)


def was_committed(path: Path) -> bool:
    """Whether the table has a version, or had one according to the list of digests."""
    return newest_version(path) is not None or any(_lost(path))


def committed(path: Path, version: int) -> float:
    """Time of a commit in seconds since 1970."""
    return manifest_of(path, version).stat().st_mtime


def open_table(path: Path, version: int | None = None) -> lance.LanceDataset:
    """Opens the table at a version, by default the newest version; later commits do not change the open table.

    Raises:
        InputError: the table or the version does not exist.
        DamagedError: a file is missing, cut short or changed, or cannot be read.
    """
    newest = newest_version(path)
    if newest is None:
        refuse_damaged(path, _lost(path))
        raise InputError(f"{path} holds no table")
    number = newest if version is None else version
    try:
        lease = _lease(path, number)
    except FileNotFoundError:
        # Another process can have removed this version after a newer commit.
        if version is None and newest_version(path) != newest:
            return open_table(path)
        raise InputError(f"{path} has no version {number}: the newest is {newest}") from None
    with _kept_open(lease):
        refuse_damaged(path, _lost(path))
        refuse_damaged(path, changed_files(path, [manifest_of(path, number)]))
        try:
            table = lance.dataset(path, version=number)
            outside = table.base_paths()
            fragments = [] if outside else table.get_fragments()
        except Exception as error:  # Lance raises exceptions of many classes
            raise DamagedError(f"{path} cannot be read: {reason(error)}") from error
        if outside:  # a table of another person could name any folder or bucket
            raise DamagedError(f"{path} has files outside of its folder, which are not read")
        _in_use[table] = lease
    weakref.finalize(table, os.close, lease)
    refuse_damaged(path, _missing_or_cut(path, fragments))
    refuse_damaged(path, changed_files(path, _deletion_files(path, fragments)))
    return table


def history(path: Path, most: int) -> list[tuple[int, str]]:
    """Number and date (ISO 8601) of the newest versions on disk, at most `most`, newest first."""
    table = open_table(path)
    with reading(table):
        versions = sorted(table.versions(), key=lambda version: -version["version"])[:most]
    found = []
    for version in versions:
        number, date = version["version"], version["timestamp"]
        assert isinstance(number, int) and isinstance(date, datetime)
        found.append((number, date.astimezone(UTC).isoformat(timespec="seconds")))
    return found


def damaged_files(table: lance.LanceDataset, path: Path) -> list[str]:
    """A line for each problem of the files of a table. All files are read, but their rows are not decoded."""
    fragments = table.get_fragments()
    problems = list(_missing_or_cut(path, fragments))
    if problems:
        return problems
    data = [file for file, _ in _data_files(path, fragments)]
    small = [manifest_of(path, table.version), *_deletion_files(path, fragments)]
    read = progress(data, total=len(data), description="verify files", unit="file")
    return [*changed_files(path, small), *changed_files(path, read, must_be_known=True)]


def keeps_removed_rows(path: Path, table: lance.LanceDataset) -> bool:
    """Whether data files have rows that the newest version does not read: deleted rows, and rows that were rewritten."""
    fragments = table.get_fragments()
    used = {file for file, _ in _data_files(path, fragments)}
    stored = {path.parent / name for name in recorded_digests(path) if name.startswith(f"{path.name}/data/")}
    return any(one.num_deletions for one in fragments) or any(one.is_file() for one in stored - used)


def refuse_changed_data(table: lance.LanceDataset, path: Path) -> None:
    """Compares the data files of a table with their digests. All files are read.

    Call this function before all rows of a table are read, if a change of one byte matters: Lance decodes changed data without
    an error, or aborts the process.

    Raises:
        DamagedError: a data file has changed.
    """
    data = [file for file, _ in _data_files(path, table.get_fragments())]
    refuse_damaged(path, changed_files(path, data))


def write_rows(
    path: Path, rows: Iterable[pa.RecordBatch], schema: pa.Schema, new: bool = False
) -> list[FragmentMetadata]:
    """Writes rows to data files that belong to no version yet; with `new`, the table can have another schema.

    Raises:
        RealmError: `rows` raised this error.
        WriteFailed: the rows cannot be written.
    """
    failed: list[RealmError] = []

    def passed_on() -> Iterator[pa.RecordBatch]:
        try:
            yield from rows
        except RealmError as error:  # Lance raises an error of another class instead
            failed.append(error)
            raise

    mode = "create" if newest_version(path) is None else "overwrite" if new else "append"
    reader = pa.RecordBatchReader.from_batches(schema, passed_on())
    with writing_table(path):
        try:
            fragments: list[FragmentMetadata] = write_fragments(
                reader,
                path,
                schema=schema,
                mode=mode,
                data_cache_bytes=min(_COLUMN_BUFFER * len(schema), _BUFFER),
            )
        except Exception:
            if failed:
                raise failed[0] from None
            raise
    written = {path / "data" / file.path: file.file_size_bytes for one in fragments for file in one.files}
    for file, size in written.items():  # Lance raises no error if the disk is full at the last file
        if size is not None and file.stat().st_size != size:
            raise WriteFailed(f"{file} cannot be written: {file.stat().st_size} of {size} bytes are on disk")
    record(path.parent, list(written))
    return fragments


@contextmanager
def uncommitted(path: Path) -> Iterator[None]:
    """A context for writing and committing files: until its end, no process removes files that belong to no version.

    If the block fails, the files that belong to no version are removed, unless another process is writing.
    """
    with writing_table(path):
        path.mkdir(parents=True, exist_ok=True)
        writing = os.open(path, os.O_RDONLY)
        with _kept_open(writing):
            lock_shared(writing)
    try:
        yield
    except BaseException:
        _unlock(writing)
        with suppress(RealmError, OSError):  # the error of the block is the one to raise
            remove_uncommitted(path)
        raise
    else:
        _unlock(writing)


def replace_rows(
    path: Path, table: lance.LanceDataset, numbers: np.ndarray, fragments: Sequence[FragmentMetadata]
) -> lance.LanceDataset:
    """Deletes the rows with these numbers and appends the rows of `fragments`, in one commit."""
    with reading(table):
        rows = table.scanner(columns=[], with_row_address=True).to_table()
    # An address has 32 bits for the fragment, and 32 bits for the row in the fragment.
    addresses = np.sort(rows.column("_rowaddr").to_numpy()[numbers])
    emptied, changed, files = [], [], []
    for fragment in table.get_fragments():
        first, end = np.searchsorted(addresses >> 32, [fragment.fragment_id, fragment.fragment_id + 1])
        if first == end:
            continue
        with writing_table(path):
            left = fragment.delete_rows((addresses[first:end] & 0xFFFFFFFF).tolist())
        if left is None or left.deletion_file is None:  # all rows of the fragment are deleted
            emptied.append(fragment.fragment_id)
        else:
            changed.append(left)
            files.append(path / left.deletion_file.path(left.id))
    record(path.parent, files)
    update = lance.LanceOperation.Update(
        removed_fragment_ids=emptied, updated_fragments=changed, new_fragments=list(fragments)
    )
    return commit(path, update, table)


def add_columns(
    path: Path,
    table: lance.LanceDataset,
    columns: Sequence[pa.Field],
    properties: Mapping[str, str] | None = None,
) -> lance.LanceDataset:
    """Commits a version with further columns, which are null in all rows; no data file is written.

    Rows that were written before, and are committed later, are null in these columns too.
    """
    schema = pa.schema([*table.schema, *columns], metadata=table.schema.metadata)
    fragments = [fragment.metadata for fragment in table.get_fragments()]
    return commit(
        path, lance.LanceOperation.Merge(fragments, LanceSchema.from_pyarrow(schema)), table, properties
    )


def commit(
    path: Path,
    operation: lance.LanceOperation.BaseOperation,
    table: lance.LanceDataset | None = None,
    properties: Mapping[str, str] | None = None,
) -> lance.LanceDataset:
    """Commits a new version atomically; `table` is the version that the operation was made for, or None for a new table.

    Raises:
        ChangedMeanwhile: another process changed the table.
    """
    # Check and commit need one lock, because Lance would commit both of two concurrent changes.
    with one_writer(path.parent):
        if table is not None:
            check_newest(path, table)
        transaction = lance.Transaction(
            table.version if table else 0, operation, transaction_properties=dict(properties or {})
        )
        with writing_table(path):
            try:
                # The session of `table` would keep the manifest of every version in memory.
                committed = lance.LanceDataset.commit(path, transaction)
            except CommitConflictError as error:
                raise _changed_meanwhile(path) from error
        try:
            record(path.parent, [manifest_of(path, committed.version)])
        except WriteFailed as error:  # the version is already committed, and valid without a digest
            _log.warning("version %d is committed, but %s", committed.version, error)
        with suppress(OSError):  # for example, too many open files; the version is already committed
            _in_use[committed] = _lease(path, committed.version)
            weakref.finalize(committed, os.close, _in_use[committed])
    return committed


def check_newest(path: Path, table: lance.LanceDataset) -> None:
    """Raises ChangedMeanwhile if there is a newer version, or if the folder was replaced after the table was opened.

    A change of several steps calls this function first, inside `one_writer`.
    """
    manifest = manifest_of(path, table.version)
    newest = newest_version(path) == table.version and manifest.exists()
    if newest and table in _in_use:
        newest = os.path.samestat(os.fstat(_in_use[table]), manifest.stat())
    if not newest:
        raise _changed_meanwhile(path)


def _changed_meanwhile(path: Path) -> ChangedMeanwhile:
    return ChangedMeanwhile(f"{path} was changed by another process meanwhile: run the command again")


def remove_uncommitted(path: Path) -> None:
    """Removes files that belong to no version, unless another process is writing."""
    newest = open_table(path)
    alone = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process is writing, or the file system has no locks
        os.close(alone)
        return
    try:
        with writing_table(path):
            newest.cleanup_old_versions(retain_versions=newest.version, delete_unverified=True)
    finally:
        _unlock(alone)


def _unlock(descriptor: int) -> None:
    # A forked child process can have the descriptor too, so closing is not enough.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def take_rows(table: lance.LanceDataset, numbers: np.ndarray, columns: Sequence[str]) -> pa.Table:
    """The rows with these numbers, in the order of the numbers; deleted rows have no number.

    Rows are taken fragment by fragment, because `LanceDataset.take` goes through the deletions of a fragment once per number.
    """
    fragments = table.get_fragments()
    ends = np.cumsum([fragment.metadata.num_rows for fragment in fragments])
    wanted, place = np.unique(numbers, return_inverse=True)
    parts, start = [], 0
    for fragment, end in zip(fragments, ends.tolist(), strict=True):
        offsets = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, end)] - start
        if len(offsets):
            # Lance puts columns that the fragment does not have before the other columns.
            parts.append(fragment.take(offsets.tolist(), columns=list(columns)).select(list(columns)))
        start = end
    if not parts:
        return table.to_table(columns=list(columns), limit=0)
    return pa.concat_tables(parts).take(place)


def stream_rows(
    path: Path, table: lance.LanceDataset, first: int = 0, columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of the fragments from number `first` on, in order, without deleted rows; by default all columns.

    The memory does not depend on the number of rows and files.

    Raises:
        DamagedError: a file is damaged.
    """
    with reading(table):
        # The session of `table` would keep the metadata of every file in memory, about 0.2 MB per file.
        uncached = lance.dataset(path, version=table.version, metadata_cache_size_bytes=0)
        fragments = uncached.get_fragments()[first:]
        yield from uncached.scanner(
            columns=columns,
            fragments=fragments,
            batch_size=1024,
            batch_readahead=2,
            fragment_readahead=1,
        ).to_batches()


@contextmanager
def reading(table: lance.LanceDataset) -> Iterator[None]:
    """Turns exceptions that Lance raises for damaged data into DamagedError."""
    try:
        yield
    except (pa.ArrowException, OSError, RuntimeError) as error:
        raise DamagedError(
            f"{table.uri} cannot be read: {reason(error)}; `realm kb verify` checks all files"
        ) from error


@contextmanager
def writing_table(path: Path) -> Iterator[None]:
    """Turns exceptions of failed writes into `WriteFailed`."""
    with writing(path, pa.ArrowException, RuntimeError):
        yield


def manifest_of(path: Path, version: int) -> Path:
    """The manifest file of a version."""
    return path / VERSIONS / f"{_LAST - version:020d}.manifest"


def versions_of(path: Path) -> list[int]:
    """Numbers of the versions on disk, oldest first, read from file names only."""
    names = [file.stem for file in (path / VERSIONS).glob("*.manifest")]
    return sorted(_LAST - int(name) for name in names if name.isdecimal())


def _lease(path: Path, version: int) -> int:
    """An open file descriptor with a lock, which prevents the removal of a version until the descriptor is closed.

    Raises:
        FileNotFoundError: the version does not exist.
    """
    manifest = manifest_of(path, version)
    lease = os.open(manifest, os.O_RDONLY)
    with _kept_open(lease):
        lock_shared(lease)
        if not (manifest.exists() and os.path.samestat(os.fstat(lease), manifest.stat())):
            raise FileNotFoundError(manifest)
    return lease


def lock_shared(descriptor: int) -> None:
    """Locks an open file or folder together with other readers; does nothing on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # the file system has no locks
            raise


@contextmanager
def _kept_open(descriptor: int) -> Iterator[None]:
    """A context that closes the descriptor if the block fails."""
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


def _lost(path: Path) -> Iterator[str]:
    """A message if the newest version with a recorded digest is missing."""
    lost = _lost_version(path)
    # Another process can have removed the version, or replaced the folder, between the reading of the digests and of the names.
    if lost is not None and lost == _lost_version(path):
        number, newest = lost
        there = f"version {newest}" if newest else "no version"
        yield (
            f"{path.name} has {there}, but version {number} was committed{' later' if newest else ''}: "
            f"{manifest_of(path, number).name} is missing"
        )


def _lost_version(path: Path) -> tuple[int, int | None] | None:
    """The newest version with a recorded digest, if it is missing, and the newest version that is there."""
    name = re.compile(rf"{re.escape(path.name)}/{VERSIONS}/(\d{{20}})\.manifest")
    committed = [_LAST - int(found[1]) for found in map(name.fullmatch, recorded_digests(path)) if found]
    # The digests are read before the names of the versions, because another process can commit a version in between.
    newest = newest_version(path)
    return (max(committed), newest) if committed and max(committed) > (newest or 0) else None


def _data_files(path: Path, fragments: Sequence[LanceFragment]) -> Iterator[tuple[Path, int | None]]:
    for fragment in fragments:
        for file in fragment.data_files():
            yield path / "data" / file.path, file.file_size_bytes


def _deletion_files(path: Path, fragments: Sequence[LanceFragment]) -> list[Path]:
    return [path / name for name in (fragment.deletion_file() for fragment in fragments) if name is not None]


def _missing_or_cut(path: Path, fragments: Sequence[LanceFragment]) -> Iterator[str]:
    for file in _deletion_files(path, fragments):
        if not file.is_file():
            yield f"{file.relative_to(path.parent)} is missing"
    for file, size in _data_files(path, fragments):
        if not file.is_file():
            yield f"{file.relative_to(path.parent)} is missing"
        elif size is not None and file.stat().st_size != size:
            yield f"{file.relative_to(path.parent)} has {file.stat().st_size} bytes instead of {size}"
