"""Copies of knowledge bases, models and workspaces on object storage: `realm push` and `realm pull`.

    ADDRESS/copy.json        the files of the newest version: path, size and SHA-256 of each
    ADDRESS/files/<SHA-256>  the content of a file

A push uploads the contents that are not stored yet, and then replaces `copy.json` in one step, so a pull copies either the old
or the new version. The contents of the replaced version stay until the next push, because a pull can still be copying them.

A pull fills a folder beside the target, and exchanges the two folders when the new one is complete. A server can use the target
meanwhile: the files of Lance tables of the replaced version stay in the folder until the next pull, because the server reads
them until it has loaded the new version.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypedDict

from realm.documents.remote import RemoteFolder
from realm.errors import ConflictError, DamagedError, InputError, writing
from realm.files import read_json, write_json
from realm.folders import one_writer, replace_folder, restore
from realm.hub import WORKSPACE_PARTS
from realm.interop.uploading import files_in, files_of_kb
from realm.model.manifest import MANIFEST, read_manifest
from realm.progress import progress
from realm.store.knowledge_base import KnowledgeBase
from realm.store.tables.table import PASSAGES, was_committed

LISTING = "copy.json"
CONTENTS = "files"
PULLED = "pulled.json"
"""File in a pulled folder that describes the version that was pulled."""
_FORMAT = 1
_MOST_BYTES = 64 << 20
"""Largest `copy.json` that is read."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_IMMUTABLE = re.compile(r"(.*/)?[^/]+\.lance/.+(?<!\.json)")
"""Files of Lance tables that are never changed after they were written."""


class FileJson(TypedDict):
    """A file of a copy."""

    path: str
    """Path in the folder, with slashes."""
    bytes: int
    sha256: str


class ListingJson(TypedDict):
    """Content of `copy.json`."""

    format: int
    kind: str
    """knowledge base, model or workspace."""
    files: list[FileJson]
    replaced: list[str]
    """SHA-256 of the contents of the version before that this version does not have."""


class PulledJson(TypedDict):
    """Content of `pulled.json`."""

    files: list[FileJson]
    replaced: list[str]
    """Paths of files of the version before, which stay until the next pull."""


class CopiedJson(TypedDict):
    """Report of `realm push` and `realm pull`."""

    kind: str
    files: int
    bytes: int
    copied_files: int
    """Number of contents that were uploaded or downloaded; the others were already there."""
    copied_bytes: int


class _File(NamedTuple):
    size: int
    sha256: str


def push(folder: Path, address: str) -> CopiedJson:
    """Copies a knowledge base, a model or a workspace to an object store. Only one push at a time may write to an address.

    Files that commands make again, such as the BM25 index, are left out. An interrupted push is continued by the next push.

    Raises:
        InputError: the folder is none of the three; or the store cannot be read or written, or has other files at this address.
        DamagedError: the knowledge base or the model is damaged.
        ConflictError: a file was changed while it was copied.
    """
    remote = RemoteFolder(address)
    restore(folder)
    kind = _kind_of(folder)
    with _one_version(folder):
        stored = remote.sizes()
        if others := [name for name in stored if name != LISTING and not _is_content(name)]:
            raise InputError(
                f"{remote.address} has files that `realm push` did not write, such as {min(others)}: give an address that "
                "only this copy uses"
            )
        listing = _read_listing(remote)
        local = _local_files(folder)
        found, copied = _upload(remote, local, stored)
    now = {file.sha256 for file in found.values()}
    replaced = set[str]()
    if listing is not None:
        before = _files_of(listing["files"])
        replaced = (
            set(listing["replaced"]) if before == found else {file.sha256 for file in before.values()} - now
        )
    new: ListingJson = {
        "format": _FORMAT,
        "kind": kind,
        "files": _records(found),
        "replaced": sorted(replaced),
    }
    remote.write(LISTING, json.dumps(new, indent=1).encode())
    used = {f"{CONTENTS}/{sha256}" for sha256 in now | replaced}
    remote.remove(sorted(name for name in stored if _is_content(name) and name not in used))
    return _report(kind, found, copied)


