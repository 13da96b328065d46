"""Draws the training curves in metrics.jsonl as a picture with several panels."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realm.qa.scoring.metrics import RANKS


class Panel(NamedTuple):
    """One panel of the picture."""

    title: str
    unit: str
    keys: dict[str, str]
    """Metric -> label of its line; the label is empty if the panel has only one metric."""
    by_version: bool = False
    """Whether the metric is measured once per index version, and not at every logged step."""
    from_start: bool = False
    """Whether to draw a dotted line at the first value, for comparison."""
    floor: float | None = None
    """Lowest value of the vertical axis; None: matplotlib chooses the value."""


PANELS = (
    Panel("Loss", "nats per hidden wordpiece", {"loss": ""}),
    Panel("Retrieval utility", "nats gained by passages", {"retrieval_utility": ""}),
    Panel("Positive gap of the reader", "nats", {"positive_gap": ""}, by_version=True),
    Panel("Null passage, p(z|x)", "probability", {"null_probability": ""}, floor=0),
    Panel(
        "Masked facts found",
        "% of queries",
        {f"probe_recall_{k}": f"@{k}" for k in reversed(RANKS)},
        True,
        True,
    ),
    Panel(
        "Questions found",
        "% of questions",
        {f"question_recall_{k}": f"@{k}" for k in reversed(RANKS)},
        True,
        True,
    ),
    Panel("Index age", "steps", {"index_age": ""}, floor=0),
    Panel("Churn of the top 20 at a new index", "share replaced", {"churn": ""}, by_version=True, floor=0),
)
COLOURS = ("#1f5fa8", "#c8641b", "#3c8d5a")
GREY = "#6b6b6b"


def draw_if_new(metrics: Sequence[Path], out: Path) -> None:
    """Draws the curves of several runs, one line per run, unless the picture is newer than the files of metrics."""
    if out.exists() and all(file.stat().st_mtime <= out.stat().st_mtime for file in metrics):
        return
    runs = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in metrics]
    draw(runs, out)


def draw(runs: Sequence[Sequence[dict[str, Any]]], out: Path) -> None:
    """Draws one panel per entry of PANELS, with one line per run and metric, and saves the picture as `out`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(
        figsize=(15, 6.8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1), facecolor="white"
    )
    FigureCanvasAgg(figure)
    figure.suptitle("REALM pre-training", fontsize=15, x=0.008, ha="left", fontweight="bold")
    notes = [f"one line for each of {len(runs)} seeds"] * (len(runs) > 1)
    notes += ["points: index versions", "dotted lines: values at the start"]
    figure.text(0.992, 0.985, "; ".join(notes), ha="right", va="top", color=GREY)
    last = max((line["step"] for run in runs for line in run), default=0)
    for axes, panel in zip(figure.subplots(2, 4).flat, PANELS, strict=True):
        for colour, (key, label) in zip(COLOURS, panel.keys.items(), strict=False):
            for run in runs:
                points = [(line["step"], line[key]) for line in run if line.get(key) is not None]
                if points:
                    _line(axes, points, colour, label, panel, thin=len(runs) > 1)
                    label = ""  # only the line of the first run has a label, because the lines of all runs end close together
        if not axes.lines:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
        axes.set_title(panel.title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylabel(panel.unit, color=GREY)
        axes.set_xlim(0, max(last, 1) * (1.1 if any(panel.keys.values()) else 1.02))
        if panel.floor is not None:
            axes.set_ylim(bottom=panel.floor)
        axes.grid(color="#ebebeb")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b0b0b0")
        axes.tick_params(color="#b0b0b0", labelcolor=GREY)
    figure.savefig(out, dpi=120)


def _line(
    axes: Any, points: list[tuple[float, float]], colour: str, label: str, panel: Panel, thin: bool
) -> None:
    style = {
        "color": colour,
        "linewidth": 1.2 if thin else 1.8,
        "alpha": 0.7 if thin else 1.0,
        "clip_on": False,
    }
    axes.plot(
        *zip(*points, strict=True),
        marker="o" if panel.by_version else None,
        markersize=3 if thin else 4,
        **style,
    )
    if panel.from_start:
        axes.axhline(points[0][1], color=colour, linestyle=":", linewidth=1)
    if label:
        axes.annotate(label, points[-1], xytext=(7, 0), textcoords="offset points", va="center", color=colour)
