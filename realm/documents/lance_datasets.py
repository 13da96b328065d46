"""Lance datasets: folders, on this machine or on object storage, each of which is read and written as a file is."""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from realm.documents.remote import RemoteFolder, name_of, temporary_folder
from realm.errors import InputError

EXTENSION, VERSIONS = ".lance", "_versions"
"""Extension of a dataset, and the folder in it that gets a file with each change."""
_PARTS = (VERSIONS, "_transactions")
_INSIDE = re.compile(rf"(.*?[^/]{re.escape(EXTENSION)})/(?:{'|'.join(_PARTS)})/", re.IGNORECASE)
"""The beginning of the address of a file in a dataset, with the address of the dataset as group 1."""


def is_dataset(path: Path) -> bool:
    """Whether a folder of this machine is a dataset. A damaged dataset may have only one of its folders."""
    return path.suffix.lower() == EXTENSION and any((path / part).is_dir() for part in _PARTS)


def stat_of(path: Path) -> os.stat_result:
    """The size and the times of a file; of a dataset, those of the folder that changes with each version.

    Raises:
        OSError: the file cannot be found.
    """
    return (path / VERSIONS if is_dataset(path) else path).stat()


def with_datasets(addresses: Collection[str]) -> dict[str, bool]:
    """The addresses of files, with one address for all files of a dataset -> whether it is the address of a dataset.

    >>> with_datasets(["s3://b/a.txt", "s3://b/t.lance/_versions/1.manifest", "s3://b/t.lance/data/0.lance"])
    {'s3://b/a.txt': False, 's3://b/t.lance': True}
    """
    datasets = {found[1] for one in addresses if (found := _INSIDE.match(one))}
    named = (next((name for name in datasets if one.startswith(f"{name}/")), one) for one in addresses)
    return {one: one in datasets for one in named}


@contextmanager
def uploaded_dataset(address: str) -> Iterator[Path]:
    """A context with a path for a new dataset, which is copied to the address when the block ends without an error.

    The files of `_versions` are copied last, so other processes find the whole dataset or none. After a kill, the call can be
    repeated.

    Raises:
        InputError: the address is not of an object store, has a dataset, or cannot be written.
    """
    there = RemoteFolder(address)
    if any(name.startswith(f"{VERSIONS}/") for name in there.sizes()):
        raise InputError(f"{address} exists: remove it, or give another name")
    with temporary_folder() as folder:
        path = folder / name_of(there.address)
        yield path
        files = sorted(one.relative_to(path) for one in path.rglob("*") if one.is_file())
        for file in sorted(files, key=lambda one: one.parts[0] == VERSIONS):
            there.put(path / file, file.as_posix(), lambda _: None)
