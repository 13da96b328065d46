"""Values that are kept on disk by the hash of what they were computed from, in a table of an SQLite database.

Several processes can use a database at the same time. After a kill, the database has all complete transactions. If the database
cannot be used, no value is known, and nothing is kept.
"""

import logging
import sqlite3
from pathlib import Path

from realm.errors import first_line

AT_ONCE = 256
"""Number of values that are written in one transaction."""
WAIT = 30.0
"""Most seconds for which a process waits until another process has written."""
_log = logging.getLogger(__name__)


class KeptValues:
    """Byte strings under keys, which are byte strings too.

    The folder and the database are made if they do not exist. `so` ends the warning that the database cannot be used. One
    thread at a time can use an object.
    """

    def __init__(self, file: Path, table: str, so: str):
        self._file, self._table, self._so = file, table, so
        self._database: sqlite3.Connection | None = None
        self._waiting: list[tuple[bytes, bytes]] = []
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # One thread at a time uses the connection, but a generator can be continued by another thread.
            self._database = sqlite3.connect(
                file, timeout=WAIT, isolation_level=None, check_same_thread=False
            )
            self._database.execute(
                f"CREATE TABLE IF NOT EXISTS {table} (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def find(self, key: bytes) -> bytes | None:
        """The value of a key; None if the key is not known."""
        if self._database is None:
            return None
        try:
            # In databases of earlier versions, the second column has another name.
            row = self._database.execute(f"SELECT * FROM {self._table} WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        return row and row[1]

    def keep(self, key: bytes, value: bytes) -> None:
        """Keeps a value, which is written together with the next values, or by `close`."""
        self._waiting.append((key, value))
        if len(self._waiting) >= AT_ONCE:
            self._write()

    def close(self) -> None:
        """Writes the values that are not yet written, and closes the database."""
        self._write()
        if self._database is not None:
            self._database.close()

    def _write(self) -> None:
        rows, self._waiting = self._waiting, []
        if self._database is None or not rows:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(f"INSERT OR REPLACE INTO {self._table} VALUES (?, ?)", rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.warning("%s cannot be used, so %s: %s", self._file, self._so, first_line(error))
        if self._database is not None:
            self._database.close()
            self._database = None
