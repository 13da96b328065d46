"""A rank ends when another rank, or the store of torchrun, is silent, and not otherwise."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from realm import heartbeats
from realm.heartbeats import Heartbeats

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # see `exits`


@pytest.fixture
def exits(monkeypatch) -> Iterator[list[int]]:
    """The exit codes of the ranks, which are threads of this process."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        sys.exit()  # the thread

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(heartbeats, "INTERVAL", 0.02)
    monkeypatch.setattr(heartbeats, "SILENCE", 0.5)
    ranks: list[Heartbeats] = []
    start = Heartbeats.__init__

    def kept(self: Heartbeats, *args: object) -> None:
        ranks.append(self)
        start(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Heartbeats, "__init__", kept)
    yield codes
    for rank in ranks:  # that a failed test did not stop
        rank.stop()


def wait_for(codes: list[int]) -> None:
    end = time.monotonic() + 30
    while not codes:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_rank_ends_with_one_line_when_another_rank_is_silent(exits, capsys) -> None:
    store = dist.HashStore()
    left, silent = (Heartbeats(store, rank, 2) for rank in range(2))
    time.sleep(1.5)
    assert exits == []
    silent.stop()
    wait_for(exits)
    left.stop()
    assert exits == [2]
    assert capsys.readouterr().err == (
        "realm: rank 0 has heard nothing from rank 1 for 0.5 s: if its machine or network has failed, "
        "repeat the command without this machine, or after the repair\n"
    )


class SilentStore:
    """A store that never answers, as TCPStore if its machine is silent."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def clone(self) -> "SilentStore":
        return self

    def set(self, key: str, value: str) -> None:
        self.released.wait()
        raise RuntimeError("connection closed")


def test_rank_ends_when_the_store_is_silent(exits, capsys) -> None:
    store = SilentStore()
    rank = Heartbeats(store, 1, 2)
    wait_for(exits)
    store.released.set()
    rank.stop()
    assert exits == [2]
    assert "rank 1 has heard nothing from the store of torchrun (on " in capsys.readouterr().err


RANK = """
import sys
import torch.distributed as dist
from realm import heartbeats
heartbeats.INTERVAL, heartbeats.SILENCE = 0.1, 2.0
rank, port = map(int, sys.argv[1:])
beats = heartbeats.Heartbeats(dist.TCPStore("127.0.0.1", port), rank, 2)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_ranks_that_are_paused_together_do_not_end() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(store.port)],
            stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.stdout.readline() for rank in ranks] == ["started\n"] * 2
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            rank.send_signal(number)
        time.sleep(4)
    assert [rank.poll() for rank in ranks] == [None, None]
    ranks[1].send_signal(signal.SIGSTOP)
    assert ranks[0].wait(60) == 2
    assert ranks[0].stderr.read().startswith("realm: rank 0 has heard nothing from rank 1 for 2 s: ")
    ranks[1].kill()
    ranks[1].wait()
