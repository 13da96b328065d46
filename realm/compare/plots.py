"""Draws a table as a picture: exact match of each row, recall of each start, 95 % intervals, seeds, recall during training, and
what the numbers depend on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from realm.compare.layout import differing, made_lines
from realm.compare.results import Retrieved, TableJson, measured_facts
from realm.compare.rows import label_of
from realm.qa.scoring.significance import percent, wilson_interval

_CURVES_INCHES = 3.0
"""Height of the curves."""


class Panel(NamedTuple):
    """One panel of the picture: for each row a value, its interval, and the values of its seeds if there are several."""

    title: str
    labels: list[str]
    values: list[float]
    intervals: list[tuple[float, float]]
    seeds: list[list[float]]


def panels(report: TableJson) -> list[Panel]:
    """The panels: for each test the rows, if any row was measured, and the starts; then the starts on masked facts."""
    found = []
    for test in next(iter(report["starts"].values()))["tests"]:
        if report["rows"]:
            answered = {row["label"]: row["tests"][test]["all"] for row in report["rows"].values()}
            intervals = [(one["em_ci95"][0], one["em_ci95"][1]) for one in answered.values()]
            title = f"{test}: exact match, %"
            seeds = [differing(one["em_by_seed"]) for one in answered.values()]
            values = [one["em"] for one in answered.values()]
            found.append(Panel(title, list(answered), values, intervals, seeds))
        retrieved = {name: start["tests"][test]["all"] for name, start in report["starts"].items()}
        found.append(
            _starts_panel(f"{test}: answer in the first 5 before training on questions, %", retrieved)
        )
    if facts := {name: one["retrieved"] for name, one in measured_facts(report).items()}:
        found.append(_starts_panel("masked facts in the first 5 before training on questions, %", facts))
    return found


def _starts_panel(title: str, retrieved: Mapping[str, Retrieved]) -> Panel:
    """Recall@5 of BM25 and the starts."""
    shares = {name: one["recall"]["5"] for name, one in retrieved.items()}
    intervals = [_interval(share, retrieved[name]["n"]) for name, share in shares.items()]
    seeds = [differing(one["recall_5_by_seed"]) for one in retrieved.values()]
    return Panel(title, [label_of(name) for name in shares], list(shares.values()), intervals, seeds)


def _interval(share: float, n: int) -> tuple[float, float]:
    low, high = wilson_interval(round(share / 100 * n), n)
    return percent(low), percent(high)


def draw(report: TableJson, out: Path) -> None:
    """Draws all panels below each other, then the curves of the training, and saves the picture as `out`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = panels(report)
    heights = [0.8 + 0.3 * len(panel.labels) for panel in drawn] + [_CURVES_INCHES] * bool(report["curves"])
    made = made_lines(report["made_by"])
    figure = Figure(figsize=(8, sum(heights) + 0.15 * len(made)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    every: Any = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)
    if report["curves"]:
        _draw_curves(every[-1, 0], report["curves"])
    for axes, panel in zip(every[:, 0], drawn, strict=False):  # the curves are below the panels
        places = range(len(panel.labels), 0, -1)
        errors = [
            [max(0.0, value - low) for value, (low, _) in zip(panel.values, panel.intervals, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(panel.values, panel.intervals, strict=True)],
        ]
        axes.errorbar(
            panel.values, places, xerr=errors, fmt="o", color="#1f5fa8", ecolor="#8fb0d6", capsize=3
        )
        for place, values in zip(places, panel.seeds, strict=True):
            axes.plot(values, [place - 0.3] * len(values), "|", color="#808080", markersize=5)
        axes.set_yticks(places, panel.labels)
        marks = "; marks: seeds" if any(panel.seeds) else ""
        _style(axes, panel.title + marks, "x")
    figure.supxlabel("\n".join(made), x=0.01, ha="left", fontsize=7)
    figure.savefig(out, dpi=120)


def _draw_curves(axes: Any, curves: Mapping[str, list[list[tuple[int, float]]]]) -> None:
    """A line for each seed of each start, in the colour of the start."""
    for number, (start, seeds) in enumerate(curves.items()):
        for seed, curve in enumerate(seeds):
            steps, recalls = zip(*curve, strict=True)
            label = None if seed else label_of(start)
            axes.plot(
                steps, recalls, label=label, color=f"C{number}", linewidth=1.2, marker=".", markersize=3
            )
    axes.set_xlabel("step")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=3)
    _style(axes, "masked facts in the first 5 during REALM training, %; a line for each seed", "y")


def _style(axes: Any, title: str, grid: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(left=0)
    axes.grid(axis=grid, color="#ebebeb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
