"""Compares maximum inner product search in `realm`, faiss, ScaNN and usearch: queries per second, memory, recall.

    python benchmarks/search.py                                     # 10,000 to 1,000,000 vectors of 128 dimensions
    python benchmarks/search.py --sizes 13350000 --systems realm faiss-fp16     # size of Wikipedia: 3.4 GB in 16 bits
    python benchmarks/search.py --sizes 13350000 --systems realm --batches 1 64 512 --device cuda   # with and without prefilter

Every system gets the same vectors (unit vectors whose spectrum is similar to that of texts), the same queries and the same
number of threads, in a process of its own.

An exact search reads the whole index once per batch. On CPUs with 8-bit products, `realm` reads an 8-bit copy of the index,
and the few vectors that the copy cannot exclude. faiss reads its index once per query, unless it uses a matrix product. So
the limit of batch size 1 is the memory bandwidth, and the limit of large batches is the speed of float32 matrix products.
Both limits are measured in the same process. GB/s is the size of the index times the number of batches per second; the
additional 32-bit copy of a small index of `realm` is not counted.

faiss-flat is measured with its default settings, and with matrix products in tiles of 1,024 vectors. The approximate systems
(IVF, HNSW, ScaNN) are shown with the share of the 20 best vectors that they find. Systems that are not installed are left out
(`pip install realm-lm[benchmarks]`). Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from realm.environment import set_torch_environment

if sys.argv[1:3] == ["--one", "realm"]:  # as in the command line; the other systems keep their own settings
    set_torch_environment()

import numpy as np
import shared
import torch

from realm.search import group_prefilter, int8_prefilter
from realm.search.exact import MipsIndex

D, K = 128, 20
JUDGED = 256
"""Number of queries for which the 20 best vectors are computed, to measure the recall."""
Find = Callable[[np.ndarray], np.ndarray]
"""A search function: queries [B, D] float32 -> numbers of the K best vectors [B, K]."""


def main() -> None:
    """Measures the selected systems, each in a process of its own, and prints the results."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument(
        "--largest-approximate",
        type=int,
        default=10_000,
        help="largest number of vectors for approximate systems, because building graphs takes long",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds for each measurement")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            make_vectors(Path(folder), size, max(JUDGED, *args.batches))
            for name in args.systems:
                if not SYSTEMS[name].is_here():
                    print(f"{name}: not installed", flush=True)
                elif SYSTEMS[name].exact or size <= args.largest_approximate:
                    words = [name, folder, args.device, args.threads, args.seconds, *args.batches]
                    rows += _print_rows(_in_own_process(words))
    result = {"benchmark": "search", "device": args.device, "threads": args.threads, "dim": D, "k": K}
    print(json.dumps(result | shared.machine() | {"rows": rows}))


def one(
    name: str, folder: str, device: str, threads: str, seconds: str, *batches: str
) -> list[dict[str, Any]]:
    """Measures one system on the vectors in a folder -> a row for each variant of the system."""
    torch.set_num_threads(int(threads))
    vectors_ND = np.load(Path(folder) / "vectors.npy", mmap_mode="r")
    queries, truth = np.load(Path(folder) / "queries.npy"), np.load(Path(folder) / "truth.npy")
    machine, system = Machine(device, int(threads)), SYSTEMS[name]
    bandwidth, flops = ceilings(device, float(seconds)) if system.exact else (0.0, 0.0)
    before, start = resident(), time.perf_counter()
    ways = dict(system.make(vectors_ND, machine))
    built, memory = time.perf_counter() - start, resident() - before
    rows = []
    for way, find in ways.items():
        found = np.concatenate([find(queries[i : i + 32]) for i in range(0, JUDGED, 32)])
        row = {
            "system": f"{name} {way}".strip(),
            "vectors": len(vectors_ND),
            "recall_20": _recall(found, truth),
            "build_s": round(built, 2),
            "index_mb": round(memory / 2**20, 1),
        }
        if system.exact:
            row |= {"memory_gb_per_s": round(bandwidth / 1e9, 1), "gflops": round(flops / 1e9, 1)}
        for batch in map(int, batches):
            rate = per_second(find, queries, batch, float(seconds))
            row |= {f"queries_per_s_{batch}": round(rate, 1), f"ms_{batch}": round(1e3 * batch / rate, 3)}
            if system.exact:
                bytes_read = system.bits(machine) / 8 * vectors_ND.size * rate / batch
                row[f"gb_per_s_{batch}"] = round(bytes_read / 1e9, 2)
                row[f"of_bandwidth_{batch}"] = round(bytes_read / bandwidth, 3)
                row[f"of_flops_{batch}"] = round(2 * vectors_ND.size * rate / flops, 3)
        rows.append(row)
    return rows


