"""Limits of memory and processor time, which a child process sets for itself before it reads untrusted files."""

import resource
from contextlib import suppress

MOST_MEMORY = 2 << 30
"""Most bytes of address space that a child process may use."""


def limit(kind: int, most: int) -> None:
    """Lowers the limit `kind` (`resource.RLIMIT_...`) of this process to `most`, if the system has this limit."""
    _, hard = resource.getrlimit(kind)
    with suppress(ValueError, OSError):  # some systems have no such limit
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
