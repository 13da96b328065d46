"""A Lance dataset as the knowledge base uses it: rows written aside, one atomic commit, damage noticed.

A change has two halves. Rows, and which rows are gone, are written to files that no version names yet;
`commit` makes a new version of them. Killed anywhere before the commit, a table is as it was, and the files
left behind go with the next removal of old versions. Writers hold the table's folder locked, shared with one
another, until their commit (`uncommitted`), and nothing that they wrote is removed before. Only one process
commits at a time, and only to the version that its change was made for.

An open table holds its version's manifest open and locked, shared with other readers. A version that is
locked so is not removed by anyone, so a reader keeps what it opened, until it closes it or dies.

Lance keeps no checksums: a flipped bit in a data file is read as other data, and one in a deletion file can
abort the process. So every file gets a line in `SHA256SUMS` beside the tables, in the format of
`sha256sum`, before the commit that names it. Opening a table compares all sizes, and the digests of the
small files, and refuses a table whose newest listed version is missing; `damaged_files` reads every byte.
"""

import errno
import fcntl
import hashlib
import io
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import lance
import numpy as np
import pyarrow as pa
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata, LanceFragment, write_fragments

from realm.errors import ConflictError, DamagedError, InputError, RealmError, WriteFailed, reason, writing
from realm.files import sync_folder, write_lines
from realm.folders import one_writer
from realm.progress import progress

T = TypeVar("T")
_log = logging.getLogger(__name__)
PASSAGES = "passages.lance"
"""The table of passages in a knowledge base."""
CHECKSUMS = "SHA256SUMS"
TRIES = 5
"""How often a change is made anew when another process changed the same tables."""
TIDY_EVERY = 32
"""How many versions there may be before small files are put together and old versions removed."""
_DIFFERS = "has changed since it was written (SHA-256 differs)"
_LAST = 2**64 - 1
"""Lance names the manifest of version v after this minus v."""

_in_use: "weakref.WeakKeyDictionary[lance.LanceDataset, int]" = weakref.WeakKeyDictionary()
"""The manifest of each open table, held open and locked: no other process removes that version (`remove_versions`)."""


class ChangedMeanwhile(ConflictError):
    """Another process changed the table that a change was made for; made anew, the change may succeed."""


class Removed(NamedTuple):
    """What became of old versions."""

    versions: int
    """How many are gone."""
    in_use: int
    """How many stay because a process has them open."""


def made_anew(folder: Path, change: Callable[[], T]) -> T:
    """`change()` of the tables in a folder, begun again where another process changed them before its commit.

    The last try keeps other writers out from its beginning, so that it succeeds.
    """
    for _ in range(TRIES - 1):
        try:
            return change()
        except ChangedMeanwhile:
            continue
    with one_writer(folder):
        return change()


def newest_version(path: Path) -> int | None:
    """The number of the table's newest version, from file names alone; none where nothing was committed."""
    return max(_versions(path), default=None)


def was_committed(path: Path) -> bool:
    """Whether the table has a version, or had one by the list of digests."""
    return newest_version(path) is not None or any(_lost(path, None))


def committed(path: Path, version: int) -> float:
    """When a version was, in seconds since 1970."""
    return _manifest(path, version).stat().st_mtime


def open_table(path: Path, version: int | None = None) -> lance.LanceDataset:
    """The table at one version, by default the newest; it stays there whatever is committed later.

    Raises:
        InputError: no table, no such version, or files that are missing, cut short or changed.
    """
    newest = newest_version(path)
    if newest is None:
        _refuse(path, _lost(path, None))
        raise InputError(f"{path} holds no table")
    number = newest if version is None else version
    try:
        lease = _lease(path, number)
    except FileNotFoundError:
        if version is None and newest_version(path) != newest:  # removed since, and a newer one is there
            return open_table(path)
        raise InputError(f"{path} has no version {number}: the newest is {newest}") from None
    with _kept_open(lease):
        _refuse(path, _lost(path, newest))
        _refuse(path, _changed(path, [_manifest(path, number)]))
        try:
            table = lance.dataset(path, version=number)
            fragments = table.get_fragments()
        except Exception as error:  # of many classes: whatever Rust could not read
            raise InputError(f"{path} cannot be read: {reason(error)}") from error
        _in_use[table] = lease
    weakref.finalize(table, os.close, lease)
    _refuse(path, _missing_or_cut(path, fragments))
    _refuse(path, _changed(path, _deletion_files(path, fragments)))
    return table


