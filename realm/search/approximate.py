"""Approximate maximum inner product search with the IVF-PQ index of Lance, for indexes that are too large for exact search.

    KB/indexes/<fingerprint>/approximate/<version>/    passage ids, vectors and their IVF-PQ index, as a Lance table

An inverted file (IVF) divides the vectors into partitions, and a search reads only the partitions whose centroids have the
largest inner products with the query. Product quantization (PQ) stores each vector in few bytes. The codes give approximate
scores. The passages with the best approximate scores (the candidates) are then scored exactly, with the vectors of the exact
index. So each score is exact, and only the choice of the candidates is approximate.

The table is made from a version of the vectors of a model, and is kept when passages are added or deleted. All added passages
are scored exactly, and deleted passages are left out. If their share exceeds `MOST_CHANGED`, the table is made again.

Axis letters: B queries, K hits per query, N passages, D embedding, R rows of the table, n some passages.
"""

import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from realm.errors import DamagedError, reason
from realm.folders import one_writer, remove, replace_folder
from realm.keys import Lookup
from realm.search.exact import Hits, MipsIndex, PassageIndex, SearchOnly, merge_hits
from realm.store.tables.table import lock_shared, writing_table
from realm.store.vectors import APPROXIMATE, Vectors, record_batches, remove_approximate, schema_of
from realm.tokens.layouts import NULL_PASSAGE

_log = logging.getLogger(__name__)
INDEX, METRIC = "approximate", "dot"
"""Name of the IVF-PQ index in its table, and Lance's name of the inner product."""
SMALLEST = 100_000
"""Smallest number of passages for which the search is approximate; exact search in fewer passages takes about 1 ms."""
READ = 1 / 2
"""Share of the partitions that a search reads. Comparing the codes of a passage takes only nanoseconds, so a search that reads
many passages is still fast, and finds more of the best passages."""
SAMPLE, ITERATIONS = 64, 20
"""Vectors per centroid from which the centroids are computed, and iterations of k-means."""
CANDIDATES, LEAST = 10, 300
"""Candidates per hit, and smallest number of candidates, that are scored exactly."""
MOST_CHANGED = 0.1
"""Largest share of passages that were added or deleted since the table was made."""


