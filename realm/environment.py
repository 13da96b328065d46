"""Environment variables that torch, NumPy and their libraries read when they are imported, and the cores of this machine."""

import os

_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that `torchrun` sets for the processes that it starts."""


def set_torch_environment() -> None:
    """Sets variables for the threads and caches of torch and NumPy. Values that the user has set are not changed.

    Call this function before torch and NumPy are imported.
    """
    # OpenMP threads must not spin at barriers while an index build or another program needs the cores, because training steps
    # would take several times as long (docs/experiments). Without any spinning, small products would be slower. Therefore a
    # thread of GNU's OpenMP spins GOMP_SPINCOUNT times, which takes some microseconds, before it sleeps.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # NumPy's BLAS is used only for small products (tagger, calibration). Several threads do not make these faster on an idle
    # machine, and make them several times slower if other processes use the cores, such as those of `kb build --processes`.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # oneDNN caches a compiled kernel for each shape. Texts have many lengths, and the default of 1,024 kernels needs much
    # memory. Torch has another cache of kernels in each thread.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_of_torchrun() -> int:
    """Number of processes that `torchrun` has started with this one; 0: this process was started in another way."""
    return int(os.environ.get("WORLD_SIZE", "1")) if _TORCHRUN in os.environ else 0


def of_child() -> dict[str, str]:
    """The environment for a child process that runs another command: it is no process of `torchrun`."""
    return {name: value for name, value in os.environ.items() if name != _TORCHRUN}