def history(path: Path, most: int) -> list[tuple[int, str]]:
    """Number and date (ISO 8601) of the newest versions that are still there, newest first."""
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
    """What is wrong with the files of a table at its version, one line each; reads them all, decodes none."""
    fragments = table.get_fragments()
    problems = list(_missing_or_cut(path, fragments))
    if problems:
        return problems
    data = [file for file, _ in _data_files(path, fragments)]
    small = [_manifest(path, table.version), *_deletion_files(path, fragments)]
    read = progress(data, total=len(data), description="verify files", unit="file")
    return [*_changed(path, small), *_changed(path, read, must_be_known=True)]


def write_rows(
    path: Path, rows: Iterable[pa.RecordBatch], schema: pa.Schema, new: bool = False
) -> list[FragmentMetadata]:
    """Puts rows into data files of no version yet; `new` ones may have another schema than the table."""
    mode = "create" if newest_version(path) is None else "overwrite" if new else "append"
    reader = pa.RecordBatchReader.from_batches(schema, rows)
    with _writing(path):
        fragments: list[FragmentMetadata] = write_fragments(reader, path, schema=schema, mode=mode)
    written = {path / "data" / file.path: file.file_size_bytes for one in fragments for file in one.files}
    for file, size in written.items():  # Lance does not notice when the disk has no room for the last of them
        if size is not None and file.stat().st_size != size:
            raise WriteFailed(f"{file} cannot be written: {file.stat().st_size} of {size} bytes are on disk")
    record(path.parent, list(written))
    return fragments


@contextmanager
def uncommitted(path: Path) -> Iterator[None]:
    """A block that writes files and commits them: until it ends, no other process removes files of no version.

    When the block fails, what it wrote is removed, unless it was committed already or others write too.
    """
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        writing = os.open(path, os.O_RDONLY)
        with _kept_open(writing):
            _lock_shared(writing)
    try:
        yield
    except BaseException:
        _unlock(writing)
        with suppress(RealmError, OSError):  # the block's own error counts
            _remove_left_behind(path)
        raise
    else:
        _unlock(writing)


def replace_rows(
    path: Path, table: lance.LanceDataset, numbers: np.ndarray, fragments: Sequence[FragmentMetadata]
) -> lance.LanceDataset:
    """One commit without the rows of these numbers and, behind the others, with those of `fragments`."""
    rows = table.scanner(columns=[], with_row_address=True).to_table()
    addresses = np.sort(rows.column("_rowaddr").to_numpy()[numbers])  # 32 bits of fragment, 32 of its row
    emptied, changed, files = [], [], []
    for fragment in table.get_fragments():
        first, end = np.searchsorted(addresses >> 32, [fragment.fragment_id, fragment.fragment_id + 1])
        if first == end:
            continue
        with _writing(path):
            left = fragment.delete_rows((addresses[first:end] & 0xFFFFFFFF).tolist())
        if left is None or left.deletion_file is None:  # nothing is left of it
            emptied.append(fragment.fragment_id)
        else:
            changed.append(left)
            files.append(path / left.deletion_file.path(left.id))
    record(path.parent, files)
    update = lance.LanceOperation.Update(
        removed_fragment_ids=emptied, updated_fragments=changed, new_fragments=list(fragments)
    )
    return commit(path, update, table)


