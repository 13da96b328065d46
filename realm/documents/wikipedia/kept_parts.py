"""Keeps the records of the parts of dumps that a Ray cluster has read, so that an interrupted build does not read them again.

The process of the command keeps them in a database of its own, because the machines of a cluster cannot share an SQLite file.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from realm.documents.formats.records import SURROGATE, Limits, Record, Unreadable
from realm.documents.wikipedia.dumps import parser_version
from realm.documents.wikipedia.multistream import DumpPart
from realm.kept_values import KeptValues
from realm.text.corpus import Link

_CODE = ("dumps.py", "multistream.py")


class KeptParts(AbstractContextManager["KeptParts"]):
    """The records of parts, under a key for each part (`key_of_part`). The records of a part are kept in several values."""

    def __init__(self, file: Path):
        self._values = KeptValues(file, "parts", "all parts of dumps are read again")

    def has(self, key: bytes) -> bool:
        """Whether all records of a part are kept."""
        return self._values.find(key) is not None

    def keep(self, key: bytes, number: int, found: Sequence[Record | Unreadable]) -> None:
        """Keeps some of the records of a part, which are the value `number` of the part."""
        values = [
            [one.where, one.reason, str(one)]
            if isinstance(one, Unreadable)
            else [one.where, one.title, one.text, one.links]
            for one in found
        ]
        self._values.keep(_value_key(key, number), zlib.compress(json.dumps(values).encode(), level=1))
        self._values.write()  # a value can have megabytes

    def complete(self, key: bytes, count: int) -> None:
        """Records that all records of a part are kept, in `count` values."""
        self._values.keep(key, str(count).encode())
        self._values.write()

    def records(self, key: bytes) -> Iterator[list[Record | Unreadable]]:
        """The records of a part, value by value.

        Raises:
            ValueError: a value is missing or damaged. The values before it were yielded.
        """
        count = self._values.find(key)
        for number in range(int(count or b"0")):
            yield _decoded(self._values.find(_value_key(key, number)))

    def __exit__(self, *exception: object) -> None:
        self._values.close()


def key_of_part(part: DumpPart, size: int, time: int, limits: Limits) -> bytes:
    """Hash of all on which the records of a part depend; `size` and `time` are those of the dump."""
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in _CODE)
    made_of = [
        str(part.path),
        part[1:],
        size,
        time,
        limits,
        parser_version(),
        hashlib.sha256(code).hexdigest(),
    ]
    return hashlib.blake2b(json.dumps(made_of).encode(), digest_size=16).digest()


def _value_key(key: bytes, number: int) -> bytes:
    return key + number.to_bytes(4, "big")


def _decoded(value: bytes | None) -> list[Record | Unreadable]:
    try:
        return [_record(*one) for one in json.loads(zlib.decompress(value or b""))]
    except (zlib.error, TypeError, RecursionError, UnicodeError) as error:
        raise ValueError("a kept value is damaged") from error


def _record(where: str, second: str, third: str, *links: Any) -> Record | Unreadable:
    if SURROGATE.search(where + second + third):
        raise ValueError("a lone surrogate")
    if not links:
        return Unreadable(where, second, third)
    (given,) = links
    found = None if given is None else tuple(Link(int(start), str(title)) for start, title in given)
    return Record(where, second, third, links=found)
