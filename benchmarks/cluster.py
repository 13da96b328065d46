"""Reading, tagging, embedding and search by several processes and on Ray: weak and strong scaling, and the cost of the engines.

    python benchmarks/cluster.py                            # 1 and 2 processes of one thread, all jobs: minutes
    python benchmarks/cluster.py --processes 1 2 4 --jobs embed search

`plain` is one process without an engine. `processes` starts the processes of `kb build --processes` (tagging), one process per
device as `realm index` does (embedding), or ranks that divide an index as in training (search); the files of the job `read` are
JSON Lines, which only Ray reads in several processes. `ray` is a cluster on this machine with as many cores; for search it has
as many machines of one core, among which the vectors are divided. `torchrun` is a training stage of a few steps.

Each job runs in a new process: first as a warm-up, then with little work, whose seconds are the column `start`, and then with
all work. The column `s` is the difference of the last two, and `plain s` is the same difference for `plain`. In strong scaling
the processes divide the same work; in weak scaling each process has the same amount of work. The efficiency is `plain s` over
`s`, and for strong scaling also divided by the number of processes. More processes than cores cannot be faster. Prints a table,
and one JSON object as the last line.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import shared

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file: the repository is the package's home

FILES, TEXTS, PASSAGES, VECTORS = 1024, 6400, 4096, 1_000_000
"""Files to read, texts to tag, passages to embed and vectors to search for each process. A process of a Ray cluster embeds
4,096 passages at a time, so with fewer passages only one process would work."""
LITTLE = 32
"""Number of files, texts, passages or vectors of a job with little work."""
DIM, QUERIES, ROUNDS = 128, 64, 20
"""Dimensions of the vectors, queries of a batch, and batches of a search."""
STEPS = 6
"""Steps of the training stage."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    """Measures what the flags ask for and prints it."""
    if sys.argv[1:2] == ["--one"]:
        job, engine, processes, amount, folder = sys.argv[2:]
        run = partial(JOBS[job], engine, int(processes))
        seconds = [run(size, Path(folder)) for size in (LITTLE, LITTLE, int(amount))]
        print(json.dumps(seconds[1:]))  # after a warm-up
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS, "torchrun"], default=[*JOBS, "torchrun"])
    parser.add_argument("--scale", type=float, default=1.0, help="how much of the usual work there is")
    args = parser.parse_args()
    rows: list[shared.Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for job in args.jobs:
            if job != "torchrun":
                rows += shown(scaled(job, args.processes, args.scale, folder))
        training = list(shown(trained(args.processes, folder))) if "torchrun" in args.jobs else []
    for table in (rows, training):
        if table:
            shared.print_table(table)
            print()
    print(json.dumps({"benchmark": "cluster", "rows": rows, "training": training} | shared.machine()))


def shown(rows: Iterator[shared.Row]) -> Iterator[shared.Row]:
    """The rows, each of which is also printed on standard error as it comes."""
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)
        yield row


def scaled(job: str, processes: list[int], scale: float, folder: Path) -> Iterator[shared.Row]:
    """A row for each engine, number of processes and kind of scaling."""
    each, most = max(LITTLE, round(scale * EACH[job])), max(processes)
    amounts = sorted({LITTLE, *(each * count for count in processes)})
    if job == "embed":
        make_knowledge_bases(folder, amounts)
    for engine in ENGINES[job]:
        for count in processes:
            for scaling, amount in {"strong": each * most, "weak": each * count}.items():
                start, seconds = one(job, engine, count, amount, folder)
                _, plain = one(job, "plain", 1, amount if scaling == "strong" else each, folder)
                ideal = plain / count if scaling == "strong" else plain
                yield {
                    "job": job, "engine": engine, "processes": count, "scaling": scaling, "amount": amount,
                    "plain s": round(plain, 2), "start s": round(start, 2), "s": round(seconds, 2),
                    "efficiency": round(ideal / seconds, 2) if seconds > 0 else None,
                }  # fmt: skip


@cache
def one(job: str, engine: str, processes: int, amount: int, folder: Path) -> tuple[float, float]:
    """Seconds of a job with little work, and the further seconds with all work; each run has a new process."""
    words = [job, engine, str(processes), str(amount), str(folder)]
    spent = shared.spent_by([sys.executable, __file__, "--one", *words], ONE_THREAD)
    start, whole = json.loads(spent.output.splitlines()[-1])
    return start, whole - start


def start_ray(processes: int) -> None:
    """A cluster of so many cores on this machine, to which the job connects."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=processes, include_dashboard=False, log_to_driver=False, configure_logging=False)


