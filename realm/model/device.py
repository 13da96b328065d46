"""Where networks run and in which precision."""

from contextlib import AbstractContextManager

import torch

from realm.config import InputError


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


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """bf16 matrix products with float32 weights where `precision` is "bf16"; nothing otherwise.

    Each use of a weight has a bf16 copy of its own: gradients of a copy that a hundred parts of a batch share would be added
    up in bf16, where small ones vanish beside the sum.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
