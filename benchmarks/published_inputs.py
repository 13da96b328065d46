"""The same inputs for both sides of `published.py`; needs nothing but torch.

Letters: B queries, K candidates per query, Q tokens of a query, P of a candidate, J of both.
"""

import json
import resource
import time
from collections.abc import Callable
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


def rows(count: int, length: int, split: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Full rows of random words: [CLS] words [SEP] words [SEP], the second part from `split` on."""
    ids = torch.randint(FIRST_WORD, VOCABULARY, (count, length), generator=draw)
    ids[:, 0], ids[:, split - 1], ids[:, -1] = CLS, SEP, SEP
    segments = (torch.arange(length) >= split).long().expand(count, length).contiguous()
    return {"ids": ids, "mask": torch.ones_like(ids), "segments": segments}


def step_inputs(queries: int = B) -> dict[str, dict[str, Tensor]]:
    """What a pre-training step reads: queries, candidates, both together, labels."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(FIRST_WORD, VOCABULARY, (queries, J), generator=draw)
    mask = torch.zeros(queries, J)
    mask[:, 10 : 10 + MASKED] = 1
    return {
        "query": rows(queries, Q, Q, draw),
        "candidate": rows(queries * K, P, 10, draw),
        "joint": rows(queries * K, J, Q, draw),
        "target": {"labels": labels, "mask": mask},
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "wall_s": round(min(wall), 4),
        "cpu_s": round(min(cpu), 4),
        "peak_gb": round(peak, 2),
        "says": says,
    }


def tell(result: dict[str, Any]) -> None:
    """The last line of a side: its result."""
    print(json.dumps(result))
