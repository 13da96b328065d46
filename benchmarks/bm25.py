"""Compares constants k1 and b of BM25: the shares of questions with an answer in the first passages, and the mean reciprocal
rank.

    python benchmarks/bm25.py --kb wikipedia/kb --questions wikipedia/questions/dev.jsonl
    python benchmarks/bm25.py --kb KB --questions FILE FILE --constants 0.9,0.4 1.2,0.75

Choose constants with questions that are in no test. The column "difference" is the mean reciprocal rank minus that of the first
constants, and "p" is its p value by the paired bootstrap. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import shared

from realm.errors import RealmError
from realm.qa.question_files import Question, read_questions
from realm.qa.scoring.metrics import RECALL_AT, first_hit, recall_at, reciprocal_ranks
from realm.qa.scoring.significance import paired_bootstrap
from realm.search.bm25 import K1, B, Bm25Index
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE


def main() -> None:
    """Makes an index for each pair of constants, asks all questions, and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kb", required=True, help="knowledge base that is searched")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument(
        "--constants",
        type=constants,
        nargs="+",
        metavar="K1,B",
        default=[(K1, B), (1.2, 0.4), (0.9, 0.4), (1.5, 0.4), (1.2, 0.75), (1.5, 0.75)],
    )
    args = parser.parse_args()
    try:
        kb = KnowledgeBase.open(args.kb)
        asked = {file: read_questions(file) for file in args.questions}
    except RealmError as error:
        sys.exit(str(error))
    titles, texts = kb.titles, list(kb.texts())
    rows: list[shared.Row] = []
    first: dict[Path, np.ndarray] = {}
    for k1, b in args.constants:
        index = Bm25Index(titles, texts, k1=k1, b=b)
        for file, questions in asked.items():
            rank_N = ranks(index, texts, questions)
            reciprocal_N = reciprocal_ranks(rank_N)
            compared = paired_bootstrap(reciprocal_N, first.setdefault(file, reciprocal_N))
            rows.append(
                {
                    "k1": k1,
                    "b": b,
                    "questions": f"{file.name} ({len(questions)})",
                    **{f"top {k}": round(recall_at(rank_N, k), 1) for k in RECALL_AT},
                    "mrr": round(float(reciprocal_N.mean()), 4),
                    "difference": round(compared.mean, 4),
                    "p": round(compared.p, 4),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shared.print_table(rows)
    print(json.dumps({"passages": len(texts), "rows": rows, **shared.machine()}))


def constants(text: str) -> tuple[float, float]:
    """k1 and b, as on the command line."""
    k1, b = map(float, text.split(","))
    return k1, b


def ranks(index: Bm25Index, texts: list[str], questions: list[Question]) -> np.ndarray:
    """Rank of the first passage with an answer for each question, 0 if there is none among the first 100 -> [N]."""
    number_NK = index.search([one.question for one in questions], max(RECALL_AT)).number_BK
    found = (
        first_hit((texts[number] for number in row if number != NULL_PASSAGE), question)
        for question, row in zip(questions, number_NK, strict=True)
    )
    return np.fromiter(found, dtype=np.int64, count=len(questions))


if __name__ == "__main__":
    main()
