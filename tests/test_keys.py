"""64-bit keys: a table on disk compared with a dict in memory, and what is left of it."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.errors import WriteFailed
from realm.keys import KeyTable, TemporaryDatabase

NUMBERS = st.one_of(
    st.integers(0, 5), st.integers(0, 2**64 - 1), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])
)

FILLED = """
import os, resource, signal
from random import Random
from realm.keys import KeyTable
from tests.peak_memory import peak_kilobytes
KeyTable.CACHE_KB = 1024
draw, table = Random(1), KeyTable()
for count in range(1, 400_001):
    table.put(draw.getrandbits(64), f"text {count}")
    if count in (100_000, 400_000):
        print(peak_kilobytes(), flush=True)
"""
"""Prints the largest memory after 100,000 keys (2.5 MB) and after 400,000 keys (10 MB)."""


@given(st.lists(st.tuples(NUMBERS, st.text(st.characters(exclude_categories=["Cs"])))), st.lists(NUMBERS))
def test_a_table_answers_as_a_dict(pairs: list[tuple[int, str]], others: list[int]) -> None:
    known: dict[int, str] = {}
    with KeyTable() as table:
        for key, value in pairs:
            assert table.put(key, value) == known.get(key)
            known.setdefault(key, value)
        for key in [*known, *others]:
            assert table.get(key) == known.get(key)


def test_an_error_while_rows_are_fetched_is_one_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def execute(self, *_: object) -> "Failing":
            return self

        def fetchall(self) -> None:
            raise sqlite3.OperationalError("disk I/O error")

    with TemporaryDatabase() as database:
        monkeypatch.setattr(database, "_database", Failing())
        with pytest.raises(WriteFailed, match="disk I/O error; set TMPDIR"):
            database.rows("SELECT 1")
        monkeypatch.undo()


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_keys_and_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    ended = run(
        FILLED + "assert not os.listdir(os.environ['TMPDIR'])\nos.kill(os.getpid(), signal.SIGKILL)", tmp_path
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    few, many = map(int, ended.stdout.split())
    assert many - few < 2_000
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "darwin", reason="other limits")
def test_a_disk_without_room_is_one_line_that_names_the_way_out(tmp_path: Path) -> None:
    limited = FILLED.replace("\ndraw", "\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
                             "resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))\ndraw", 1)  # fmt: skip
    ended = run(limited, tmp_path)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert (
        last.startswith("realm.errors.WriteFailed: the temporary file cannot be written: ")
        and "TMPDIR" in last
    )
