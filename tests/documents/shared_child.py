"""Tests use the processes that read files again, because a process takes longer to start than a small file takes to be read."""

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from realm.documents import child_process
from realm.documents.child_process import ReaderProcess
from realm.documents.formats.records import Record, Unreadable


@contextmanager
def shared_child() -> Iterator[None]:
    """A process that has read its last file to the end goes on after its `ReaderProcess`, and reads files of the next one."""
    start, read = child_process._start, ReaderProcess.read
    idle: dict[str, list[subprocess.Popen[bytes]]] = defaultdict(list)  # by the folder in which they started
    started_in: dict[int, str] = {}
    unfinished: list[ReaderProcess] = []

    def idle_or_new() -> "subprocess.Popen[bytes]":
        if idle[os.getcwd()]:
            return idle[os.getcwd()].pop()
        child = start()
        started_in[child.pid] = os.getcwd()
        return child

    def noted(self: ReaderProcess, path: Path, *rest: Any) -> Iterator[Record | Unreadable]:
        unfinished.append(self)
        yield from read(self, path, *rest)
        unfinished.remove(self)

    def kept(self: ReaderProcess, *_: object) -> None:
        if self in unfinished or self._child is None:
            self._stop()
        else:
            idle[started_in[self._child.pid]].append(self._child)
            self._child = None

    with (
        patch.object(child_process, "_start", idle_or_new),
        patch.object(ReaderProcess, "read", noted),
        patch.object(ReaderProcess, "__exit__", kept),
    ):
        yield
    for reader in unfinished:
        reader._stop()
    for child in (one for children in idle.values() for one in children):
        child.kill()
        child.communicate()
