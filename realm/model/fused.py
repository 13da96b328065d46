"""Parts of the layers of a BERT on a GPU, each in one pass over its memory, by kernels of Triton.

    added       the end of each half of a layer: bias, dropout, the residual connection and LayerNorm
    activated   bias and GELU

Torch runs several kernels for each part. Each of them reads and writes all states, and autocast makes some of these float32.
Here states are in bf16, and only sums, means and variances are in float32. Triton comes with the builds of torch for NVIDIA
GPUs. It needs a C compiler when a kernel runs for the first time.

Axis letters: N tokens, H hidden, F width of a linear layer. In the kernels, small letters are parts of these axes: what a
program computes in one step.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from realm.errors import first_line
from realm.model.cpu.dropout import new_seed
from realm.model.device import current_device

_log = logging.getLogger(__name__)

ROWS, STEPS, STAGES = 4, 16, 3
"""Tokens that a program of `added` computes: ROWS forwards; one at a time and STEPS in all backwards, of which STAGES are read
ahead."""
TILE_ROWS, TILE_COLUMNS, TILE_STEPS = 4, 256, 32
"""Tokens and numbers of each token that the backward pass of a program of `activated` computes at a time, and how many
times."""
BLOCK = 2048
"""Numbers that a program of the forward pass of `activated` computes. All these were chosen among sizes tried on an H200."""


def added(
    found_NH: Tensor,
    bias_H: Tensor,
    given_NH: Tensor,
    weight_H: Tensor,
    shift_H: Tensor,
    epsilon: float,
    dropout: float,
) -> Tensor:
    """LayerNorm(dropout(found + bias) + given) -> [N, H] in the type of `found`."""
    result: Tensor = _Added.apply(found_NH, bias_H, given_NH, weight_H, shift_H, epsilon, dropout)
    return result


def activated(found_NF: Tensor, bias_F: Tensor, tanh: bool) -> Tensor:
    """GELU(found + bias) -> [N, F] in the type of `found`; `tanh`: by its approximation with tanh."""
    result: Tensor = _Activated.apply(found_NF, bias_F, tanh)
    return result


def are_right(added: Callable[..., Tensor], activated: Callable[..., Tensor], device: torch.device) -> bool:
    """Whether two functions give on this device, in bf16, what torch gives on a CPU in float32, and the same gradients."""

    def plain_added(
        found: Tensor,
        bias: Tensor,
        given: Tensor,
        weight: Tensor,
        shift: Tensor,
        epsilon: float,
        dropout: float,
    ) -> Tensor:
        return F.layer_norm(F.dropout(found + bias, dropout) + given, bias.shape, weight, shift, epsilon)

    def plain_activated(found: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        return F.gelu(found + bias, approximate="tanh" if tanh else "none")

    def results(
        added: Callable[..., Tensor], activated: Callable[..., Tensor], given: list[Tensor]
    ) -> list[Tensor]:
        state, *others = leaves = [part.requires_grad_() for part in given]
        for tanh in (False, True):
            state = added(activated(state, others[0], tanh), *others, 1e-5, 0.0)
        return [state, *torch.autograd.grad(state.float().square().sum(), leaves)]

    def same(part: Tensor) -> Tensor:
        return part

    # The call can come from a forward pass that is recorded to be computed again, whose hooks must not see these tensors.
    hooks = torch.autograd.graph.saved_tensors_hooks(same, same)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        draw = torch.Generator().manual_seed(0)
        rows = [torch.randn(9, 24, generator=draw) for _ in range(2)]
        bias, weight, shift = torch.randn(3, 24, generator=draw)
        given = [rows[0], bias, rows[1], weight, shift]
        there = [
            part.detach().to(device, torch.bfloat16 if part.dim() == 2 else torch.float32) for part in given
        ]
        try:
            made = results(added, activated, there)
        except Exception as error:  # each version of Triton raises other exceptions
            _log.warning("layers on %s are slower without fused kernels: %s", device, first_line(error))
            return False
        wanted = results(plain_added, plain_activated, [part.detach().clone() for part in given])
        pairs = zip(made, wanted, strict=True)
        right = all((one.float().cpu() - other).norm() <= 0.05 * other.norm() for one, other in pairs)
    if not right:
        _log.warning("layers on %s are slower without fused kernels, which give wrong numbers", device)
    return right


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, found_NH: Tensor, bias_H: Tensor, given_NH: Tensor, weight_H: Tensor, shift_H: Tensor, epsilon: float,
        dropout: float,
    ) -> Tensor:  # fmt: skip
        found_NH, given_NH, (count, width) = found_NH.contiguous(), given_NH.contiguous(), found_NH.shape
        result_NH, total_NH = torch.empty_like(found_NH), torch.empty_like(found_NH)
        mean_N, scale_N = found_NH.new_empty(2, count, dtype=torch.float32)
        ctx.dropout = dropout, new_seed() % 2**31 if dropout else 0
        if count:
            with current_device(found_NH):
                _added_kernel[(triton.cdiv(count, ROWS),)](
                    found_NH, bias_H, given_NH, weight_H, shift_H, result_NH, total_NH, mean_N, scale_N, count, epsilon,
                    *_drawing(ctx.dropout), H=width, WIDTH=triton.next_power_of_2(width), ROWS=ROWS, num_warps=4,
                )  # fmt: skip
        ctx.save_for_backward(total_NH, weight_H, mean_N, scale_N)
        return result_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_NH = gradients[0].contiguous()
        total_NH, weight_H, mean_N, scale_N = ctx.saved_tensors
        count, width = gradient_NH.shape
        found_NH, given_NH = torch.empty_like(gradient_NH), torch.empty_like(gradient_NH)
        programs = triton.cdiv(count, STEPS)
        sums_P3H = weight_H.new_empty(programs, 3, width)
        if count:
            with current_device(gradient_NH):
                _added_backward_kernel[(programs,)](
                    gradient_NH, total_NH, weight_H, mean_N, scale_N, found_NH, given_NH, sums_P3H, count,
                    *_drawing(ctx.dropout),
                    H=width, WIDTH=triton.next_power_of_2(width), STEPS=STEPS, STAGES=STAGES, num_warps=4,
                )  # fmt: skip
        bias_H, weight_H, shift_H = sums_P3H.sum(dim=0)
        return found_NH, bias_H, given_NH, weight_H, shift_H, None, None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found_NF: Tensor, bias_F: Tensor, tanh: bool) -> Tensor:
        ctx.tanh, found_NF = tanh, found_NF.contiguous()
        result_NF = torch.empty_like(found_NF)
        if found_NF.numel():
            with current_device(found_NF):
                _activated_kernel[(triton.cdiv(found_NF.numel(), BLOCK),)](
                    found_NF,
                    bias_F,
                    result_NF,
                    found_NF.numel(),
                    F=found_NF.shape[1],
                    BLOCK=BLOCK,
                    TANH=tanh,
                    num_warps=4,
                )
        ctx.save_for_backward(found_NF, bias_F)
        return result_NF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        found_NF, bias_F = ctx.saved_tensors
        gradient_NF, result_NF = gradients[0].contiguous(), torch.empty_like(found_NF)
        count, width = found_NF.shape
        programs = triton.cdiv(count, TILE_ROWS * TILE_STEPS)
        sums_PF = found_NF.new_empty(programs, width, dtype=torch.float32)
        if count:
            with current_device(found_NF):
                _activated_backward_kernel[(programs, triton.cdiv(width, TILE_COLUMNS))](
                    gradient_NF, found_NF, bias_F, result_NF, sums_PF, count,
                    F=width, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, STEPS=TILE_STEPS, TANH=ctx.tanh, num_warps=4,
                )  # fmt: skip
        return result_NF, sums_PF.sum(dim=0), None


def _drawing(dropout: tuple[float, int]) -> tuple[int, int, float]:
    """The seed of the draws, the number that draws of kept numbers reach, and the factor of kept numbers."""
    probability, seed = dropout
    return seed, round(probability * 2**31), 1 / (1 - probability)


@triton.jit
def _kept(place, seed, least):  # type: ignore[no-untyped-def]
    """Whether dropout keeps the number at a place. Forward and backward pass draw the same, so no mask is stored.

    A draw is a hash of place and seed: a multiplication by the golden ratio, and the finalizer of splitmix32.
    """
    drawn = (place.to(tl.uint32) * 0x9E3779B1) ^ seed.to(tl.uint32)
    drawn = (drawn ^ (drawn >> 16)) * 0x21F0AAAD
    drawn = (drawn ^ (drawn >> 15)) * 0x735A2D97
    return ((drawn ^ (drawn >> 15)) >> 1).to(tl.int32) >= least


@triton.jit(do_not_specialize=["N", "seed", "least"])
def _added_kernel(  # type: ignore[no-untyped-def]
    found, bias, given, weight, shift, result, total, mean, scale, N, epsilon, seed, least, factor, H: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program p computes the rows from p * ROWS on."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, WIDTH)
    place = n.to(tl.int64)[:, None] * H + h[None]
    inside = (n < N)[:, None] & (h < H)[None]
    total_nh = tl.load(found + place, mask=inside, other=0.0).to(tl.float32)
    total_nh += tl.load(bias + h, mask=h < H, other=0.0)[None]
    total_nh = tl.where(_kept(place, seed, least), total_nh * factor, 0.0)
    total_nh += tl.load(given + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + place, total_nh, mask=inside)
    mean_n = tl.sum(total_nh, axis=1) / H
    centred_nh = tl.where(inside, total_nh - mean_n[:, None], 0.0)
    scale_n = tl.rsqrt(tl.sum(centred_nh * centred_nh, axis=1) / H + epsilon)
    tl.store(mean + n, mean_n, mask=n < N)
    tl.store(scale + n, scale_n, mask=n < N)
    weight_h = tl.load(weight + h, mask=h < H, other=0.0)
    shift_h = tl.load(shift + h, mask=h < H, other=0.0)
    tl.store(result + place, centred_nh * scale_n[:, None] * weight_h[None] + shift_h[None], mask=inside)


@triton.jit(do_not_specialize=["N", "seed", "least"])
def _added_backward_kernel(  # type: ignore[no-untyped-def]
    gradient, total, weight, mean, scale, found, given, sums, N, seed, least, factor, H: tl.constexpr,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p computes the rows from p * STEPS on, and the sums over these rows: of the gradients of the linear layer (for
    its bias), of the weight and of the shift."""
    h = tl.arange(0, WIDTH)
    weight_h = tl.load(weight + h, mask=h < H, other=0.0)
    bias_h = tl.zeros((WIDTH,), tl.float32)
    weight_sum_h, shift_sum_h = bias_h, bias_h
    for step in tl.range(STEPS, num_stages=STAGES):
        n = (tl.program_id(0) * STEPS + step).to(tl.int64)
        inside = (n < N) & (h < H)
        gradient_h = tl.load(gradient + n * H + h, mask=inside, other=0.0).to(tl.float32)
        total_h = tl.load(total + n * H + h, mask=inside, other=0.0).to(tl.float32)
        row_mean = tl.load(mean + n, mask=n < N, other=0.0)
        row_scale = tl.load(scale + n, mask=n < N, other=0.0)
        normed_h = tl.where(inside, (total_h - row_mean) * row_scale, 0.0)
        weight_sum_h += gradient_h * normed_h
        shift_sum_h += gradient_h
        gradient_h *= weight_h
        along, mean_gradient = tl.sum(gradient_h * normed_h) / H, tl.sum(gradient_h) / H
        gradient_h = tl.where(inside, (gradient_h - normed_h * along - mean_gradient) * row_scale, 0.0)
        tl.store(given + n * H + h, gradient_h, mask=inside)
        gradient_h = tl.where(_kept(n * H + h, seed, least), gradient_h * factor, 0.0)
        tl.store(found + n * H + h, gradient_h, mask=inside)
        bias_h += gradient_h
    place_h = sums + tl.program_id(0) * 3 * H + h
    tl.store(place_h, bias_h, mask=h < H)
    tl.store(place_h + H, weight_sum_h, mask=h < H)
    tl.store(place_h + 2 * H, shift_sum_h, mask=h < H)