def pull(address: str, folder: Path) -> CopiedJson:
    """Copies what `realm push` copied to an address into a folder, which is made, or replaced if an earlier pull made it.

    Contents that the folder has already are not downloaded. An interrupted pull is continued by the next pull.

    Raises:
        InputError: there is no copy at this address, the store cannot be read, or the folder was not made by a pull.
        ConflictError: the folder was changed after it was pulled; or the copy was replaced twice while it was read.
        DamagedError: a content at the address differs from its SHA-256, or its list of files is damaged.
        WriteFailed: the folder cannot be written.
    """
    remote = RemoteFolder(address)
    listing = _read_listing(remote)
    if listing is None:
        raise InputError(f"{remote.address} has no copy: make it with `realm push FOLDER {remote.address}`")
    wanted = _files_of(listing["files"])
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with one_writer(folder.parent):
        restore(folder)
        before = _pulled(folder)
        if before is not None and _files_of(before["files"]) == wanted:
            return _report(listing["kind"], wanted, [])
        aside = folder.with_name(f"{folder.name}.writing")
        with ExitStack() as stack:
            if before is not None:
                stack.enter_context(_one_version(folder))
                before = _pulled(folder)  # another process can have changed the folder before it was locked
            copied = _download(remote, wanted, aside, folder if before is not None else None)
            replaced = [] if before is None else _keep_replaced(folder, aside, before, wanted)
            new: PulledJson = {"files": listing["files"], "replaced": replaced}
            with writing(aside):
                write_json(aside / PULLED, new)
                replace_folder(aside, folder)
    return _report(listing["kind"], wanted, copied)


def _kind_of(folder: Path) -> str:
    """Whether a folder is a knowledge base, a model or a workspace."""
    if was_committed(folder / PASSAGES):
        KnowledgeBase.open(folder)
        return "knowledge base"
    if (folder / MANIFEST).is_file():
        read_manifest(folder)
        return "model"
    if _is_workspace(folder):
        for part in WORKSPACE_PARTS:
            _kind_of(folder / part)
        return "workspace"
    raise InputError(f"{folder} is not a knowledge base, a model or a workspace")


def _is_workspace(folder: Path) -> bool:
    return all((folder / part).is_dir() for part in WORKSPACE_PARTS)


def _local_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that are copied: path in the folder -> file."""
    if not _is_workspace(folder):
        found = files_of_kb(folder)
    else:
        kb, model = WORKSPACE_PARTS
        own = {file.name: file for file in folder.glob("*.json")}
        found = own | files_of_kb(folder / kb, f"{kb}/") | files_in(folder / model, f"{model}/")
    return {path: file for path, file in found.items() if path != PULLED}


@contextmanager
def _one_version(folder: Path) -> Iterator[None]:
    """A context in which no command changes the tables in a folder, so that all files belong to one version."""
    kb = folder / WORKSPACE_PARTS[0] if _is_workspace(folder) else folder
    with ExitStack() as stack:
        if was_committed(kb / PASSAGES):  # a model has no tables
            for one in (kb, *sorted((kb / "indexes").glob("*"))):
                stack.enter_context(one_writer(one))
        yield


def _upload(
    remote: RemoteFolder, local: Mapping[str, Path], stored: Mapping[str, int]
) -> tuple[dict[str, _File], list[_File]]:
    """Uploads the contents that are not stored -> all files, and those that were uploaded."""
    times = {path: file.stat() for path, file in local.items()}
    found = {path: _measured(file) for path, file in local.items()}
    missing = {
        file: path for path, file in found.items() if stored.get(f"{CONTENTS}/{file.sha256}") != file.size
    }
    with _bar("push", missing) as report:
        for file, path in missing.items():
            name = f"{CONTENTS}/{file.sha256}"
            remote.put(local[path], name, report)
            now = local[path].stat()
            if (now.st_ino, now.st_mtime_ns) != (times[path].st_ino, times[path].st_mtime_ns):
                remote.remove([name])  # it can have another content than its name says
                raise ConflictError(f"{local[path]} was changed while it was copied: repeat the command")
    return found, list(missing)


def _download(
    remote: RemoteFolder, wanted: Mapping[str, _File], aside: Path, before: Path | None
) -> list[_File]:
    """Fills the folder `aside` with all files of a copy -> the files that were downloaded.

    A file with the right content is taken from `aside`, where an interrupted pull can have left it, or from the folder
    `before`.
    """
    for path, there in files_in(aside).items():
        if path not in wanted:
            there.unlink()
    missing: dict[_File, list[str]] = {}
    for path, file in wanted.items():
        target = aside / path
        if _has(target, file):
            continue
        if before is not None and _has(before / path, file):
            _link(before / path, target)
        else:
            missing.setdefault(file, []).append(path)
    with _bar("pull", missing) as report:
        for file, (path, *same) in missing.items():
            _fetch(remote, file, aside / path, report)
            for other in same:
                _link(aside / path, aside / other)
    return list(missing)


@contextmanager
def _bar(description: str, files: Iterable[_File]) -> Iterator[Callable[[int], None]]:
    """A context with a function that is called with the number of bytes that were copied since the last call."""
    total, copied = sum(file.size for file in files), 0
    with progress(total=total // 1000, description=description, unit="kB") as bar:

        def report(size: int) -> None:
            nonlocal copied
            copied += size
            bar.update(copied // 1000 - bar.n)

        yield report


def _fetch(remote: RemoteFolder, file: _File, target: Path, report: Callable[[int], None]) -> None:
    name = f"{CONTENTS}/{file.sha256}"
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        remote.get(name, part, report)
        if _measured(part) != file:
            raise DamagedError(
                f"{remote.address}/{name} is damaged: its SHA-256 differs; push the copy again"
            )
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _keep_replaced(folder: Path, aside: Path, before: PulledJson, wanted: Mapping[str, _File]) -> list[str]:
    """Keeps files of Lance tables of the replaced version for processes that are reading them -> their paths."""
    kept = []
    for path in _files_of(before["files"]).keys() - wanted.keys():
        if _IMMUTABLE.fullmatch(path):
            with suppress(FileNotFoundError):  # a command has removed an old version
                _link(folder / path, aside / path)
                kept.append(path)
    return sorted(kept)


def _link(file: Path, target: Path) -> None:
    """Makes a hard link to a file that is never changed, and a copy of any other file."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if _IMMUTABLE.fullmatch(file.as_posix()):
            with suppress(PermissionError, NotImplementedError):  # not every file system has links
                os.link(file, target)
                return
        shutil.copyfile(file, target)


