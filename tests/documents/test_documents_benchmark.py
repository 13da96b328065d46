"""`benchmarks/documents.py` on a few of the vital articles."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "documents.py"


@pytest.mark.slow
def test_all_forms_of_the_same_articles_have_the_same_words(tmp_path: Path) -> None:
    words = ["package:vital-articles", "--folder", str(tmp_path / "forms"), "--articles", "50"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    forms = ["JSON Lines", "dump", "dump, 2 processes", "ZIM", "ZIM, 2 processes"]
    assert [row["form"] for row in rows] == forms
    assert {(row["articles"], row["left out"], row["other words"]) for row in rows} == {(50, 0, 0)}
    assert all(row["words/s"] > 0 and row["peak MB"] > 0 for row in rows)
