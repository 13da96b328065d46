"""What index refreshes cost and what they keep fresh: a table for people, then one line of JSON.

    python benchmarks/refresh.py                                                # a corpus made up here, tiny networks
    python benchmarks/refresh.py --kb demo/kb --model demo/models/ict --config demo --every 50 500 1500 --steps 1500

Every number comes from `realm pretrain` itself, run into a temporary folder: steps per second with no build, beside
background builds and between foreground ones; passages per second of a build against bare forward passes of the same
batches; seconds from a version's commit to its use; and how much of what the run retrieves an index of the moment would
retrieve too (`candidate_freshness`, top 20 of the probe), for several refresh intervals, with and without write-through, and
for the two query towers that can search.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realm.cli import main as cli
from realm.config import read_config
from realm.model.device import autocast, choose_device
from realm.model.encoders import evaluating
from realm.model.folder import load_model
from realm.retrieval.embedding import batches_by_length, embed_passages
from realm.retrieval.knowledge_base import KnowledgeBase
from realm.text.inputs import passage_inputs
from realm.train import pretrain


def main() -> None:
    """Measures what the flags ask for and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kb", help="a knowledge base; default: a small one, made here")
    parser.add_argument("--model", help="the model to start from")
    parser.add_argument("--config", default="tiny", help="preset or file with a [pretrain] table")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="one more setting")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run that measures freshness")
    parser.add_argument(
        "--every", type=int, nargs="+", default=[10, 30, 60], help="refresh intervals to compare"
    )
    parser.add_argument("--speed-steps", type=int, default=60, help="steps of a run that measures speed")
    parser.add_argument("--seeds", type=int, default=1, help="runs per row of the freshness table")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory() as folder:
        kb_folder, model = (args.kb, args.model) if args.kb else _made_up(Path(folder))
        kb = KnowledgeBase.open(kb_folder)
        runs = Runs(kb, model, args.config, args.set, Path(folder))
        result = {
            "passages": len(kb),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "device": str(choose_device("auto")),
            "torch": torch.__version__,
            "speed": speed(runs, args.speed_steps),
            "embedding": embedding(kb, model),
            "freshness": freshness(runs, args.steps, args.every, args.seeds),
        }
    _print_table(result)
    print(json.dumps(result))


class Runs:
    """Pre-training runs that differ in a few settings."""

    def __init__(self, kb: KnowledgeBase, model: str, config: str, settings: list[str], folder: Path):
        self._kb, self._model, self._config, self._settings, self._folder = (
            kb,
            model,
            config,
            settings,
            folder,
        )
        self._count = 0

    def lines(self, *settings: str) -> list[dict[str, Any]]:
        """metrics.jsonl of a run with these settings."""
        self._count += 1
        common = ["health.gate=0", "health.margin=-1", "checkpoint_seconds=1e9"]
        config = read_config(
            pretrain.PretrainConfig, self._config, "pretrain", [*common, *self._settings, *settings]
        )
        out = pretrain.train(self._kb, self._folder / f"run{self._count}", config, self._model)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def speed(runs: Runs, steps: int) -> list[dict[str, Any]]:
    """Steps per second: none, background and foreground builds; several thread splits for the background."""
    rows = []
    least = max(1, steps // 6)
    for name, *settings in (
        ("no build", "refresh.every=0"),
        ("foreground", f"refresh.every={least}", "refresh.in_background=false"),
        *(
            (f"background, {threads} thread(s)", "refresh.every=1", "refresh.in_background=true", f"refresh.threads={threads}")
            for threads in range(1, min(3, (os.cpu_count() or 1) + 1))
        ),
    ):  # fmt: skip
        lines = runs.lines(f"steps={steps}", "log_every=1", "health.queries=50", "health.read=1", *settings)
        logged = [line for line in lines if line["loss"] is not None]
        passed = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(logged)]
        beside = [s for s, line in zip(passed, logged[1:], strict=False) if line["building"]]
        versions = [line for line in lines if "build_seconds" in line][1:-1]  # not the first and the last
        rows.append(
            {
                "what": name,
                "steps_per_second": (len(logged) - 1) / sum(passed),
                "median_step_seconds": statistics.median(passed),
                "median_step_seconds_beside_build": statistics.median(beside) if beside else None,
                "builds": len(versions),
                "build_seconds": _median([v["build_seconds"] for v in versions]),
                "build_passages_per_second": _median([v["build_passages_per_second"] for v in versions]),
                "commit_to_swap_seconds": _median([v["swap_seconds"] for v in versions]),
            }
        )
    return rows


