"""Where networks run and in which precision."""

import ctypes
import platform
from contextlib import AbstractContextManager
from functools import cache
from typing import Literal

import torch

from realm.errors import InputError

Precision = Literal["auto", "bf16", "fp32"]
"""Of matrix products; "auto" is bf16 where a device has instructions for it, else float32."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""


def choose_device(name: str) -> torch.device:
    """The torch device of a `device` setting; "auto" is a GPU when there is one, else the CPU.

    Raises:
        InputError: unknown, or not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """bf16 matrix products with float32 weights where `precision` says so; nothing otherwise.

    Each use of a weight has a bf16 copy of its own: gradients of a copy that a hundred parts of a batch share would be added
    up in bf16, where small ones vanish beside the sum.
    """
    bf16 = chosen(device, precision) == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False)


def chosen(device: torch.device, precision: Precision) -> Literal["bf16", "fp32"]:
    """What `precision` means on this device."""
    if precision != "auto":
        return precision
    return "bf16" if multiplies_bf16(device.type) else "fp32"


@cache
def multiplies_bf16(device_type: str) -> bool:
    """Whether such devices have instructions for bf16 products: a CPU without is a hundred times slower than in float32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu":
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):  # where torch calls it supported with AVX-512 alone
        return bool(torch.cpu._is_avx512_bf16_supported())
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def keep_freed_memory() -> None:
    """From here on this process keeps what it has freed for what it needs next; with other C libraries than glibc as before.

    glibc gives large pieces back at once, and the system clears every page that comes again: a tenth of a training step.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    c = ctypes.CDLL(None)
    # Older ones take no more than 32 MB; refused, a threshold would only stop growing by itself, so then all stays as it is.
    if c.mallopt(M_MMAP_THRESHOLD, 1 << 30) or c.mallopt(M_MMAP_THRESHOLD, 1 << 25):
        c.mallopt(M_TRIM_THRESHOLD, -1)  # never
        c.mallopt(M_ARENA_MAX, 1)  # new threads share what others have freed
