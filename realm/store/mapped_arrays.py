"""Arrays that all processes of a machine map from the same files, so that the machine has one copy in memory.

    KB/mapped/KEY/NAME/     an .npy file per array, and checksums; KEY identifies the version of the knowledge base

The processes that `torchrun` starts on a machine use such arrays for the wordpieces and the spans of the knowledge base, and so
does every process if the knowledge base is large. The arrays are computed from the knowledge base alone. So if the files are
missing, damaged or of another version, the arrays are computed again.
"""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from realm.checksums import CHECKSUMS, check_folder, record_checksums
from realm.errors import RealmError, WriteFailed
from realm.folders import one_writer, remove, replace_folder

MAPPED = "mapped"

Arrays = Mapping[str, np.ndarray]


def mapped_arrays(folder: Path, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` returns, mapped from the files in `folder`.

    One process writes the files, and other processes wait meanwhile. If the files cannot be written, the arrays are only in
    the memory of this process.
    """
    found = _read(folder)
    if found is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with one_writer(folder.parent):
            found = _read(folder)  # another process may have written the files during the wait
            if found is not None:
                return found
            made = make()
            with contextlib.suppress(OSError):
                _write(folder, made)
            return _read(folder) or made
    except (OSError, WriteFailed):
        return make()


def _read(folder: Path) -> Arrays | None:
    """The arrays in a folder; None if there are none, or if the files are damaged."""
    if not (folder / CHECKSUMS).is_file():
        return None
    with contextlib.suppress(RealmError, OSError, ValueError):
        check_folder(folder)
        # With mode "c", torch accepts the arrays without a warning. Slices of plain arrays are faster than slices of a memmap.
        return {file.stem: np.asarray(np.load(file, mmap_mode="c")) for file in folder.glob("*.npy")}
    return None


def _write(folder: Path, arrays: Arrays) -> None:
    """Writes the arrays under a temporary name, renames the folder, and removes the arrays of other versions.

    The caller has the lock of the parent folder.
    """
    aside = folder.with_name(f"{folder.name}.writing")
    remove(aside)  # a killed process can have left files in this folder
    aside.mkdir()
    try:
        for name, array in arrays.items():
            np.save(aside / f"{name}.npy", array)
        record_checksums(aside)
        replace_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for other in folder.parent.parent.iterdir():
        if other != folder.parent:
            shutil.rmtree(other, ignore_errors=True)
