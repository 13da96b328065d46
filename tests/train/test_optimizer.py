"""The schedule and the optimizer of a run, against plain formulas."""

import math

import numpy as np
import pytest
import torch

from realm.train import optimizer
from realm.train.loop import TrainRun
from realm.train.run_config import RunConfig
from tests.train.toy import DATA, config


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize(("steps", "warmup", "ramp"), [(1000, 50, 50), (1000, None, 100), (3000, None, 300)])
def test_rate_rises_linearly_then_falls_linearly_from_step_0(
    tiny_model, tmp_path, steps, warmup, ramp, decay
) -> None:
    run = TrainRun(
        "toy",
        tmp_path / "out",
        config(steps=steps, warmup=warmup, decay=decay),
        tiny_model,
        {tiny_model.reader: 1.0},
    )
    for step in range(steps):
        plain = (1 - step / steps if decay else 1.0) if step >= ramp else (step + 1) / (ramp + 1)
        assert math.isclose(run.optimizer.rate_factor(step), plain)


def adamw(
    settings: RunConfig, rate: float, steps: int, start: dict[str, np.ndarray], gradient
) -> dict[str, np.ndarray]:
    """AdamW as Loshchilov and Hutter write it, in float64, with weight decay 0.1 and largest norm 0.5.

    With `bias_correction` off, the two divisions are left out.
    """
    values = {name: value.astype(np.float64) for name, value in start.items()}
    first, second = ({name: np.zeros_like(value) for name, value in values.items()} for _ in range(2))
    for step in range(steps):
        found = gradient(values)
        norm = math.sqrt(sum((g**2).sum() for g in found.values()))
        now = rate * (1 - step / settings.steps)
        for name, value in values.items():
            g = found[name] * min(1.0, 0.5 / norm)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g**2
            m, v = first[name], second[name]
            if settings.bias_correction:
                m, v = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
            decay = 0.1 * value if value.ndim > 1 else 0.0
            values[name] = value - now * (m / (np.sqrt(v) + 1e-6) + decay)
    return values


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-6], ids=["usual gradients", "gradients near epsilon"])
def test_optimizer_is_textbook_adamw_with_and_without_bias_correction(
    tiny_model, tmp_path, monkeypatch, bias_correction, size
) -> None:
    monkeypatch.setattr(optimizer, "WEIGHT_DECAY", 0.1)
    monkeypatch.setattr(optimizer, "LARGEST_NORM", 0.5)
    settings = config(steps=40, warmup=0, bias_correction=bias_correction)
    part = tiny_model.embedder.query.projection
    rows, goal = DATA.numpy().astype(np.float64), 3.0
    start = {name: value.detach().numpy().copy() for name, value in part.named_parameters()}

    def gradient(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        error = rows @ values["weight"].T + values["bias"] - goal
        scale = 2 * size / error.size
        return {"weight": scale * error.T @ rows, "bias": scale * error.sum(axis=0)}

    expected = adamw(settings, 0.01, 40, start, gradient)
    with TrainRun("toy", tmp_path / "out", settings, tiny_model, {part: 0.01}) as run:
        for _ in run.steps():
            run.update(size * ((part(DATA) - goal) ** 2).mean(), {})
    moved = max(np.abs(expected[name] - start[name]).max() for name in start)
    for name, value in part.named_parameters():
        np.testing.assert_allclose(value.detach().numpy(), expected[name], atol=2e-4 * moved)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_parameters_that_start_late_or_anew_are_textbook_adamw_too(
    tiny_model, tmp_path, monkeypatch, bias_correction
) -> None:
    """A gate holds one part back for 7 steps, its momentum is dropped after 13, one weight of it has no gradient till 20."""
    monkeypatch.setattr(optimizer, "WEIGHT_DECAY", 0.1)
    monkeypatch.setattr(optimizer, "LARGEST_NORM", 1e9)
    settings = config(steps=30, warmup=0, decay=False, bias_correction=bias_correction)
    gated, free = tiny_model.embedder.query.projection, tiny_model.reader.bert.cls.predictions.transform.dense
    parts = {"gated.weight": gated.weight, "gated.bias": gated.bias, "free.weight": free.weight}
    values = {name: part.detach().double().numpy().copy() for name, part in parts.items()}
    begins = {"gated.weight": 7, "gated.bias": 20, "free.weight": 0}
    averages = dict.fromkeys(values, (0, 0.0, 0.0))
    generator = torch.Generator().manual_seed(0)
    with TrainRun("toy", tmp_path / "out", settings, tiny_model, {gated: 1e-2, free: 1e-3}) as run:
        for number in run.steps():
            if number == 13:
                run.optimizer.reset_averages(gated)
                averages |= {name: (0, 0.0, 0.0) for name in values if name.startswith("gated")}
            loss = torch.zeros((), requires_grad=True)
            for name, part in parts.items():
                if number >= begins[name]:
                    gradient = torch.randn(part.shape, generator=generator)
                    loss = loss + (part * gradient).sum()
                    steps, first, second = averages[name]
                    first = 0.9 * first + 0.1 * gradient.double().numpy()
                    second = 0.999 * second + 0.001 * gradient.double().numpy() ** 2
                    averages[name] = (steps := steps + 1), first, second
                    if bias_correction:
                        first, second = first / (1 - 0.9**steps), second / (1 - 0.999**steps)
                    rate = 1e-2 if name.startswith("gated") else 1e-3
                    decay = 0.1 * values[name] if values[name].ndim > 1 else 0.0
                    values[name] -= rate * (first / (np.sqrt(second) + 1e-6) + decay)
            run.update(loss, {})
            for name, part in parts.items():
                np.testing.assert_allclose(part.detach().numpy(), values[name], rtol=1e-4, atol=1e-5)


def test_two_parts_have_their_own_rates_and_one_can_be_slowed_or_stopped(tiny_model, tmp_path) -> None:
    fast, slow = tiny_model.embedder.query.projection, tiny_model.reader
    settings = config(warmup=0, decay=False)
    moved: list[tuple[float, float]] = []

    def step(run: TrainRun) -> None:
        parts = fast.weight, slow.bert.cls.predictions.transform.dense.weight
        before = [p.detach().clone() for p in parts]
        run.update(sum((p.sum() for p in parts), torch.zeros(())), {})
        moved.append(tuple((p - b).abs().mean().item() for p, b in zip(parts, before, strict=True)))

    with TrainRun("toy", tmp_path / "out", settings, tiny_model, {fast: 1e-2, slow: 1e-3}) as run:
        for number, _ in enumerate(run.steps()):
            if number == 4:
                run.optimizer.scale_rate(fast, 0.5)
            if number == 8:
                run.optimizer.scale_rate(fast, 0.0)
            step(run)
    fasts, slows = np.array(moved).T
    np.testing.assert_allclose(fasts[:4] / slows[:4], 10, rtol=0.1)
    np.testing.assert_allclose(fasts[4:8] / slows[4:8], 5, rtol=0.1)
    assert (fasts[8:] == 0).all() and (slows[8:] > 0).all()


def test_parts_whose_momentum_is_forgotten_start_anew(tiny_model, tmp_path) -> None:
    part = tiny_model.embedder.query.projection
    with TrainRun("toy", tmp_path / "out", config(warmup=0, decay=False), tiny_model, {part: 0.01}) as run:
        for step in run.steps():
            if step == 6:
                run.optimizer.reset_averages(part)
            before = part.bias.detach().clone()
            sign = 1.0 if step < 6 else -1.0
            run.update(sign * part.bias.sum(), {})
            if (
                step == 6
            ):  # Adam's first step is the rate itself, against the gradient; old averages would go on
                np.testing.assert_allclose((part.bias - before).detach().numpy(), 0.01, rtol=1e-3)
