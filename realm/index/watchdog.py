"""A process of our own that is watched: it must end in time, and not fall silent.

Its log is its heartbeat: whatever it prints goes there, and one that has printed nothing for a while is stuck. Its standard
input is a pipe that nobody writes to: it ends when we die, however we die, and a child that reads it can end too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path


class Child(AbstractContextManager["Child"]):
    """A running command; leaving the `with` block kills it and whatever it started."""

    def __init__(self, command: Sequence[str], log: Path, deadline: float, silence: float):
        """Starts `command` with its output behind what `log` holds; `deadline` and `silence` are seconds."""
        self._log, self._deadline, self._silence = log, deadline, silence
        self.failure = ""
        """What went wrong, once it has ended; empty where nothing did."""
        self._started = self._heard = time.monotonic()
        self._printed = log.stat().st_size if log.exists() else 0
        self._ended: float | None = None
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self._ended or time.monotonic()) - self._started

    def running(self) -> bool:
        """Whether it goes on; never waits. One that is late or silent is killed here, and has failed."""
        if self._ended is not None:
            return False
        code = self._process.poll()
        if code is not None:
            self.failure = "" if code == 0 else f"failed with {in_words(code)}"
        elif self.seconds > self._deadline:
            self.failure = f"took longer than {self._deadline:g} s"
        elif self._silent() > self._silence:
            self.failure = f"printed nothing for {self._silence:g} s"
        else:
            return True
        self.stop()
        return False

    def stop(self) -> None:
        """Kills it, with whatever it started, and waits for its end."""
        if self._ended is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._ended = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _silent(self) -> float:
        printed = self._log.stat().st_size
        if printed != self._printed:
            self._printed, self._heard = printed, time.monotonic()
        return time.monotonic() - self._heard


def end_with_parent() -> None:
    """Called in the child: from now on it ends, with whatever it started, when its standard input does."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        print("the process that started this one is gone", file=sys.stderr, flush=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def in_words(code: int) -> str:
    """How a process ended, by what the system says of it."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"
