"""Keeps what a tagger found in each text, so that a later build tags only new and changed texts.

The annotations are in the SQLite database `names.sqlite` in the user's cache folder. A key is a hash of the tagger, its rules
and the text, and a value has only positions and labels, so the database contains no text. Several processes can use the
database at the same time. After a kill, the database has all complete transactions. If the database cannot be used, all texts
are tagged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from realm.errors import first_line
from realm.text.corpus import Annotations, Span

if TYPE_CHECKING:
    from realm.text.salient_spans import Tagger

DATABASE = "names.sqlite"
WINDOW, WINDOW_CHARS = 20_000, 16_000_000
"""Approximate limits of texts and of characters that are looked up together. The tagger starts its processes once for these."""
AT_ONCE = 256
"""Number of texts whose annotations are written in one transaction."""
WAIT = 30.0
"""Most seconds for which a process waits until another process has written."""
_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """The folder `REALM_CACHE`, by default the folder `realm` in the user's cache folder; None if `REALM_CACHE` is empty, or if
    the user has no home folder."""
    named = os.environ.get("REALM_CACHE")
    if named is not None:
        return Path(named) if named else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "realm"
    except RuntimeError:
        return None


class KeepingTagger:
    """A tagger that finds the annotations of known texts in a database, and adds those of new texts.

    `identity` differs between two taggers if their annotations can differ.
    """

    def __init__(self, tagger: Tagger, identity: str, folder: Path):
        self.name = tagger.name
        self._tagger, self._folder = tagger, folder
        self._identity = hashlib.sha256(identity.encode()).digest()

    def annotate(self, texts: Iterable[str]) -> Iterator[Annotations]:
        texts = iter(texts)
        number = known = 0
        end: Exception | None = None
        with closing(_Database(self._folder / DATABASE)) as database:
            while end is None:
                window, end = _window(texts)
                keys = [self._key(text) for text in window]
                found = list(map(database.find, keys, map(len, window)))
                new = self._tagger.annotate(
                    text for text, one in zip(window, found, strict=True) if one is None
                )
                number, known = number + len(window), known + sum(one is not None for one in found)
                for key, one in zip(keys, found, strict=True):
                    if one is None:
                        one = next(new)
                        database.keep(key, one)
                    yield one
        if known:
            _log.info(
                "%s: names and dates of %d of %d texts are known", self._folder / DATABASE, known, number
            )
        if not isinstance(end, StopIteration):
            raise end

    def _key(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=16, key=self._identity).digest()


def _window(texts: Iterator[str]) -> tuple[list[str], Exception | None]:
    """The next texts; and, after the last text, the exception that ended `texts`. Texts before an error are tagged too."""
    window: list[str] = []
    characters = 0
    while len(window) < WINDOW and characters < WINDOW_CHARS:
        try:
            text = next(texts)
        except Exception as end:
            return window, end
        window.append(text)
        characters += len(text)
    return window, None


class _Database:
    """The database on disk. After an error it is no longer used: no text is known, and nothing is kept."""

    def __init__(self, file: Path):
        self._file = file
        self._database: sqlite3.Connection | None = None
        self._waiting: list[tuple[bytes, bytes]] = []
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # One thread at a time uses the connection, but a generator can be continued by another thread.
            self._database = sqlite3.connect(
                file, timeout=WAIT, isolation_level=None, check_same_thread=False
            )
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS names (key BLOB PRIMARY KEY, annotations BLOB) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def find(self, key: bytes, length: int) -> Annotations | None:
        """The annotations of a text of `length` characters; None if they are not known, or damaged."""
        if self._database is None:
            return None
        try:
            row = self._database.execute("SELECT annotations FROM names WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        return row and _decoded(row[0], length)

    def keep(self, key: bytes, found: Annotations) -> None:
        self._waiting.append((key, _encoded(found)))
        if len(self._waiting) >= AT_ONCE:
            self._write()

    def close(self) -> None:
        self._write()
        if self._database is not None:
            self._database.close()

    def _write(self) -> None:
        rows, self._waiting = self._waiting, []
        if self._database is None or not rows:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("INSERT OR REPLACE INTO names VALUES (?, ?)", rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.warning("%s cannot be used, so all texts are tagged: %s", self._file, first_line(error))
        if self._database is not None:
            self._database.close()
            self._database = None


def _encoded(found: Annotations) -> bytes:
    return zlib.compress(json.dumps(found, separators=(",", ":")).encode())


def _decoded(data: bytes, length: int) -> Annotations | None:
    """Annotations from a value of the database; None if the value is damaged, or has positions outside of the text."""
    try:
        sentences, spans = json.loads(zlib.decompress(data))
        found = Annotations(
            tuple((start, end) for start, end in sentences), tuple(Span(*span) for span in spans)
        )
        bounds = (*found.sentences, *((span.start, span.end) for span in found.spans))
        inside = all(0 <= start < end <= length for start, end in bounds)
        return found if inside else None
    except (zlib.error, ValueError, TypeError, RecursionError):
        return None
