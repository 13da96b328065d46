"""Passages and their vectors in a table of a PostgreSQL database with the extension pgvector.

The address of a table is the address of the database, and the name of the table: `postgresql://HOST/DATABASE?table=NAME`. The
table has a row per passage: `id`, `document_id`, `title`, `text`, `fields` (JSON), `vector`, and `digest`, from which an upload
knows whether the document or the fields of the passage have changed. The comment of the table is a JSON object that describes
the content (`Contents`).

An upload commits batches of rows. While it runs, and after it was interrupted, the description says that the table is not
complete, and searches refuse the table. A repeated upload adds only the rows that are missing.

Axis letters: D embedding, R rows of the table, n some passages.
"""

import dataclasses
import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from urllib.parse import unquote

import numpy as np

from realm.errors import ConflictError, InputError, first_line
from realm.keys import Lookup, hex_id
from realm.progress import progress
from realm.settings import config_from
from realm.store.knowledge_base import KnowledgeBase
from realm.store.vectors import Vectors
from realm.text.corpus import Passage

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed

_log = logging.getLogger(__name__)
SCHEMES = ("postgresql://", "postgres://")
TABLE = "realm_passages"
"""Name of the table if the address has none."""
AT_ONCE = 4096
"""Passages that an upload compares and commits at a time."""
LOCK_PATIENCE = 5.0
"""Seconds that an upload waits for the lock of another one: the server may notice late that an upload has ended."""
CONNECT_SECONDS = 10
"""Seconds until a database must accept a connection, if the address has no `connect_timeout`."""
LEAST_PGVECTOR = (0, 8)
"""Oldest version of pgvector whose searches find as many passages as they are asked for (iterative scans)."""
MOST_INDEXED = {16: 4000, 32: 2000}
"""Largest number of dimensions that an HNSW index of pgvector can have, for the bits per number."""
_NUL_IN_JSON = re.compile(r"\\\\|\\u0000")
"""NUL in a text of JSON. Escaped backslashes are matched too, because the next characters do not belong to them."""
TYPES = {16: "halfvec", 32: "vector"}
"""Types of pgvector, for the bits per number."""


class Address(NamedTuple):
    """A table of a database."""

    database: str
    """Address of the database for libpq, possibly with a password."""
    table: str
    shown: str
    """The address without user, password and parameters, for messages."""


def is_address(text: str) -> bool:
    """Whether a text is an address of PostgreSQL."""
    return text.startswith(SCHEMES)


def parsed(url: str) -> Address:
    """Reads `postgresql://USER@HOST:PORT/DATABASE?table=NAME`; all parameters except `table` are passed to libpq.

    Raises:
        InputError: the text is not such an address. The message does not contain the text, which can have a password.
    """
    if not is_address(url):
        raise InputError("an address of PostgreSQL begins with postgresql://")
    base, _, query = url.partition("?")
    parameters = query.split("&") if query else []
    tables = [unquote(one.partition("=")[2]) for one in parameters if one.startswith("table=")]
    if len(tables) > 1 or any(not 1 <= len(one.encode()) <= 63 or {"\0", "%"} & set(one) for one in tables):
        raise InputError(
            "table=NAME in the address of PostgreSQL must be one name of 1 to 63 bytes without %"
        )
    table = tables[0] if tables else TABLE
    rest = "&".join(one for one in parameters if not one.startswith("table="))
    scheme, _, place = base.partition("://")
    # If a password contains "?", the part before "?" is not a host and a database.
    place = "..." if "@" in rest and "@" not in place else place.rpartition("@")[2]
    return Address(f"{base}?{rest}" if rest else base, table, f"{scheme}://{place}?table={table}")


@dataclass(frozen=True)
class Contents:
    """What a table contains."""

    model: str
    """Fingerprint of the model that computed the vectors."""
    corpus: str
    """Fingerprint of the knowledge base."""
    version: int
    """Number of the version of the index."""
    step: int
    """Training step of the model."""
    created: str
    """Time of the build of the index, ISO 8601."""
    dim: int
    bits: int
    """Bits per number."""
    complete: bool = True
    """False while an upload runs, and after an upload was interrupted."""

    @classmethod
    def of(cls, corpus: str, vectors: Vectors) -> "Contents":
        info = vectors.info
        return cls(
            info.model, corpus, vectors.version, info.step, info.created, vectors.array.shape[1], info.bits
        )


class Uploaded(TypedDict):
    """Report of an upload."""

    table: str
    """Address of the table, without user and password."""
    passages: int
    added: int
    """Rows that were added, or replaced because the document or the fields of the passage have changed."""
    removed: int
    """Rows of passages that the knowledge base does not have any more."""


