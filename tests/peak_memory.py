"""The largest memory of this process so far, for the scripts that tests start."""

import resource
import sys
from pathlib import Path


def peak_kilobytes() -> int:
    """On Linux without what the process inherited: there, `ru_maxrss` begins with the memory of the parent."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
