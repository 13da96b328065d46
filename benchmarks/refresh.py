"""What index refreshes cost and what they keep fresh: tables for people, then one line of JSON.

    python benchmarks/refresh.py                                    # a corpus made here: five minutes on two quiet cores
    python benchmarks/refresh.py --parts freshness --steps 300 --every 10 100 300 \
        --kb demo-from-text/kb --model demo-from-text/models/ict --config demo --set retriever_rate=1e-3
    python benchmarks/refresh.py --results refresh.jsonl            # keeps each row; started again, it does the others

Every number comes from `realm pretrain` itself, run into a temporary folder.

speed: steps per second with no build, with foreground builds and beside background ones, for each split of the threads
    between the two; passages per second of a build; seconds from a version's commit to its use.
freshness: how much of what the run retrieves an index of the moment would retrieve too (`candidate_freshness`, top 20 of
    the probe), and the recall where it ends, by refresh interval; with the live query tower, and with the
    snapshot's. Passages that hold the hidden span are the credit: no reader's time, and no luck of
    its start. All runs of an interval take the same steps and the same builds.
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

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file: the repository is the package's home
from realm.environment import set_torch_environment

set_torch_environment()  # as the command line does

import torch
from shared import Row, made_up, print_table

from realm.model.device import choose_device
from realm.settings import read_config
from realm.store.knowledge_base import KnowledgeBase
from realm.train import pretrain

LOOKS = 12
"""How often a run is asked how fresh its candidates are."""
SEARCHES = {
    "live": ("refresh.search=live",),
    "snapshot": ("refresh.search=snapshot",),
}
MADE_HERE = (
    "batch_size=16", "candidates=5", "injected=2", "warmup=10", "ict=1.0", "ict_batch=32", "health.queries=400",
)  # fmt: skip
"""Pre-training on the corpus made here, beside what `tiny` says."""


def main() -> None:
    """Measures what the flags ask for and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--kb", help="a knowledge base; default: a small one, made here")
    parser.add_argument("--model", help="with --kb: the model to start from")
    parser.add_argument("--config", default="tiny", help="preset or file with a [pretrain] table")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="one more setting")
    parser.add_argument("--towns", type=int, default=1000, help="documents of the corpus made here")
    parser.add_argument("--steps", type=int, default=600, help="steps of a run that measures freshness")
    parser.add_argument(
        "--every", type=int, nargs="+", default=[50, 200, 600], help="refresh intervals to compare"
    )
    parser.add_argument("--speed-steps", type=int, default=100, help="steps of a run that measures speed")
    parser.add_argument("--seeds", type=int, default=1, help="runs per row of the freshness table")
    parser.add_argument("--results", type=Path, metavar="FILE", help="rows that are done, to go on from")
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


class Bench:
    """The corpus, the two models to start from, and the rows that are done."""

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
        """What `measure` finds; not again where an earlier run with the same arguments did."""
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

    def lines(self, model: str, *settings: str) -> list[Row]:
        """metrics.jsonl of a pre-training run with these settings."""
        self._runs += 1
        common = ["health.gate=0", "health.margin=-1", "health.read=1", "checkpoint_seconds=1e9"]
        common += [] if self.args.kb else MADE_HERE
        config = read_config(
            pretrain.PretrainConfig, self.args.config, "pretrain", [*common, *settings, *self.args.set]
        )
        out = pretrain.train(self.kb, self._folder / f"run{self._runs}", config, model)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def speed(bench: Bench) -> Iterator[tuple[str, Callable[[], Row]]]:
    """No build, foreground builds, background ones; each with every number of threads for the trainer and for the build."""
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
    """Every interval with everything that can search."""
    for every, name in itertools.product(bench.args.every, SEARCHES):
        yield f"every {every}, {name}", lambda e=every, n=name: _freshness(bench, e, n)


def _freshness(bench: Bench, every: int, search: str) -> Row:
    """Means over the seeds."""
    steps = bench.args.steps
    asked = (
        f"steps={steps}", f"refresh.every={every}", "refresh.in_background=false", "signal=entity",
        "reader_gradient=none", "retriever_rate=1e-3", f"health.freshness_every={max(1, steps // LOOKS)}",
    )  # fmt: skip
    found: list[Row] = []
    for seed in range(bench.args.seeds):
        lines = bench.lines(bench.words, *asked, f"seed={seed}", *SEARCHES[search])
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
