"""Arrays that all processes of a machine map from the same files, so that the machine has one copy in memory.

    KB/mapped/KEY/NAME/     an .npy file per array, and checksums; KEY identifies the version of the knowledge base

The processes that `torchrun` starts on a machine use such arrays for the wordpieces and the spans of the knowledge base, and so
does every process if the knowledge base is large.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from realm.store.computed import computed

MAPPED = "mapped"

Arrays = Mapping[str, np.ndarray]


def mapped_arrays(folder: Path, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` returns, mapped from the files in `folder`, as `computed` does; `folder` is KB/mapped/KEY/NAME."""
    return computed(folder, folder.parent, _load, make, _save)


def _load(folder: Path) -> Arrays:
    # With mode "c", torch accepts the arrays without a warning. Slices of plain arrays are faster than slices of a memmap.
    return {file.stem: np.asarray(np.load(file, mmap_mode="c")) for file in folder.glob("*.npy")}


def _save(arrays: Arrays, folder: Path) -> None:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
