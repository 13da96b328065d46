"""A child process that is killed if it takes too long, or if it prints nothing for too long.

The output of the child process goes to a log. The standard input of the child process is an empty pipe. When the parent process
ends, even by a kill, the pipe is closed, and the child process can end too (`end_with_parent`).
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

from realm.environment import of_child


class Child(AbstractContextManager["Child"]):
    """A running command; leaving the `with` block kills the command and its child processes."""

    def __init__(self, command: Sequence[str], log: Path, deadline: float, silence: float):
        """Starts `command` and appends the output of the command to `log`.

        The command is killed after `deadline` seconds, or after `silence` seconds without output.
        """
        self._log, self._deadline, self._silence = log, deadline, silence
        self.failure = ""
        """Reason of the failure; "" if the process is running or has succeeded."""
        self._started = self._heard = time.monotonic()
        self._printed = log.stat().st_size if log.exists() else 0
        self._ended: float | None = None
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=of_child(),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        """Time since the start of the process, until now or until the end of the process."""
        return (self._ended or time.monotonic()) - self._started

    def poll(self) -> bool:
        """Whether the process is running. A process that exceeds `deadline` or `silence` is killed, and counts as failed."""
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
        """Kills the process and its child processes, and waits for the end."""
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
    """Ends this process and its child processes when the standard input of this process is closed. A child calls this."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        print("the parent process has ended", file=sys.stderr, flush=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def in_words(code: int) -> str:
    """The exit status of a process in words."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"