def embedding(kb: KnowledgeBase, model_path: str) -> dict[str, float]:
    """Passages per second of the whole embedding, and of nothing but the forward passes over the same batches."""
    model = load_model(model_path).to(choose_device("auto"))
    tokens, tower = kb.tokens, model.embedder.passage
    numbers = np.arange(min(len(kb), 20_000))
    length_N = np.minimum(
        tokens.title.lengths[numbers] + tokens.body.lengths[numbers] + 3, model.lengths.passage
    )
    batches = [
        passage_inputs(
            [tokens.title.row(n) for n in batch], [tokens.body.row(n) for n in batch], model.tokenizer, model.lengths
        ).to(model.device)
        for batch in batches_by_length(length_N)
    ]  # fmt: skip

    def forward() -> None:
        with torch.no_grad(), evaluating(tower):
            for batch in batches:
                tower(batch).float().cpu()

    def whole() -> None:
        embed_passages(tower, tokens, numbers, model.tokenizer, model.lengths, model.device)

    with autocast(model.device, "bf16"):
        rates = {name: len(numbers) / _seconds(do) for name, do in (("forward", forward), ("whole", whole))}
    return {
        "forward_passages_per_second": rates["forward"],
        "embed_passages_per_second": rates["whole"],
        "share_of_ceiling": rates["whole"] / rates["forward"],
    }


def freshness(runs: Runs, steps: int, intervals: list[int], seeds: int) -> list[dict[str, Any]]:
    """Mean freshness of candidates over a run, and where its retriever ends, by interval and by what searches."""
    rows = []
    look = max(1, steps // 12)
    for every in intervals:
        for name, setting in (
            ("live", "refresh.write_through=false"),
            ("live, write-through", "refresh.write_through=true"),
            ("snapshot", "refresh.search=snapshot"),
        ):
            found = []
            for seed in range(seeds):
                began = time.monotonic()
                lines = runs.lines(
                    f"steps={steps}", f"refresh.every={every}", "refresh.in_background=false", f"seed={seed}",
                    f"health.freshness_every={look}", setting,
                )  # fmt: skip
                seen = [x for x in lines if "candidate_freshness" in x and "index_step" not in x]
                last = [x for x in lines if "probe_recall_5" in x][-1]
                found.append(
                    {
                        "freshness": statistics.mean(x["candidate_freshness"] for x in seen),
                        "least": min(x["candidate_freshness"] for x in seen),
                        "probe_recall_5": last["probe_recall_5"],
                        "probe_recall_20": last["probe_recall_20"],
                        "seconds": time.monotonic() - began,
                        "over_steps": [(x["step"], x["candidate_freshness"]) for x in seen],
                    }
                )
            row = {k: statistics.mean(f[k] for f in found) for k in found[0] if k != "over_steps"}
            rows.append({"every": every, "search": name, **row, "over_steps": found[0]["over_steps"]})
    return rows


def _made_up(folder: Path) -> tuple[str, str]:
    """A knowledge base of 600 invented towns and a tiny model with random weights, by our own commands."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghiklmnoprstuvw", k=draw.randint(4, 9))) for _ in range(2000)]
    with (folder / "towns.jsonl").open("w", encoding="utf-8") as file:
        for number in range(600):
            sentences = [
                f"In {draw.randint(1100, 1990)} the {' '.join(draw.choices(words, k=12))} of {draw.choice(words)}."
                for _ in range(5)
            ]
            file.write(json.dumps({"title": f"Town {number}", "text": " ".join(sentences)}) + "\n")
    kb, model = str(folder / "kb"), str(folder / "start")
    for command in (
        ["kb", "build", str(folder / "towns.jsonl"), "--out", kb, "--config", "tiny", "--vocab-size", "3000"],
        ["mlm", "--kb", kb, "--out", model, "--config", "tiny"],
    ):
        if code := cli(command):
            raise SystemExit(code)
    return kb, model


def _seconds(do: Any) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        began = time.monotonic()
        do()
        times.append(time.monotonic() - began)
    return min(times)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _print_table(result: dict[str, Any]) -> None:
    print(
        "| builds | steps/s | step, s | beside a build, s | seconds/build | passages/s | commit to swap, s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in result["speed"]:
        cells = [
            row["what"],
            *(f"{row[k]:.3g}" if row[k] is not None else "-" for k in list(row)[1:] if k != "builds"),
        ]
        print("| " + " | ".join(cells) + " |")
    rates = result["embedding"]
    print(
        f"\nembedding: {rates['embed_passages_per_second']:.0f} passages/s, {100 * rates['share_of_ceiling']:.0f} % of bare "
        f"forward passes ({rates['forward_passages_per_second']:.0f})\n"
    )
    print("| refresh every | search | candidate freshness, mean | least | probe recall@5 / 20 | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in result["freshness"]:
        print(
            f"| {row['every']} | {row['search']} | {row['freshness']:.3f} | {row['least']:.3f} | "
            f"{row['probe_recall_5']:.1f} / {row['probe_recall_20']:.1f} | {row['seconds']:.0f} |"
        )


if __name__ == "__main__":
    main()
