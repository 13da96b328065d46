"""Runs the readers of binary formats in a child process, so that a hostile file cannot harm the caller.

Office and EPUB files are compressed archives, which can expand without limit; so can Parquet, Arrow and Lance files. The
libraries that read these files, PDF and ZIM are written in C++ and Rust, and a damaged file can crash them. If a file takes too
much time or memory, or crashes its reader, this file is left out, and a new child process reads the next file.
The output of the child process is JSON, with one line per page or record.
"""

import importlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from realm.documents.child_limits import MOST_MEMORY, limit
from realm.documents.formats.records import Clusters, Limits, Pages, Reason, Record, Unreadable
from realm.errors import first_line, shortened
from realm.orphans import end_when_orphaned
from realm.progress import progress
from realm.text.corpus import Link, Section
from realm.text.fields import FieldNames, json_value

MODULES = {
    ".parquet": "realm.documents.formats.columns",
    ".arrow": "realm.documents.formats.columns",
    ".lance": "realm.documents.formats.columns",
    ".pdf": "realm.documents.formats.pdf",
    ".rst": "realm.documents.formats.rst",
    ".docx": "realm.documents.formats.word",
    ".odt": "realm.documents.formats.odt",
    ".pptx": "realm.documents.formats.slides",
    ".xlsx": "realm.documents.formats.workbooks",
    ".xlsm": "realm.documents.formats.workbooks",
    ".xls": "realm.documents.formats.workbooks",
    ".ods": "realm.documents.formats.workbooks",
    ".epub": "realm.documents.formats.epub",
    ".eml": "realm.documents.formats.mail",
    ".mbox": "realm.documents.formats.mail",
    ".ipynb": "realm.documents.formats.notebooks",
    ".zim": "realm.documents.wikipedia.zim",
}
"""Extension -> module with a function `read(path, limits)` that yields `Record`, `Unreadable` and, for the progress bar,
`Pages`. The function of `zim` can also be given `Clusters`."""

FRUGAL = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "LANCE_CPU_THREADS": "1",
    "TOKIO_WORKER_THREADS": "1",
}
"""Environment of the child process. Without it, Arrow and the threads of Lance reserve most of the address space that the child
process may use."""
MOST_SECONDS = 120
"""Most seconds of processor time for a file; each page that was read adds one second."""


class ReaderProcess(AbstractContextManager["ReaderProcess"]):
    """A child process that reads one file after the other. It starts with the first file and ends with the `with` block."""

    def __init__(self, shows: bool = True) -> None:
        """With `shows`, a progress bar counts the pages of a long file."""
        self._shows = shows
        self._child: subprocess.Popen[bytes] | None = None

    def read(
        self, path: Path, limits: Limits, clusters: Clusters | None = None
    ) -> Iterator[Record | Unreadable]:
        """The records of a file in one of the formats of `MODULES`, or of a part of a ZIM archive."""
        child = self._child = self._child or _start()
        assert child.stdin is not None and child.stdout is not None
        with ExitStack() as whatever_comes, ExitStack() as shown:
            # A child process whose answer was not read to the end cannot be used again.
            whatever_comes.callback(self._stop)
            bar = None
            request = {"path": str(path), "limits": limits, "clusters": clusters}
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            for line in child.stdout:
                kind, values = json.loads(line)
                if kind == "pages":
                    done, total = values
                    if bar is None:
                        name = shortened(path.name, 30)
                        bar = shown.enter_context(
                            progress(
                                total=total, description=name, unit="page", shown=self._shows, leave=False
                            )
                        )
                    bar.update(done - bar.n)
                elif kind == "end":
                    whatever_comes.pop_all()
                    return
                else:
                    yield record_of_json(*values) if kind == "record" else Unreadable(*values)
            raise _ended(path, child.wait())

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def __exit__(self, *_: object) -> None:
        self._stop()


def _start() -> subprocess.Popen[bytes]:
    # With -P, Python imports no modules from the current folder, which may contain files with the names of modules.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "realm.documents.child_process", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **FRUGAL},
    )


def record_of_json(*values: Any) -> Record:
    """A record from its values in JSON, in which links and sections are lists."""
    record = Record(*values)
    links = None if record.links is None else tuple(Link(*link) for link in record.links)
    return record._replace(links=links, sections=tuple(Section(*section) for section in record.sections))


def _ended(path: Path, code: int) -> Unreadable:
    if code == -signal.SIGXCPU:
        return Unreadable(
            path, Reason.TOO_LONG, f"{path}: reading took over {MOST_SECONDS} s of processor time: split it"
        )
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Unreadable(
        path, Reason.DAMAGED, f"{path} cannot be read (the process that read it ended with {how})"
    )


# --- in the child --------------------------------------------------------------------------------


def _value(value: object) -> str | float:
    """A value for JSON; NaN, which is no field, if JSON has no such value."""
    try:
        return json_value(value)
    except (TypeError, OverflowError):
        return math.nan


def main() -> None:
    """Reads the files that standard input lists, until the parent process closes standard input or ends.

    The only argument of the command is the id of the parent process.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints goes to standard error, not into the answers
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, MOST_MEMORY)
    end_when_orphaned(int(sys.argv[1]))

    def answer(kind: str, *values: object) -> None:
        answers.write(json.dumps([kind, values], default=_value) + "\n")
        answers.flush()

    for line in sys.stdin.buffer:
        request = json.loads(line)
        path = Path(request["path"])
        seconds = math.ceil(time.process_time() + MOST_SECONDS)
        limit(resource.RLIMIT_CPU, seconds)
        try:
            if not path.is_dir():
                with path.open("rb") as file:
                    if not file.read(1):
                        raise Unreadable(path, Reason.EMPTY, f"{path} is empty")
            read = importlib.import_module(MODULES[path.suffix.lower()]).read
            chars, headings, names = request["limits"]
            part = [Clusters(*clusters)] if (clusters := request["clusters"]) else []
            for found in read(path, Limits(chars, headings, FieldNames(*names)), *part):
                if isinstance(found, Pages):
                    limit(resource.RLIMIT_CPU, seconds + found.done)
                    answer("pages", *found)
                elif isinstance(found, Record):
                    answer("record", *found)
                else:
                    answer("unreadable", found.where, found.reason, str(found))
        except Unreadable as problem:
            answer("unreadable", problem.where, problem.reason, str(problem))
        except OSError as error:
            answer(
                "unreadable", str(path), Reason.NOT_OPENED, f"{path}: {error.strerror or first_line(error)}"
            )
        except MemoryError:
            message = f"{path}: reading takes over {MOST_MEMORY >> 30} GiB of memory: split it"
            answer("unreadable", str(path), Reason.TOO_LONG, message)
        except Exception as error:  # libraries raise errors of many classes
            message = f"{path} cannot be read ({shortened(first_line(error))})"
            answer("unreadable", str(path), Reason.DAMAGED, message)
        answer("end")


if __name__ == "__main__":
    main()
