"""The folder that is pushed, or that a pull made: which of its files are copied, and whether they were changed."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from realm.errors import ConflictError, InputError
from realm.files import read_json
from realm.folders import is_new, one_writer
from realm.hub import WORKSPACE_PARTS
from realm.interop.object_storage.listing import KB_KIND, PULLED, ListingJson, checked, files_of
from realm.model.manifest import MANIFEST, checked_manifest
from realm.search.stored_bm25 import WORDS
from realm.store import mapped_arrays, unfinished, vectors
from realm.store.knowledge_base import KnowledgeBase
from realm.store.tables.digests import recorded_digests
from realm.store.tables.table import PASSAGES, was_committed

ROWS = re.compile(r"(?P<table>(?:.+/)?[^/]+\.lance)/(?:data|_deletions)/[^/]+")
"""Data files and deletion files of Lance tables, which are never changed after they were written."""


def kind_of(folder: Path) -> str:
    """The kind of a folder, one of `KINDS`.

    Raises:
        InputError: the folder is none of the three.
        DamagedError: the knowledge base or the model is damaged.
    """
    if was_committed(folder / PASSAGES):
        KnowledgeBase.open(folder)
        return KB_KIND
    if (folder / MANIFEST).is_file():
        checked_manifest(folder)
        return "model"
    if all((folder / part).is_dir() for part in WORKSPACE_PARTS):
        for part in WORKSPACE_PARTS:
            kind_of(folder / part)
        return "workspace"
    raise InputError(f"{folder} is not a knowledge base, a model or a workspace")


def local_files(folder: Path, kind: str) -> dict[str, Path]:
    """The files of a folder that are copied: path in the folder -> file.

    Files that commands make again, locks, temporary files, and files of tables that belong to no version are left out.

    Raises:
        InputError: a folder in the folder is a link, whose files would be left out.
    """
    kb = WORKSPACE_PARTS[0] if kind == "workspace" else ""
    found: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder)
        if file.is_dir():
            if file.is_symlink():
                raise InputError(
                    f"{file} is a link to a folder, which is not copied: replace it by the folder"
                )
            continue
        if any(part.startswith(".") for part in path.parts) or path.as_posix() == PULLED:
            continue
        if kind != "model" and path.is_relative_to(kb) and _is_made_again(path.relative_to(kb)):
            continue
        found[path.as_posix()] = file
    tables = {folder / match["table"] for match in map(ROWS.fullmatch, found) if match}
    known = {table.parent / name for table in tables for name in recorded_digests(table)}
    return {path: file for path, file in found.items() if not ROWS.fullmatch(path) or file in known}


def _is_made_again(file: Path) -> bool:
    """Whether commands make a file of a knowledge base again: copies of the vectors for mapped and for approximate search,
    vectors of an unfinished index, the BM25 index, and the arrays of training.

    >>> _is_made_again(Path("indexes/0a1b/mapped-3-77.npy")), _is_made_again(Path("indexes/0a1b/vectors.lance/data/1.lance"))
    (True, False)
    """
    match file.parts:
        case (kind, *_) if kind in (mapped_arrays.MAPPED, WORDS):
            return True
        case ("indexes", _, inside, *_):
            return inside == vectors.APPROXIMATE or inside.startswith((vectors.MAPPED, unfinished.NAME))
    return False


@contextmanager
def one_version(folder: Path, kind: str) -> Iterator[None]:
    """A context in which no command changes the tables in a folder, so that all files belong to one version."""
    with ExitStack() as stack:
        if kind == "workspace":
            stack.enter_context(one_writer(folder))
            folder /= WORKSPACE_PARTS[0]
        if kind != "model":  # a model has no tables
            for one in (folder, *sorted(path for path in (folder / "indexes").glob("*") if path.is_dir())):
                stack.enter_context(one_writer(one))
        yield


def pulled_version(folder: Path, kind: str) -> ListingJson | None:
    """The content of `pulled.json` in a folder that a pull made and that no command changed; None if the folder is missing or
    empty.

    Raises:
        InputError: no pull made the folder, or it has a copy of another kind.
        ConflictError: the folder was changed.
        DamagedError: `pulled.json` is damaged.
    """
    if is_new(folder):
        return None
    if not (folder / PULLED).is_file():
        raise InputError(f"{folder} exists, and was not made by `realm pull`: give another folder")
    pulled = checked(read_json(folder / PULLED), folder / PULLED, f"remove {folder}, and pull again")
    if pulled["kind"] != kind:
        raise InputError(f"{folder} has a {pulled['kind']}, and the copy is a {kind}: give another folder")
    expected = {path: file.size for path, file in files_of(pulled["files"]).items()}
    there = {
        path: size
        for path, size in _sizes(local_files(folder, kind)).items()
        if path in expected or path not in pulled["replaced"]
    }
    if there != expected:
        changed = min(
            path for path in there.keys() | expected.keys() if there.get(path) != expected.get(path)
        )
        raise ConflictError(
            f"{folder} was changed after it was pulled ({changed}), and a pull would undo the change: give another folder, or "
            f"remove {folder}"
        )
    return pulled


def _sizes(files: Mapping[str, Path]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path, file in files.items():
        with suppress(FileNotFoundError):  # removed meanwhile
            sizes[path] = file.stat().st_size
    return sizes
