"""Measures index refreshes: the speed of training and builds, and the freshness of the index.

    python benchmarks/refresh.py                                    # makes a corpus; five minutes on two free cores
    python benchmarks/refresh.py --parts freshness --steps 300 --every 10 100 300 \
        --kb demo-from-text/kb --model demo-from-text/models/ict --config demo --set retriever_rate=1e-3
    python benchmarks/refresh.py --results refresh.jsonl            # stores rows; a repeated call measures the missing rows

All numbers are from runs of `realm pretrain` in a temporary folder. Prints a table for each part, and one JSON object as the
last line. The parts are:

speed: steps per second without builds, with builds in the foreground, and with builds in the background for several numbers of
    threads of the trainer and of the build; passages per second of a build; seconds from the commit of a version to its use.
freshness: the share of the first 20 passages of the probe that an index of the current weights also finds
    (`candidate_freshness`), and the recall at the end of the run, for several intervals between builds, with the live query
    tower and with the query tower of the snapshot. Passages with the masked span get a fixed likelihood instead of that of a
    reader, which saves time and makes the results independent of a reader. All runs with the same interval have the same
    steps and builds.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

sys.path.insert(
    0, str(Path(__file__).parent.parent)
)  # a file that is run by its path does not find the package `realm`
from realm.environment import set_torch_environment

set_torch_environment()  # as in the command line

import numpy as np
import torch
from shared import Row, made_up, print_table

from realm.index.embedding import embed_passages
from realm.index.versions import IndexVersion
from realm.model.device import choose_device
from realm.search.exact import MipsIndex
from realm.settings import read_config
from realm.store.knowledge_base import KnowledgeBase
from realm.train import pretrain
from realm.train.health import HealthWatch, overlap

LOOKS = 12
"""Number of measurements of the freshness in a run."""
SEARCHES = {
    "live": ("refresh.search=live",),
    "snapshot": ("refresh.search=snapshot",),
}
MADE_HERE = (
    "batch_size=16", "candidates=5", "injected=2", "warmup=10", "ict=1.0", "ict_batch=32", "health.queries=400",
)  # fmt: skip
"""Settings of pre-training on the corpus that this program makes, in addition to those of the preset."""


def main() -> None:
    """Measures the parts that the flags select, and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--kb", help="a knowledge base (default: a small one that is made)")
    parser.add_argument("--model", help="with --kb: the model to start from")
    parser.add_argument("--config", default="tiny", help="preset or file with a [pretrain] table")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a further setting (repeatable)"
    )
    parser.add_argument(
        "--towns", type=int, default=1000, help="number of documents of the corpus that is made"
    )
    parser.add_argument("--steps", type=int, default=600, help="steps of a run that measures freshness")
    parser.add_argument(
        "--every", type=int, nargs="+", default=[50, 200, 600], help="refresh intervals to compare"
    )
    parser.add_argument("--speed-steps", type=int, default=100, help="steps of a run that measures speed")
    parser.add_argument("--seeds", type=int, default=1, help="runs per row of the freshness table")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="file that stores measured rows; rows in this file are not measured again",
    )
    args = parser.parse_args()
    if (args.kb is None) != (args.model is None):
        parser.error("--kb and --model go together")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        rows = {part: [bench.row(part, *one) for one in PARTS[part](bench)] for part in args.parts}
        result = {
            "passages": len(bench.kb),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "device": str(choose_device("auto")),
            "torch": torch.__version__,
            **rows,
        }
    for part, done in rows.items():
        print(f"\n{part}\n")
        print_table(done)
    print(json.dumps(result))


class FreshnessWatch(HealthWatch):
    """Also logs the freshness of the version in use, by an index that is built for this purpose from the current weights."""

    every = 0
    """Steps between two measurements."""

    def after_step(self, built: IndexVersion | None, current: IndexVersion) -> IndexVersion:
        if self.run.step % self.every == 0 and self.queries:
            with self.run.autocast():
                vectors_ND = embed_passages(self.model, self.kb.tokens, np.arange(len(self.kb)))
            fresh = IndexVersion(MipsIndex(vectors_ND, self.model.device), number=0, step=self.run.step)
            query_BD = self._embed(self.model)
            share = overlap(self._found(current, query_BD), self._found(fresh, query_BD))
            self.run.log({"candidate_freshness": round(share, 4)})
        return super().after_step(built, current)