def _pulled(folder: Path) -> PulledJson | None:
    """The content of `pulled.json` in a folder that a pull made and that no command changed; None if the folder is missing or
    empty.

    Raises:
        InputError: no pull made the folder.
        ConflictError: the folder was changed.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / PULLED).is_file():
        raise InputError(f"{folder} exists, and was not made by `realm pull`: give another folder")
    pulled: PulledJson = read_json(folder / PULLED)
    there = {path: file.stat().st_size for path, file in _local_files(folder).items()}
    expected = {path: file.size for path, file in _files_of(pulled["files"]).items()}
    for path in pulled["replaced"]:
        if path not in expected:
            there.pop(path, None)
    if there != expected:
        differing = min(
            path for path in there.keys() | expected.keys() if there.get(path) != expected.get(path)
        )
        raise ConflictError(
            f"{folder} was changed after it was pulled ({differing}), and a pull would undo the change: give another folder, "
            f"or remove {folder}"
        )
    return pulled


def _read_listing(remote: RemoteFolder) -> ListingJson | None:
    """The list of files at an address; None if there is none.

    Raises:
        DamagedError: the list is damaged, or has a path outside the folder.
        InputError: the list has an unknown format.
    """
    content = remote.read(LISTING, _MOST_BYTES)
    if content is None:
        return None
    try:
        listing: ListingJson = json.loads(content)
        if listing["format"] != _FORMAT:
            raise InputError(
                f"{remote.address}/{LISTING} has format {listing['format']!r}, which this version of realm cannot read"
            )
        for record in listing["files"]:
            _check(record)
        if not all(type(one) is str and _SHA256.fullmatch(one) for one in listing["replaced"]):
            raise ValueError("replaced")
        if type(listing["kind"]) is not str:
            raise ValueError("kind")
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{remote.address}/{LISTING} is damaged: push the copy again") from error
    return listing


def _check(record: FileJson) -> None:
    """Raises ValueError if a record is not that of a file inside the folder."""
    path, size, sha256 = record["path"], record["bytes"], record["sha256"]
    if not (type(path) is type(sha256) is str and type(size) is int and size >= 0):
        raise ValueError("a value of another type")
    parts = PurePosixPath(path).parts
    if (
        not parts
        or path != "/".join(parts)
        or ".." in parts
        or "\\" in path
        or "\0" in path
        or path == PULLED
    ):
        raise ValueError(f"the path {path!r}")
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"the SHA-256 {sha256!r}")


def _is_content(name: str) -> bool:
    folder, _, sha256 = name.partition("/")
    return folder == CONTENTS and _SHA256.fullmatch(sha256) is not None


def _has(file: Path, wanted: _File) -> bool:
    """Whether a file exists and has the content."""
    return file.is_file() and file.stat().st_size == wanted.size and _measured(file) == wanted


def _measured(file: Path) -> _File:
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return _File(stream.tell(), sha256)


def _files_of(records: Iterable[FileJson]) -> dict[str, _File]:
    return {record["path"]: _File(record["bytes"], record["sha256"]) for record in records}


def _records(files: Mapping[str, _File]) -> list[FileJson]:
    return [{"path": path, "bytes": file.size, "sha256": file.sha256} for path, file in sorted(files.items())]


def _report(kind: str, files: Mapping[str, _File], copied: list[_File]) -> CopiedJson:
    return {
        "kind": kind,
        "files": len(files),
        "bytes": sum(file.size for file in files.values()),
        "copied_files": len(copied),
        "copied_bytes": sum(file.size for file in copied),
    }
