"""Functions for folders that several processes use: a lock for one writer at a time, and atomic replacement."""

import ctypes
import errno
import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from realm.errors import ConflictError, InputError, WriteFailed, reason, way_out
from realm.files import read_json, write_json

MANIFEST = "realm.json"
"""The manifest of a model; no other folder has this file."""
PASSAGES = "passages.lance"
"""The table of passages in a knowledge base; no other folder has this folder."""
KB, DOCUMENTS = "kb", "documents.json"
"""The knowledge base of a workspace, and the list of its documents; no other folder has both."""
VERSIONS = "_versions"
"""Folder of a Lance dataset that Lance makes with the first version, and that gets a file with each version."""
TABLE_KEY = b"realm"
"""Key of the settings in the metadata of the schema of every table in a knowledge base; no other table has this key."""
LOCK = ".lock"
"""Lock file in a folder."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS."""
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
"""Error numbers of file systems that cannot exchange two folders."""
_held = threading.local()


def what_it_is(folder: Path) -> str:
    """ "a model" or "a knowledge base", for the message that refuses the folder; otherwise ""."""
    if (folder / MANIFEST).is_file():
        return "a model"
    return "a knowledge base" if (folder / PASSAGES).is_dir() else ""


def is_new(folder: Path) -> bool:
    """Whether the folder does not exist or is empty, so that a command can make it."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


@contextmanager
def one_writer(folder: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the lock of a folder during the block, after waiting until no other thread or process holds the lock.

    A kill releases the lock. A thread that already holds the lock does not wait. `waits` is called before a wait, which may be
    long.

    Raises:
        WriteFailed: the folder cannot be written, or its file system does not support locks.
    """
    held: set[Path] = _held.__dict__.setdefault("folders", set())
    name = folder.absolute()
    if name in held:
        yield
        return
    try:
        descriptor = _lock(folder / LOCK, waits)
    except OSError as error:
        raise _not_locked(folder, error) from error
    held.add(name)
    try:
        yield
    finally:
        held.remove(name)
        # It is not enough to close the descriptor, because a forked child may also have it open.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def copy_into(folder: Path, items: Iterable[Path]) -> None:
    """Copies files, and folders with their content, into a folder, under the same names."""
    for one in items:
        (shutil.copytree if one.is_dir() else shutil.copy)(one, folder / one.name)


@contextmanager
def only_holder(file: Path, refusal: str) -> Iterator[None]:
    """Holds the lock of a file during the block; the file is made if it does not exist. A kill releases the lock.

    Raises:
        ConflictError: another thread or process holds the lock; `refusal` is the message.
        WriteFailed: the folder cannot be written, or its file system does not support locks.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _not_locked(file.parent, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(refusal) from None
        except OSError as error:
            raise _not_locked(file.parent, error) from error
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may also have the descriptor open
    finally:
        os.close(descriptor)


def _not_locked(folder: Path, error: OSError) -> WriteFailed:
    return WriteFailed(f"{folder} cannot be locked for writing: {reason(error)}{way_out(folder, error)}")


def _lock(file: Path, waits: Callable[[], None]) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the folder was replaced while this process waited


def replace_folder(new: Path, target: Path) -> None:
    """Replaces the folder `target` by the complete folder `new`. After a kill, `target` is the old or the new folder.

    Exception: on a file system that cannot exchange two names, `target` does not exist between two renames. If the process is
    killed there, `restore` completes the replacement.
    """
    coming, going = _coming(target), target.with_name(f"{target.name}.going")
    remove(coming)
    remove(going)
    if not target.exists():
        new.rename(target)
        return
    new.rename(coming)
    try:
        _exchange(coming, target)
        with suppress(OSError):
            coming.rename(going)  # otherwise `restore` could rename the old folder to `target`
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            coming.rename(new)
            raise
        target.rename(going)
        try:
            coming.rename(target)
        except OSError:
            # If `target` exists, `restore` in another process has renamed `coming`.
            if not target.exists():
                going.rename(target)
                raise
    # The replacement is done. The next replacement removes a folder that cannot be removed now.
    for old in (coming, going):
        with suppress(OSError):
            remove(old)


def make_once(
    folder: Path, file: str, made_of: Mapping[str, str], make: Callable[[Path], None], continues: bool = False
) -> None:
    """Makes a folder, unless the folder exists and its JSON file `file` equals `made_of`.

    `make` fills a temporary folder, which then replaces `folder`. With `continues`, the temporary folder has the files that a
    killed call with the same `made_of` left.

    Raises:
        InputError: `folder` has files, but not `file`: it was not made by this function, and is not replaced.
    """

    def made(where: Path) -> bool:
        return (where / file).is_file() and read_json(where / file) == made_of

    if made(folder):
        return
    check_made(folder, file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_writer(folder.parent):
        if made(folder):  # by another process, meanwhile
            return
        aside = folder.with_name(folder.name + ".writing")
        if not (continues and made(aside)):
            remove(aside)  # a killed process can have left files in this folder
            aside.mkdir()
            write_json(aside / file, made_of)
        make(aside)
        replace_folder(aside, folder)


def check_made(folder: Path, file: str) -> None:
    """Checks that `make_once` may make or replace a folder: it is new, or has the JSON file `file` of an earlier call.

    Raises:
        InputError: the folder has other files.
    """
    if not (is_new(folder) or (folder / file).is_file()):
        raise InputError(f"{folder} exists already and has other files: choose another folder")


def restore(target: Path) -> None:
    """Completes a replacement that was killed between two renames."""
    coming = _coming(target)
    if not target.exists() and coming.exists():
        with suppress(FileNotFoundError):  # another process has renamed the folder
            coming.rename(target)


def remove(folder: Path) -> None:
    """Removes a folder or a link to a folder, if it exists."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _coming(target: Path) -> Path:
    named = target if target.name else target.absolute()  # "." has no name
    return named.with_name(f"{named.name}.replaced")


def _exchange(one: Path, other: Path) -> None:
    """Exchanges the names of two folders in one step."""
    system = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform == "darwin" and hasattr(system, "renamex_np"):
        failed = system.renamex_np(*names, _EXCHANGE)
    elif hasattr(system, "renameat2"):
        here = -100  # AT_FDCWD: names are relative to the working directory
        failed = system.renameat2(here, names[0], here, names[1], _EXCHANGE)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))
