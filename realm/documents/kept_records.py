"""Keeps the documents of PDF and Word files until the end of a build, because reading such a file takes longer than tagging it.

A key is a hash of the file, its name, the limits, the libraries and the code of the readers. Files with problems,
and files that change while they are read, are not kept.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from realm.documents.child_process import ReaderProcess, record_of_json
from realm.documents.formats.records import Clusters, Limits, Record, Unreadable, checked
from realm.documents.sources import state_of
from realm.documents.wikipedia import zim
from realm.kept_values import KeptValues

LIBRARIES = {".pdf": ("pypdfium2",), ".docx": ("mammoth", "lxml")}
"""Extensions of the files whose documents are kept -> the libraries that read them."""
CODE = (
    "documents/formats/*.py",
    "documents/child_process.py",
    "documents/file_records.py",
    "documents/kept_*.py",
    "text/corpus.py",
    "text/fields.py",
)
"""The code on which the documents of a file depend, and how they are kept."""


class KeepingReader(AbstractContextManager["KeepingReader"]):
    """Reads files in a child process, and keeps their documents in the database `kept`, if one is given."""

    def __init__(self, kept: Path | None = None, shows: bool = True):
        """With `shows`, a progress bar counts the pages of a long file."""
        self._child, self._shows = ReaderProcess(shows), shows
        self._kept = None if kept is None else KeptValues(kept, "files", "all files are read again")

    def read(
        self, path: Path, limits: Limits, clusters: Clusters | None = None
    ) -> Iterator[Record | Unreadable]:
        """The records of a file, or of a part of a ZIM archive, as from `ReaderProcess.read`. A whole archive is checked first.

        Raises:
            Unreadable: a ZIM archive is damaged.
        """
        if clusters is None and zim.is_archive(path):
            zim.check(path, self._shows)
        before = state_of(path)
        key = None if self._kept is None else _key(path, limits)
        if self._kept is None or key is None:
            yield from self._child.read(path, limits, clusters)
            return
        value = self._kept.find(key)
        if value is not None and (known := _records(value, path, limits)) is not None:
            yield from known
            return
        found = []
        for one in self._child.read(path, limits):
            found.append(one)
            yield one
        # a file that was replaced after its hash was taken has other documents
        if before == state_of(path) and not any(isinstance(one, Unreadable) for one in found):
            self._kept.keep(key, zlib.compress(json.dumps([str(path), found]).encode(), level=1))
            self._kept.write()  # a file can take minutes, so a kill should not lose many

    def __exit__(self, *exception: object) -> None:
        self._child.__exit__(*exception)
        if self._kept is not None:
            self._kept.close()


def _key(path: Path, limits: Limits) -> bytes | None:
    """Hash of all on which the documents of a file depend; None if the documents of such files are not kept."""
    reader = reader_of(path)
    if reader is None:
        return None
    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None  # the reader reports the error
    text = json.dumps([reader, path.name, limits, content])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def reader_of(path: Path) -> str | None:
    """The versions of the libraries that read a file, and a digest of the code of all readers.

    None if the documents of such files are not kept, or if a library is not installed.
    """
    libraries = LIBRARIES.get(path.suffix.lower())
    return None if libraries is None else _reader(libraries)


@cache
def _reader(libraries: tuple[str, ...]) -> str | None:
    try:
        installed = " ".join(map(version, libraries))
    except PackageNotFoundError:
        return None
    return f"{installed} {digest_of_code(CODE)}"


def digest_of_code(patterns: Iterable[str]) -> str:
    """Digest of files of this package."""
    files = [file for pattern in patterns for file in sorted(Path(__file__).parents[1].glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _records(value: bytes, path: Path, limits: Limits) -> list[Record] | None:
    """The records of a kept value for a file that may now have another path; None if the value is damaged."""
    try:
        expanding = zlib.decompressobj()
        text = expanding.decompress(value, limits.file_bytes)
        if not expanding.eof:
            return None
        before, found = json.loads(text)
        return [_moved(record_of_json(*one), before, path) for one in found] or None
    except (zlib.error, ValueError, TypeError, RecursionError):
        return None


def _moved(record: Record, before: str, path: Path) -> Record:
    """The record of a file that had the path `before`.

    Raises:
        ValueError: no reader makes such a record of the file.
        TypeError: a value is not of the type of its field.
    """
    record = checked(record)
    # the key depends on the name
    if Path(before).name != path.name or not record.where.startswith(before):
        raise ValueError(record)
    own = path.as_posix() if record.id == Path(before).as_posix() else record.id
    return record._replace(where=f"{path}{record.where.removeprefix(before)}", id=own)