def commit(
    path: Path,
    operation: lance.LanceOperation.BaseOperation,
    table: lance.LanceDataset | None = None,
    properties: Mapping[str, str] | None = None,
) -> lance.LanceDataset:
    """One atomic new version; `table` is the version that the operation was made for, if there is one.

    Raises:
        ChangedMeanwhile: another process changed the table.
    """
    # The check and the commit are one step: Lance would put the second change on top.
    with one_writer(path.parent):
        if table is not None:
            check_newest(path, table)
        transaction = lance.Transaction(
            table.version if table else 0, operation, transaction_properties=dict(properties or {})
        )
        with _writing(path):
            try:
                committed = lance.LanceDataset.commit(table or path, transaction)
            except CommitConflictError as error:
                raise _changed_meanwhile(path) from error
        try:
            record(path.parent, [_manifest(path, committed.version)])
        except WriteFailed as error:  # the version is there, and stands without its line
            _log.warning("version %d is committed, but %s", committed.version, error)
        with suppress(OSError):  # no more open files, perhaps: the version is committed all the same
            _in_use[committed] = _lease(path, committed.version)
            weakref.finalize(committed, os.close, _in_use[committed])
    return committed


def check_newest(path: Path, table: lance.LanceDataset) -> None:
    """Raises ChangedMeanwhile unless the table is at the newest version, and its folder was not replaced since it was opened.

    For a change that has more than one step, inside `one_writer`.
    """
    manifest = _manifest(path, table.version)
    newest = newest_version(path) == table.version and manifest.exists()
    if newest and table in _in_use:
        newest = os.path.samestat(os.fstat(_in_use[table]), manifest.stat())
    if not newest:
        raise _changed_meanwhile(path)


def _changed_meanwhile(path: Path) -> ChangedMeanwhile:
    return ChangedMeanwhile(f"{path} was changed by another process meanwhile: run the command again")


