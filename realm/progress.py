"""Shows the progress of long work: as a bar on a terminal, as a line of text every half minute in a log or pipe.

Lines for a terminal are broken between words.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

BAR_AFTER = 2.0
"""Seconds after which a bar appears."""
NARROW, WIDE = 60, 120
"""On terminals with fewer columns than `NARROW`, bars have no values and no rate, and with fewer than `WIDE`, one value and no
rate, because the bar itself would have no room, and numbers would be cut."""
NARROW_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
MEDIUM_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
EVERY = 30.0
"""Seconds between two lines of text."""


def progress(
    iterable: Iterable[T] | None = None,
    *,
    total: int | None,
    description: str,
    unit: str,
    done: int = 0,
    shown: bool = True,
    leave: bool = True,
) -> tqdm[T] | PlainLines:
    """Shows progress on standard error, with the time left if `total` is known, and with the rate if there is room.

    `done` items were finished before this call.

    On a terminal, a bar appears after two seconds; in a log or pipe, a line is printed every half minute. With `shown=False`
    nothing is printed, because another process or bar shows the same work. With `leave=False` the bar is removed at the end.
    """
    if shown and not sys.stderr.isatty():
        return PlainLines(iterable, total, description, unit, done)
    from tqdm import tqdm  # imported here, because `realm --help` does not need tqdm

    columns = _columns()
    return tqdm(
        iterable,
        total=total,
        desc=description,
        unit=f" {unit}",
        initial=done,
        file=sys.stderr,
        delay=BAR_AFTER,
        disable=not shown,
        leave=leave,
        bar_format=None if total is None else _format(columns or 80),
        **({"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}),
    )


def values_that_fit(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a bar has room for: the first, or all on a wide terminal and in a log."""
    has_room = not sys.stderr.isatty() or _columns() >= WIDE
    return dict(islice(values.items(), None if has_room else 1))


def _format(columns: int) -> str | None:
    """The format of a bar on a terminal; None: tqdm's own, with everything."""
    if columns >= WIDE:
        return None
    return MEDIUM_BAR if columns >= NARROW else NARROW_BAR


def _columns() -> int:
    """Columns of the terminal; 0 if the size is unknown.

    A pseudo-terminal with 0 rows counts as one of unknown size, because tqdm would print nothing.
    """
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return 0
    return columns if rows else 0


class PlainLines(AbstractContextManager["PlainLines"]):
    """Prints a line on standard error every half minute. The methods are those of tqdm's bar that `realm` uses.

    For work that takes less than half a minute, nothing is printed.
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
        """Adds to the count, and prints a line if half a minute has passed since the last line."""
        self.n += count
        if time.monotonic() - self._printed >= EVERY:
            self._print()

    def set_postfix(self, values: Mapping[str, Any], refresh: bool = True) -> None:
        """Sets values that are part of the next line."""
        self.postfix = ", ".join(f"{name}={value}" for name, value in values.items())

    def write(self, text: str, file: TextIO) -> None:
        """Prints a line of text."""
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
    """Seconds as minutes and seconds, or as hours, minutes and seconds.

    >>> duration(9), duration(75), duration(7500)
    ('0:09', '1:15', '2:05:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things; `plural` is the plural of the noun if it is not the noun and "s".

    >>> counted(1, "step"), counted(2500, "step"), counted(2, "query", "queries")
    ('1 step', '2,500 steps', '2 queries')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def wrapped(line: str) -> str:
    """The line, broken between words where a terminal on standard output would break it, with the indentation of its start.

    A row of a table, whose columns are three spaces apart, stays.
    """
    columns = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or len(line) <= columns or "   " in line.strip():
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
