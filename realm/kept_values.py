"""Values that are kept on disk by the hash of what they were computed from, in a table of an SQLite database.

Several processes can use a database at the same time. After a kill, the database has all complete transactions. If the database
cannot be used, no value is known, and nothing is kept.
"""

import logging
import sqlite3
from pathlib import Path

from realm.errors import first_line

PARSED = "parsed.sqlite"
"""Name of the database of what the readers of documents keep, in the folder of a build or of a workspace."""
AT_ONCE = 256
"""Number of values that are written in one transaction, unless `write` is called earlier."""
WAIT = 30.0
"""Most seconds for which a process waits until another process has written."""
_log = logging.getLogger(__name__)


def database_files(database: Path) -> list[Path]:
    """The file of a database, and the files that SQLite writes beside it."""
    return [database.with_name(database.name + ending) for ending in ("", "-journal", "-wal", "-shm")]


def remove_database(database: Path) -> None:
    """Removes a database that no process uses, if it exists."""
    for file in database_files(database):
        file.unlink(missing_ok=True)


class KeptValues:
    """Byte strings under keys, which are byte strings too.

    The folder and the database are made when the first value is written. `consequence` ends the warning that the database
    cannot be used. One thread at a time can use an object.
    """

    def __init__(self, file: Path, table: str, consequence: str):
        self._file, self._table, self._consequence = file, table, consequence
        self._database: sqlite3.Connection | None = None
        self._usable = True
        self._waiting: list[tuple[bytes, bytes]] = []

    def find(self, key: bytes) -> bytes | None:
        """The value of a key; None if the key is not known."""
        if (database := self._opened(make=False)) is None:
            return None
        try:
            row = database.execute(f"SELECT value FROM {self._table} WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        return row and row[0]

    def keep(self, key: bytes, value: bytes) -> None:
        """Keeps a value, which is written together with the next values."""
        self._waiting.append((key, value))
        if len(self._waiting) >= AT_ONCE:
            self.write()

    def write(self) -> None:
        """Writes the values that are not yet written."""
        rows, self._waiting = self._waiting, []
        if not rows or (database := self._opened(make=True)) is None:
            return
        try:
            database.execute("BEGIN IMMEDIATE")
            database.executemany(f"INSERT OR REPLACE INTO {self._table} VALUES (?, ?)", rows)
            database.execute("COMMIT")
        except sqlite3.Error as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes the values that are not yet written, and closes the database."""
        self.write()
        if self._database is not None:
            self._database.close()
            self._database = None

    def discard(self) -> None:
        """Closes the database and removes its file; a file that is no usable database stays."""
        self._waiting = []
        used = self._database is not None
        self.close()
        if used:
            self._file.unlink(missing_ok=True)

    def _opened(self, make: bool) -> sqlite3.Connection | None:
        """The database; None if it cannot be used, or if it does not exist and is not to be made."""
        if self._database is None and self._usable:
            try:
                if not make and not self._file.exists():
                    return None
                self._file.parent.mkdir(parents=True, exist_ok=True)
                # One thread at a time uses the connection, but a generator can be continued by another thread.
                database = sqlite3.connect(
                    self._file, timeout=WAIT, isolation_level=None, check_same_thread=False
                )
                self._database = database
                database.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._table} (key BLOB PRIMARY KEY, value BLOB)"
                )
            except (OSError, sqlite3.Error) as error:
                self._give_up(error)
        return self._database

    def _give_up(self, error: Exception) -> None:
        _log.warning("%s cannot be used, so %s: %s", self._file, self._consequence, first_line(error))
        self._usable = False
        if self._database is not None:
            self._database.close()
            self._database = None
