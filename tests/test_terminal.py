"""Commands under a pseudo-terminal, where bars are shown; narrow and wide."""

import fcntl
import os
import pty
import shlex
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from realm import cli

TINY = "--config tiny --set steps=2 --set device=cpu --set precision=fp32"


class Screen:
    """What a terminal was sent."""

    def __init__(self) -> None:
        self.text = ""


@contextmanager
def terminal(columns: int) -> Iterator[Screen]:
    """Makes a new pseudo-terminal of so many columns the standard output and standard error of this process."""
    controller, line = pty.openpty()
    fcntl.ioctl(line, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen, received = Screen(), bytearray()

    def receive() -> None:
        try:
            while part := os.read(controller, 65536):
                received.extend(part)
        except OSError:  # how Linux says that the other end is closed
            pass

    reader = threading.Thread(target=receive)
    reader.start()
    before = os.dup(1), os.dup(2)
    try:
        with open(line, "w", encoding="utf-8", buffering=1) as stream:
            os.dup2(line, 1)
            os.dup2(line, 2)
            with redirect_stdout(stream), redirect_stderr(stream):
                yield screen
    finally:
        for descriptor, copy in enumerate(before, start=1):
            os.dup2(copy, descriptor)
            os.close(copy)
        reader.join()
        os.close(controller)
        screen.text = received.decode()


@pytest.mark.parametrize("columns", [40, 200])
def test_training_that_embeds_the_corpus_runs_on_a_terminal(tiny_kb, columns: int, tmp_path: Path) -> None:
    out = tmp_path / "encoder"
    with terminal(columns) as screen:
        code = cli.main(shlex.split(f"mlm --kb {tiny_kb.folder} {TINY} --out {out}"))
    assert (code, out.is_dir()) == (0, True), screen.text
