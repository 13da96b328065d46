"""The largest memory of this process so far, for the scripts that tests start."""

import resource
import sys
from pathlib import Path


def peak_kilobytes() -> int:
    """On Linux without what the process inherited: there, `ru_maxrss` begins with the memory of the parent."""
    if sys.platform == "darwin":
        return _kilobytes(resource.RUSAGE_SELF)
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def peak_kilobytes_of_children() -> int:
    """The largest memory of a child process that has ended. It is at least the memory that this process had at its start."""
    return _kilobytes(resource.RUSAGE_CHILDREN)


def _kilobytes(whose: int) -> int:
    found = resource.getrusage(whose).ru_maxrss
    return found >> 10 if sys.platform == "darwin" else found