def tidy(path: Path, table: lance.LanceDataset) -> lance.LanceDataset:
    """After every `TIDY_EVERY` commits: small files at the end become one, and old versions go -> the newest version.

    The rows keep their order. Files at the end are taken together while the next is at most twice as large as those
    behind it: a row is written again about as often as the number of rows can be halved. A failure to write is logged:
    the change before it is committed.
    """
    if len(_versions(path)) <= TIDY_EVERY:
        return table
    counts = [fragment.count_rows() for fragment in table.get_fragments()]
    first, rows = len(counts), 0
    while first and (rows == 0 or counts[first - 1] <= 2 * rows):
        first -= 1
        rows += counts[first]
    try:
        if len(counts) - first > 1:
            table = _rewritten(path, table, first)
        remove_versions(path, TIDY_EVERY // 2)
    except (ChangedMeanwhile, WriteFailed) as error:
        _log.warning("%s was not compacted: %s", path, error)
    return table


def compacted(path: Path, table: lance.LanceDataset) -> lance.LanceDataset:
    """The same rows in few files, without those that were deleted; older versions stay until they are removed.

    Raises:
        ChangedMeanwhile: another process changed the table.
    """
    fragments = table.get_fragments()
    if len(fragments) > 1 or any(fragment.num_deletions for fragment in fragments):
        return _rewritten(path, table, 0)
    return table


def _rewritten(path: Path, table: lance.LanceDataset, first: int) -> lance.LanceDataset:
    """A version whose fragments from the `first`-th on are written anew, without deleted rows."""
    old = table.get_fragments()[first:]
    with uncommitted(path):
        with reading(table):
            batches = table.scanner(fragments=old, batch_size=8192).to_batches()
            new = write_rows(path, batches, table.schema) if sum(one.count_rows() for one in old) else []
        update = lance.LanceOperation.Update(
            removed_fragment_ids=[fragment.fragment_id for fragment in old],
            updated_fragments=[],
            new_fragments=new,
        )
        return commit(path, update, table)


def remove_versions(path: Path, keep: int) -> Removed:
    """Removes all but the newest `keep` versions and those that a process has open, with the files that no other has.

    What killed writers left goes too, unless somebody writes at this moment.
    """
    in_use = 0
    with one_writer(path.parent):
        old = _versions(path)[:-keep]
        for start in range(0, len(old), 256):  # a file stays open for each
            in_use += _remove(path, old[start : start + 256])
        _remove_left_behind(path)
        with _writing(path):
            forget(path.parent)
    return Removed(len(old) - in_use, in_use)


def _remove(path: Path, versions: Sequence[int]) -> int:
    """Removes those of the versions that nobody has open; returns how many are open."""
    free, locked = [], []
    try:
        with _writing(path):
            for version in versions:
                locked.append(os.open(_manifest(path, version), os.O_RDWR))
                try:
                    fcntl.flock(locked[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                    free.append(version)
                except BlockingIOError:
                    continue
            if free:
                newest = lance.dataset(path)
                newest.cleanup_old_versions(versions=free, error_if_tagged_old_versions=False)
    finally:
        for descriptor in locked:
            os.close(descriptor)
    return len(versions) - len(free)


def _remove_left_behind(path: Path) -> None:
    """Removes files that no version names, unless a process may still commit them."""
    newest = open_table(path)
    alone = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody writes, or the file system has no locks
        os.close(alone)
        return
    try:
        with _writing(path):
            newest.cleanup_old_versions(retain_versions=newest.version, delete_unverified=True)
    finally:
        _unlock(alone)


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a forked child has it too
    os.close(descriptor)


def forget_after(path: Path, version: int) -> None:
    """Removes every version after this one, and every file that no version names.

    For a table with one writer, which is the caller. Killed anywhere, it leaves a table that opens, and can be called again.

    Raises:
        InputError: there is no such version, or it is damaged; nothing is removed.
    """
    open_table(path, version)
    newest = newest_version(path) or version
    later = {_manifest(path, number) for number in range(version + 1, newest + 1)}
    forget(
        path.parent, later
    )  # first: a version with a line in the list and no manifest is lost, not forgotten
    for manifest in sorted(later):  # the newest first, so that at any moment the newest is whole
        manifest.unlink(missing_ok=True)
    (path / "_versions" / "latest_version_hint.json").unlink(missing_ok=True)
    open_table(path).cleanup_old_versions(retain_versions=newest, delete_unverified=True)
    forget(path.parent)


def take_rows(table: lance.LanceDataset, numbers: np.ndarray, columns: Sequence[str]) -> pa.Table:
    """The rows of these numbers in this order; a number counts the rows that are not deleted.

    Fragment by fragment, because `LanceDataset.take` walks a fragment's deletions once for every number: a
    second for 256 rows where 4,000 are gone.
    """
    fragments = table.get_fragments()
    ends = np.cumsum([fragment.metadata.num_rows for fragment in fragments])
    wanted, place = np.unique(numbers, return_inverse=True)
    parts, start = [], 0
    for fragment, end in zip(fragments, ends.tolist(), strict=True):
        offsets = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, end)] - start
        if len(offsets):
            parts.append(fragment.take(offsets.tolist(), columns=list(columns)))
        start = end
    if not parts:
        return table.to_table(columns=list(columns), limit=0)
    return pa.concat_tables(parts).take(place)


@contextmanager
def reading(table: lance.LanceDataset) -> Iterator[None]:
    """Turns whatever Lance raises over damaged data into an InputError."""
    try:
        yield
    except (pa.ArrowException, OSError, RuntimeError) as error:
        raise InputError(f"{table.uri} cannot be read, see `realm kb verify`: {reason(error)}") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns what Lance or the system raises when it cannot write into `WriteFailed`; no version has anything of it."""
    with writing(path, pa.ArrowException, RuntimeError):
        yield


def _manifest(path: Path, version: int) -> Path:
    return path / "_versions" / f"{_LAST - version:020d}.manifest"


def _versions(path: Path) -> list[int]:
    """The versions that are there, oldest first, from file names alone."""
    names = [file.stem for file in (path / "_versions").glob("*.manifest")]
    return sorted(_LAST - int(name) for name in names if name.isdecimal())


def _lease(path: Path, version: int) -> int:
    """An open file that keeps a version from being removed, until it is closed or its process ends."""
    manifest = _manifest(path, version)
    lease = os.open(manifest, os.O_RDONLY)
    with _kept_open(lease):
        _lock_shared(lease)
        if not (manifest.exists() and os.path.samestat(os.fstat(lease), manifest.stat())):
            raise FileNotFoundError(manifest)
    return lease


def _lock_shared(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
            raise


@contextmanager
def _kept_open(descriptor: int) -> Iterator[None]:
    """Closes the file when the block fails."""
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


def _lost(path: Path, newest: int | None) -> Iterator[str]:
    """What is wrong where a version was committed and is not there: each has a line in the list."""
    name = re.compile(rf"{re.escape(path.name)}/_versions/(\d{{20}})\.manifest")
    committed = [_LAST - int(found[1]) for found in map(name.fullmatch, _recorded(path)) if found]
    if committed and max(committed) > (newest or 0):
        there = f"version {newest}" if newest else "no version"
        yield (
            f"{path.name} has {there}, and version {max(committed)} was committed{' after it' if newest else ''}: "
            f"{_manifest(path, max(committed)).name} is missing"
        )


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


def _changed(path: Path, files: Iterable[Path], must_be_known: bool = False) -> Iterator[str]:
    """Files unlike their line in the list. The newest manifest may have none: it gets it after its commit."""
    known = _recorded(path)
    for file in files:
        name = file.relative_to(path.parent).as_posix()
        if name not in known:
            if must_be_known:
                yield f"{name} has no checksum in {CHECKSUMS}"
        elif _digest(file) != known[name]:
            yield f"{name} {_DIFFERS}"


def _refuse(path: Path, problems: Iterable[str]) -> None:
    for problem in problems:
        raise DamagedError(f"{path.parent} is damaged: {problem}")


def record(folder: Path, files: Sequence[Path]) -> None:
    """Puts the digests of files of a folder into its list."""
    lines = "".join(f"{_digest(file)}  {file.relative_to(folder).as_posix()}\n" for file in files)
    with one_writer(folder), _writing(folder), (folder / CHECKSUMS).open("ab+") as listed:
        if listed.tell() and (listed.seek(-1, os.SEEK_END), listed.read(1))[1] != b"\n":
            lines = "\n" + lines  # a full disk cut the last line short
        listed.write(lines.encode())
        listed.flush()
        os.fsync(listed.fileno())


def add_lines(file: Path, lines: Iterable[str]) -> None:
    """Adds lines to a file that stands beside tables, on disk, and its new digest to the list.

    Killed between the two, the lines count. What a full disk leaves of a line stays a line of its own.
    """
    with one_writer(file.parent):
        with _writing(file), file.open("ab") as stream:
            stream.write("".join(f"\n{line}" for line in lines).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
            sync_folder(file.parent)  # the file may be new
        record(file.parent, [file])


def lines_of(file: Path) -> list[bytes]:
    """Of a file that grows by `add_lines`; none where there is no file.

    Raises:
        InputError: what its digest was taken of has changed.
    """
    _refuse(file, changed_lines(file))
    return _content(file).split(b"\n")


def changed_lines(file: Path) -> Iterator[str]:
    """What is wrong with a file that grows by `add_lines`: it must begin with what its digest in the list was taken of.

    A file without a digest is taken as it is: it was written before such files had one, or its writer was killed.
    """
    known = _recorded(file).get(file.name)
    if known is None:
        return
    digest = hashlib.sha256()
    for line in io.BytesIO(_content(file)):
        digest.update(line)
        if digest.hexdigest() == known:
            return
    if _recorded(file).get(file.name) != known:  # it was written anew meanwhile
        yield from changed_lines(file)
    else:
        yield f"{file.name} {_DIFFERS if file.is_file() else 'is missing'}"


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def forget(folder: Path, files: Set[Path] = frozenset()) -> None:
    """Takes from the list the lines of these files and of files that are gone: a later version may have a name again."""
    there = {
        name: digest
        for name, digest in _recorded(folder / CHECKSUMS).items()
        if (folder / name).is_file() and folder / name not in files
    }
    write_lines(folder / CHECKSUMS, [f"{digest}  {name}" for name, digest in there.items()])


def _recorded(path: Path) -> dict[str, str]:
    listed = path.parent / CHECKSUMS
    lines = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