def make_vectors(folder: Path, size: int, count: int) -> None:
    """Writes vectors.npy [N, D] in float16, queries.npy with queries near some vectors, and truth.npy with the best vectors."""
    rng, spectrum = np.random.default_rng(0), np.arange(1, D + 1) ** -0.5

    def unit(rows_ND: np.ndarray) -> np.ndarray:
        return rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)

    vectors_ND = np.lib.format.open_memmap(folder / "vectors.npy", "w+", dtype=np.float16, shape=(size, D))
    for start in range(0, size, 100_000):
        part_ND = vectors_ND[start : start + 100_000]
        part_ND[:] = unit(rng.standard_normal(part_ND.shape, dtype=np.float32) * spectrum)
    near = vectors_ND[rng.integers(size, size=count)].astype(np.float32)
    queries = unit(near + 0.05 * rng.standard_normal((count, D))).astype(np.float32)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "truth.npy", best(vectors_ND, queries[:JUDGED]))


def best(vectors_ND: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The K best vectors of each query by float32 products, unordered; all systems are compared with these -> [B, K]."""
    scores, numbers = np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int64)
    for start in range(0, len(vectors_ND), 1 << 16):
        part = queries @ vectors_ND[start : start + (1 << 16)].astype(np.float32).T
        scores = np.concatenate([scores, part], axis=1)
        place = np.broadcast_to(np.arange(start, start + part.shape[1]), part.shape)
        numbers = np.concatenate([numbers, place], axis=1)
        keep = np.argpartition(-scores, K, axis=1)[:, :K]
        scores, numbers = (np.take_along_axis(rows, keep, axis=1) for rows in (scores, numbers))
    return numbers


def ceilings(device: str, seconds: float) -> tuple[float, float]:
    """Memory bandwidth in bytes per second, and float32 operations per second of a matrix product."""
    words = torch.ones(1 << 27, dtype=torch.float32, device=device)  # 512 MB, more than any cache
    left = torch.ones(4096 if device == "cuda" else 2048, 2048, device=device)
    reads = words.nbytes / _best(lambda: words.max().item(), seconds)
    return reads, 2 * len(left) ** 2 * 2048 / _best(lambda: (left @ left.T)[0, 0].item(), seconds)


def per_second(find: Find, queries: np.ndarray, batch: int, seconds: float) -> float:
    """Queries per second in batches of one size, in the fastest of several rounds."""
    starts = iter(range(0, 1 << 60, batch))

    def ask() -> None:
        first = next(starts) % (len(queries) - batch + 1)
        find(queries[first : first + batch])

    return batch / _best(ask, seconds)


def _best(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest run after one warm-up run; runs are repeated for `seconds`, and at least three times."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


# -- the systems --------------------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """Device and number of threads of a system."""

    device: str
    threads: int

    def codes(self) -> bool:
        """Whether `realm` searches with an 8-bit copy."""
        return self.device == "cpu" and int8_prefilter.is_fast()


def realm(vectors_ND: np.ndarray, machine: Machine) -> Iterator[tuple[str, Find]]:
    """The exact search of `realm`, as in a server and in training."""
    index = MipsIndex(np.array(vectors_ND), torch.device(machine.device))
    index.prepare()

    def find(queries: np.ndarray) -> np.ndarray:
        return index.search(torch.from_numpy(queries), K).number_BK.cpu().numpy()

    yield "", find
    if machine.device == "cuda":
        yield "no kernel", _without("kernels_run", find)
        yield "float32", _without("is_fast", find)


def _without(test: str, find: Find) -> Find:
    """The search, while a test of the prefilter of a GPU (`realm.search.group_prefilter`) fails."""

    def searched(queries: np.ndarray) -> np.ndarray:
        usual = getattr(group_prefilter, test)
        setattr(group_prefilter, test, lambda *_: False)
        try:
            return find(queries)
        finally:
            setattr(group_prefilter, test, usual)

    return searched


def faiss_flat(vectors_ND: np.ndarray, machine: Machine) -> Iterator[tuple[str, Find]]:
    """Exact search of faiss in 32 bits, with its default choice between sums and matrix products, and with matrix products."""
    import faiss

    usual = faiss.cvar.distance_compute_blas_threshold, faiss.cvar.distance_compute_blas_database_bs
    index = _faiss("Flat", vectors_ND, machine)
    for way, settings in {"": usual, "matrix": (1, 1024)}.items():

        def find(queries: np.ndarray, settings: tuple[int, int] = settings) -> np.ndarray:
            faiss.cvar.distance_compute_blas_threshold, faiss.cvar.distance_compute_blas_database_bs = (
                settings
            )
            return np.asarray(index.search(queries, K)[1])

        yield way, find
        if machine.device == "cuda":
            return


def faiss_fp16(vectors_ND: np.ndarray, machine: Machine) -> Iterator[tuple[str, Find]]:
    """Exact search of faiss in 16 bits."""
    index = _faiss("SQfp16", vectors_ND, machine)
    yield "", lambda queries: np.asarray(index.search(queries, K)[1])


def faiss_ivf(vectors_ND: np.ndarray, machine: Machine) -> Iterator[tuple[str, Find]]:
    """Inverted lists of faiss; a search reads only the `nprobe` nearest lists."""
    lists = 4 * round(len(vectors_ND) ** 0.5)
    index = _faiss(f"IVF{lists},Flat", vectors_ND, machine)
    for probes in (1, 8, 64):

        def find(queries: np.ndarray, probes: int = probes) -> np.ndarray:
            index.nprobe = probes
            return np.asarray(index.search(queries, K)[1])

        yield f"nprobe {probes}", find


def faiss_hnsw(vectors_ND: np.ndarray, machine: Machine) -> Iterator[tuple[str, Find]]:
    """HNSW of faiss, a graph with 32 neighbours per node."""
    index = _faiss("HNSW32", vectors_ND, machine)
    for width in (32, 128):

        def find(queries: np.ndarray, width: int = width) -> np.ndarray:
            index.hnsw.efSearch = width
            return np.asarray(index.search(queries, K)[1])

        yield f"ef {width}", find


def scann(vectors_ND: np.ndarray, machine: Machine) -> Iterator[tuple[str, Find]]:
    """ScaNN: inverted lists, 4-bit codes that are trained for inner products, and exact scores of the best 100 vectors."""
    import scann as package

    leaves = round(len(vectors_ND) ** 0.5)
    builder = package.scann_ops_pybind.builder(np.array(vectors_ND, dtype=np.float32), K, "dot_product")
    builder.set_n_training_threads(machine.threads)
    tree = builder.tree(num_leaves=leaves, num_leaves_to_search=max(1, leaves // 10))
    searcher = tree.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100).build()
    searcher.set_num_threads(machine.threads)
    yield "", lambda queries: np.asarray(searcher.search_batched_parallel(queries)[0])


def usearch(vectors_ND: np.ndarray, machine: Machine) -> Iterator[tuple[str, Find]]:
    """HNSW of usearch in 16 bits."""
    from usearch.index import Index

    index = Index(ndim=D, metric="ip", dtype="f16")
    index.add(np.arange(len(vectors_ND)), np.array(vectors_ND), threads=machine.threads)
    for width in (64, 256):

        def find(queries: np.ndarray, width: int = width) -> np.ndarray:
            index.expansion_search = width
            found = index.search(queries.astype(np.float16), K, threads=machine.threads)
            return np.asarray(found.keys).reshape(-1, K)

        yield f"ef {width}", find


def _faiss(factory: str, vectors_ND: np.ndarray, machine: Machine) -> Any:
    import faiss

    faiss.omp_set_num_threads(machine.threads)
    index = faiss.index_factory(D, factory, faiss.METRIC_INNER_PRODUCT)
    if machine.device == "cuda" and factory == "Flat" and hasattr(faiss, "index_cpu_to_all_gpus"):
        index = faiss.index_cpu_to_all_gpus(index)
    if not index.is_trained:
        index.train(np.array(vectors_ND[: 1 << 17], dtype=np.float32))
    for start in range(0, len(vectors_ND), 1 << 17):
        index.add(np.array(vectors_ND[start : start + (1 << 17)], dtype=np.float32))
    return index


class System(NamedTuple):
    """A system: the function that makes its variants, its package, and whether it is exact."""

    make: Callable[[np.ndarray, Machine], Iterator[tuple[str, Find]]]
    package: str
    exact: bool
    bits: Callable[[Machine], int] = lambda machine: 0
    """Bits per number of the index that an exact search reads completely."""

    def is_here(self) -> bool:
        return find_spec(self.package) is not None


SYSTEMS = {
    "realm": System(realm, "realm", True, lambda machine: 8 if machine.codes() else 16),
    "faiss-flat": System(faiss_flat, "faiss", True, lambda machine: 32),
    "faiss-fp16": System(faiss_fp16, "faiss", True, lambda machine: 16),
    "faiss-ivf": System(faiss_ivf, "faiss", False),
    "faiss-hnsw": System(faiss_hnsw, "faiss", False),
    "scann": System(scann, "scann", False),
    "usearch-hnsw": System(usearch, "usearch", False),
}


def _in_own_process(words: list[Any]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
    )
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


def _print_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        rates = "  ".join(
            f"{key.rpartition('_')[2]:>4}: {row[key]:>10,.1f}/s{_bounds(row, key.rpartition('_')[2])}"
            for key in row
            if key.startswith("queries_per_s")
        )
        print(
            f"{row['vectors']:>10,} {row['system']:20} recall {row['recall_20']:.3f}  build {row['build_s']:7.1f} s  "
            f"{row['index_mb']:8,.0f} MB  {rates}",
            flush=True,
        )
    return rows


def _bounds(row: dict[str, Any], batch: str) -> str:
    if f"of_bandwidth_{batch}" not in row:
        return ""
    return (
        f" ({row[f'gb_per_s_{batch}']:.1f} GB/s, {row[f'of_bandwidth_{batch}']:.0%} of bandwidth, "
        f"{row[f'of_flops_{batch}']:.0%} of flops)"
    )


def _recall(found: np.ndarray, truth: np.ndarray) -> float:
    hits = [len(np.intersect1d(a, b)) for a, b in zip(found, truth, strict=True)]
    return round(float(np.mean(hits)) / K, 4)


def resident() -> int:
    """Memory of this process in bytes without mapped files; on systems without /proc the peak memory of the process."""
    try:
        _, pages, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (pages - of_files) * resource.getpagesize()


if __name__ == "__main__":
    main()
