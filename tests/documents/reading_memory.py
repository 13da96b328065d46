"""Measures the memory that a file takes while it is read."""

import subprocess
import sys
from pathlib import Path

BOMB = """
import sys
from realm.documents.reading import ReadingReport, read_documents
from tests.peak_memory import peak_kilobytes
import pyarrow.parquet, pyarrow.ipc
before = peak_kilobytes()
report = ReadingReport()
try:
    print(sum(1 for _ in read_documents([sys.argv[1]], report=report)), end=" ")
except ValueError as error:
    print(str(error)[:300], end=" ")
print(sum(report.reasons.values()), (peak_kilobytes() - before) >> 10)
"""


def documents_and_megabytes(path: Path) -> tuple[str, int]:
    run = subprocess.run([sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True)
    said, _, megabytes = run.stdout.strip().rpartition(" ")
    return said, int(megabytes)
