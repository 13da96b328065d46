"""Devices and precisions of networks."""

import ctypes
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from realm.errors import InputError, first_line

Precision = Literal["auto", "bf16", "fp32"]
"""Precision of matrix products; "auto" is bf16 if the device has bf16 matrix instructions, else float32."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Constants of glibc's malloc.h."""


@dataclass(frozen=True)
class DeviceConfig:
    """Settings of where, and how precisely, a command computes."""

    device: str = "auto"
    """"auto": a GPU if the machine has one, else the CPU. Any torch device can be given."""
    precision: Precision = "auto"
    """Precision of matrix products; weights, norms and losses stay float32."""


def choose_device(name: str) -> torch.device:
    """The torch device for a setting `device`; "auto" is a GPU if there is one, else the CPU.

    Raises:
        InputError: the device is unknown or missing.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """A context with float32 weights and matrix products of the given precision; for float32, autocast is off.

    In bf16, weights are cast at each use. With one shared bf16 copy of a weight, the gradients of many parts of a batch would
    be added up in bf16, and small gradients would be lost.
    """
    bf16 = chosen(device, precision) == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False)


def chosen(device: torch.device, precision: Precision) -> Literal["bf16", "fp32"]:
    """The precision that the setting `precision` selects on this device."""
    if precision != "auto":
        return precision
    return "bf16" if multiplies_bf16(device.type) else "fp32"


@cache
def multiplies_bf16(device_type: str) -> bool:
    """Whether this type of device has bf16 matrix instructions; on CPUs without them bf16 is much slower than float32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu":
        return False
    # On x86, torch.backends reports bf16 for every processor with AVX-512, even without bf16 instructions.
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported())
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compiles_kernels(device: torch.device) -> bool:
    """Whether Triton can be tried on this device; it also needs a C compiler, and a GPU that it knows."""
    return device.type == "cuda" and find_spec("triton") is not None


def current_device(tensor: Tensor) -> AbstractContextManager[object]:
    """A context for kernels of Triton, which run on the current device, and not on that of their arguments."""
    other = tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if other else nullcontext()


def keep_freed_memory() -> None:
    """Makes glibc's malloc reuse freed memory instead of returning large blocks to the system; without glibc it does nothing.

    The system clears returned pages when the pages are allocated again, and this makes training steps slower.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    c = ctypes.CDLL(None)
    # Older versions of glibc accept at most 32 MB. If both values are refused, all settings stay at their defaults.
    if c.mallopt(M_MMAP_THRESHOLD, 1 << 30) or c.mallopt(M_MMAP_THRESHOLD, 1 << 25):
        c.mallopt(M_TRIM_THRESHOLD, -1)  # memory is never returned
        c.mallopt(M_ARENA_MAX, 1)  # with one arena, a thread can reuse memory that another thread has freed
