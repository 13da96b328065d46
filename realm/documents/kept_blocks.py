"""Keeps the records of parts of dumps and of PDF and Word files that a Ray cluster has read, so that an interrupted build does
not parse them again.

The process of the command keeps them in a database of its own, because the machines of a cluster cannot share an SQLite file.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from realm.documents.child_process import record_of_json
from realm.documents.formats.records import SURROGATE, Limits, Reason, Record, Unreadable, checked
from realm.documents.kept_records import digest_of_code, reader_of
from realm.documents.sources import State
from realm.documents.wikipedia.dumps import parser_version
from realm.documents.wikipedia.multistream import DumpPart
from realm.kept_values import KeptValues

CODE = (
    "documents/wikipedia/*.py",
    "documents/formats/compressed.py",
    "documents/formats/records.py",
    "documents/child_limits.py",
    "documents/child_process.py",
    "documents/kept_*.py",
    "text/corpus.py",
)
"""The code on which the records of a part of a dump depend, and how they are kept."""


class KeptBlocks(AbstractContextManager["KeptBlocks"]):
    """The records of blocks, under a key for each block (`key_of_part`, `key_of_file`), in several values per block."""

    def __init__(self, file: Path):
        self._values = KeptValues(file, "blocks", "all dumps, PDF and Word files are parsed again")

    def has(self, key: bytes) -> bool:
        """Whether all records of a block are kept."""
        return self._count(key) is not None

    def keep(self, key: bytes, number: int, found: Sequence[Record | Unreadable], last: bool) -> None:
        """Keeps some of the records of a block, which are the value `number` of the block, and perhaps its last value."""
        values = [
            ["unreadable", one.where, one.reason, str(one)]
            if isinstance(one, Unreadable)
            else ["record", *one._replace(fields=dict(one.fields))]
            for one in found
        ]
        self._values.keep(_value_key(key, number), _encoded(values))
        if last:
            self._values.keep(key, _encoded(number + 1))
        self._values.write()  # a value can have megabytes

    def records(self, key: bytes) -> Iterator[list[Record | Unreadable]]:
        """The records of a block, value by value.

        Raises:
            ValueError: a value is missing or damaged. The values before it were yielded.
        """
        count = self._count(key)
        if count is None:
            raise ValueError("the number of values is missing or damaged")
        for number in range(count):
            values = _decoded(self._values.find(_value_key(key, number)))
            try:
                yield [_record(*one) for one in values]
            except TypeError as error:
                raise ValueError("a kept value is damaged") from error

    def _count(self, key: bytes) -> int | None:
        """Number of values of a block; None if not all values are kept, or if the number is damaged."""
        with suppress(ValueError):
            count = _decoded(self._values.find(key))
            if type(count) is int and count > 0:
                return count
        return None

    def __exit__(self, *exception: object) -> None:
        self._values.close()


def key_of_part(part: DumpPart, state: State, limits: Limits) -> bytes:
    """Hash of all on which the records of a part depend; `state` is that of the dump."""
    return _hash(str(part.path), part[1:], state, limits, _parser())


def key_of_file(path: Path, state: State, limits: Limits) -> bytes | None:
    """Hash of all on which the records of a file depend; None if the records of such files are not kept."""
    reader = reader_of(path)
    return None if reader is None else _hash(str(path), state, limits, reader)


def _hash(*parts: object) -> bytes:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()


@cache
def _parser() -> str:
    """The version of the parser of pages, and a digest of the code."""
    return f"{parser_version()} {digest_of_code(CODE)}"


def _value_key(key: bytes, number: int) -> bytes:
    return key + number.to_bytes(4, "big")


def _encoded(value: object) -> bytes:
    return zlib.compress(json.dumps(value).encode(), level=1)


def _decoded(value: bytes | None) -> Any:
    """Raises ValueError if the value is missing or damaged."""
    try:
        return json.loads(zlib.decompress(value or b""))
    except (zlib.error, RecursionError) as error:
        raise ValueError("a kept value is missing or damaged") from error


def _record(kind: str, *values: Any) -> Record | Unreadable:
    if kind == "record":
        return checked(record_of_json(*values))
    where, reason, message = values
    if SURROGATE.search(where + message):
        raise ValueError("a lone surrogate")
    return Unreadable(where, Reason(reason), message)
