"""The published checkpoints here and in transformers 4.57.6: one pre-training step, one question, memory.

    python benchmarks/interop.py --folder runs/published              20,000 blocks; makes the files, then runs both sides
    python benchmarks/interop.py --folder runs/million --blocks 1000000 --parts convert answer

Both sides get the same weights and inputs, each measurement in a process of its own; the best round counts. Before they are
timed, both sides' losses without dropout and their first answers are compared: "fp32" must give the reference's. Times are
wall and processor seconds: on a busy machine compare the latter. Prints a table, and as the last line one JSON object.
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
sys.path[:0] = [str(HERE), str(HERE.parent)]  # run as a file: the repository is the package's home

from realm.environment import set_torch_environment

if sys.argv[1:2] == ["--side"]:  # as the command line does; the reference as it comes
    set_torch_environment()

from interop_inputs import B, questions, tell, timed

OURS = {
    "step": ["fp32", "fp32-sampled", "bf16", "bf16-sampled"],
    "answer": ["fp32", "bf16", "fp32-batch", "bf16-batch", "bf16-mapped"],
}
"""Ways in which our side runs; "sampled" trains the reader through one candidate."""
BATCH = 16


def answer(folder: Path, rounds: int, way: str) -> dict[str, Any]:
    """Questions, one at a time or `BATCH` at once; seconds for each question."""
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
    """Makes the files, and converts them -> what the conversion took; `peak_gb` counts pages of mapped files, `own_gb` none."""
    from realm.interop.block_records import BlockRecords
    from realm.interop.checkpoint import RECORDS

    records = folder / "openqa" / RECORDS
    if not records.exists():
        _python("interop_files.py", str(folder), str(blocks))
    if (there := len(BlockRecords(records))) != blocks:
        raise SystemExit(f"{records} has {there} blocks: say --blocks {there}, or another --folder")
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
    """A process' memory without the files that are mapped, whose pages go when others need the room."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("RssAnon")), 0.0)


def _python(file: str, *words: str, python: str = sys.executable) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [python, str(HERE / file), *words], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return done.stdout


def _last(said: str) -> dict[str, Any]:
    return dict(json.loads(said.strip().splitlines()[-1]))


def ways(part: str) -> list[str]:
    """Those of ours that run here: bf16 only where the CPU has instructions for it."""
    from realm.model.device import multiplies_bf16

    return [way for way in OURS[part] if "bf16" not in way or multiplies_bf16("cpu")]


def compare(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a part, ours in each of its ways; ratios are the reference's cost in ours."""
    from tests.interop.reference_environment import reference_python

    words = [part, str(args.folder), str(args.threads), str(args.rounds)]
    queries = [str(args.queries), "full"] if part == "step" else []
    result: dict[str, Any] = {
        "reference": _last(_python("interop_reference.py", *words, *queries, python=str(reference_python())))
    }
    for way in ways(part):
        said = _python("published.py", "--side", *words, way, str(args.queries))
        result[way] = _last(said)
    if not _same(result["reference"]["says"], result["fp32"]["says"]):
        raise SystemExit(
            f"the reference says {result['reference']['says']!r}, fp32 here {result['fp32']['says']!r}"
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
    """Losses to 1e-5; answers by their letters, for the reference's are wordpieces joined in lower case."""
    if isinstance(theirs, float) and isinstance(ours, float):
        return math.isclose(theirs, ours, rel_tol=1e-5)
    return "".join(str(theirs).split()) == "".join(str(ours).lower().split())


def table(part: str, result: dict[str, Any]) -> None:
    """Prints a line for each side and way."""
    for name in ("reference", *ways(part)):
        one = result[name]
        ratio = result["ratios"].get(name, {"cpu_s": 1.0, "wall_s": 1.0, "peak_gb": 1.0})
        print(
            f"{part:8} {name:14} {one['wall_s']:9.3f} s wall ({ratio['wall_s']:5.2f}x)  {one['cpu_s']:9.3f} s cpu "
            f"({ratio['cpu_s']:5.2f}x)  {one['peak_gb']:6.2f} GB ({ratio['peak_gb']:5.2f}x)",
            flush=True,
        )


def main() -> None:
    """Both sides; or, started by itself, ours alone."""
    if sys.argv[1:2] == ["--side"]:
        side(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the files are, or go")
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=B, help="of a pre-training step, 8 candidates each")
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
    """One measurement of ours."""
    import torch

    torch.set_num_threads(int(threads))
    if part == "step":
        from train_step import step

        tell(step(Path(folder), int(rounds), way, int(queries), full=True))
    else:
        tell(answer(Path(folder), int(rounds), way))


if __name__ == "__main__":
    main()
