"""Environment variables that torch and its libraries read when they are imported."""

import os


def set_torch_environment() -> None:
    """Sets thread and cache variables for torch; values that the user has set stay.

    Call this before torch is imported.
    """
    # OpenMP threads must not spin at barriers while an index build or another program needs the cores: on 2 cores with a
    # busy neighbour a training step took five times as long. Sleeping at once would slow small products down, so GNU's
    # OpenMP spins this many times first, about ten microseconds.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # oneDNN keeps a compiled kernel for each shape. Texts have many lengths, and the default of 1,024 kernels takes half a
    # gigabyte, once per thread where torch keeps them itself.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