def read(engine: str, processes: int, amount: int, folder: Path) -> float:
    """Seconds to read HTML files, each with 100 paragraphs of about 200 words."""
    from realm.documents.reading import read_documents
    from realm.ray_actors import EngineConfig

    documents = folder / f"pages{amount}"
    documents.mkdir(exist_ok=True)
    if not any(documents.iterdir()):
        towns = folder / "towns"
        towns.mkdir(exist_ok=True)
        shared.made_up_towns(towns, 100)
        lines = (towns / "towns.jsonl").read_text(encoding="utf-8").splitlines()
        body = "".join(f"<p>{json.loads(line)['text']}</p>" for line in lines)
        for number in range(amount):
            page = f"<html><title>Page {number}</title><body><h1>Page {number}</h1>{body}</body></html>"
            (documents / f"{number}.html").write_text(page, encoding="utf-8")
    if engine == "ray":
        start_ray(processes)
    began = time.perf_counter()
    found = read_documents([str(documents)], engine=EngineConfig("ray" if engine == "ray" else "local"))
    assert sum(1 for _ in found) == amount
    return time.perf_counter() - began


def tag(engine: str, processes: int, amount: int, folder: Path) -> float:
    """Seconds to find names and dates in texts of 200 words."""
    from realm.ray_actors import EngineConfig
    from realm.text.salient_spans import load_tagger

    documents = folder / f"texts{amount}"
    documents.mkdir(exist_ok=True)
    towns = shared.made_up_towns(documents, amount)
    lines = (documents / "towns.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) == len(towns)
    if engine == "ray":
        start_ray(processes)
    began = time.perf_counter()
    tagger = load_tagger("realm", processes, EngineConfig("ray" if engine == "ray" else "local"))
    for _ in tagger.annotate(texts):
        pass
    return time.perf_counter() - began


def make_knowledge_bases(folder: Path, amounts: list[int]) -> None:
    """A knowledge base for each number of passages, and a model whose embedder has layers."""
    for amount in amounts:
        documents, kb = folder / f"documents{amount}", folder / f"kb{amount}"
        documents.mkdir()
        shared.made_up_towns(documents, amount)
        build = "--config", "tiny", "--set", "passage_tokens=288"
        shared.run("kb", "build", str(documents / "towns.jsonl"), "--out", str(kb), *build)
    size = "--set encoder.hidden=128 --set encoder.layers=2 --set encoder.heads=2 --set steps=0".split()
    kb = folder / f"kb{amounts[0]}"
    shared.run("mlm", "--kb", str(kb), "--out", str(folder / "model"), "--config", "tiny", *size)


def embed(engine: str, processes: int, amount: int, folder: Path) -> float:
    """Seconds to embed all passages of a knowledge base."""
    import numpy as np

    from realm.index.embedding import IndexConfig, embed_passages
    from realm.index.multi_process import embed_on_devices
    from realm.index.ray_embedding import embed_on_ray
    from realm.model.folder import load_model
    from realm.store.knowledge_base import KnowledgeBase

    kb, path = KnowledgeBase.open(folder / f"kb{amount}"), str(folder / "model")
    index = Path(tempfile.mkdtemp(dir=folder))
    if engine == "ray":
        start_ray(processes)
    began = time.perf_counter()
    model = load_model(path, reader=False)
    if engine == "plain":
        embed_passages(model, kb.tokens, np.arange(len(kb)), description=None)
    elif engine == "processes":
        config = IndexConfig(device=",".join(["cpu"] * processes), precision="fp32", threads=1)
        embed_on_devices(kb, path, index, config)
    else:
        embed_on_ray(kb, model, path, index, IndexConfig("ray", device="cpu", precision="fp32"))
    return time.perf_counter() - began


def search(engine: str, processes: int, amount: int, folder: Path) -> float:
    """Seconds of some batches of searches, each rank with its share of the vectors and of the queries."""
    import torch

    if engine == "plain":
        return searches(0, 1, amount, "")
    if engine == "ray":
        return ray_searches(processes, amount, folder)
    with tempfile.TemporaryDirectory(dir=folder) as meeting:
        result = Path(meeting) / "seconds"
        torch.multiprocessing.spawn(searches, (processes, amount, meeting), nprocs=processes)
        return float(result.read_text())


def searches(rank: int, ranks: int, amount: int, meeting: str) -> float:
    """Seconds of the searches of one rank; rank 0 writes them down."""
    import torch
    import torch.distributed as dist

    from realm import distributed
    from realm.search.shards import divided_index, own_passages

    if meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}/meet", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    own = own_passages(amount)
    draw = torch.Generator().manual_seed(rank)
    index = divided_index(
        torch.randn(own.stop - own.start, DIM, generator=draw).half(), amount, torch.device("cpu")
    )
    index.prepare()
    query_BD = torch.randn(QUERIES, DIM, generator=draw)
    index.search(distributed.shard(query_BD), 20)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        index.search(distributed.shard(query_BD), 20)
    seconds = time.perf_counter() - began
    if meeting and rank == 0:
        (Path(meeting) / "seconds").write_text(str(seconds))
    distributed.shutdown()
    return seconds


