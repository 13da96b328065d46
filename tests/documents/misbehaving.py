"""A reader that does what a file says."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from realm.documents.formats.records import Limits, Pages, Record, Unreadable


def read(path: Path, limits: Limits) -> Iterator[Record | Unreadable | Pages]:
    match path.read_text():
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "loop":
            while True:
                pass
        case "memory":
            bytearray(8 << 30)
        case "exit":
            os._exit(3)
        case text:
            print("what a library prints")
            for page in range(len(text)):
                yield Pages(page + 1, len(text))
            yield Record(str(path), "T", text, path.as_posix())
