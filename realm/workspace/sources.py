"""The sources of a workspace, and which documents came from them.

`documents.json` lists the documents that the last fit read from its sources, so that documents which were added in another way
are not deleted. `watched.json` lists the files that `realm watch` has read. This file does not import torch.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from realm.errors import DamagedError, InputError
from realm.files import read_json, write_json
from realm.folders import DOCUMENTS

WATCHED = "watched.json"
WATCH_LOCK = ".watch.lock"
"""File whose lock a watcher holds until it ends, because watched.json has one writer at a time."""


class DocumentsJson(TypedDict):
    """The content of documents.json: ids of the documents that came from the sources."""

    documents: list[str]


class WatchedFileJson(TypedDict):
    """A file whose documents are in the knowledge base."""

    source: str
    version: list[int]
    """Size of the file that was read, and two timestamps in nanoseconds: the last change of the content, and the last change of
    content, name or permissions. Empty while the documents of the file are added."""
    documents: list[str]


class WatchedJson(TypedDict):
    """The content of watched.json."""

    files: dict[str, WatchedFileJson]
    unclaimed: list[str]
    """Documents of the last fit. When all files have been read once, each of these documents that comes from no file is
    deleted."""


def source_names(sources: Sequence[str]) -> list[str]:
    """The sources as stored in the report, with normalised paths: "docs/" becomes "docs".

    Raises:
        InputError: a source is empty. Its normalised path would be the current folder.
    """
    if "" in sources:
        raise InputError("a source is empty: give files, folders or packages")
    return [one if one.startswith("package:") else os.path.normpath(one) for one in sources]


def check_sources(
    workspace: Path, sources: Sequence[str], dropped: Sequence[str], before: Sequence[str]
) -> None:
    """Raises InputError if a source is dropped too, or if one of the earlier sources `before` is in neither list."""
    if both := [one for one in dropped if one in sources]:
        raise InputError(f"{both[0]} is a source and is dropped: give it only once")
    if missing := [one for one in before if one not in (*sources, *dropped)]:
        drop = " ".join(f"--drop {shlex.quote(one)}" for one in missing)
        raise InputError(
            f"{workspace} was made from {', '.join(missing)} too: give all earlier sources, in the same words and in the same "
            f"current folder; to delete the documents of these sources, give {drop}; to add documents without giving the "
            f"earlier sources, use `realm kb add SOURCE... --in {shlex.quote(str(workspace))}`"
        )


def listed_documents(workspace: Path) -> set[str]:
    """Ids of the documents that the last fit read from its sources."""
    known = workspace / DOCUMENTS
    if not known.is_file():
        return set()
    try:
        return set(map(str, read_json(known)["documents"]))
    except (KeyError, TypeError):
        raise DamagedError(f"{known} is damaged: put the file back, or make the workspace again") from None


def watched_documents(workspace: Path, sources: Sequence[str]) -> set[str]:
    """Ids of the documents that `realm watch` read from these sources."""
    files = _watched(workspace)["files"].values()
    return {id for file in files if file["source"] in sources for id in file["documents"]}


def forget_watched(workspace: Path, sources: Sequence[str]) -> None:
    """Removes the files of these sources from watched.json. The caller holds the lock of `WATCH_LOCK`."""
    watched = _watched(workspace)
    kept = {path: file for path, file in watched["files"].items() if file["source"] not in sources}
    if kept != watched["files"]:
        now: WatchedJson = {**watched, "files": kept}
        write_json(workspace / WATCHED, now)


def _watched(workspace: Path) -> WatchedJson:
    known = workspace / WATCHED
    if not known.is_file():
        return {"files": {}, "unclaimed": []}
    found: WatchedJson = read_json(known)
    return found
