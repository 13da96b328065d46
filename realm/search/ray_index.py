"""Exact search in an index that is divided among the machines of a Ray cluster, for an index larger than one machine's memory.

An actor on each machine holds the vectors of a range of passages (its part of the index), which it reads from a file. Each part
is searched for all queries, and the hits are merged. The results are the same as with one `MipsIndex` of all passages.

If an actor or its machine dies, Ray starts the actor again, if necessary on another machine, and repeats its calls. The actor
reads its file again. If there is a newer version of the index by then, the file may be gone, and searches fail; a server then
loads the newer version.

Axis letters: B queries, K hits per query, D embedding, n some passages.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realm.errors import RealmError, first_line
from realm.ray_actors import connect, machines
from realm.search.exact import Hits, MipsIndex, SearchOnly, merge_hits

MOST_SECONDS = 120
"""Most seconds that a search takes, including the time to start an actor again."""


class RayIndex(SearchOnly):
    """Search over the vectors of all passages, in actors of a Ray cluster. The actors end with this object."""

    def __init__(self, file: Path, count: int):
        """Starts the actors; `file` is an .npy file with the vectors of `count` passages, which all machines can read.

        Raises:
            InputError: Ray is not installed, there is no cluster, or no machine of the cluster has cores.
            RealmError: an actor cannot read the file.
        """
        self._ray = ray = connect("")
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = machines(ray)[:count]
        self._bounds = np.arange(len(nodes) + 1) * count // len(nodes)
        actor_class = ray.remote(_Part)
        self._parts = [
            # The cores of a machine are also used by other work, so an actor reserves none. It reserves a byte, because Ray
            # chooses a machine at random for an actor that reserves nothing, unless the affinity is hard.
            actor_class.options(
                num_cpus=0,
                memory=1,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=True),
            ).remote(str(file.absolute()), int(first), int(stop))
            for node, (first, stop) in zip(nodes, pairwise(self._bounds), strict=True)
        ]
        self._each("size", [()] * len(nodes), seconds=None)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def prepare(self) -> None:
        """As `MipsIndex.prepare`, for all parts."""
        self._each("prepare", [()] * len(self._parts), seconds=None)

    def rows(self, numbers: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """As `MipsIndex.rows`."""
        number_n = np.asarray(numbers, dtype=np.int64)
        owner_n = np.searchsorted(self._bounds, number_n, side="right") - 1
        order_n = np.argsort(owner_n, kind="stable")
        asked = [number_n[owner_n == part] for part in range(len(self._parts))]
        found_nD = np.concatenate(self._each("rows", [(part,) for part in asked]))
        rows_nD = np.empty_like(found_nD)
        rows_nD[order_n] = found_nD
        return torch.from_numpy(rows_nD)

    def search(self, query_BD: Tensor, k: int) -> Hits:
        """As `MipsIndex.search`."""
        query = self._ray.put(_array(query_BD))
        return self._merged(self._all("search", query, k), k)

    def search_subset(self, query_BD: Tensor, number_n: np.ndarray, k: int) -> Hits:
        """As `MipsIndex.search_subset`."""
        query, ends = self._ray.put(_array(query_BD)), np.searchsorted(number_n, self._bounds)
        asked = [(query, number_n[a:b], k) for a, b in pairwise(ends)]
        return self._merged(self._each("search_subset", asked), k)

    def _merged(self, found: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> Hits:
        return merge_hits([Hits(*map(torch.from_numpy, arrays)) for arrays in found], k)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """The results of a method of each part, with the same arguments."""
        return self._each(method, [arguments] * len(self._parts))

    def _each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float | None = MOST_SECONDS
    ) -> list[Any]:
        """The results of a method of each part, in the order of the parts.

        Raises:
            RealmError: a part failed, or did not answer within `seconds`.
        """
        try:
            calls = [
                getattr(part, method).remote(*own) for part, own in zip(self._parts, arguments, strict=True)
            ]
            found: list[Any] = self._ray.get(calls, timeout=seconds)
        except self._ray.exceptions.RayError as error:
            raise RealmError(f"a part of the index on the Ray cluster failed: {first_line(error)}") from error
        # Ray's arrays cannot be written to, and torch warns about such arrays.
        return [tuple(map(np.array, one)) if isinstance(one, tuple) else np.array(one) for one in found]


class _Part:
    """The class of the actors. Passages have the numbers that they have in the whole index."""

    def __init__(self, file: str, first: int, stop: int):
        # Ray has set the number of cores that the actor reserves.
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._first = first
        self._index = MipsIndex(np.array(np.load(file, mmap_mode="r")[first:stop]))

    def size(self) -> int:
        return len(self._index)

    def prepare(self) -> bool:
        self._index.prepare()
        return True

    def rows(self, number_n: np.ndarray) -> np.ndarray:
        return self._index.rows(number_n - self._first).numpy()

    def search(self, query_BD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self._numbered(self._index.search(torch.tensor(query_BD), k))

    def search_subset(
        self, query_BD: np.ndarray, number_n: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._numbered(self._index.search_subset(torch.tensor(query_BD), number_n - self._first, k))

    def _numbered(self, hits: Hits) -> tuple[np.ndarray, np.ndarray]:
        return hits.score_BK.numpy(), (hits.number_BK + self._first).numpy()


def _array(query_BD: Tensor) -> np.ndarray:
    return query_BD.detach().float().cpu().numpy()
