"""Reads and writes rankings in the format of TREC: query, Q0, document, rank, score and name, separated by spaces."""

import math
from collections.abc import Iterator
from pathlib import Path

from realm.errors import InputError, shown
from realm.files import write_lines

Run = dict[str, dict[str, float]]
"""Query id -> document id -> score, best first."""


def read_run(file: str | Path) -> Run:
    """The scores of a file. Ranks and names are ignored, as by trec_eval.

    Raises:
        InputError: the file cannot be read, or a line has another form; the message has the number of the line.
    """
    run: Run = {}
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        score = _number(words[4]) if len(words) == 6 else None
        if score is None:
            raise InputError(
                f"{file}:{number}: the line is {shown(line)}, and must be: query Q0 document rank score name"
            )
        query, document = words[0], words[2]
        if document in run.setdefault(query, {}):
            raise InputError(f"{file}:{number}: query {query} has document {document} twice")
        run[query][document] = score
    if not run:
        raise InputError(f"{file} has no lines: give a file with rankings in the format of TREC")
    return {query: dict(sorted(scores.items(), key=lambda one: -one[1])) for query, scores in run.items()}


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def write_run(file: Path, run: Run) -> None:
    """Writes rankings under the name "realm". The file appears when it is complete.

    Raises:
        InputError: an id contains spaces, which the format cannot represent.
    """

    def lines() -> Iterator[str]:
        for query, scores in run.items():
            for rank, (document, score) in enumerate(scores.items(), start=1):
                if len(query.split()) != 1 or len(document.split()) != 1:
                    raise InputError(
                        f"a file of TREC cannot have ids with spaces: query {query!r}, document {document!r}"
                    )
                yield f"{query} Q0 {document} {rank} {score:.9g} realm"  # as precise as float32

    file.parent.mkdir(parents=True, exist_ok=True)
    write_lines(file, lines())
