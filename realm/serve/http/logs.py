"""Limits the log lines that clients can cause, so that many bad requests cannot fill the disk."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

LINES = 5
"""Largest number of lines of one kind per period. The first line of the next period has the number of lines left out."""
SECONDS = 60.0
"""Length of a period in seconds."""
_KINDS = 1000
"""Largest number of kinds in memory."""
_LOGGERS = ("asyncio", "uvicorn.error", "realm.serve.app")


class _Count(NamedTuple):
    since: float
    lines: int


class LineLimit(logging.Filter):
    """Passes at most `LINES` records of a kind per `SECONDS`. A kind is a logger, the start of a message, and an exception."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[object, ...], _Count] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        raised = record.exc_info[0] if record.exc_info else None
        kind = (record.name, str(record.msg).partition("\n")[0][:200], raised)
        now = time.monotonic()
        with self._lock:
            count = self._counts.get(kind)
            if count is None or now - count.since >= SECONDS:
                if count is not None and count.lines > LINES:
                    record.msg = f"{record.msg} ({count.lines - LINES} more lines of this kind were left out)"
                if len(self._counts) >= _KINDS:
                    self._counts.clear()
                count = _Count(now, 0)
            self._counts[kind] = count._replace(lines=count.lines + 1)
            return count.lines < LINES


@contextmanager
def limited_logs() -> Iterator[None]:
    """Applies a common limit to the loggers whose lines a client can cause, until the block ends."""
    limit = LineLimit()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(limit)
