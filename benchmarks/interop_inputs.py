"""The same inputs for all sides of `published.py` and `train_step.py`; needs nothing but torch.

Letters: B queries, K candidates per query, Q tokens of a query, P of a candidate, J of both.
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
"""Tokens hidden in each query."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MARKS = [*LETTERS, *"0123456789.,?'-", *(f"##{letter}" for letter in LETTERS)]
VOCABULARY = 30522
"""Wordpieces, as many as BERT has: special ones, marks, made-up words of four letters."""
FIRST_WORD = len(SPECIAL) + len(MARKS)
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")


def vocabulary() -> list[str]:
    """The wordpieces by id."""
    words = [f"{a}{b}{c}{d}" for a in "bdfg" for b in LETTERS for c in LETTERS for d in LETTERS]
    return [*SPECIAL, *MARKS, *words][:VOCABULARY]


def rows(ids_n: list[list[Tensor]], length: int) -> dict[str, Tensor]:
    """[CLS] part [SEP] part [SEP] ... for each row's parts, padded to `length`; a part's number is its segment."""
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
    """What a pre-training step reads: queries, candidates, both together, labels.

    Rows of random words: all as long as may be, or of unlike lengths as sentences and passages are (a third to the whole).
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
    """Made-up questions of twelve of the more frequent words."""
    words = vocabulary()[FIRST_WORD:]
    places = torch.randint(0, 3000, (count, 12), generator=torch.Generator().manual_seed(1))
    return ["who " + " ".join(words[place] for place in row) for row in places.tolist()]


def timed(run: Callable[[int], float | str], rounds: int) -> dict[str, Any]:
    """The best of some rounds after a warm-up: wall and processor seconds, the process' peak memory in GB.

    `run(0)` is the warm-up, and `says` what it gave: the loss without dropout, or an answer. The sides must agree in that.
    """
    says = run(0)
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
        "says": says,
    }


def peak_gb() -> float:
    """This process' largest memory; where the kernel tells it, without the peak of the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(
            int(line.split()[1]) / 2**20
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def tell(result: dict[str, Any]) -> None:
    """The last line of a side: its result."""
    print(json.dumps(result))
