"""Measures `realm answer`: milliseconds per question for each stage, one question at a time and several together.

    python benchmarks/answer.py    # uses demo-from-text/ if it exists, else makes a small knowledge base
    python benchmarks/answer.py --kb demo-from-text/kb --model demo-from-text/models/qa --batches 1 8 32 128 --seconds 20

The measurement starts after a first batch, and every batch has other questions. The columns are:

    embed         computing the vectors of the questions
    search        finding the best passages by inner product
    read          loading, tokenizing and reading the passages, and choosing the answers
    reader alone  the forward passes of the span reader over the same inputs, which is a lower bound of `read`
    a batch       the time until the answers to a batch are complete

All columns but the last are times per question. p50 and p95 are percentiles over batches. Prints a table, and one JSON object
as the last line.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parent.parent)
)  # a file that is run by its path does not find the package `realm`
from realm.environment import set_torch_environment

set_torch_environment()  # as in the command line

import numpy as np
import shared
import torch

from realm.model.device import autocast
from realm.qa.pipeline import ROWS_READ, AnswerConfig, Answerer
from realm.qa.reading import joint_reading


def main() -> None:
    """Measures the parts that the flags select, and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kb", help="knowledge base (default: that of the demo, else a small one that is made)"
    )
    parser.add_argument("--model", help="with --kb: the model that answers the questions")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32], help="numbers of questions in a batch"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds for each batch size (default: 5)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default=AnswerConfig.precision)
    args = parser.parse_args()
    if (args.kb is None) != (args.model is None):
        parser.error("--kb and --model go together")
    with shared.to_ask(args.kb, args.model) as asked:
        answerer = Answerer.load(asked.kb, asked.model, AnswerConfig(precision=args.precision))
        rows = [measured(answerer, asked.questions, batch, args.seconds) for batch in args.batches]
        result = {
            "benchmark": "answer",
            "knowledge_base": asked.name,
            "passages": len(answerer.kb),
            "device": str(answerer.model.device),
            "torch_threads": torch.get_num_threads(),
            "rows": rows,
        }
    shared.print_table(rows)
    print(json.dumps(result | shared.machine()))


def measured(answerer: Answerer, questions: Sequence[str], batch: int, seconds: float) -> shared.Row:
    """Measures batches of one size for some seconds -> a row of the table."""
    turn = itertools.cycle(questions)
    answerer.answer_batch([next(turn) for _ in range(batch)])
    stages: dict[str, list[float]] = {"embed": [], "search": [], "read": []}
    took: list[float] = []
    end = time.perf_counter() + seconds
    while len(took) < 5 or time.perf_counter() < end:
        asked = [next(turn) for _ in range(batch)]
        began = time.perf_counter()
        answers = answerer.answer_batch(asked)
        took.append(1000 * (time.perf_counter() - began))
        for stage, values in stages.items():
            values.append(answers[0].ms[stage])
    row: shared.Row = {"batch": batch, "questions/s": 1000 * batch * len(took) / sum(took)}
    for stage, values in stages.items():
        row |= {f"{stage} p50": float(np.median(values)), f"{stage} p95": float(np.percentile(values, 95))}
    row["reader alone p50"] = reader_alone(answerer, [next(turn) for _ in range(batch)], seconds / 4)
    return row | {"a batch p50": float(np.median(took)), "a batch p95": float(np.percentile(took, 95))}


@torch.no_grad()
def reader_alone(answerer: Answerer, questions: Sequence[str], seconds: float) -> float:
    """Milliseconds per question of the span reader's forward passes, on the inputs for these questions."""
    model, ids = answerer.model, answerer.tokenized(questions)
    assert model.span_reader is not None
    _, number_BK = answerer.retrieve(questions, answerer.config.read, "dense")
    pairs = [(ids[row], one.text) for row, own in enumerate(number_BK) for one in answerer.kb.passages(own)]
    pairs.sort(key=lambda pair: -len(pair[1]))  # as in the pipeline
    inputs = []
    for start in range(0, len(pairs), ROWS_READ):
        asked, texts = zip(*pairs[start : start + ROWS_READ], strict=True)
        reading = joint_reading(asked, texts, model.tokenizer, model.lengths)
        inputs.append((reading.tokens.to(model.device), reading.body_BT.to(model.device)))
    took: list[float] = []
    end = time.perf_counter() + seconds
    with autocast(model.device, answerer.config.precision):
        while len(took) < 5 or time.perf_counter() < end:
            began = time.perf_counter()
            for tokens, body_BT in inputs:
                model.span_reader(tokens, body_BT).cpu()
            took.append(1000 * (time.perf_counter() - began) / len(questions))
    return float(np.median(took))


if __name__ == "__main__":
    main()
