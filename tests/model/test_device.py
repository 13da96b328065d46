"""Where networks run, and in which precision."""

import platform
import subprocess
import sys
import time

import pytest
import torch

from realm.model import device
from realm.model.device import autocast, multiplies_bf16

CPU = torch.device("cpu")


def product_type(precision: device.Precision) -> torch.dtype:
    with autocast(CPU, precision):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(("has", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_only_where_the_device_has_instructions_for_it(has, expected, monkeypatch) -> None:
    monkeypatch.setattr(device, "multiplies_bf16", lambda kind: has)
    assert product_type("auto") == expected
    assert product_type("bf16") == torch.bfloat16
    assert product_type("fp32") == torch.float32


@pytest.mark.skipif(not multiplies_bf16("cpu"), reason="this CPU has no instructions for bf16 products")
def test_bf16_that_auto_chooses_on_this_cpu_is_no_fallback() -> None:
    """Without instructions torch multiplies bf16 some hundred times slower than float32."""

    def seconds(dtype: torch.dtype) -> float:
        square, best = torch.ones(256, 256, dtype=dtype), float("inf")
        for _ in range(5):
            start = time.perf_counter()
            square @ square
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(torch.bfloat16) < 5 * seconds(torch.float32)


def test_a_gpu_counts_as_able_only_without_emulation(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(including_emulation) or True
    )
    multiplies_bf16.cache_clear()
    try:
        assert multiplies_bf16("cuda")
        assert not multiplies_bf16("mps")
    finally:
        multiplies_bf16.cache_clear()
    assert asked == [False]


FAULTS = """
import resource
from realm.model.device import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(1 << 26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(3)))
keep_freed_memory()
print(min(faults() for _ in range(3)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_given_back_unless_it_is_kept() -> None:
    """64 MB, again and again: pages that the system had to clear, 32 at least where they are of 2 MB."""
    done = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < 8 < given_back
