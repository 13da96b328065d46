"""The inputs of `interop.py` and `train_step.py`, which are the same for `realm` and the reference. Needs only torch.

Axis letters: B queries, K candidates per query, Q tokens of a query, P tokens of a candidate, J tokens of both together.
"""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

B, K, Q, P, J = 4, 8, 64, 288, 352
MASKED = 5
"""Masked tokens of each query."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MARKS = [*LETTERS, *"0123456789.,?'-", *(f"##{letter}" for letter in LETTERS)]
VOCABULARY = 30522
"""Number of wordpieces, as in BERT: special wordpieces, single characters, and artificial words of four letters."""
FIRST_WORD = len(SPECIAL) + len(MARKS)
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")


def vocabulary() -> list[str]:
    """The wordpieces in the order of their ids."""
    words = [f"{a}{b}{c}{d}" for a in "bdfg" for b in LETTERS for c in LETTERS for d in LETTERS]
    return [*SPECIAL, *MARKS, *words][:VOCABULARY]


def rows(ids_n: list[list[Tensor]], length: int) -> dict[str, Tensor]:
    """Rows [CLS] part [SEP] part [SEP] ..., padded to `length`; the segment of a part is the number of the part."""
    shape = len(ids_n), length
    filled = {name: torch.zeros(shape, dtype=torch.int64) for name in ("ids", "mask", "segments")}
    for row, parts in enumerate(ids_n):
        closed = [torch.cat([part, torch.tensor([SEP])]) for part in parts]
        ids = torch.cat([torch.tensor([CLS]), *closed])
        filled["ids"][row, : len(ids)] = ids
        filled["mask"][row, : len(ids)] = 1
        filled["segments"][row, 1 : len(ids)] = torch.cat(
            [torch.full((len(part),), number) for number, part in enumerate(closed)]
        )
    return filled


def step_inputs(queries: int = B, full: bool = True) -> dict[str, dict[str, Tensor]]:
    """Inputs of a pre-training step: queries, candidates, pairs of both, and labels, made of random words.

    `full`: all rows have the maximal length. Otherwise lengths are random, from a third of the maximum to the maximum.
    """
    draw = torch.Generator().manual_seed(0)

    def words(longest: int, shortest: int) -> Tensor:
        count = longest if full else int(torch.randint(shortest, longest + 1, (), generator=draw))
        return torch.randint(FIRST_WORD, VOCABULARY, (count,), generator=draw)

    asked = [words(Q - 2, Q // 3) for _ in range(queries)]
    titles = [words(8, 2) for _ in range(queries * K)]
    bodies = [words(J - Q - 1, P // 3) for _ in range(queries * K)]
    mask = torch.zeros(queries, J)
    mask[:, 10 : 10 + MASKED] = 1
    return {
        "query": rows([[part] for part in asked], Q),
        "candidate": rows([[t, body[: P - 3 - len(t)]] for t, body in zip(titles, bodies, strict=True)], P),
        "joint": rows([[asked[place // K], body] for place, body in enumerate(bodies)], J),
        "target": {
            "labels": torch.randint(FIRST_WORD, VOCABULARY, (queries, J), generator=draw),
            "mask": mask,
        },
    }


def questions(count: int) -> list[str]:
    """Artificial questions of twelve words each, from the first 3,000 words."""
    words = vocabulary()[FIRST_WORD:]
    places = torch.randint(0, 3000, (count, 12), generator=torch.Generator().manual_seed(1))
    return ["who " + " ".join(words[place] for place in row) for row in places.tolist()]


def timed(run: Callable[[int], float | str], rounds: int) -> dict[str, Any]:
    """The fastest of some rounds after a warm-up: wall-clock and CPU seconds, and the peak memory of the process in GB.

    `run(0)` is the warm-up. Its result is `outcome`: the loss without dropout, or an answer. `outcome` must be the same for
    `realm` and the reference.
    """
    outcome = run(0)
    wall, cpu = [], []
    for number in range(1, rounds + 1):
        before = time.perf_counter(), time.process_time()
        run(number)
        wall.append(time.perf_counter() - before[0])
        cpu.append(time.process_time() - before[1])
    return {
        "wall_s": round(min(wall), 4),
        "cpu_s": round(min(cpu), 4),
        "peak_gb": round(peak_gb(), 2),
        "outcome": outcome,
    }


def peak_gb() -> float:
    """Peak memory of this process. On Linux this excludes the peak of the process that started this process."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(
            int(line.split()[1]) / 2**20
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def print_result(result: dict[str, Any]) -> None:
    """Prints the result of a measurement as the last line, for the process that started this process."""
    print(json.dumps(result))
