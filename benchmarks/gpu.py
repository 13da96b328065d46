"""Measures a training step, search, index build and losses on a GPU. It is meant to take less than ten minutes; a whole run has
not been timed.

    python benchmarks/gpu.py                        # on a machine with a GPU
    python benchmarks/gpu.py --small                # tiny sizes, to try the script without a GPU

The parts, and the goals on an H100:

- step: a pre-training step of BERT-base in bf16, at the paper's lengths (benchmarks/train_step.py), with and without the fused
  kernels; goal: 45 % of the data sheet
- search: exact search in 13.35 million vectors of 128 dimensions, 512 queries (benchmarks/search.py), with and without kernels
  and prefilter; goal: 3 ms
- embed: passages per second of an index build with BERT-base (benchmarks/embed.py)
- parity: losses of 50 steps of `realm pretrain` on the GPU, in float32 and bf16, and on the CPU; goal: 1 %

Each part runs in new processes. A part that fails is reported, and the other parts go on. Prints a table, and one JSON
object as the last line. The exit code is 1 if a part has failed.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shared

HERE = Path(__file__).parent
STEPS = 50
PEAK_TFLOPS = {
    "H100": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "H200 NVL": 836, "A100": 312, "B200": 2250, "L4": 121,
    "L40S": 362, "RTX 4090": 165,
}  # fmt: skip
"""Words of a GPU's name -> bf16 TFLOP/s of its data sheet, without sparsity."""


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    gpu = gpu_name()
    if gpu is None and not args.small:
        parser.error("this machine has no GPU that torch can use: --small tries the script on the CPU")
    results: dict[str, dict[str, Any]] = {}
    for name in args.parts:
        try:
            results[name] = PARTS[name](gpu, args.small)
        except (SystemExit, Exception) as error:  # the other parts go on
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
    shared.print_table(
        [
            {"part": name, "measured": key, "value": value}
            for name, found in results.items()
            for key, value in found.items()
        ]
    )
    print(
        json.dumps(
            {"benchmark": "gpu", "device": gpu, "small": args.small} | shared.machine() | {"parts": results}
        )
    )
    if any("failed" in found for found in results.values()):
        raise SystemExit(1)


def gpu_name() -> str | None:
    """Name of the first GPU, asked in another process, so that this process does not hold memory of the GPU."""
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    return shared.spent_by([sys.executable, "-c", code]).output.strip() or None


def peak_tflops(gpu: str | None) -> int | None:
    """The bf16 TFLOP/s of a GPU's data sheet, by its name; None for a GPU that is not listed.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA A100-SXM4-80GB"), peak_tflops("NVIDIA L40")
    (989, 312, None)
    """
    words = re.split("[ -]", gpu or "")  # "NVIDIA A100-SXM4-80GB"
    known = [name for name in PEAK_TFLOPS if set(name.split()) <= set(words)]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


def last_line(script: str, *words: object) -> dict[str, Any]:
    """The JSON object that a benchmark prints as its last line."""
    command = [sys.executable, str(HERE / script), *map(str, words)]
    return dict(json.loads(shared.spent_by(command).output.strip().splitlines()[-1]))


def step(gpu: str | None, small: bool) -> dict[str, Any]:
    """A pre-training step in bf16, with all rows at their maximal lengths and with rows of different lengths."""
    size = (
        ("--hidden", 48, "--layers", 1, "--queries", 1)
        if small
        else ("--hidden", 768, "--layers", 12, "--queries", 32)
    )
    peak = peak_tflops(gpu)
    found: dict[str, Any] = {}
    ways = ["fp32"] if gpu is None else ["bf16", "bf16-unfused"]
    for name, full in (("full rows", ["--full"]), ("mixed rows", [])):
        one, *others = last_line("train_step.py", *size, *full, "--rounds", 5, "--ways", *ways)[
            "ways"
        ].values()
        tflops = one["gflop"] / one["wall_s"] / 1e3
        found |= {
            f"{name}, steps/s": one["steps_s"],
            f"{name}, tokens/s": one["tokens_s"],
            f"{name}, TFLOP/s": round(tflops, 2),
            f"{name}, share of a large matrix product": one["utilisation"],
            f"{name}, peak GiB": one["peak_gb"],
        }
        if peak is not None:
            found[f"{name}, MFU"] = round(tflops / peak, 3)
        for unfused in others:
            found[f"{name}, times as fast as unfused"] = round(unfused["wall_s"] / one["wall_s"], 2)
    return found


def search(gpu: str | None, small: bool) -> dict[str, Any]:
    """Exact search in an index of the size of Wikipedia."""
    sizes, batches = (20_000, (8,)) if small else (13_350_000, (1, 64, 512))
    device = "cpu" if gpu is None else "cuda"
    words = ("--sizes", sizes, "--systems", "realm", "--batches", *batches, "--device", device)
    rows = last_line("search.py", *words)["rows"]
    return {"vectors": rows[0]["vectors"], "recall of the 20 best": min(row["recall_20"] for row in rows)} | {
        f"{row['system']}, ms for {batch} queries": row[f"ms_{batch}"] for row in rows for batch in batches
    }


def embed(gpu: str | None, small: bool) -> dict[str, Any]:
    """An index build with a BERT and passages of up to 288 wordpieces."""
    size = (
        ("--hidden", 64, "--layers", 1, "--sizes", 500)
        if small
        else ("--hidden", 768, "--layers", 12, "--sizes", 50_000)
    )
    (row,) = last_line("embed.py", *size, "--towers", "layers", "--passage", 288, "--rounds", 1)["rows"]
    return {name: row[name] for name in ("build, passages/s", "forward, passages/s", "share", "padding")}


def parity(gpu: str | None, small: bool) -> dict[str, Any]:
    """Losses of `realm pretrain` without dropout, from the same model: on a CPU in float32, on a GPU in float32 and bf16."""
    steps = 4 if small else STEPS
    with tempfile.TemporaryDirectory() as folder:
        kb, start, _ = shared.made_up(Path(folder), 200 if small else 1000)
        losses, there = [], "cpu" if gpu is None else "cuda"
        for number, (device, precision) in enumerate((("cpu", "fp32"), (there, "fp32"), (there, "bf16"))):
            out = Path(folder) / str(number)
            # The candidates of the sampled gradient are drawn on the device, and a GPU draws others than a CPU.
            settings = (f"steps={steps}", f"device={device}", f"precision={precision}", "dropout=0.0", "log_every=1",
                        "refresh.in_background=false", "refresh.every=10", "health.gate=0.0",
                        "reader_gradient=all")  # fmt: skip
            words = [word for one in settings for word in ("--set", one)]
            shared.run(
                "pretrain", "--kb", kb, "--model", start, "--out", str(out), "--config", "tiny", *words
            )
            lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
            losses.append([line["loss"] for line in lines if line["loss"] is not None])
    cpu, fp32, bf16 = losses

    def difference(others: list[float]) -> float:
        return max(abs(a - b) / abs(a) for a, b in zip(cpu, others, strict=True))

    return {
        "steps": len(cpu),
        "last loss on the CPU": cpu[-1],
        "last loss on the device": fp32[-1],
        "largest relative difference": difference(fp32),
        "largest relative difference in bf16": difference(bf16),
    }


PARTS: dict[str, Callable[[str | None, bool], dict[str, Any]]] = {
    "step": step,
    "search": search,
    "embed": embed,
    "parity": parity,
}

if __name__ == "__main__":
    main()