def upload(kb: KnowledgeBase, vectors: Vectors, address: Address, replace_table: bool = False) -> Uploaded:
    """Makes the table equal to the passages of the knowledge base, with the vectors in the order of the passages.

    Raises:
        InputError: the database cannot be reached, the table was not made by `realm`, or it has the vectors of another model
            and `replace_table` is False.
        ConflictError: another process uploads to the table, and has not ended after `LOCK_PATIENCE`.
    """
    target = Contents.of(kb.fingerprint, vectors)
    with one_line_errors(address), connect(address) as db:
        check_pgvector(db, address, make=True)
        table = Table(db, address)
        _lock(table, address)
        found = table.contents()
        if found is None or (found.model, found.dim, found.bits) != (target.model, target.dim, target.bits):
            if found is not None and not replace_table:
                raise InputError(
                    f"{address.shown} has vectors of the model {found.model}, not {target.model}: give another table, or "
                    "replace this table with --replace"
                )
            table.create(target, anew=found is not None)
        added, removed = _bring_up_to_date(table, kb, vectors, target)
    return {"table": address.shown, "passages": len(kb), "added": added, "removed": removed}


def _lock(table: "Table", address: Address) -> None:
    """Locks the table for uploads, until the connection ends."""
    until = time.monotonic() + LOCK_PATIENCE
    while not table.rows("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [table.name])[0][0]:
        if time.monotonic() > until:
            raise ConflictError(f"another process uploads to {address.shown}: wait until it has ended")
        time.sleep(0.1)


def _bring_up_to_date(
    table: "Table", kb: KnowledgeBase, vectors: Vectors, target: Contents
) -> tuple[int, int]:
    """Adds, replaces and removes rows, and describes the table as complete -> the numbers of added and of removed rows."""
    key_R, digest_R = table.stored()
    lookup, added = Lookup(key_R), 0
    key_gone = np.setdiff1d(key_R, kb.keys_N)
    with progress(total=len(kb), description="upload", unit="passage") as bar:
        for start in range(0, len(kb), AT_ONCE):
            number_n = np.arange(start, min(start + AT_ONCE, len(kb)))
            passages = kb.passages(number_n)
            digest_n = np.array([_digest(one) for one in passages], dtype=np.int64)
            row_n, known_n = lookup.find(kb.keys_N[number_n])
            new_n = ~known_n
            if len(digest_R):
                new_n |= digest_n != digest_R[row_n]
            if new_n.any():
                rows = zip(passages, digest_n.tolist(), vectors.array[number_n], strict=True)
                table.describe(replace(target, complete=False))
                table.put([row for row, new in zip(rows, new_n, strict=True) if new])
                added += int(new_n.sum())
            bar.update(len(passages))
    if len(key_gone):
        table.describe(replace(target, complete=False))
    table.finish([hex_id(key) for key in key_gone.tolist()], target)
    return added, len(key_gone)


def _digest(passage: Passage) -> int:
    """A signed 64-bit hash of what can change of a passage: its document, and the fields of the document."""
    text = json.dumps([passage.document_id, dict(passage.fields)], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _text(text: str) -> str:
    """The text without NUL, which PostgreSQL cannot store."""
    return text.replace("\0", "\ufffd")


def vector_text(vector_D: np.ndarray) -> str:
    """A vector in the format of pgvector."""
    return f"[{','.join(map(str, vector_D.tolist()))}]"


class Table:
    """A table of passages in an open database."""

    def __init__(self, db: "psycopg.Connection[Any]", address: Address):
        from psycopg import sql

        self.db, self._address = db, address
        self._identifier = sql.Identifier(address.table)
        self.name = self._identifier.as_string(db)
        """The quoted name of the table."""

    def _sql(self, text: str, **parts: Any) -> "Composed":
        """An SQL statement in which {t} is the quoted name of the table."""
        from psycopg import sql

        return sql.SQL(text).format(t=self._identifier, **parts)

    def contents(self) -> Contents | None:
        """What the table contains; None if there is no such table.

        Raises:
            InputError: the table was not made by `realm`.
        """
        [[is_there, comment]] = self.rows(
            "SELECT to_regclass(%s) IS NOT NULL, obj_description(to_regclass(%s), 'pg_class')",
            [self.name, self.name],
        )
        if not is_there:
            return None
        try:
            return config_from(Contents, json.loads(comment)["realm"], self._address.shown)
        except (TypeError, KeyError, ValueError):
            raise InputError(
                f"{self._address.shown} is a table that `realm kb upload` did not make: give another table in the address"
            ) from None

    def create(self, contents: Contents, anew: bool) -> None:
        """Makes an empty table; with `anew`, replaces an existing table."""
        kind = f"{TYPES[contents.bits]}({int(contents.dim)})"
        with self.db.transaction():
            if anew:
                self.db.execute(self._sql("DROP TABLE {t}"))
            columns = (
                "id text PRIMARY KEY CHECK (id ~ '^[0-9a-f]{{16}}$'), document_id text NOT NULL, title text NOT NULL, "
                f"text text NOT NULL, fields jsonb NOT NULL, vector {kind} NOT NULL, digest bigint NOT NULL"
            )
            self.db.execute(self._sql(f"CREATE TABLE {{t}} ({columns})"))
            self.describe(replace(contents, complete=False))

    def describe(self, contents: Contents) -> None:
        """Stores the description of the content."""
        from psycopg import sql

        comment = json.dumps({"realm": dataclasses.asdict(contents)})
        self.db.execute(self._sql("COMMENT ON TABLE {t} IS {comment}", comment=sql.Literal(comment)))

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and digests of all rows."""
        with self.db.transaction(), self.db.cursor("realm_rows") as cursor:
            cursor.itersize = AT_ONCE
            pairs = (
                (int(id, 16), digest)
                for id, digest in cursor.execute(self._sql("SELECT id, digest FROM {t}"))
            )
            rows_R = np.fromiter(pairs, dtype=[("key", np.uint64), ("digest", np.int64)])
        return rows_R["key"], rows_R["digest"]

    def put(self, rows: Sequence[tuple[Passage, int, np.ndarray]]) -> None:
        """Adds rows, which replace rows with the same ids, in one commit."""
        with self.db.transaction(), self.db.cursor() as cursor:
            cursor.execute(self._sql("DELETE FROM {t} WHERE id = ANY(%s)"), [[one.id for one, _, _ in rows]])
            into = "COPY {t} (id, document_id, title, text, fields, vector, digest) FROM STDIN"
            with cursor.copy(self._sql(into)) as copy:
                for one, digest, vector_D in rows:
                    fields = _NUL_IN_JSON.sub(
                        lambda found: found[0] if found[0] == "\\\\" else "\ufffd",
                        json.dumps(dict(one.fields)),
                    )
                    texts = (_text(text) for text in (one.document_id, one.title, one.text))
                    copy.write_row([one.id, *texts, fields, vector_text(vector_D), digest])

    def finish(self, gone: Sequence[str], contents: Contents) -> None:
        """Removes rows, makes an HNSW index if there is no index for the vectors, and describes the table as complete."""
        with self.db.transaction():
            if gone:
                self.db.execute(self._sql("DELETE FROM {t} WHERE id = ANY(%s)"), [list(gone)])
            [[has_index]] = self.rows(
                "SELECT count(*) > 0 FROM pg_index JOIN pg_class c ON c.oid = indexrelid JOIN pg_am a ON a.oid = c.relam "
                "WHERE indrelid = to_regclass(%s) AND amname IN ('hnsw', 'ivfflat')",
                [self.name],
            )
            if not has_index and contents.dim <= MOST_INDEXED[contents.bits]:
                _log.info("making the HNSW index of %s ...", self._address.shown)
                operators = f"{TYPES[contents.bits]}_ip_ops"
                self.db.execute(self._sql(f"CREATE INDEX ON {{t}} USING hnsw (vector {operators})"))
            self.describe(contents)
        self.db.execute(self._sql("ANALYZE {t}"))

    def rows(self, text: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that an SQL statement selects, if it selects rows; {t} is the quoted name of the table."""
        cursor = self.db.cursor(binary=True).execute(self._sql(text), parameters)
        return cursor.fetchall() if cursor.description else []


def check_pgvector(db: "psycopg.Connection[Any]", address: Address, make: bool = False) -> None:
    """Raises InputError if the database lacks pgvector, or has an old version; with `make`, the extension is made first."""
    import psycopg

    if make:
        with suppress(
            psycopg.errors.FeatureNotSupported,
            psycopg.errors.UndefinedFile,
            psycopg.errors.InsufficientPrivilege,
        ):
            db.execute("CREATE EXTENSION IF NOT EXISTS vector")
    row = db.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
    if row is None:
        raise InputError(
            f"{address.shown}: the database lacks the extension pgvector: install it, and run `CREATE EXTENSION vector` as an "
            "administrator of the database"
        )
    if tuple(int(part) for part in row[0].split(".")[:2]) < LEAST_PGVECTOR:
        least = ".".join(map(str, LEAST_PGVECTOR))
        raise InputError(
            f"{address.shown}: the database has pgvector {row[0]}, but {least} or later is needed"
        )


def connect(address: Address) -> "psycopg.Connection[Any]":
    """A connection to the database of a table."""
    import psycopg

    defaults = {"connect_timeout": CONNECT_SECONDS, "application_name": "realm"}
    given: dict[str, Any] = {**defaults, **psycopg.conninfo.conninfo_to_dict(address.database)}
    return psycopg.connect(psycopg.conninfo.make_conninfo(**given), autocommit=True)


@contextmanager
def one_line_errors(address: Address) -> Iterator[None]:
    """Turns exceptions of psycopg, and a missing psycopg, into an InputError with one line that contains no password."""
    try:
        import psycopg
    except ImportError:
        raise InputError(
            f"{address.shown} needs psycopg: install it with `pip install 'realm-lm[postgres]'`"
        ) from None
    try:
        yield
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None:
            raise InputError(f"{address.shown}: {first_line(error)}") from None
        # libpq cannot read the address. Its message can contain a part of the address, such as the password.
        raise InputError(
            "the address of PostgreSQL cannot be read: give postgresql://USER@HOST:PORT/DATABASE?table=NAME"
        ) from None
    except psycopg.Error as error:
        raise InputError(f"{address.shown}: {first_line(error)}") from None