def ray_searches(machines: int, amount: int, folder: Path) -> float:
    """Seconds of the same searches in an index that is divided among the machines of a cluster."""
    import numpy as np
    import torch

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    from realm.search.ray_index import RayIndex

    cores, cluster = sorted(os.sched_getaffinity(0)), Cluster()
    for number in range(machines):
        os.sched_setaffinity(0, [cores[number % len(cores)]])  # all processes of the machine have this core
        cluster.add_node(num_cpus=1, include_dashboard=False)
    os.sched_setaffinity(0, cores)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    file = Path(tempfile.mkdtemp(dir=folder)) / "vectors.npy"
    draw = torch.Generator().manual_seed(0)
    np.save(file, torch.randn(amount, DIM, generator=draw).half().numpy())
    index = RayIndex(file, amount)
    index.prepare()
    query_BD = torch.randn(QUERIES, DIM, generator=draw)
    index.search(query_BD, 20)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        index.search(query_BD, 20)
    seconds = time.perf_counter() - began
    ray.shutdown()
    cluster.shutdown()
    file.unlink()
    return seconds


def trained(processes: list[int], folder: Path) -> Iterator[shared.Row]:
    """A row for each number of processes of a training stage, and one without torchrun."""
    documents, kb = folder / "documents", folder / "kb"
    documents.mkdir()
    shared.made_up_towns(documents, 500)
    shared.run("kb", "build", str(documents / "towns.jsonl"), "--out", str(kb), "--config", "tiny")
    settings = (
        f"encoder.hidden=256 encoder.layers=4 encoder.heads=4 steps={STEPS} batch_size=64 log_every=1".split()
    )
    words = ["--kb", str(kb), "--config", "tiny", *(word for one in settings for word in ("--set", one))]
    for count in [0, *processes]:
        out = folder / f"trained{count}"
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count else []
        command = [sys.executable, *launch, "-m", "realm", "mlm", *words, "--out", str(out)]
        spent = shared.spent_by(command, ONE_THREAD)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds = [line["seconds"] for line in lines if line["loss"] is not None]
        steps = sorted(later - earlier for earlier, later in itertools.pairwise(seconds))
        yield {
            "stage": "mlm", "engine": f"torchrun, {count} processes" if count else "plain",
            "s": round(spent.seconds, 2), "CPU s": round(spent.cpu_seconds, 2),
            "s a step": round(steps[len(steps) // 2], 3),
        }  # fmt: skip


JOBS = {"read": read, "tag": tag, "embed": embed, "search": search}
EACH = {"read": FILES, "tag": TEXTS, "embed": PASSAGES, "search": VECTORS}
ENGINES = {
    "read": ["ray"],
    "tag": ["processes", "ray"],
    "embed": ["processes", "ray"],
    "search": ["processes", "ray"],
}


if __name__ == "__main__":
    main()
