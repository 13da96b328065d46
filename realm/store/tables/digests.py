"""SHA-256 digests of the files of Lance tables, in `SHA256SUMS` beside the tables.

Lance has no checksums: if a bit of a data file has changed, Lance reads wrong data, and a changed bit in a deletion file can
abort the process. So every file has a line in `SHA256SUMS`, in the format of `sha256sum`. The digests of data files and
deletion files are recorded before the commit, the digest of the manifest after the commit.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

from realm.errors import DamagedError, writing
from realm.files import sync, write_lines
from realm.folders import one_writer

CHECKSUMS = "SHA256SUMS"
_DIFFERS = "has changed since it was written (SHA-256 differs)"


def changed_files(path: Path, files: Iterable[Path], must_be_known: bool = False) -> Iterator[str]:
    """Messages about files that differ from their digest; with `must_be_known` also about files without a digest.

    The newest manifest can be without a digest, because the digest of a manifest is recorded after the commit.
    """
    known = recorded_digests(path)
    for file in files:
        name = file.relative_to(path.parent).as_posix()
        if name not in known:
            if must_be_known:
                yield f"{name} has no checksum in {CHECKSUMS}"
        elif _digest(file) != known[name]:
            yield f"{name} {_DIFFERS}"


def refuse_damaged(path: Path, problems: Iterable[str]) -> None:
    """Raises DamagedError for the first problem, if there is one."""
    for problem in problems:
        raise DamagedError(f"{path.parent} is damaged: {problem}")


def record(folder: Path, files: Sequence[Path]) -> None:
    """Appends the digests of some files of a folder to `SHA256SUMS` in this folder."""
    lines = "".join(f"{_digest(file)}  {file.relative_to(folder).as_posix()}\n" for file in files)
    with one_writer(folder), writing(folder), (folder / CHECKSUMS).open("ab+") as listed:
        if listed.tell() and (listed.seek(-1, os.SEEK_END), listed.read(1))[1] != b"\n":
            lines = "\n" + lines  # the last line is incomplete, because the disk was full
        listed.write(lines.encode())
        listed.flush()
        os.fsync(listed.fileno())


def add_lines(file: Path, lines: Iterable[str]) -> None:
    """Appends lines to a file beside the tables, syncs the file to disk, and records the new digest of the file.

    If the process is killed before the digest is recorded, the lines are valid. If the disk was full, the file can end with an
    incomplete line; the new lines begin after a line break, so they are not joined to this line.
    """
    with one_writer(file.parent):
        with writing(file), file.open("ab") as stream:
            stream.write("".join(f"\n{line}" for line in lines).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
            sync(file.parent)  # the file may be new
        record(file.parent, [file])


def lines_of(file: Path) -> list[bytes]:
    """The lines of a file that `add_lines` appends to. A missing file is read as an empty file.

    Raises:
        DamagedError: the content whose digest was recorded has changed.
    """
    refuse_damaged(file, changed_lines(file))
    return _content(file).split(b"\n")


def changed_lines(file: Path) -> Iterator[str]:
    """Messages about a file that `add_lines` appends to: the file must begin with the content whose digest was recorded.

    A file without a digest is accepted: it was written by a process that was killed.
    """
    known = recorded_digests(file).get(file.name)
    if known is None:
        return
    digest = hashlib.sha256()
    for line in io.BytesIO(_content(file)):
        digest.update(line)
        if digest.hexdigest() == known:
            return
    if recorded_digests(file).get(file.name) != known:  # another process has rewritten the file meanwhile
        yield from changed_lines(file)
    else:
        yield f"{file.name} {_DIFFERS if file.is_file() else 'is missing'}"


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def forget(folder: Path, files: Set[Path] = frozenset()) -> None:
    """Removes the digests of these files and of missing files, because a later version can use the same file names."""
    there = {
        name: digest
        for name, digest in recorded_digests(folder / CHECKSUMS).items()
        if (folder / name).is_file() and folder / name not in files
    }
    write_lines(folder / CHECKSUMS, [f"{digest}  {name}" for name, digest in there.items()])


def recorded_digests(path: Path) -> dict[str, str]:
    """The digests in `SHA256SUMS` beside `path`: file name -> digest."""
    listed = path.parent / CHECKSUMS
    lines = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
