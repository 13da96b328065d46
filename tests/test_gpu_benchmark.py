"""`benchmarks/gpu.py`, which nobody can run without a GPU, at tiny sizes on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def test_peaks_of_data_sheets_are_found_by_the_words_of_a_name() -> None:
    subprocess.run([sys.executable, "-m", "doctest", SCRIPT], check=True)


@pytest.mark.slow
def test_all_parts_of_the_benchmark_of_a_gpu_run_on_a_machine_without_one() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--small"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["parts"]) == {"step", "search", "embed", "parity"}
    assert all("failed" not in part for part in found["parts"].values())
    assert found["parts"]["search"]["recall of the 20 best"] == 1
    assert found["parts"]["parity"]["steps"] == 4
