"""Checksums of files on disk: which of them have changed since they were written.

CRC-32C, which processors compute at several gigabytes per second, so that files can be checked each time they are read. It is
for accidents: who changes a file on purpose can change its checksum too.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import google_crc32c

from realm.config import InputError, read_json, reason

CHECKSUMS = "checksums.json"
"""In a folder that has no manifest: file -> checksum."""
_AT_ONCE = 1 << 20


def checksum(data: bytes) -> str:
    """Eight hex digits.

    >>> checksum(b"123456789")
    'e3069283'
    """
    return f"{google_crc32c.value(data):08x}"


def checksums_of(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """The checksum of each file, by its path inside the folder."""
    return {name: _of_file(folder / name) for name in files}


def changed(folder: Path, recorded: Mapping[str, str], leave: Iterable[str] = ()) -> str:
    """What is wrong with the first file that is not as recorded; empty where all are. Files in `leave` are not read."""
    for name in sorted(recorded.keys() - set(leave)):
        try:
            if _of_file(folder / name) != recorded[name]:
                return f"{name} is not what its checksum says"
        except OSError as error:
            return f"{name} cannot be read: {reason(error)}"
    return ""


@cache
def check_folder(folder: Path) -> None:
    """Compares a folder's files with its `CHECKSUMS`, where it has that; once in a process, unless it raises.

    Raises:
        InputError: one of them has changed.
    """
    if (folder / CHECKSUMS).is_file():
        recorded = read_json(folder / CHECKSUMS)
        if problem := changed(folder, recorded):
            raise InputError(f"{folder} is damaged: {problem}; install realm anew")


def _of_file(path: Path) -> str:
    so_far = 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_AT_ONCE):
            so_far = google_crc32c.extend(so_far, part)
    return f"{so_far:08x}"
