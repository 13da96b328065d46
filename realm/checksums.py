"""CRC-32C checksums of files, which detect accidental damage.

Processors compute CRC-32C at several gigabytes per second, so files are checked each time they are read. These checksums do
not protect against deliberate changes."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path, PurePath

import google_crc32c

from realm.errors import DamagedError, reason, shown
from realm.files import read_json, write_json

CHECKSUMS = "checksums.json"
"""File with the checksums of a folder without a manifest."""
_AT_ONCE = 1 << 20


def checksum(data: bytes) -> str:
    """CRC-32C as eight hex digits.

    >>> checksum(b"123456789")
    'e3069283'
    """
    return f"{google_crc32c.value(data):08x}"


def checksums_of(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """Path of a file inside the folder -> its checksum."""
    return {name: _of_file(folder / name) for name in files}


def changed(folder: Path, recorded: Mapping[str, str], leave: Iterable[str] = ()) -> str:
    """A message about the first file that differs from its checksum, or "". Files in `leave` are not read."""
    for name in sorted(recorded.keys() - set(leave)):
        # A folder of another person could name any file or device.
        if not name.isprintable() or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            return f"{shown(name)} is not a file inside the folder"
        try:
            if not (folder / name).is_file():
                return f"{name} is missing, or is no file"
            if _of_file(folder / name) != recorded[name]:
                return f"{name} differs from its checksum"
        except OSError as error:
            return f"{name} cannot be read: {reason(error)}"
    return ""


def record_checksums(folder: Path) -> None:
    """Writes `CHECKSUMS` with the checksums of all files in a folder."""
    write_json(folder / CHECKSUMS, checksums_of(folder, sorted(file.name for file in folder.iterdir())))


def check_folder(folder: Path) -> None:
    """Compares the files of a folder with its file `CHECKSUMS`, if there is such a file.

    Raises:
        DamagedError: a file has changed.
    """
    if (folder / CHECKSUMS).is_file():
        recorded = read_json(folder / CHECKSUMS)
        try:
            problem = changed(folder, recorded)
        except (AttributeError, TypeError) as error:
            raise DamagedError(f"{folder / CHECKSUMS} is damaged: {reason(error)}") from error
        if problem:
            raise DamagedError(
                f"{folder} is damaged: {problem}; copy or install it again (after a change on purpose, remove its {CHECKSUMS})"
            )


@cache
def check_installed(folder: Path) -> None:
    """Calls `check_folder` once per process, for folders that do not change while the process runs."""
    check_folder(folder)


def _of_file(path: Path) -> str:
    so_far = 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_AT_ONCE):
            so_far = google_crc32c.extend(so_far, part)
    return f"{so_far:08x}"
