"""64-bit keys of texts. `Lookup` finds keys in memory, and `KeyTable` finds keys in a temporary file, a `TemporaryDatabase`.

Keys are unsigned numbers. Equal texts have equal keys. The probability that any two of 10 million different texts have the same
key is about 1 in 400,000.
"""

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from realm.errors import WriteFailed, first_line


def key_of(text: str) -> int:
    """The first 64 bits of the SHA-1 of a text."""
    return int.from_bytes(hashlib.sha1(text.encode(), usedforsecurity=False).digest()[:8], "big")


def hex_id(key: int) -> str:
    """A key as 16 hex digits: the form in which passages are named.

    >>> hex_id(255)
    '00000000000000ff'
    """
    return f"{key:016x}"


class Lookup:
    """Finds positions of 64-bit keys in an array by bisection; needs 16 bytes of memory per key."""

    def __init__(self, keys_N: np.ndarray):
        self._order_N = np.argsort(keys_N, kind="stable")
        self._sorted_N = keys_N[self._order_N]

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A position of each key, and whether the key occurs; the position of a key that does not occur has no meaning."""
        if len(self._sorted_N) == 0:
            return np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=bool)
        place = np.minimum(np.searchsorted(self._sorted_N, keys), len(self._sorted_N) - 1)
        return self._order_N[place], self._sorted_N[place] == keys

    def all(self, key: int) -> np.ndarray:
        """Every position of a key, ascending."""
        first, end = (np.searchsorted(self._sorted_N, np.uint64(key), side=s) for s in ("left", "right"))
        return self._order_N[first:end]


class TemporaryDatabase:
    """SQLite tables in a temporary file.

    The memory is at most that of the cache, whatever the size of the tables. The file is made when the cache is full, in the
    folder `TMPDIR`, by default `/var/tmp`. The file has no name, so the system deletes it when the process ends or is killed.
    """

    CACHE_KB = 16 << 10

    def __init__(self, *tables: str) -> None:
        """`tables` are statements that create tables."""
        # One thread at a time uses a database, but a generator that uses a database can be continued by another thread.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        # A temporary table needs no protection against a crash.
        for setting in (f"cache_size = -{self.CACHE_KB}", "journal_mode = OFF", "synchronous = OFF"):
            self._database.execute(f"PRAGMA {setting}")
        for statement in (*tables, "BEGIN"):
            self._database.execute(statement)

    def execute(self, statement: str, *values: int | str | bytes) -> int:
        """Runs a statement with these values in place of its question marks -> number of rows that were changed.

        Raises:
            WriteFailed: the temporary file cannot be written.
        """
        with self._writing():
            return self._database.execute(statement, values).rowcount

    def rows(self, query: str, *values: int | str | bytes) -> list[tuple[Any, ...]]:
        """The rows that a query finds, with these values in place of its question marks.

        Raises:
            WriteFailed: the temporary file cannot be written. Reading can write too, because the cache is full.
        """
        with self._writing():
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise WriteFailed(
                f"the temporary file cannot be written: {first_line(error)}; set TMPDIR to a folder with more room"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


class KeyTable(TemporaryDatabase):
    """64-bit keys, each with a text, in a temporary file of about 20 bytes per key and the bytes of the texts.

    >>> with KeyTable() as table:
    ...     table.put(7, "first"), table.put(7, "second"), table.get(7), table.get(8)
    (None, 'first', 'first', None)
    """

    def __init__(self) -> None:
        super().__init__("CREATE TABLE keys (key INTEGER PRIMARY KEY, value TEXT)")

    def put(self, key: int, value: str = "") -> str | None:
        """Adds a key with a text, unless the table has the key -> the text that the table had, or None for a new key.

        Raises:
            WriteFailed: the temporary file cannot be written.
        """
        added = self.execute("INSERT INTO keys VALUES (?, ?) ON CONFLICT DO NOTHING", _signed(key), value)
        return None if added else self.get(key)

    def get(self, key: int) -> str | None:
        """The text of a key, or None if the table does not have the key."""
        found = self.rows("SELECT value FROM keys WHERE key = ?", _signed(key))
        return str(found[0][0]) if found else None


def _signed(key: int) -> int:
    """The key as a signed number, because SQLite has no unsigned numbers."""
    return key - (1 << 63)
