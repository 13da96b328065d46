"""Upkeep of Lance tables: merges small files, and removes deleted rows and old versions."""

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import lance

from realm.errors import DamagedError, WriteFailed
from realm.folders import one_writer
from realm.store.merged import settle_merged
from realm.store.tables.digests import forget
from realm.store.tables.table import (
    ChangedMeanwhile,
    check_newest,
    commit,
    manifest_of,
    newest_version,
    open_table,
    remove_uncommitted,
    stream_rows,
    uncommitted,
    versions_of,
    write_rows,
    writing_table,
)

_log = logging.getLogger(__name__)

TIDY_EVERY = 32
"""If a table has more versions than this number, small files are merged and old versions are removed."""


class Removed(NamedTuple):
    """Result of removing old versions."""

    versions: int
    """Number of removed versions."""
    in_use: int
    """Number of versions that stay because a process has them open."""


def tidy(path: Path, table: lance.LanceDataset) -> lance.LanceDataset:
    """If a table has more than `TIDY_EVERY` versions, merges small files and removes old versions -> the newest version.

    The order of the rows stays. The last files of the table are merged. Starting with the last file, a file is included if it
    has at most twice as many rows as all later files together. So each row is rewritten O(log rows) times. If the disk is full
    or a file is damaged, the failure is only logged, because the change before this upkeep is already committed.
    """
    if len(versions_of(path)) <= TIDY_EVERY:
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
    except (ChangedMeanwhile, DamagedError, WriteFailed) as error:
        _log.warning("%s was not compacted: %s", path, error)
    return table


def compacted(path: Path, table: lance.LanceDataset) -> lance.LanceDataset:
    """Commits a version with the same rows in few files, without deleted rows. Older versions stay until they are removed.

    Raises:
        ChangedMeanwhile: another process changed the table.
    """
    fragments = table.get_fragments()
    if len(fragments) > 1 or any(fragment.num_deletions for fragment in fragments):
        return _rewritten(path, table, 0)
    return table


def _rewritten(path: Path, table: lance.LanceDataset, first: int) -> lance.LanceDataset:
    """Commits a version in which the fragments from number `first` on are rewritten without deleted rows.

    The lines of `merged.jsonl` that a killed change wrote for this version are removed first.
    """
    old = table.get_fragments()[first:]
    with uncommitted(path):
        batches = stream_rows(path, table, first)
        new = write_rows(path, batches, table.schema) if sum(one.count_rows() for one in old) else []
        update = lance.LanceOperation.Update(
            removed_fragment_ids=[fragment.fragment_id for fragment in old],
            updated_fragments=[],
            new_fragments=new,
        )
        with one_writer(path.parent):
            check_newest(path, table)
            settle_merged(path.parent, int(table.version))
            return commit(path, update, table)


def remove_versions(path: Path, keep: int) -> Removed:
    """Removes all versions except the newest `keep` versions and the versions that a process has open.

    The files that only removed versions use are removed. Files that were left behind when a process was killed are removed
    too, unless another process is writing.
    """
    in_use = 0
    with one_writer(path.parent):
        old = versions_of(path)[:-keep]
        for start in range(0, len(old), 256):  # one open file per version
            in_use += _remove(path, old[start : start + 256])
        remove_uncommitted(path)
        with writing_table(path):
            forget(path.parent)
    return Removed(len(old) - in_use, in_use)


def _remove(path: Path, versions: Sequence[int]) -> int:
    """Removes those of the given versions that no process has open -> the number of versions that a process has open."""
    free, locked = [], []
    try:
        with writing_table(path):
            for version in versions:
                locked.append(os.open(manifest_of(path, version), os.O_RDWR))
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


def forget_after(path: Path, version: int) -> None:
    """Removes every version after `version`, and every file that belongs to no version.

    No other process may write to the table. If the process is killed, the table can still be opened, and the call can be
    repeated.

    Raises:
        InputError: the version does not exist; nothing is removed.
        DamagedError: the version is damaged; nothing is removed.
    """
    open_table(path, version)
    newest = newest_version(path) or version
    later = {manifest_of(path, number) for number in range(version + 1, newest + 1)}
    # The digests are removed first, because a version with a digest and without a manifest counts as lost.
    forget(path.parent, later)
    for manifest in sorted(later):  # newest first, so that the newest remaining version is always complete
        manifest.unlink(missing_ok=True)
    (path / "_versions" / "latest_version_hint.json").unlink(missing_ok=True)
    open_table(path).cleanup_old_versions(retain_versions=newest, delete_unverified=True)
    forget(path.parent)
