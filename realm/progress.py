"""How far a long piece of work is, where no terminal is to show a bar: plain lines, for logs and pipes."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TextIO

EVERY = 30.0
"""Seconds between two lines."""


class PlainLines(AbstractContextManager["PlainLines"]):
    """The part of tqdm's bar that this project uses, as a line on standard error every half minute.

    Work that takes less than half a minute prints nothing.
    """

    def __init__(
        self, iterable: Iterable[Any] | None, total: int | None, description: str, unit: str, done: int
    ):
        self._iterable, self._total, self._description, self._unit = iterable, total, description, unit
        self.n = done
        self.postfix: str | None = None
        self._started = self._printed = time.monotonic()
        self._n_printed = done
        self._has_printed = False

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self._iterable or ():
                yield item
                self.update()

    def update(self, count: int = 1) -> None:
        """Counts, and prints a line where the last one is old."""
        self.n += count
        if time.monotonic() - self._printed >= EVERY:
            self._print()

    def set_postfix(self, values: Mapping[str, Any], refresh: bool = True) -> None:
        """Values that the next line shows too."""
        self.postfix = ", ".join(f"{name}={value}" for name, value in values.items())

    def write(self, text: str, file: TextIO) -> None:
        """A line of its own."""
        print(text, file=file, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._has_printed and self.n != self._n_printed:
            self._print()

    def _print(self) -> None:
        now = time.monotonic()
        print(self._line(now), file=sys.stderr, flush=True)
        self._printed, self._n_printed, self._has_printed = now, self.n, True

    def _line(self, now: float) -> str:
        rate = (self.n - self._n_printed) / max(now - self._printed, 1e-9)
        words = [f"{self._description}: {self._unit} {self.n:,}"]
        if self._total:
            words[0] += f" of {self._total:,} ({self.n / self._total:.0%})"
        words.append(f"{duration(now - self._started)} so far")
        if rate > 0:
            words.append(f"{rate:,.1f} a second" if rate >= 1 else f"{1 / rate:,.1f} s each")
            if self._total and self.n < self._total:
                words.append(f"{duration((self._total - self.n) / rate)} left")
        if self.postfix:
            words.append(self.postfix)
        return ", ".join(words)


def duration(seconds: float) -> str:
    """
    >>> duration(9), duration(75), duration(7500)
    ('0:09', '1:15', '2:05:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
