"""Compares the ways in which `realm` searches passages for answers: exact, approximate (IVF-PQ), and PostgreSQL with pgvector.

    python benchmarks/approximate.py                                    # 100,000 and 1,000,000 artificial vectors
    python benchmarks/approximate.py --vectors passages.npy --queries questions.npy         # vectors of an embedder
    python benchmarks/approximate.py --sizes 100000 --postgres 'postgresql://localhost/test?table=benchmark'

The artificial vectors are made as in benchmarks/search.py: they have the spectrum of texts but no groups of similar texts, and
the queries are near some of the vectors. Files have vectors [N, D] in float16 and queries [B, D] in float32.

The columns: share of the 5, 20 and 100 best passages that a search for so many passages finds; seconds to make the index from
the vectors, by the clock and of the CPU, with the start of the process; memory of an opened index without mapped files, and
size of its table on disk; milliseconds by the clock and of the CPU for a question alone, for a question whose filter matches
1 % or half of the passages, and for a question in a batch of 16. The CPU of a database on this machine counts. Each way runs in
separate processes, with one thread of torch. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from realm.environment import set_torch_environment

set_torch_environment()

import numpy as np
import search
import shared
import torch

from realm.search.approximate import approximate_index
from realm.search.exact import Hits, MipsIndex, PassageIndex
from realm.search.postgres import PostgresIndex
from realm.search.postgres_table import connect, parsed, upload
from realm.store.vectors import Vectors, VectorsInfo
from realm.text.corpus import Passage

DEPTHS = (5, 20, 100)
JUDGED, TIMED, BATCH = 256, 64, 16
"""Queries whose best passages are compared, queries whose searches are timed, and questions of a batch."""


class Numbered:
    """The passages of a knowledge base, each with its number as its text, as far as an upload needs them."""

    fingerprint = "benchmark"

    def __init__(self, count: int):
        self.keys_N = np.arange(count, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.keys_N)

    def passages(self, numbers: np.ndarray) -> list[Passage]:
        return [Passage(f"{n:016x}", f"d{n}", f"Passage {n}", f"Text {n}", (), ()) for n in numbers.tolist()]


def main() -> None:
    """Measures all ways for all sizes, and prints the results."""
    if sys.argv[1:2] == ["--build"]:
        make(sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
        return
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--vectors", type=Path, help="file with vectors of passages, instead of --sizes")
    parser.add_argument("--queries", type=Path, help="file with queries, for --vectors")
    parser.add_argument("--postgres", metavar="URL", help="also measure a new table of this database")
    args = parser.parse_args()
    if (args.vectors is None) != (args.queries is None):
        parser.error("--vectors and --queries need each other")
    ways = ["exact", "approximate", *(["postgres"] if args.postgres else [])]
    rows = []
    for size in args.sizes if args.vectors is None else [None]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if size is None:
                np.save(folder / "vectors.npy", np.load(args.vectors))
                np.save(folder / "queries.npy", np.load(args.queries)[:JUDGED])
            else:
                search.make_vectors(folder, size, JUDGED)
            for way in ways:
                words = [way, name, *([args.postgres] if way == "postgres" else [])]
                built = shared.spent_by([sys.executable, __file__, "--build", *words])
                measured = shared.spent_by([sys.executable, __file__, "--one", *words])
                row = json.loads(measured.output.splitlines()[-1])
                rows.append(row | {"build_s": round(built.seconds), "build_cpu_s": round(built.cpu_seconds)})
    shared.print_table(rows)
    print(json.dumps({"benchmark": "approximate", **shared.machine(), "rows": rows}))


def one(way: str, folder: Path, *address: str) -> dict[str, Any]:
    """Measures one way of searching the vectors in a folder -> a row of the table."""
    torch.set_num_threads(1)
    queries = torch.from_numpy(np.load(folder / "queries.npy").astype(np.float32))
    before = search.resident()
    index = make(way, folder, *address)
    found = {k: hits(index, queries, k).number_BK.numpy() for k in DEPTHS}
    if way == "exact":
        np.save(folder / "truth.npy", found[max(DEPTHS)])
    truth = np.load(folder / "truth.npy")
    memory = search.resident() - before
    row: dict[str, Any] = {"passages": len(index), "search": way}
    for k in DEPTHS:
        row[f"recall@{k}"] = float(
            np.mean([len(np.intersect1d(a, b[:k])) / k for a, b in zip(found[k], truth, strict=True)])
        )
    row |= {"build_s": 0, "build_cpu_s": 0, "mb": round(memory / 2**20)}
    if way == "approximate":
        files = [file for file in folder.glob("approximate/**/*") if file.is_file()]
        row["disk_mb"] = round(sum(file.stat().st_size for file in files) / 2**20)
    else:
        row["disk_mb"] = None
    draw = np.random.default_rng(0)
    few, half = (np.flatnonzero(draw.random(len(index)) < share) for share in (0.01, 0.5))
    timed: dict[str, Callable[[torch.Tensor], object]] = {
        "": lambda part: index.search(part, 20),
        "_1%": lambda part: index.search_subset(part, few, 20),
        "_50%": lambda part: index.search_subset(part, half, 20),
    }
    for name, ask in timed.items():
        count = TIMED if not name else 8
        row[f"ms{name}"], row[f"cpu_ms{name}"] = spent(ask, queries[:count].split(1), *address)
    row[f"ms_of_{BATCH}"], row[f"cpu_ms_of_{BATCH}"] = spent(
        timed[""], queries[:TIMED].split(BATCH), *address
    )
    return row


def make(way: str, folder: Path, *address: str) -> PassageIndex:
    """The index that is measured, ready for questions; its table is made if it does not exist."""
    array_ND = np.load(folder / "vectors.npy", mmap_mode="c")
    info = VectorsInfo("benchmark", "", 0, array_ND.shape[1], "", "benchmark", 8 * array_ND.dtype.itemsize)
    vectors, kb = Vectors(array_ND, np.zeros(0, dtype=np.int64), info, 1, 0), Numbered(len(array_ND))
    index: PassageIndex
    if way == "exact":
        index = MipsIndex(np.array(array_ND))
    elif way == "approximate":
        index = approximate_index(folder, kb.keys_N, vectors)
    else:
        table = parsed(*address)
        upload(kb, vectors, table, replace_table=True)
        index = PostgresIndex(table, kb, "benchmark")
    index.prepare()
    return index


def hits(index: PassageIndex, queries: torch.Tensor, k: int) -> Hits:
    """The k best passages for the queries, in batches."""
    parts = [index.search(part, k) for part in queries.split(BATCH)]
    return Hits(*(torch.cat(rows) for rows in zip(*parts, strict=True)))


def spent(
    ask: Callable[[torch.Tensor], object], parts: Sequence[torch.Tensor], *address: str
) -> tuple[float, float]:
    """Milliseconds of the clock and of the CPU per query, after one search that is not measured."""
    ask(parts[0])
    began, cpu = time.perf_counter(), cpu_seconds(*address)
    for part in parts:
        ask(part)
    clock, used = time.perf_counter() - began, cpu_seconds(*address) - cpu
    count = sum(map(len, parts))
    return round(1000 * clock / count, 2), round(1000 * used / count, 2)


def cpu_seconds(*address: str) -> float:
    """CPU seconds of this process, and of the processes of a database on this machine that serve this program."""
    total = time.process_time()
    for url in address:
        with connect(parsed(url)) as db:
            served = db.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'realm' AND pid <> pg_backend_pid()"
            ).fetchall()
        for (pid,) in served:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
    return total


if __name__ == "__main__":
    main()
