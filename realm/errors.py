"""Errors that the command line shows as one line, the system's reason behind an exception, and short texts for messages.

RealmError           exit code 2
├── InputError       bad use or bad input: a flag, a setting, a file, a request
├── DamagedError     data of ours on disk that is torn, changed or incomplete
├── ConflictError    another process or an earlier run stands in the way
├── DivergedError    training produced numbers that are not finite, or a reader that does not learn
└── WriteFailed      the operating system refused to write
AlreadyDone          nothing is left to do: exit code 0
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class RealmError(ValueError):
    """An error that one line explains: what is wrong, the values, and what to do about it."""


class InputError(RealmError):
    """Bad use or bad input."""


class DamagedError(RealmError):
    """A file or folder that this package wrote is torn, changed or incomplete."""


class ConflictError(RealmError):
    """Another process, an interrupted run or a change on disk stands in the way."""


class DivergedError(RealmError):
    """Training cannot go on: a loss or gradient is not finite, or a network does not learn what the next stage needs."""


class WriteFailed(RealmError):
    """The operating system refused to write: a full disk, missing rights, a read-only folder."""


class AlreadyDone(Exception):
    """Nothing is left to do, in one line."""


def reason(error: BaseException) -> str:
    """The operating system's message in one line; libraries wrap that message in errors of their own."""
    inner: BaseException | None = error
    while inner is not None and not (isinstance(inner, OSError) and inner.strerror):
        inner = inner.__cause__ or inner.__context__
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    # Lance and safetensors put the message in their text alone; Lance adds a stack of Rust source lines.
    return re.split(r", /\S+\.rs:\d+|\n", str(error))[0]


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shortened(text: str, longest: int = 200) -> str:
    """The text, cut to `longest` characters.

    >>> shortened("abcdefghij", 8)
    'abcde...'
    """
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def shown(value: Any) -> str:
    """The value's `repr`, cut to 60 characters."""
    return shortened(repr(value), 60)


def error_number(error: BaseException) -> int | None:
    """The operating system's error number behind an exception (`errno.ENOSPC` ...)."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            return inner.errno
        if found := re.search(r"\(os error (\d+)\)", str(inner)):  # Lance and safetensors
            return int(found[1])
        inner = inner.__cause__ or inner.__context__
    return None


def way_out(path: str | os.PathLike[str] | None, error: BaseException) -> str:
    """A clause that tells the user what to do after a failed write; empty for most reasons.

    Without a path the free space of its file system is unknown, and left out.
    """
    match error_number(error):
        case errno.ENOSPC:
            room = "" if path is None else f"{_free(Path(path))}: "
            return f"; {room}remove files, or make a knowledge base smaller with `realm kb compact`"
        case errno.EDQUOT:
            return "; remove files of this user, or make a knowledge base smaller with `realm kb compact`"
        case errno.EFBIG:
            return "; raise the limit on the size of a file (`ulimit -f`)"
        case errno.EROFS:
            return "; give a folder on a file system that can be written to"
        case errno.EACCES | errno.EPERM:
            return "; give this user the right to it (`chmod`, or ask its owner), or give another folder"
    return ""


def _free(path: Path) -> str:
    folder = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there"


@contextmanager
def writing(path: str | os.PathLike[str], *kinds: type[Exception]) -> Iterator[None]:
    """Turns an operating system error in the block into `WriteFailed`; `kinds` are further exceptions to turn."""
    refusals: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except refusals as error:
        raise WriteFailed(f"{path} cannot be written: {reason(error)}{way_out(path, error)}") from error


def at_least(settings: object, **least: float) -> None:
    """Raises ValueError if a setting of a dataclass is below its least value, or is not a number."""
    for name, bound in least.items():
        if not getattr(settings, name) >= bound:
            raise ValueError(f"{name} is {getattr(settings, name)}: it must be {bound} or more")
