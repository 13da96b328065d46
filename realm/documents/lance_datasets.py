"""Lance datasets: folders, on this machine or on object storage, each of which is read and written as a file is."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from realm.documents.remote import RemoteFolder, name_of, temporary_folder
from realm.errors import InputError
from realm.folders import VERSIONS

EXTENSION = ".lance"
_PARTS = ("_transactions", VERSIONS)
"""Folders by which a dataset is known."""


def is_dataset(path: Path) -> bool:
    """Whether a folder of this machine is a dataset. A damaged dataset may have only one of its folders."""
    return path.suffix.lower() == EXTENSION and any((path / part).is_dir() for part in _PARTS)


def stat_of(path: Path) -> os.stat_result:
    """The size and the times of a file. A dataset has those of its folder `VERSIONS`, which changes with each version.

    Raises:
        OSError: the file cannot be found.
    """
    return (path / VERSIONS if is_dataset(path) else path).stat()


def with_datasets(addresses: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The addresses of files and datasets -> the files of the dataset, or nothing for a file.

    >>> with_datasets(["s3://b/a.txt", "s3://b/t.lance/_versions/1.manifest", "s3://b/t.lance/data/0.lance"])
    {'s3://b/a.txt': (), 's3://b/t.lance': ('s3://b/t.lance/_versions/1.manifest', 's3://b/t.lance/data/0.lance')}
    """
    datasets = set()
    for address in addresses:
        names = address.split("/")
        for place in range(1, len(names)):
            if names[place] in _PARTS and names[place - 1].lower().endswith(EXTENSION):
                datasets.add("/".join(names[:place]))
    found: dict[str, list[str]] = {}
    for address in addresses:
        names = address.split("/")
        above = ("/".join(names[:place]) for place in range(1, len(names)))  # the outermost folder first
        dataset = next((one for one in above if one in datasets), None)
        if dataset is None:
            found[address] = []
        else:
            found.setdefault(dataset, []).append(address)
    return {name: tuple(files) for name, files in found.items()}


@contextmanager
def uploaded_dataset(address: str) -> Iterator[Path]:
    """A context with a path for a new dataset, which is copied to the address when the block ends without an error.

    The files of `_versions` are copied last, so programs that open the address find the whole dataset or none. After a kill,
    the call can be repeated; the files of the killed call stay, and belong to no version. Of two calls at once, one wins.

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
        for file in sorted(
            files, key=lambda one: one.parts[0] in _PARTS
        ):  # `_transactions` before `_versions`
            there.put(path / file, file.as_posix(), lambda _: None)
