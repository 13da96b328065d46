"""Settings from TOML files and `--set`, and the little that every room shares: errors, progress, JSON files.

A room's settings live in a frozen dataclass beside the code they steer; this file only fills them in. Presets
are the files of `configs/`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import sys
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from realm.progress import PlainLines

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

TABLES = (
    "fit",
    "kb",
    "questions",
    "mlm",
    "ict",
    "pretrain",
    "adapt",
    "index",
    "finetune",
    "answer",
    "probe",
    "serve",
    "demo",
    "from_text",
)
"""What a configuration file may have: one table for each kind of command."""


BAR_AFTER = 2.0
"""Seconds after which a bar appears: short work needs none."""
NARROW = 60
"""Columns below which a bar has no room for its rate and values, which would be cut within a number."""
NARROW_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"


class InputError(ValueError):
    """Bad use or bad input, in one line: what, the values, the way out. The command line exits with 2."""


class WriteFailed(InputError):
    """The system refused to write: a full disk, no rights, a folder that is read-only. What was asked is not at fault."""


def reason(error: BaseException) -> str:
    """What the system said, in one line: libraries wrap it in errors of their own."""
    inner: BaseException | None = error
    while inner is not None and not (isinstance(inner, OSError) and inner.strerror):
        inner = inner.__cause__ or inner.__context__
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    # Lance and safetensors have it in the text alone; Lance adds a stack of Rust source lines.
    return re.split(r", /\S+\.rs:\d+|\n", str(error))[0]


def error_number(error: BaseException) -> int | None:
    """The number of the system's error behind an exception (`errno.ENOSPC` ...); Lance and safetensors have it in the text."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            return inner.errno
        if found := re.search(r"\(os error (\d+)\)", str(inner)):
            return int(found[1])
        inner = inner.__cause__ or inner.__context__
    return None


def way_out(path: str | os.PathLike[str] | None, error: BaseException) -> str:
    """What to do where the system refused the path, as a clause behind its reason; nothing for most reasons.

    The room that is left is of the path's file system, so it is unknown without a path.
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
    """Turns what the system raises when it cannot write there into `WriteFailed`; `kinds` are what libraries make of that."""
    refusals: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except refusals as error:
        raise WriteFailed(f"{path} cannot be written: {reason(error)}{way_out(path, error)}") from error


def sync_folder(folder: Path) -> None:
    """Makes new names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AlreadyDone(Exception):
    """Nothing is left to do, in one line. The command line says it and exits with 0."""