class ApproximateIndex(SearchOnly):
    """An index that finds passages with IVF-PQ, and scores them with the vectors of an exact index."""

    def __init__(self, exact: MipsIndex, keys_N: np.ndarray, folder: Path):
        """Opens the table in `folder`, which `approximate_index` made; `keys_N` are the ids of the passages of the exact index.

        Raises:
            DamagedError: the table cannot be read.
            FileNotFoundError: the folder does not exist.
        """
        self._exact, self.folder = exact, folder
        lease = os.open(folder, os.O_RDONLY)
        weakref.finalize(self, os.close, lease)
        lock_shared(lease)  # until this object is deleted, no process removes the folder
        if not folder.exists():
            raise FileNotFoundError(folder)
        with self._reading():
            self._table = lance.dataset(folder)
            if self._table.base_paths():
                raise ValueError("it has files outside of its folder")
            keys_R = self._table.to_table(columns=["id"]).column("id").to_numpy()
        number_R, known_R = Lookup(keys_N).find(keys_R)
        self._number_R = np.where(known_R, number_R, NULL_PASSAGE)
        self._added_n = np.setdiff1d(np.arange(len(keys_N)), number_R[known_R], assume_unique=True)
        self.changed = (len(self._added_n) + int((~known_R).sum())) / max(1, len(keys_N))
        """Passages that were added or deleted since the table was made, as a share of all passages."""
        self._probes = max(1, round(READ * _partitions(len(keys_R))))

    def __len__(self) -> int:
        return len(self._exact)

    @property
    def device(self) -> torch.device:
        return self._exact.device

    def rows(self, numbers: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """As `MipsIndex.rows`."""
        return self._exact.rows(numbers)

    def prepare(self) -> None:
        """Reads the IVF-PQ index into memory."""
        with self._reading():
            self._table.prewarm_index(INDEX)

    @torch.no_grad()
    def search(self, query_BD: Tensor, k: int) -> Hits:
        """The k best passages among the candidates, with exact scores; all passages, if the index has fewer than k."""
        query_BD = query_BD.detach().float().to(self.device)
        k = min(k, len(self))
        candidates = list(self._candidates(query_BD, max(LEAST, CANDIDATES * k)))
        if min(map(len, candidates), default=0) < k:
            return self._exact.search(query_BD, k)
        hits = self._exact.search_among(query_BD, candidates, k)
        if not len(self._added_n):
            return hits
        return merge_hits([hits, self._exact.search_subset(query_BD, self._added_n, k)], k)

    def search_subset(self, query_BD: Tensor, number_n: np.ndarray, k: int) -> Hits:
        """As `MipsIndex.search_subset`: the scores of all these passages are computed, so the result is exact."""
        return self._exact.search_subset(query_BD, number_n, k)

    def _candidates(self, query_BD: Tensor, count: int) -> Iterator[np.ndarray]:
        """Yields for each query the numbers of the passages with the best approximate scores, in rising order.

        Deleted passages are left out, so there can be fewer than `count`.
        """
        if not len(query_BD):
            return
        nearest = {"column": "vector", "q": query_BD.numpy(), "k": count, "metric": METRIC}
        nearest |= {"minimum_nprobes": self._probes}
        with self._reading():
            found = self._table.scanner(
                columns=[], nearest=nearest, with_row_id=True, disable_scoring_autoprojection=True
            ).to_table()
        query, row = (found.column(name).to_numpy() for name in ("query_index", "_rowid"))
        order = np.argsort(query, kind="stable")
        ends = np.bincount(query, minlength=len(query_BD)).cumsum()[:-1]
        for number in np.split(self._number_R[row[order]], ends):
            yield np.sort(number[number != NULL_PASSAGE])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns exceptions that Lance raises for damaged files into DamagedError."""
        try:
            yield
        except (pa.ArrowException, OSError, RuntimeError, ValueError) as error:
            raise DamagedError(
                f"{self.folder} cannot be read: {reason(error)}; remove this folder, and the next search makes it again"
            ) from error


def approximate_index(folder: Path, keys_N: np.ndarray, vectors: Vectors) -> PassageIndex:
    """An approximate index of the vectors in `folder`; its table is made now if there is none, or if it is too old.

    If there are fewer than `SMALLEST` passages, the result is an exact index.
    """
    exact = MipsIndex(vectors.array)
    if len(exact) < SMALLEST:
        return exact
    tables = folder / APPROXIMATE
    found = _newest(tables, exact, keys_N)
    if found is not None and found.changed <= MOST_CHANGED:
        return found
    with writing_table(tables):
        tables.mkdir(exist_ok=True)
    with one_writer(tables):
        found = _newest(tables, exact, keys_N)  # another process can have made a table meanwhile
        if found is None or found.changed > MOST_CHANGED:
            found = ApproximateIndex(exact, keys_N, _build(tables / str(vectors.version), keys_N, vectors))
        remove_approximate(folder, keep=found.folder)
    return found


def _newest(tables: Path, exact: MipsIndex, keys_N: np.ndarray) -> ApproximateIndex | None:
    """The index with the newest table that can be read; None if there is no such table."""
    names = [one for one in tables.glob("*") if one.name.isdecimal()]
    for one in sorted(names, key=lambda name: -int(name.name)):
        with suppress(DamagedError, FileNotFoundError):
            return ApproximateIndex(exact, keys_N, one)
    return None


def _build(folder: Path, keys_N: np.ndarray, vectors: Vectors) -> Path:
    """Makes a table for approximate search in `folder`, which is replaced if it exists -> `folder`."""
    passages, dim = vectors.array.shape
    sub_vectors, bits = _codes(dim)
    _log.info("making the table for approximate search in %s passages ...", f"{passages:,}")
    aside = folder.with_name("making")
    remove(aside)  # a killed process can have left this folder
    with writing_table(folder):
        # With a single data file, the row id of Lance is the number of the row.
        reader = pa.RecordBatchReader.from_batches(
            schema_of(vectors.info), record_batches(keys_N, vectors.array, vectors.info)
        )
        table = lance.write_dataset(reader, aside, max_rows_per_file=passages)
        table.create_index(
            "vector",
            "IVF_PQ",
            name=INDEX,
            metric=METRIC,
            num_partitions=_partitions(passages),
            num_sub_vectors=sub_vectors,
            num_bits=bits,
            sample_rate=SAMPLE,
            max_iters=ITERATIONS,
        )
        replace_folder(aside, folder)
    return folder


def _partitions(passages: int) -> int:
    """Number of partitions of the inverted file."""
    return round(passages**0.5)


def _codes(dim: int) -> tuple[int, int]:
    """Codes per vector, and bits per code: 4 bits for two numbers of a vector, or for one number, or 8 bits for one number.

    Codes of 4 bits make the search faster, but Lance needs an even number of them.
    """
    if dim % 2:
        return dim, 8
    return (dim if dim % 4 else dim // 2), 4
