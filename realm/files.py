"""Reads and writes JSON and text files. A file is written completely or not at all."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from realm.errors import DamagedError, reason


def sync(path: Path) -> None:
    """Syncs a file or a folder to disk, so that its content, or new names in it, are not lost in a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file as plain values.

    Raises:
        DamagedError: the file cannot be read, is not JSON in UTF-8, is nested too deeply, or contains a lone surrogate.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # refuses a lone surrogate such as \\ud800
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {reason(error)}") from error
    return value


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON. After a kill, the old file or the complete new file exists."""
    with _aside(Path(path)) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def write_json_lines(path: str | os.PathLike[str], values: Iterable[Any]) -> None:
    """Writes each value as a line of JSON. After a kill, the old file or the complete new file exists."""
    with _aside(Path(path)) as file:
        for value in values:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Writes lines of text. After a kill, the old file or the complete new file exists."""
    with _aside(Path(path)) as file:
        file.writelines(_ended(lines))


def has_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> bool:
    """Whether a file has exactly these lines, as `write_lines` writes them."""
    return Path(path).read_bytes() == "".join(_ended(lines)).encode()


def _ended(lines: Iterable[str]) -> Iterator[str]:
    return (f"{line}\n" for line in lines)


@contextmanager
def _aside(path: Path) -> Iterator[TextIO]:
    """A temporary text file that becomes `path`; see `new_file`."""
    with new_file(path) as aside, aside.open("w", encoding="utf-8") as file:
        yield file


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """The path of a temporary file. When the block ends without an error, the file is synced to disk and renamed to `path`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
