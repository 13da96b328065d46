"""What disks and people do to files: one damage at a time, drawn by a seed."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def damage(draw: random.Random, files: list[Path]) -> str:
    """Changes one or two of the files -> what was done."""
    file, other = draw.sample(files, 2)
    data = bytearray(file.read_bytes())
    place = draw.randrange(max(len(data), 1))
    match draw.choice(["flip", "flip", "zero", "cut", "grow", "delete", "swap", "copy"]):
        case "flip" if data:
            data[place] ^= 1 << draw.randrange(8)
            what = f"bit of byte {place} flipped in {file.name}"
        case "zero":
            end = min(place + draw.choice([1, 512, 4096]), len(data))
            data[place:end] = bytes(end - place)
            what = f"bytes {place} to {end} zeroed in {file.name}"
        case "cut":
            del data[place:]
            what = f"{file.name} cut to {place} bytes"
        case "grow":
            data += draw.randbytes(64)
            what = f"64 bytes behind {file.name}"
        case "swap":
            mine, theirs = file.read_bytes(), other.read_bytes()
            file.write_bytes(theirs)
            other.write_bytes(mine)
            return f"{file.name} and {other.name} swapped"
        case "copy":
            file.write_bytes(other.read_bytes())
            return f"{other.name} copied over {file.name}"
        case _:
            file.unlink()
            return f"{file.name} deleted"
    file.write_bytes(data)
    return what


@contextmanager
def full_disk_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The number-th step of what is written inside finds no room -> the steps that were taken, the failed one last."""
    steps: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **named: Any) -> Any:
            if name == "open" and "r" in [*args[1:], named.get("mode", "r")][0]:
                return function(*args, **named)
            steps.append(name)
            if len(steps) == number + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **named)

        return step

    with monkeypatch.context() as patch:
        for owner, name in (
            *((Path, name) for name in ("open", "touch", "mkdir", "chmod", "rename", "replace")),
            (os, "fsync"),
        ):
            patch.setattr(owner, name, counted(name, getattr(owner, name)))
        yield steps
