"""The list of files of a copy, `copy.json` at the address and `pulled.json` in a pulled folder."""

import json
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypedDict, cast

from realm.documents.remote import RemoteFolder
from realm.errors import DamagedError, InputError, RealmError

LISTING = "copy.json"
CONTENTS = "files"
"""Folder of the contents, whose names are their SHA-256."""
PULLED = "pulled.json"
"""File in a pulled folder that describes the version that was pulled."""
KB_KIND = "knowledge base"
KINDS = (KB_KIND, "model", "workspace")
FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileJson(TypedDict):
    """A file of a copy."""

    path: str
    """Path in the folder, with slashes."""
    bytes: int
    sha256: str


class ListingJson(TypedDict):
    """Content of `copy.json` and `pulled.json`."""

    format: int
    kind: str
    """One of `KINDS`."""
    files: list[FileJson]
    replaced: list[str]
    """What stays of the version before: in `copy.json` the SHA-256 of contents, in `pulled.json` paths of files."""


class CopiedFile(NamedTuple):
    """The content of a file."""

    size: int
    sha256: str


def listing_of(content: bytes, remote: RemoteFolder) -> ListingJson:
    """The list of files at an address.

    Raises:
        DamagedError: the list is damaged, or has a path outside the folder.
        InputError: the list has an unknown format.
    """
    name, way_out = f"{remote.address}/{LISTING}", "push the folder again"
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is damaged: {way_out}") from error
    return checked(value, name, way_out)


def checked(value: Any, name: object, way_out: str) -> ListingJson:
    """The value as a list of files, if it is one. `name` and `way_out` are for the message of an error.

    Raises:
        DamagedError: the value is no list of files, or has a path twice or outside the folder.
        InputError: the list has an unknown format.
    """
    try:
        if value["format"] != FORMAT:
            raise InputError(
                f"{name} has format {value['format']!r}, which this version of realm cannot read"
            )
        listing = cast(ListingJson, {key: value[key] for key in ListingJson.__annotations__})
        if listing["kind"] not in KINDS or not all(type(one) is str for one in listing["replaced"]):
            raise ValueError(listing["kind"])
        for record in listing["files"]:
            _check(record)
        if len(files_of(listing["files"])) < len(listing["files"]):
            raise ValueError("a path occurs twice")
    except RealmError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{name} is damaged: {way_out}") from error
    return listing


def _check(record: FileJson) -> None:
    """Raises ValueError if a record is not that of a file that a push copies."""
    path, size, sha256 = record["path"], record["bytes"], record["sha256"]
    if not (type(path) is type(sha256) is str and type(size) is int and size >= 0):
        raise ValueError("a value of another type")
    parts = PurePosixPath(path.encode().decode()).parts
    hidden = any(part.startswith(".") for part in parts)  # also "." and ".."
    if not parts or path != "/".join(parts) or hidden or "\\" in path or path.lower() == PULLED:
        raise ValueError(f"the path {path!r}")
    if any(ord(character) < 32 for character in path):
        raise ValueError(f"the path {path!r}")
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"the SHA-256 {sha256!r}")


def is_content(name: str) -> bool:
    """Whether a path at an address is that of a content."""
    folder, _, sha256 = name.partition("/")
    return folder == CONTENTS and _SHA256.fullmatch(sha256) is not None


def files_of(records: Iterable[FileJson]) -> dict[str, CopiedFile]:
    """Path of each file in a list -> its content."""
    return {record["path"]: CopiedFile(record["bytes"], record["sha256"]) for record in records}