def before_torch() -> None:
    """Sets what torch reads when it is imported; what the user's environment says stays."""
    # Its threads must not spin at barriers while an index build or another program wants the cores: on 2 cores with one busy
    # neighbour a step took 3.8 s spinning, 0.7 s without. But to sleep at once makes small products wait for a thread to
    # wake: GNU's look this many times first, some ten microseconds, which halves the time of a search among 10,000 passages.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # Texts have many lengths, and a program for each of the last 1,024 that were multiplied is half a gigabyte, for each thread
    # where torch keeps them itself.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def presets() -> dict[str, Path]:
    """The configuration files that travel with the package, by name: `configs/demo.toml` is `demo`."""
    package = Path(__file__).parent
    folders = (package / "configs", package.parent / "configs")  # installed, checkout
    folder = next((f for f in folders if f.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


def read_config(cls: type[T], file: str | None, section: str, overrides: Sequence[str] = ()) -> T:
    """Settings `cls` from the table `section` of a TOML file or preset, then `a.b=c` overrides.

    No file means defaults, and so does a file without the table: one file serves several commands. The right
    side of an override is read as a TOML value, and as plain text when it is none.

    Raises:
        InputError: one line with all problems.
    """
    values: dict[str, Any] = {}
    where = "--set"
    if file is not None:
        path = _config_path(file)
        where = f"{path} [{section}]"
        tables = _read_toml(path)
        if unknown := tables.keys() - {*TABLES, section}:
            raise InputError(
                f"{path}: unknown table {', '.join(sorted(unknown))} (known: {', '.join(TABLES)})"
            )
        table = tables.get(section, {})
        if not isinstance(table, dict):
            raise InputError(
                f"{path}: {section} = {table!r} must be a table: write [{section}] above its keys"
            )
        values = table
    for override in overrides:
        _set(values, override)
    return config_from(cls, values, where)


def config_from(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """The dataclass tree `cls` from nested mappings, as read from TOML or JSON; errors begin with `where`.

    Missing keys take their defaults.

    Raises:
        InputError: one line with all unknown keys, wrong types and values that a `__post_init__` refuses.
    """
    from pydantic import TypeAdapter, ValidationError  # here, so that `realm --help` does not pay for it

    try:
        # Through JSON because only its strict mode still takes lists for tuples and strings for paths.
        return TypeAdapter(cls).validate_json(json.dumps(values, default=str), strict=True, extra="forbid")
    except ValidationError as error:
        problems = dict.fromkeys(_problem(cls, dict(p)) for p in error.errors(include_url=False))
        raise InputError(f"{where}: " + "; ".join(problems)) from None


def progress(
    iterable: Iterable[T] | None = None,
    *,
    total: int | None,
    description: str,
    unit: str,
    done: int = 0,
    shown: bool = True,
    leave: bool = True,
) -> tqdm[T] | PlainLines:
    """How far a piece of work is, on standard error, with rate and time left; `done` was done before it began.

    On a terminal a bar, after two seconds; elsewhere a plain line every half minute; nothing where it is not
    `shown`, because another process or another bar reports the same work. A bar of a part of some work is to `leave`
    nothing on the terminal.
    """
    if shown and not sys.stderr.isatty():
        return PlainLines(iterable, total, description, unit, done)
    from tqdm import tqdm

    columns = _columns()
    return tqdm(
        iterable,
        total=total,
        desc=description,
        unit=f" {unit}",
        initial=done,
        file=sys.stderr,
        delay=BAR_AFTER,
        disable=not shown,
        leave=leave,
        bar_format=NARROW_BAR if total is not None and 0 < columns < NARROW else None,
        **({"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}),
    )


def _columns() -> int:
    """Of the terminal; 0 where it does not say its size.

    A terminal that a program opened may have 0 rows, where tqdm shows nothing.
    """
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return 0
    return columns if rows else 0


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds, as plain values.

    Raises:
        InputError: it cannot be read, is not JSON in UTF-8, nests too deeply, or has text that no file can hold.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # an escape such as \\ud800 alone is no character
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {reason(error)}") from error
    return value


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON so that the file is the old one or the new one, never half of either."""
    with _aside(Path(path)) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def write_json_lines(path: str | os.PathLike[str], values: Iterable[Any]) -> None:
    """Writes each value on a line of its own; the file is whole or not there, as with `write_json`."""
    with _aside(Path(path)) as file:
        for value in values:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Writes text, a line each; the file is whole or as it was, as with `write_json`."""
    with _aside(Path(path)) as file:
        file.writelines(f"{line}\n" for line in lines)


@contextmanager
def _aside(path: Path) -> Iterator[TextIO]:
    """A file beside `path` that takes its place, on disk, when the block ends well."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _config_path(file: str) -> Path:
    known = presets()
    path = known.get(file, Path(file))
    if not path.is_file():
        raise InputError(f"no configuration file {file}: give a TOML file or a preset ({', '.join(known)})")
    return path


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of 5,000 digits, too deep
        raise InputError(f"{path} is not TOML: {error}") from None


def _set(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *tables, key = (part.strip() for part in name.split("."))
    if not equals or not all((*tables, key)):
        raise InputError(f"--set {override}: write it as name=value or table.name=value")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise InputError(f"--set {override}: {table} holds {values!r}, not a table")
    try:
        values[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[key] = text.strip()
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, too deep
        raise InputError(f"--set {_short(override)}: {error}") from None


def _problem(cls: type, problem: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "unexpected_keyword_argument":
        known = _keys(cls, problem["loc"][:-1])
        return f"unknown key {name} (known: {', '.join(known)})"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":  # from a __post_init__, which says its own values
        return f"{name}: {message}" if name else message
    return f"{name}: {message[:1].lower()}{message[1:]}, got {_short(problem['input'])}"


def _keys(cls: Any, path: Sequence[str | int]) -> list[str]:
    """Field names of the dataclass that `path` reaches; a name that is no field is a step through a union."""
    for part in path:
        hints = typing.get_type_hints(cls)
        if part in hints:
            kinds = (hints[part], *typing.get_args(hints[part]))
            cls = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), cls)
    return [field.name for field in dataclasses.fields(cls)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
