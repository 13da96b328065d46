"""Files that are computed from a knowledge base: one process computes and writes them, and all processes read them.

If the files are missing, damaged or of another version of the knowledge base, they are computed again.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from realm.checksums import CHECKSUMS, check_folder, record_checksums
from realm.errors import RealmError, WriteFailed
from realm.folders import LOCK, one_writer, remove, replace_folder

T = TypeVar("T")


def computed(
    folder: Path,
    version: Path,
    load: Callable[[Path], T],
    make: Callable[[], T],
    save: Callable[[T, Path], None],
) -> T:
    """What `load` reads from `folder`, after a process has made it with `make` and written it with `save`.

    `version` is `folder` or its parent, and identifies the version of the knowledge base; after files are written, the folders
    beside it are removed. While a process makes the files, other processes wait. If the files cannot be written, the result is
    only in the memory of this process.
    """
    found = _loaded(folder, load)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(one_writer(version.parent))
        except (OSError, WriteFailed):
            return make()
        found = _loaded(folder, load)  # another process may have written the files during the wait
        if found is not None:
            return found
        made = make()
        with contextlib.suppress(OSError, WriteFailed):
            _write(folder, version, made, save)
        found = _loaded(folder, load)
        return made if found is None else found


def _loaded(folder: Path, load: Callable[[Path], T]) -> T | None:
    """None if there are no files, or if they are damaged."""
    if not (folder / CHECKSUMS).is_file():
        return None
    with contextlib.suppress(RealmError, OSError, ValueError, LookupError, TypeError):
        check_folder(folder)
        return load(folder)
    return None


def _write(folder: Path, version: Path, made: T, save: Callable[[T, Path], None]) -> None:
    """Writes the files under a temporary name, renames the folder, and removes other versions.

    The caller has the lock of the folder that contains `version`.
    """
    aside = folder.with_name(f"{folder.name}.writing")
    remove(aside)  # a killed process can have left files in this folder
    aside.mkdir()
    try:
        save(made, aside)
        record_checksums(aside)
        replace_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for other in version.parent.iterdir():
        if other != version and other.name != LOCK:
            shutil.rmtree(other, ignore_errors=True)
