"""`benchmarks/cluster.py` at tiny sizes: every job runs and is reported, with one process and with several."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "cluster.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "processes", "count"), [("tag", "1 2", 8), ("read embed search torchrun", "2", 10)]
)
def test_all_jobs_of_the_benchmark_of_a_cluster_are_reported(jobs: str, processes: str, count: int) -> None:
    words = ["--scale", "0.001", "--jobs", *jobs.split(), "--processes", *processes.split()]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["benchmark"] == "cluster" and {"cores", "machine", "python"} <= set(found)
    rows, training = found["rows"], found["training"]
    columns = ["job", "engine", "processes", "scaling", "amount", "plain s", "start s", "s", "efficiency"]
    assert len(rows) == count and all(list(row) == columns for row in rows)
    assert {row["job"] for row in rows} | ({"torchrun"} if training else set()) == set(jobs.split())
    assert {row["engine"] for row in rows} == {"processes", "ray"}
    assert {str(row["processes"]) for row in rows} == set(processes.split())
    assert {row["scaling"] for row in rows} == {"strong", "weak"}
    assert all(row["amount"] > 0 and row["start s"] >= 0 for row in rows)
    assert all(step["s a step"] > 0 for step in training)
    assert [one["engine"] for one in training] in ([], ["plain", "torchrun, 2 processes"])
    titles = [line for line in table if line.startswith(("| job ", "| stage "))]
    assert len(titles) == 1 + bool(training)