class Bench:
    """The corpus, the two models from which runs start, and the rows that are measured already."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self._folder, self._runs = args, folder, 0
        kb_folder, self.layers, self.words = (
            (args.kb, args.model, args.model) if args.kb else made_up(folder, args.towns)
        )
        self.kb = KnowledgeBase.open(kb_folder)
        self._file: Path | None = args.results
        self._done: dict[str, Row] = {}
        if self._file is not None and self._file.exists():
            kept = [json.loads(line) for line in self._file.read_text().splitlines()]
            self._done = {line["key"]: line["row"] for line in kept}

    def row(self, part: str, name: str, measure: Callable[[], Row]) -> Row:
        """The row that `measure` returns, or the row that an earlier call with the same arguments has stored."""
        asked = {k: v for k, v in vars(self.args).items() if k not in ("parts", "results", "every")}
        key = f"{part}: {name}, {json.dumps(asked)}"
        if key not in self._done:
            began = time.monotonic()
            self._done[key] = {"what": name, **measure()}
            print(f"{part}: {name}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps({"key": key, "row": self._done[key]}) + "\n")
        return self._done[key]

    def lines(self, model: str, *settings: str, watch: type[HealthWatch] = HealthWatch) -> list[Row]:
        """Makes a pre-training run with these settings and health checks -> the lines of its metrics.jsonl."""
        self._runs += 1
        common = ["health.gate=0", "health.margin=-1", "health.read=1", "checkpoint_seconds=1e9"]
        common += [] if self.args.kb else MADE_HERE
        config = read_config(
            pretrain.PretrainConfig, self.args.config, "pretrain", [*common, *settings, *self.args.set]
        )
        with patch.object(pretrain, "HealthWatch", watch):
            out = pretrain.train(self.kb, self._folder / f"run{self._runs}", config, model)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def speed(bench: Bench) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The rows of the speed table: no builds, builds in the foreground, and builds in the background, by numbers of threads."""
    steps, cpus = bench.args.speed_steps, os.cpu_count() or 1
    some = sorted({1, cpus // 2, cpus} - {0})
    foreground = f"refresh.every={max(1, steps // 4)}", "refresh.in_background=false"
    for threads in some:
        yield f"no build, {threads} thread(s)", lambda t=threads: _speed(bench, t, "refresh.every=0")
    yield f"foreground, {cpus} thread(s)", lambda: _speed(bench, cpus, *foreground)
    for threads, other in itertools.product(some, some):
        yield (
            f"background, {threads} + {other} thread(s)",
            lambda t=threads, o=other: _speed(bench, t, "refresh.every=1", f"refresh.threads={o}"),
        )


def _speed(bench: Bench, threads: int, *settings: str) -> Row:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    background = "refresh.in_background=true"
    few = f"steps={bench.args.speed_steps}", "log_every=1", "health.queries=50"
    lines = bench.lines(bench.layers, *few, background, *settings)
    torch.set_num_threads(before)
    logged = [line for line in lines if line["loss"] is not None]
    passed = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(logged)]
    beside = [s for s, line in zip(passed, logged[1:], strict=False) if line["building"]]
    versions = [line for line in lines if "build_seconds" in line][1:-1]  # not the first and the last
    return {
        "steps/s": (len(logged) - 1) / sum(passed),
        "step, s": statistics.median(passed),
        "step beside a build, s": statistics.median(beside) if beside else None,
        "builds": len(versions),
        "s/build": _median([v["build_seconds"] for v in versions]),
        "passages/s": _median([v["build_passages_per_second"] for v in versions]),
        "commit to swap, s": _median([v["swap_seconds"] for v in versions]),
    }


def freshness(bench: Bench) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The rows of the freshness table: every interval with both query towers."""
    for every, name in itertools.product(bench.args.every, SEARCHES):
        yield f"every {every}, {name}", lambda e=every, n=name: _freshness(bench, e, n)


def _freshness(bench: Bench, every: int, search: str) -> Row:
    """Measures the freshness of an interval with one of the query towers -> means over the seeds."""
    steps = bench.args.steps
    asked = (
        f"steps={steps}", f"refresh.every={every}", "refresh.in_background=false", "signal=entity",
        "reader_gradient=none", "retriever_rate=1e-3",
    )  # fmt: skip
    FreshnessWatch.every = max(1, steps // LOOKS)
    found: list[Row] = []
    for seed in range(bench.args.seeds):
        lines = bench.lines(bench.words, *asked, f"seed={seed}", *SEARCHES[search], watch=FreshnessWatch)
        seen = [x for x in lines if "candidate_freshness" in x and "index_step" not in x]
        first, *_, last = (x for x in lines if "probe_recall_5" in x)
        found.append(
            {
                "freshness": statistics.mean(x["candidate_freshness"] for x in seen),
                "least": min(x["candidate_freshness"] for x in seen),
                "recall@5 before": first["probe_recall_5"],
                "recall@5": last["probe_recall_5"],
                "recall@20": last["probe_recall_20"],
                "over steps": [(x["step"], x["candidate_freshness"]) for x in seen],
            }
        )
    row = {k: statistics.mean(f[k] for f in found) for k in found[0] if k != "over steps"}
    return {**row, "over steps": found[0]["over steps"]}


PARTS: dict[str, Callable[[Bench], Iterator[tuple[str, Callable[[], Row]]]]] = {
    "speed": speed,
    "freshness": freshness,
}


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


if __name__ == "__main__":
    main()
