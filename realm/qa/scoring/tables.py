"""Formats tables, paragraphs and numbers as plain text."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from realm.qa.scoring.metrics import RANKS, Recall
from realm.qa.scoring.significance import PairedDifference, p_value

WIDEST = 100
"""Largest width of a paragraph, in columns."""
RECALL_HEAD = "".join(f"{k:>7}" for k in RANKS)
"""Heading of cells that `recall_cell` makes."""


def paragraph(text: str) -> str:
    """Wraps the text at the width of the terminal, or at WIDEST if the terminal is wider. Words are not cut at hyphens."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of a table, in which the first column is aligned left and all other columns are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{first:<{widths[0]}}"
        + "".join(f"{cell:>{width + 4}}" for cell, width in zip(cells, widths[1:], strict=True))
        for first, *cells in rows
    ]


def fitting(rows: list[list[str]], width: int) -> list[list[str]]:
    """The table without the last columns, if it is wider than `width`; at least two columns stay. 0: the width is unknown."""
    while width and len(rows[0]) > 2 and len(aligned(rows)[0]) > width:
        rows = [row[:-1] for row in rows]
    return rows


def recall_cell(recall: Recall) -> str:
    """The recall at each of `RANKS`, in percent."""
    return "".join(f"{recall[str(k)]:>7.1f}" for k in RANKS)  # type: ignore[literal-required]


def difference(found: PairedDifference) -> str:
    """A difference in points, with its 95 % interval in brackets and its p value."""
    return f"{found['points']:+.1f} ({found['low']:+.1f} to {found['high']:+.1f}) p {p_value(found['p'])}"


def costs(seconds: Mapping[str, float], peak_memory_mb: float, verbs: Sequence[str]) -> str:
    """Seconds of the stages, and peak memory. The seconds of stages whose names begin with the same verb are added up."""
    groups: dict[str, float] = {}
    for name, spent in seconds.items():
        group = next((verb for verb in verbs if name.startswith(verb)), name)
        groups[group] = groups.get(group, 0.0) + spent
    total = groups.pop("total")
    listed = ", ".join(f"{name} {spent:.0f}" for name, spent in groups.items())
    return f"Seconds: {listed}; total {total:.0f}. Peak memory {peak_memory_mb / 1000:.1f} GB."
