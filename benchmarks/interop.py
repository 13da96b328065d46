"""Compares `realm` with transformers 4.57.6 (the reference) on a checkpoint of the published format: time and memory.

    python benchmarks/interop.py --folder runs/published              # 20,000 blocks; makes the files, then measures
    python benchmarks/interop.py --folder runs/million --blocks 1000000 --parts convert answer

The parts are the conversion of the checkpoint, one pre-training step, and one question. The reference and `realm` get the same
weights and inputs, each measurement runs in its own process, and the fastest round counts. The losses without dropout and the
first answers are compared: `realm` in float32 must give the same results as the reference. Times are wall-clock seconds and CPU
seconds; on a busy machine compare the CPU seconds. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent),
]  # a file that is run by its path does not find the package `realm`

from realm.environment import set_torch_environment

if sys.argv[1:2] == ["--side"]:  # as in the command line; the reference keeps its own settings
    set_torch_environment()

from interop_inputs import B, print_result, questions, timed

OURS = {
    "step": ["fp32", "fp32-sampled", "bf16", "bf16-sampled"],
    "answer": ["fp32", "bf16", "fp32-batch", "bf16-batch", "bf16-mapped"],
}
"""Variants of `realm` for each part; "sampled" trains the reader through one candidate."""
BATCH = 16


def answer(folder: Path, rounds: int, way: str) -> dict[str, Any]:
    """Answers questions with `realm`, one at a time or `BATCH` at once -> seconds per question."""
    from realm.qa.pipeline import AnswerConfig, Answerer

    first, *more = way.split("-")
    config = AnswerConfig(
        device="cpu", precision="fp32" if first == "fp32" else "bf16", mapped_index="mapped" in more
    )
    answerer = Answerer.load(str(folder / "ours" / "kb"), str(folder / "ours" / "model"), config)
    at_once = BATCH if "batch" in more else 1
    asked = questions((rounds + 1) * at_once)

    def run(number: int) -> str:
        found = answerer.answer_batch(asked[number * at_once : (number + 1) * at_once])
        return found[0].answers[0].text

    found = timed(run, rounds)
    return found | {key: round(found[key] / at_once, 4) for key in ("wall_s", "cpu_s")}


def prepare(folder: Path, blocks: int) -> dict[str, float]:
    """Makes the files and converts them -> time and memory of the conversion; only `peak_gb` includes pages of mapped files."""
    from realm.interop.block_records import BlockRecords
    from realm.interop.checkpoint import RECORDS

    records = folder / "openqa" / RECORDS
    if not records.exists():
        _python("interop_files.py", str(folder), str(blocks))
    if (there := len(BlockRecords(records))) != blocks:
        raise SystemExit(f"{records} has {there} blocks: use --blocks {there}, or another --folder")
    if (folder / "ours" / "kb").exists():
        return {}
    start = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "realm",
        "convert",
        str(folder / "openqa"),
        str(folder / "ours"),
        "--json",
    ]
    pid = os.spawnve(os.P_NOWAIT, sys.executable, command, {**os.environ, "PYTHONPATH": str(HERE.parent)})
    own = 0.0
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        own = max(own, _own_gb(pid))
        time.sleep(0.1)
    _, status, used = ended
    if status:
        raise SystemExit("the conversion failed")
    return {
        "blocks": blocks,
        "wall_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_gb": round(used.ru_maxrss / 2**20, 2),
        "own_gb": round(own, 2),
    }


def _own_gb(pid: int) -> float:
    """Memory of a process without pages of mapped files, which the system can drop when it needs memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("RssAnon")), 0.0)


def _python(file: str, *words: str, python: str = sys.executable) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [python, str(HERE / file), *words], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return done.stdout


def _last(output: str) -> dict[str, Any]:
    return dict(json.loads(output.strip().splitlines()[-1]))


def ways(part: str) -> list[str]:
    """The variants of `realm` that this machine can run: bf16 only if the CPU has instructions for it."""
    from realm.model.device import multiplies_bf16

    return [way for way in OURS[part] if "bf16" not in way or multiplies_bf16("cpu")]


def compare(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the reference and all variants of `realm`; `ratios` are costs of the reference divided by those of a variant."""
    from tests.interop.reference_environment import reference_python

    words = [part, str(args.folder), str(args.threads), str(args.rounds)]
    queries = [str(args.queries), "full"] if part == "step" else []
    result: dict[str, Any] = {
        "reference": _last(_python("interop_reference.py", *words, *queries, python=str(reference_python())))
    }
    for way in ways(part):
        result[way] = _last(_python("interop.py", "--side", *words, way, str(args.queries)))
    if not _same(result["reference"]["outcome"], result["fp32"]["outcome"]):
        raise SystemExit(
            f"the result of the reference is {result['reference']['outcome']!r}, that of `realm` in float32 is "
            f"{result['fp32']['outcome']!r}"
        )
    result["ratios"] = {
        way: {
            key: round(result["reference"][key] / result[way][key], 2)
            for key in ("wall_s", "cpu_s", "peak_gb")
        }
        for way in ways(part)
    }
    return result


def _same(theirs: float | str, ours: float | str) -> bool:
    """Whether two losses agree to 1e-5, or two answers in their letters (the reference joins wordpieces in lower case)."""
    if isinstance(theirs, float) and isinstance(ours, float):
        return math.isclose(theirs, ours, rel_tol=1e-5)
    return "".join(str(theirs).split()) == "".join(str(ours).lower().split())


def table(part: str, result: dict[str, Any]) -> None:
    """Prints a line for the reference and for each variant of `realm`."""
    for name in ("reference", *ways(part)):
        one = result[name]
        ratio = result["ratios"].get(name, {"cpu_s": 1.0, "wall_s": 1.0, "peak_gb": 1.0})
        print(
            f"{part:8} {name:14} {one['wall_s']:9.3f} s wall ({ratio['wall_s']:5.2f}x)  {one['cpu_s']:9.3f} s cpu "
            f"({ratio['cpu_s']:5.2f}x)  {one['peak_gb']:6.2f} GB ({ratio['peak_gb']:5.2f}x)",
            flush=True,
        )


def main() -> None:
    """Runs the comparison; with --side, a process that this program started measures one variant of `realm`."""
    if sys.argv[1:2] == ["--side"]:
        side(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the files, which are made if they are missing"
    )
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument(
        "--queries", type=int, default=B, help="queries of a pre-training step, with 8 candidates each"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--parts", nargs="+", choices=["convert", "step", "answer"], default=["convert", "step", "answer"]
    )
    args = parser.parse_args()
    results: dict[str, Any] = {"blocks": args.blocks, "queries": args.queries, "threads": args.threads}
    converted = prepare(args.folder, args.blocks)
    if converted:
        results["convert"] = converted
        print(f"convert  {converted}", flush=True)
    for part in (part for part in args.parts if part != "convert"):
        results[part] = compare(part, args)
        table(part, results[part])
    print(json.dumps(results))


def side(part: str, folder: str, threads: str, rounds: str, way: str, queries: str) -> None:
    """Measures one variant of `realm`."""
    import torch

    torch.set_num_threads(int(threads))
    if part == "step":
        from train_step import step

        print_result(step(Path(folder), int(rounds), way, int(queries), full=True))
    else:
        print_result(answer(Path(folder), int(rounds), way))


if __name__ == "__main__":
    main()