@triton.jit
def _gelu(value, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The share of a value that GELU keeps, and its derivative; `TANH`: of the approximation by tanh, which some models use.

    The normal distribution is the approximation 7.1.26 of Abramowitz and Stegun (Handbook of Mathematical Functions), with an
    error below 1e-7: the function erf of a GPU would take longer than the memory needs for the numbers.
    """
    if TANH:
        share = 1 / (
            1 + tl.exp(-1.5957691216057308 * (value + 0.044715 * value * value * value))
        )  # 2 sqrt(2 / pi)
        slope = share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * value * value)
    else:
        bell = tl.exp(-0.5 * value * value)
        t = 1 / (1 + 0.2316418882663604 * tl.abs(value))  # 0.3275911 / sqrt(2)
        polynomial = (
            (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
        ) * t
        above = 0.5 * polynomial * bell
        share = tl.where(value > 0, 1 - above, above)
        slope = 0.3989422804014327 * bell  # 1 / sqrt(2 pi)
    return share, slope


@triton.jit
def _activated_kernel(  # type: ignore[no-untyped-def]
    found, bias, result, COUNT, F: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr
):  # fmt: skip
    """Program p computes the numbers from p * BLOCK on."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    f = ((first % F).to(tl.int32) + tl.arange(0, BLOCK)) % F
    value = tl.load(found + place, mask=place < COUNT, other=0.0).to(tl.float32) + tl.load(bias + f)
    share, _ = _gelu(value, TANH)
    tl.store(result + place, value * share, mask=place < COUNT)


@triton.jit(do_not_specialize=["N"])
def _activated_backward_kernel(  # type: ignore[no-untyped-def]
    gradient, found, bias, result, sums, N, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Program (p, c) computes the rows from p * ROWS * STEPS on, in the columns from c * COLUMNS on, and the sums over them."""
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias_f = tl.load(bias + f, mask=f < F, other=0.0)
    sums_nf = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        n = ((tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (n < N)[:, None] & (f < F)[None]
        place = n[:, None] * F + f[None]
        gradient_nf = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        value_nf = tl.load(found + place, mask=inside, other=0.0).to(tl.float32) + bias_f[None]
        share_nf, slope_nf = _gelu(value_nf, TANH)
        gradient_nf *= share_nf + value_nf * slope_nf
        tl.store(result + place, gradient_nf, mask=inside)
        sums_nf += gradient_nf
    tl.store(sums + tl.program_id(0) * F + f, tl.sum(sums_nf, axis=0), mask=f < F)
