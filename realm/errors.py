"""Errors that the command line prints as one line, and functions for messages.

RealmError           exit code 2
├── InputError       wrong use or wrong input: a flag, a setting, a file, a request
├── DamagedError     a file or folder that `realm` wrote is damaged, changed or incomplete
├── ConflictError    another process, an earlier run or a change on disk prevents the work
│   └── OtherSettings  saved work has other settings than this command
├── DivergedError    training produced numbers that are not finite, or a network that does not learn
└── WriteFailed      the operating system refused to write
AlreadyDone          nothing is left to do: exit code 0
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any


class RealmError(ValueError):
    """An error whose message is one line with the problem, the values, and a way to solve the problem."""


class InputError(RealmError):
    """Wrong use or wrong input."""


class DamagedError(RealmError):
    """A file or folder that `realm` wrote is damaged, changed or incomplete."""


class ConflictError(RealmError):
    """Another process, an earlier run or a change on disk prevents the work."""


class OtherSettings(ConflictError):
    """Saved work cannot be continued: it has other settings than this command."""


class DivergedError(RealmError):
    """Training cannot continue: a loss or gradient is not finite, or a network does not learn what the next stage needs."""


class WriteFailed(RealmError):
    """The operating system refused to write, for example because the disk is full or the folder is read-only."""


class AlreadyDone(Exception):
    """Nothing is left to do; the message is one line."""


def reason(error: BaseException) -> str:
    """The message of the operating system in one line. Libraries raise errors that contain this message."""
    inner: BaseException | None = error
    while inner is not None and not (isinstance(inner, OSError) and inner.strerror):
        inner = inner.__cause__ or inner.__context__
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    if isinstance(error, shutil.Error) and (number := error_number(error)):
        return os.strerror(number)  # the text would be a list of all files that were not copied
    # In errors of Lance and safetensors, the message is a part of the text. Lance adds lines with positions in Rust sources.
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


def without_passwords(text: str) -> str:
    """The text with addresses that have neither user nor password.

    >>> without_passwords("cannot reach postgresql://me:secret@a.b/c")
    'cannot reach postgresql://a.b/c'
    """
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def shown(value: Any) -> str:
    """The value's `repr`, without passwords in addresses, cut to 60 characters."""
    return shortened(without_passwords(repr(value)), 60)


def check_encodable(text: str, what: str = "") -> None:
    """Raises InputError if a text has one half of a surrogate pair, which JSON can hold and UTF-8 cannot.

    The message begins with `what`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what}{shown(text)} has one half of a surrogate pair") from None


def error_number(error: BaseException) -> int | None:
    """The error number of the operating system (`errno.ENOSPC` ...) that caused an exception, or None."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            return inner.errno
        # Texts of Lance and safetensors, and of `shutil.Error`.
        if found := re.search(r"(?:\(os error |\[Errno )(\d+)", str(inner)):
            return int(found[1])
        inner = inner.__cause__ or inner.__context__
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is missing.

    Python and NumPy raise a MemoryError, torch raises an OutOfMemoryError for a GPU and a RuntimeError for a CPU.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"))
    True
    """
    of_torch = isinstance(error, RuntimeError) and re.search(
        "out of memory|n[o']t allocate memory", str(error)
    )
    return isinstance(error, MemoryError) or bool(of_torch)


def way_out(path: str | os.PathLike[str] | None, error: BaseException) -> str:
    """The part of a message about what the user can do after a failed write; "" for most reasons.

    If `path` is None, the message does not contain the free space of a file system.
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
            return "; give this user permission (`chmod`, or ask the owner), or give another path"
    return ""


def _free(path: Path) -> str:
    folder = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free"


@contextmanager
def writing(path: str | os.PathLike[str], *kinds: type[Exception]) -> Iterator[None]:
    """Raises `WriteFailed` if the block raises an `OSError` or one of the exceptions `kinds`."""
    refusals: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except refusals as error:
        raise WriteFailed(f"{path} cannot be written: {reason(error)}{way_out(path, error)}") from error


def at_least(settings: object, **least: float) -> None:
    """Raises InputError if a setting is no number, is below its least value or is NaN. `least` has names of settings and least
    values.

    A setting that is None is not checked.
    """
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not _number(name, value) >= bound:
            raise InputError(f"{name} is {value}: it must be {bound} or more")


def check_shares(settings: object, *names: str) -> None:
    """Raises InputError if one of the named settings is not a share, a number from 0 to 1. None is not checked."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= _number(name, value) <= 1:
            raise InputError(f"{name} is {value}: it must be between 0 and 1")


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):  # also a number of numpy
        raise InputError(f"{name} is {shown(value)}: it must be a number")
    return float(value)


def no_rank(command: str) -> InputError:
    """The error of a command that runs in one process, if `torchrun` has started several."""
    return InputError(f"realm {command} runs in one process; torchrun is for mlm, ict, pretrain and finetune")
