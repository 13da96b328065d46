"""The reports in docs/tables."""

import json
from pathlib import Path

import pytest

from realm.compare import layout, plots

REPORTS = sorted((Path(__file__).parents[2] / "docs" / "tables").glob("*.json"))


@pytest.mark.parametrize("file", REPORTS, ids=[file.name for file in REPORTS])
def test_a_report_in_the_docs_can_be_shown_again(file: Path) -> None:
    report = json.loads(file.read_text(encoding="utf-8"))
    shown, drawn = layout.markdown(report), plots.panels(report)
    for row in report["rows"].values():
        assert f"| {row['label']} |" in shown and row["label"] in drawn[0].labels
