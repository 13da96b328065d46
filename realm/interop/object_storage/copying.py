"""Copies a folder to an object store, and from there to other machines: `realm push` and `realm pull`.

    ADDRESS/copy.json        the files of the newest version: path, size and SHA-256 of each
    ADDRESS/files/<SHA-256>  the content of a file

A push uploads the contents that are not stored yet, and then replaces `copy.json` in one step, so a pull copies either the old
or the new version. The contents of the replaced version stay until the next push, because a pull can still be copying them.

A pull fills a folder beside the target, and exchanges the two folders when the new one is complete. A server can use the target
meanwhile: it reads texts of the replaced version until it has loaded the new one, so the files with these texts stay in the
folder until the next pull.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypedDict

from realm.documents.remote import RemoteFolder, is_remote
from realm.errors import ConflictError, DamagedError, InputError, RealmError, writing
from realm.files import sync, write_json
from realm.folders import only_holder, remove, replace_folder, restore
from realm.hub import WORKSPACE_PARTS
from realm.interop.object_storage.folder import ROWS, kind_of, local_files, one_version, pulled_version
from realm.interop.object_storage.listing import (
    CONTENTS,
    FORMAT,
    LISTING,
    PULLED,
    CopiedFile,
    ListingJson,
    files_of,
    is_content,
    listing_of,
)
from realm.progress import progress
from realm.store.tables.table import PASSAGES

_MOST_BYTES = 64 << 20
"""Largest `copy.json` that is read."""
_TEXTS = re.compile(rf"(?:{WORKSPACE_PARTS[0]}/)?{re.escape(PASSAGES)}/(?:data|_deletions)/[^/]+")
_log = logging.getLogger(__name__)


class CopiedJson(TypedDict):
    """Report of `realm push` and `realm pull`."""

    kind: str
    files: int
    bytes: int
    copied_files: int
    """Number of contents that were uploaded or downloaded; the others were already there."""
    copied_bytes: int


def push(folder: Path, address: str) -> CopiedJson:
    """Copies a knowledge base, a model or a workspace to an object store. Only one push at a time may write to an address.

    Files that commands make again, such as the BM25 index, are left out. An interrupted push is continued by the next push.

    Raises:
        InputError: the folder is none of the three; or the store cannot be read or written, or has other files at this address.
        DamagedError: the knowledge base or the model is damaged.
        ConflictError: the folder was changed while it was copied, or another push wrote to the address.
    """
    remote = RemoteFolder(address)
    folder = folder.resolve()
    restore(folder)
    kind = kind_of(folder)
    with one_version(folder, kind):
        stored = remote.sizes()
        if others := [name for name in stored if name != LISTING and not is_content(name)]:
            raise InputError(
                f"{remote.address} has files that `realm push` did not write, such as {min(others)}: give an address that "
                "only this copy uses"
            )
        content = remote.read(LISTING, _MOST_BYTES)
        before = None if content is None else _replaceable(content, remote, folder, kind)
        found, copied = _upload(remote, folder, kind, stored)
    _publish(remote, kind, found, content, before)
    return _report(kind, found, copied)


def pull(address: str, folder: str | Path) -> CopiedJson:
    """Copies what `realm push` copied to an address into a folder, which is made, or replaced if an earlier pull made it.

    Contents that the folder has already are not downloaded. An interrupted pull is continued by the next pull.

    Raises:
        InputError: there is no copy at this address, the store cannot be read, or the folder was not made by a pull.
        ConflictError: the folder was changed after it was pulled, another process pulls into it, or the copy was replaced twice
            while it was read.
        DamagedError: a content at the address differs from its SHA-256, the list of files is damaged, or the files are not
            what the list says.
        WriteFailed: the folder cannot be written.
    """
    remote = RemoteFolder(address)
    if is_remote(str(folder)):
        raise InputError(f"{folder} must be a folder on this machine")
    folder = Path(folder).resolve()
    if os.path.ismount(folder):
        raise InputError(
            f"{folder} is a mount point, which cannot be replaced: give a folder in it, such as {folder / 'copy'}"
        )
    content = remote.read(LISTING, _MOST_BYTES)
    if content is None:
        raise InputError(f"{remote.address} has no copy: make it with `realm push FOLDER {remote.address}`")
    listing = listing_of(content, remote)
    wanted = files_of(listing["files"])
    restore(folder)
    before = pulled_version(folder, listing["kind"])
    if before is not None and files_of(before["files"]) == wanted:
        return _report(listing["kind"], wanted, [])
    work = folder.parent / f".{folder.name}.pull"
    if work.is_symlink():
        raise InputError(f"{work} is a link, and a pull needs a folder with this name: remove the link")
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
    with only_holder(work / "lock", f"another process pulls into {folder}"):
        aside = work / "new"
        try:
            copied = _download(remote, wanted, aside, None if before is None else folder)
        except InputError as error:
            if remote.read(LISTING, _MOST_BYTES) != content:
                raise ConflictError(
                    f"{remote.address} was replaced while it was read: repeat the command"
                ) from error
            raise
        _check_kind(aside, listing["kind"], remote)
        with ExitStack() as stack:
            if before is not None:
                stack.enter_context(one_version(folder, listing["kind"]))
            # The folder can have been changed during the download.
            before = pulled_version(folder, listing["kind"])
            replaced = [] if before is None else _keep_texts(folder, aside, before, wanted)
            with writing(aside):
                write_json(aside / PULLED, listing | {"replaced": replaced})
                for one in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
                    sync(one)
                replace_folder(aside, folder)
        remove(work)
    return _report(listing["kind"], wanted, copied)


def _replaceable(content: bytes, remote: RemoteFolder, folder: Path, kind: str) -> ListingJson | None:
    """The list of files that a push replaces; None if the list is damaged."""
    try:
        listing = listing_of(content, remote)
    except DamagedError:
        return None
    if listing["kind"] != kind:
        raise InputError(
            f"{remote.address} has a copy of a {listing['kind']}, and {folder} is a {kind}: give another address"
        )
    return listing


def _publish(
    remote: RemoteFolder,
    kind: str,
    found: Mapping[str, CopiedFile],
    content: bytes | None,
    before: ListingJson | None,
) -> None:
    """Writes the list of files, and removes the contents that neither the new nor the replaced version has.

    `content` is the `copy.json` that was there before the upload, and `before` the list in it, unless it is damaged.
    """
    now, replaced = {file.sha256 for file in found.values()}, set[str]()
    if before is not None:
        old = files_of(before["files"])
        replaced = set(before["replaced"]) if old == found else {file.sha256 for file in old.values()} - now
    listing: ListingJson = {
        "format": FORMAT,
        "kind": kind,
        "files": [
            {"path": path, "bytes": file.size, "sha256": file.sha256} for path, file in sorted(found.items())
        ],
        "replaced": sorted(replaced),
    }
    stored = remote.sizes()
    if remote.read(LISTING, _MOST_BYTES) != content or any(f"{CONTENTS}/{one}" not in stored for one in now):
        raise ConflictError(f"another push has written to {remote.address} meanwhile: repeat the command")
    remote.write(LISTING, json.dumps(listing, indent=1).encode())
    if content is not None and before is None:
        return  # which contents the replaced version has is unknown
    used = {f"{CONTENTS}/{sha256}" for sha256 in now | replaced}
    try:
        remote.remove(sorted(name for name in stored if is_content(name) and name not in used))
    except InputError as error:
        _log.warning("the copy is complete, but contents that it no longer needs stay: %s", error)


# -- copying ----------------------------------------------------------------------------------------------------------


def _upload(
    remote: RemoteFolder, folder: Path, kind: str, stored: Mapping[str, int]
) -> tuple[dict[str, CopiedFile], list[CopiedFile]]:
    """Uploads the contents that are not stored -> all files, and those that were uploaded.

    Raises:
        ConflictError: a file was changed while the files were read.
    """
    uploaded: list[str] = []
    try:
        with _unchanged(folder, kind) as local:
            found = _measured_all(local)
            missing = {
                file: path
                for path, file in found.items()
                if stored.get(f"{CONTENTS}/{file.sha256}") != file.size
            }
            with _bar("push", missing) as report:
                for file, path in missing.items():
                    uploaded.append(f"{CONTENTS}/{file.sha256}")
                    remote.put(local[path], uploaded[-1], report)
    except ConflictError:
        remote.remove(uploaded)  # a content can differ from its name
        raise
    return found, list(missing)


@contextmanager
def _unchanged(folder: Path, kind: str) -> Iterator[dict[str, Path]]:
    """A context with the files of a folder, which ends with ConflictError if a file was changed, added or removed in it."""

    def states(files: Mapping[str, Path]) -> dict[str, tuple[int, int, int]]:
        found = {path: file.stat() for path, file in files.items()}
        return {path: (one.st_ino, one.st_size, one.st_mtime_ns) for path, one in found.items()}

    try:
        local = local_files(folder, kind)
        before = states(local)
        yield local
        after = states(local_files(folder, kind))
    except FileNotFoundError as error:
        raise ConflictError(f"{error.filename} was removed while it was copied: repeat the command") from None
    if changed := sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    ):
        raise ConflictError(f"{folder / changed[0]} was changed while it was copied: repeat the command")


def _download(
    remote: RemoteFolder, wanted: Mapping[str, CopiedFile], aside: Path, before: Path | None
) -> list[CopiedFile]:
    """Fills the folder `aside` with all files of a copy -> the files that were downloaded.

    A file with the right content is taken from `aside`, where an interrupted pull can have left it, or from the folder
    `before`.
    """
    with writing(aside):
        for there in sorted(aside.rglob("*"), reverse=True):  # the files of a folder before the folder
            if there.is_dir() and not there.is_symlink():
                if not any(there.iterdir()):
                    there.rmdir()
            elif there.relative_to(aside).as_posix() not in wanted or there.is_symlink():
                there.unlink()
        aside.mkdir(exist_ok=True)
    missing: dict[CopiedFile, list[str]] = {}
    for path, file in wanted.items():
        if _has(aside / path, file):
            continue
        if before is not None and _has(before / path, file):
            _take(before, aside, path)
        else:
            missing.setdefault(file, []).append(path)
    with _bar("pull", missing) as report:
        for file, (first, *same) in missing.items():
            _fetch(remote, file, aside / first, report)
            for path in same:
                with writing(aside / path):
                    (aside / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(aside / first, aside / path)
    return list(missing)


def _check_kind(folder: Path, kind: str, remote: RemoteFolder) -> None:
    """Raises DamagedError if the files that were copied to a folder are not of this kind."""
    try:
        found = kind_of(folder)
    except RealmError:
        found = ""
    if found != kind:
        raise DamagedError(
            f"the files at {remote.address} are not a {kind} that this version of realm can read: push the folder again"
        )


def _fetch(remote: RemoteFolder, file: CopiedFile, target: Path, report: Callable[[int], None]) -> None:
    name = f"{CONTENTS}/{file.sha256}"
    part = target.with_name(f".{target.name}.part")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        remote.get(name, part, report)
        if _measured(part) != file:
            raise DamagedError(
                f"{remote.address}/{name} is damaged, because its SHA-256 differs: remove it, and push the folder again"
            )
        with writing(target):
            sync(part)
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _keep_texts(
    folder: Path, aside: Path, before: ListingJson, wanted: Mapping[str, CopiedFile]
) -> list[str]:
    """Keeps the passages of the replaced version for processes that read them -> the paths of their files."""
    kept = [
        path
        for path in files_of(before["files"])
        if path not in wanted and _TEXTS.fullmatch(path) and (folder / path).is_file()
    ]
    for path in kept:
        _take(folder, aside, path)
    return sorted(kept)


def _take(before: Path, aside: Path, path: str) -> None:
    """Takes a file from another folder: a file that is never changed as a hard link, any other file as a copy.

    A manifest is a copy, so that a process with the old manifest recognises that the folder was replaced.
    """
    file, target = before / path, aside / path
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if ROWS.fullmatch(path):
            with suppress(OSError):  # not every file system has links
                os.link(file, target)
                return
        shutil.copyfile(file, target)
        sync(target)


def _has(file: Path, wanted: CopiedFile) -> bool:
    """Whether a file exists and has the content."""
    with suppress(FileNotFoundError):
        return file.is_file() and file.stat().st_size == wanted.size and _measured(file) == wanted
    return False


def _measured_all(files: Mapping[str, Path]) -> dict[str, CopiedFile]:
    read = progress(files.items(), total=len(files), description="read files", unit="file", leave=False)
    return {path: _measured(file) for path, file in read}


def _measured(file: Path) -> CopiedFile:
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return CopiedFile(stream.tell(), sha256)


@contextmanager
def _bar(description: str, files: Iterable[CopiedFile]) -> Iterator[Callable[[int], None]]:
    """A context with a function that is called with the number of bytes that were copied since the last call."""
    total, copied = sum(file.size for file in files), 0
    with progress(total=total // 1000, description=description, unit="kB") as bar:

        def report(size: int) -> None:
            nonlocal copied
            copied += size
            bar.update(copied // 1000 - bar.n)

        yield report


def _report(kind: str, files: Mapping[str, CopiedFile], copied: list[CopiedFile]) -> CopiedJson:
    return {
        "kind": kind,
        "files": len(files),
        "bytes": sum(file.size for file in files.values()),
        "copied_files": len(copied),
        "copied_bytes": sum(file.size for file in copied),
    }
