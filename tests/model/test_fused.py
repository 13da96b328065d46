"""The kernels of the layers on a GPU, run on a CPU by Triton's interpreter: beside the functions of torch in float64."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from realm.model.modes import recomputed

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ADDED = ("found", "bias", "given", "weight", "shift")
SIZES = {"narrow": (37, 24), "wide": (70, 96), "one": (1, 300), "none": (0, 8)}
DROPOUT = {"narrow": 0.0, "wide": 0.3, "one": 0.1, "none": 0.1}
EPSILON = 1e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs of all cases, and the results and gradients of the kernels.

    Triton runs a kernel on a CPU if the variable was set before Triton was imported, so a new process is needed.
    """
    folder, draw = tmp_path_factory.mktemp("fused"), torch.Generator().manual_seed(0)
    given = {}
    for case, (tokens, width) in SIZES.items():
        for bits in ("float32", "bfloat16"):
            for part in ("found", "given", "added", "activated", "long"):
                rows = torch.randn(
                    tokens, 2 * width if part in ("activated", "long") else width, generator=draw
                )
                given[f"{case}.{bits}.{part}"] = 2 * rows.to(getattr(torch, bits))
            for part in ("bias", "weight", "shift", "wide"):
                given[f"{case}.{bits}.{part}"] = torch.randn(
                    2 * width if part == "wide" else width, generator=draw
                )
    save_file(given, folder / "given")
    run = subprocess.run(
        [sys.executable, "-c", RUN, folder, str(EPSILON), *(str(DROPOUT[case]) for case in SIZES)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return given, load_file(folder / "found")


RUN = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from realm.model.fused import activated, added
folder, epsilon, *dropouts = sys.argv[1:]
given, found = load_file(Path(folder) / "given"), {}
for case, dropout in zip(("narrow", "wide", "one", "none"), map(float, dropouts), strict=True):
    for bits in ("float32", "bfloat16"):
        part = {name.split(".")[2]: value for name, value in given.items() if name.startswith(f"{case}.{bits}.")}
        inputs = [part[name].requires_grad_() for name in ("found", "bias", "given", "weight", "shift")]
        torch.manual_seed(1)
        results = [added(*inputs, float(epsilon), dropout)]
        results += torch.autograd.grad(results[0], inputs, part["added"])
        torch.manual_seed(1)
        results.append(added(*(part.T.contiguous().T for part in inputs), float(epsilon), dropout))
        results.append(added(*inputs, float(epsilon), dropout))
        for tanh in (False, True):
            inputs = [part[name].requires_grad_() for name in ("long", "wide")]
            results.append(activated(*inputs, tanh))
            assert torch.equal(results[-1], activated(inputs[0].T.contiguous().T, inputs[1], tanh))
            results += torch.autograd.grad(results[-1], inputs, part["activated"])
        found |= {f"{case}.{bits}.{number}": value.detach().clone() for number, value in enumerate(results)}
save_file(found, Path(folder) / "found")
"""


def parts(
    made: tuple[dict[str, Tensor], dict[str, Tensor]], start: str
) -> tuple[dict[str, Tensor], list[Tensor]]:
    given, found = ({k[len(start) :]: v for k, v in some.items() if k.startswith(start)} for some in made)
    return given, [found[str(number)] for number in range(len(found))]


def reference(
    function: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    result = function(*doubles)
    return result, torch.autograd.grad(result, doubles, gradient.double())


def assert_close(found: list[Tensor], wanted: list[Tensor], bits: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        scale = max(1.0, float(other.detach().abs().max())) if other.numel() else 1.0
        assert torch.allclose(one.double(), other, rtol=0, atol=scale * (1e-5 if bits == "float32" else 0.02))


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("bits", ["float32", "bfloat16"])
def test_norm_of_a_dropped_sum_and_its_gradients_are_those_of_torch(made, case, bits) -> None:
    given, (result, *gradients) = parts(made, f"{case}.{bits}.")
    kept = (gradients[0] != 0).double() / (1 - DROPOUT[case])  # almost surely not 0 where a number is kept

    def plain(found: Tensor, bias: Tensor, given: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm((found + bias) * kept + given, bias.shape, weight, shift, EPSILON)

    wanted, wanted_gradients = reference(plain, [given[name] for name in ADDED], given["added"])
    assert_close([result, *gradients[:5]], [wanted, *wanted_gradients], bits)


def test_dropout_keeps_a_share_of_the_numbers_and_is_drawn_anew_from_the_seed_of_torch(made) -> None:
    first, gradient, _, _, _, _, same, other, *_ = parts(made, "wide.float32.")[1]
    kept = (gradient != 0).double()
    deviation = (0.3 * 0.7 / kept.numel()) ** 0.5
    assert abs(kept.mean() - 0.7) < 4 * deviation
    for one, next_one in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):  # neighbours are independent
        assert abs((one * next_one).mean() - 0.49) < 6 * deviation
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("bits", ["float32", "bfloat16"])
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_and_its_gradients_are_those_of_torch(made, case, bits, tanh) -> None:
    given, found = parts(made, f"{case}.{bits}.")

    def plain(found: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(found + bias, approximate="tanh" if tanh else "none")

    wanted, wanted_gradients = reference(plain, [given["long"], given["wide"]], given["activated"])
    first = 11 if tanh else 8
    assert_close(found[first : first + 3], [wanted, *wanted_gradients], bits)


def test_kernels_that_fail_or_have_wrong_gradients_are_not_used(caplog) -> None:
    from realm.model import flash, fused

    def added(found: Tensor, bias: Tensor, given: Tensor, weight: Tensor, shift: Tensor, *_: float) -> Tensor:
        return F.layer_norm((found + bias + given).float(), bias.shape, weight, shift).to(found.dtype)

    def activated(found: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        return F.gelu(found + bias, approximate="tanh" if tanh else "none").to(found.dtype)

    def no_gradient(found: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        return activated(found, bias.detach(), tanh) + 0 * bias.to(found.dtype)

    def fails(*_: object) -> Tensor:
        raise RuntimeError("Failed to find C compiler")

    cpu = torch.device("cpu")
    assert fused.are_right(added, activated, cpu)
    with torch.inference_mode():
        assert fused.are_right(added, activated, cpu)
    assert not caplog.messages
    assert not fused.are_right(added, no_gradient, cpu)
    assert not fused.are_right(added, lambda *given: activated(*given) * 1.1, cpu)
    assert not fused.are_right(fails, activated, cpu)
    assert caplog.messages == [
        "layers on cpu are slower without fused kernels, which give wrong numbers",
        "layers on cpu are slower without fused kernels, which give wrong numbers",
        "layers on cpu are slower without fused kernels: Failed to find C compiler",
    ]
    assert not flash._fused_kernels_run(cpu)


def test_kernels_are_compared_inside_a_forward_pass_that_is_recomputed() -> None:
    """As in the first step of a training with `cached_rows`; the comparison is made only once."""
    from realm.model import fused

    @cache
    def right() -> bool:
        return fused.are_right(
            lambda found, *_: 1.0 * found, lambda found, *_: 2.0 * found, torch.device("cpu")
        )

    def forward(given: Tensor) -> Tensor:
        right()
        return given * given

    given = torch.ones(3, requires_grad=True)
    recomputed(forward, given).sum().backward()
    assert given.grad is not None and given.grad.tolist() == [2, 2, 2]
