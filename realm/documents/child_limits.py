"""Limits of memory and processor time that a child process sets for itself before it reads what others wrote."""

import resource
from contextlib import suppress

MOST_MEMORY = 2 << 30
"""Bytes of address space that a child may take."""


def limit(kind: int, most: int) -> None:
    """Lowers a limit of this process (`resource.RLIMIT_...`), where the system has such a limit."""
    _, hard = resource.getrlimit(kind)
    with suppress(ValueError, OSError):  # some systems have no such limit
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
