"""Search in a PostgreSQL database with the extension pgvector, which has the vectors of all passages (`postgres_table`).

The database finds passages with its index for vectors (HNSW) or, if passages are filtered, by comparing the vectors of all
matching passages. Scores are computed here, from the vectors that the database returns, so each score is the score of exact
search.

Axis letters: B queries, K hits per query, D embedding, n some passages.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from realm.errors import ConflictError, InputError
from realm.keys import Lookup, hex_id
from realm.model.scores import scores
from realm.search.exact import Hits, SearchOnly, ranked
from realm.search.postgres_table import (
    TYPES,
    Address,
    Contents,
    Table,
    check_pgvector,
    connect,
    one_line_errors,
    vector_text,
)
from realm.store.knowledge_base import KnowledgeBase

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
Near = tuple[np.ndarray, Tensor]
"""Numbers of passages in rising order, and their vectors."""
WIDTH, LEAST_WIDTH, MOST_WIDTH = 10, 400, 1000
"""Width (`hnsw.ef_search`) of a search in an HNSW index, per passage that is asked for, and its smallest and largest value."""


class PostgresIndex(SearchOnly):
    """The vectors of all passages in a table of a database."""

    def __init__(self, address: Address, kb: KnowledgeBase, model: str):
        """Connects to the database; `model` is the fingerprint of the model.

        Raises:
            InputError: the database cannot be reached, or the table does not have the vectors of this model for the passages of
                this knowledge base.
        """
        self._address, self._model = address, model
        self._keys_N, self._lookup = kb.keys_N, Lookup(kb.keys_N)
        self._lock = threading.Lock()
        self._db: psycopg.Connection[Any] | None = None
        self.contents: Contents = self._in_transaction(lambda table: self._usable(table, kb.fingerprint))

    def __len__(self) -> int:
        return len(self._keys_N)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def prepare(self) -> None:
        """Does nothing, because the database has its own caches."""

    def rows(self, numbers: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """As `MipsIndex.rows`.

        Raises:
            ConflictError: the table lacks a passage, because it was changed.
        """
        number_n, place_n = np.unique(np.asarray(numbers, dtype=np.int64), return_inverse=True)
        text, ids = "SELECT 1::bigint, id, vector::real[] FROM {t} WHERE id = ANY(%s)", self._ids(number_n)
        ((found_n, vector_nD),) = self._ask(lambda table: self._read(table, text, [ids], 1))
        if len(found_n) != len(number_n):
            raise self._changed()
        return vector_nD[torch.from_numpy(place_n)]

    @torch.no_grad()
    def search(self, query_BD: Tensor, k: int) -> Hits:
        """The k best of the passages that the database finds with its index; scores are exact.

        There are fewer than k passages if the index has fewer, or if the table is being changed.
        """
        query_BD, k = query_BD.detach().float().cpu(), min(k, len(self))

        def near(table: Table) -> list[Near]:
            table.rows(f"SET LOCAL hnsw.ef_search = {min(max(WIDTH * k, LEAST_WIDTH), MOST_WIDTH)}")
            table.rows("SET LOCAL hnsw.iterative_scan = strict_order")
            found = self._near(table, query_BD, k)
            if all(len(number_n) >= k for number_n, _ in found):
                return found
            return self._near(table, query_BD, k, "SELECT id, vector FROM {t}")

        return _hits(query_BD, self._ask(near), k)

    @torch.no_grad()
    def search_subset(self, query_BD: Tensor, number_n: np.ndarray, k: int) -> Hits:
        """As `MipsIndex.search_subset`: the database compares the vectors of all these passages, so the result is exact."""
        query_BD, k = query_BD.detach().float().cpu(), min(k, len(number_n))
        ids, chosen = self._ids(number_n), "SELECT id, vector FROM {t} WHERE id = ANY(%s)"
        return _hits(query_BD, self._ask(lambda table: self._near(table, query_BD, k, chosen, [ids])), k)

    def _near(
        self, table: Table, query_BD: Tensor, k: int, chosen: str = "", parameters: Sequence[Any] = ()
    ) -> list[Near]:
        """The passages nearest to each query, more than k because the database rounds the queries.

        `chosen` selects rows, which are all compared; if it is empty, the index of the database finds the rows.
        """
        # The planner must not use the index for the chosen rows, because the index can leave rows out.
        before = f"WITH chosen AS MATERIALIZED ({chosen}) " if chosen else ""
        text = (
            f"{before}SELECT place, id, numbers FROM unnest(%s::text[]) WITH ORDINALITY AS asked (query, place) "
            f"CROSS JOIN LATERAL (SELECT id, vector::real[] AS numbers FROM {'chosen' if chosen else '{t}'} "
            f"ORDER BY vector <#> query::{TYPES[self.contents.bits]} LIMIT %s) AS near"
        )
        queries = [vector_text(query_D) for query_D in query_BD.numpy()]
        return self._read(table, text, [*parameters, queries, 2 * k], len(queries))

    def _read(self, table: Table, text: str, parameters: Sequence[Any], queries: int) -> list[Near]:
        """The passages that an SQL statement selects for each query, which is numbered from 1 in the first column.

        Passages that were added to the table after it was opened are left out.
        """
        if not queries:
            return []
        found = table.rows(text, parameters)
        place_n = np.array([place for place, _, _ in found], dtype=np.int64)
        number_n, known_n = self._lookup.find(np.array([int(id, 16) for _, id, _ in found], dtype=np.uint64))
        vector_nD = np.array([vector for _, _, vector in found], dtype=np.float32)
        vector_nD = vector_nD.reshape(-1, self.contents.dim)
        order_n = np.lexsort((number_n, place_n))
        order_n = order_n[known_n[order_n]]
        ends = np.bincount(place_n[order_n] - 1, minlength=queries).cumsum()[:-1]
        parts = zip(np.split(number_n[order_n], ends), np.split(vector_nD[order_n], ends), strict=True)
        return [(number_m, torch.from_numpy(vector_mD)) for number_m, vector_mD in parts]

    def _ids(self, number_n: np.ndarray) -> list[str]:
        return [hex_id(key) for key in self._keys_N[number_n].tolist()]

    def _usable(self, table: Table, corpus: str) -> Contents:
        """What the table contains, if it has the vectors of this model for the passages of the knowledge base."""
        check_pgvector(table.db, self._address)
        contents, shown = table.contents(), self._address.shown
        if contents is None:
            raise InputError(f"{shown}: there is no such table: make it with `realm kb upload`")
        if not contents.complete:
            raise InputError(f"{shown} is not complete: `realm kb upload` runs or was interrupted; repeat it")
        if contents.model != self._model:
            raise InputError(
                f"{shown} has vectors of the model {contents.model}, not {self._model}: run `realm kb upload` with this model"
            )
        if contents.corpus != corpus:
            raise InputError(
                f"{shown} has the passages of another version of the knowledge base: run `realm kb upload`"
            )
        return contents

    def _ask(self, ask: Callable[[Table], T]) -> T:
        """The result of `ask`; raises ConflictError if the table has other vectors than when it was opened."""

        def checked(table: Table) -> T:
            contents = table.contents()
            if contents is None or contents.model != self._model:
                raise self._changed()
            return ask(table)

        return self._in_transaction(checked)

    def _changed(self) -> ConflictError:
        return ConflictError(
            f"{self._address.shown} was changed: repeat the command, or start the server again"
        )

    def _in_transaction(self, ask: Callable[[Table], T]) -> T:
        """The result of `ask` in a transaction that cannot write. If the connection is lost, it is opened again, once."""
        with one_line_errors(self._address), self._lock:
            import psycopg

            if self._db is None or self._db.closed:
                self._db = connect(self._address)
            try:
                return self._try(self._db, ask)
            except psycopg.OperationalError:
                if not self._db.closed:
                    raise
                self._db = connect(self._address)
                return self._try(self._db, ask)

    def _try(self, db: "psycopg.Connection[Any]", ask: Callable[[Table], T]) -> T:
        with db.transaction():
            db.execute("SET TRANSACTION READ ONLY")
            return ask(Table(db, self._address))


def _hits(query_BD: Tensor, near: Sequence[Near], k: int) -> Hits:
    """The best k of the passages near each query; fewer, if fewer are near one of the queries."""
    k = min([k, *(len(number_n) for number_n, _ in near)])
    best = [ranked(scores(query_BD[row : row + 1], vector_nD), k) for row, (_, vector_nD) in enumerate(near)]
    if not best:
        return Hits(query_BD.new_empty(0, k), torch.empty((0, k), dtype=torch.int64))
    numbers = [
        torch.from_numpy(number_n)[one.number_BK] for (number_n, _), one in zip(near, best, strict=True)
    ]
    return Hits(torch.cat([one.score_BK for one in best]), torch.cat(numbers))
