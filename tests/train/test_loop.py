"""The edges of a training run: its schedule and optimizer against plain formulas, interruption, and what it refuses."""

import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.errors import AlreadyDone, RealmError
from realm.model import device
from realm.model.folder import Model, load_model
from realm.settings import config_from
from realm.train import loop
from realm.train.loop import TrainRun
from realm.train.run_config import RunConfig, generator
from tests.damages import damage, full_disk_at

DATA = torch.from_numpy(np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32))


def config(**values) -> RunConfig:
    defaults = {
        "steps": 12,
        "warmup": 3,
        "log_every": 3,
        "device": "cpu",
        "precision": "fp32",
        "dropout": 0.3,
    }
    return RunConfig(**{**defaults, **values})


def train(
    model, out: Path, settings: RunConfig, before_update=lambda run: None, after_update=lambda run: None
) -> Path:
    """A stage in small: random rows by step, dropout, and something of its own to remember."""
    part = model.embedder.query
    with TrainRun("toy", out, settings, model, {part: 0.05}, {"data": "rows"}) as run:
        for step in run.steps():
            rows = DATA[torch.from_numpy(generator(settings.seed, step).permutation(200)[:4])]
            loss = (part.encoder.embeddings.dropout(part.projection(rows)) ** 2).mean()
            before_update(run)
            run.update(loss, {"retrieval_utility": float(step)})
            run.state["total"] = run.state.get("total", 0.0) + loss.item()
            if run.step % 4 == 0:
                run.log({"total": run.state["total"]})
            after_update(run)
        return run.finish()


def lines(out: Path) -> list[dict]:
    """metrics.jsonl without its clock."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder).embedder.query.state_dict()


def assert_same_result(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    mine, theirs = weights(one), weights(other)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def at(step: int, do):
    """Does something once, when `step` steps are done."""
    return lambda run: do() if run.step == step else None


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crash() -> None:
    raise RuntimeError("power cut")


# -- schedule and optimizer


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
    """AdamW as Loshchilov and Hutter write it, in float64; with `bias_correction` off, without the two divisions."""
    values = {name: value.astype(np.float64) for name, value in start.items()}
    first, second = ({name: np.zeros_like(value) for name, value in values.items()} for _ in range(2))
    for step in range(steps):
        found = gradient(values)
        norm = math.sqrt(sum((g**2).sum() for g in found.values()))
        now = rate * (1 - step / settings.steps)
        for name, value in values.items():
            g = found[name] * min(1.0, settings.clip / norm)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g**2
            m, v = first[name], second[name]
            if settings.bias_correction:
                m, v = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
            decay = settings.weight_decay * value if value.ndim > 1 else 0.0
            values[name] = value - now * (m / (np.sqrt(v) + 1e-6) + decay)
    return values


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-6], ids=["usual gradients", "gradients near epsilon"])
def test_optimizer_is_textbook_adamw_with_and_without_bias_correction(
    tiny_model, tmp_path, bias_correction, size
) -> None:
    settings = config(steps=40, warmup=0, bias_correction=bias_correction, weight_decay=0.1, clip=0.5)
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
    tiny_model, tmp_path, bias_correction
) -> None:
    """A gate holds one part back for 7 steps, its momentum is dropped after 13, one weight of it has no gradient till 20."""
    settings = config(
        steps=30, warmup=0, decay=False, bias_correction=bias_correction, weight_decay=0.1, clip=1e9
    )
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


def test_run_without_bias_correction_goes_on_from_an_earlier_versions_checkpoint(
    tiny_model_folder, tmp_path
) -> None:
    """Those counted each parameter's steps from 0."""
    settings = config(bias_correction=False)
    train(load_model(tiny_model_folder), tmp_path / "plain", settings)
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), tmp_path / "out", settings, before_update=at(5, stop))
    (file,) = (tmp_path / "out.training").glob("checkpoint-*.pt")
    saved = torch.load(file, weights_only=True)
    for state in saved["optimizer"]["state"].values():
        state["step"].fill_(6)
    for group in saved["optimizer"]["param_groups"]:
        group["eps"], group["weight_decay"] = 1e-5, 1.0
    torch.save(saved, file)
    train(load_model(tiny_model_folder), tmp_path / "out", settings)
    assert_same_result(tmp_path / "out", tmp_path / "plain")


def test_two_parts_have_their_own_rates_and_one_can_be_slowed_or_stopped(tiny_model, tmp_path) -> None:
    fast, slow = tiny_model.embedder.query.projection, tiny_model.reader
    settings = config(warmup=0, decay=False, weight_decay=0.1)
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
    with TrainRun(
        "toy", tmp_path / "out", config(warmup=0, decay=False, weight_decay=0.0), tiny_model, {part: 0.01}
    ) as run:
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


# -- interruption


@pytest.fixture(scope="module")
def plain(tiny_model_folder, tmp_path_factory) -> Path:
    """What an uninterrupted run gives."""
    return train(load_model(tiny_model_folder), tmp_path_factory.mktemp("plain") / "out", config())


@pytest.mark.parametrize("step", [1, 3, 5, 12])
def test_run_stopped_by_a_signal_goes_on_as_if_nothing_had_happened(
    tiny_model_folder, tmp_path, plain, step
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, config(), before_update=at(step - 1, stop))
    assert not out.exists() and (tmp_path / "out.training").is_dir()
    train(load_model(tiny_model_folder), out, config())
    assert_same_result(out, plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("step", [3, 7])
def test_run_that_crashed_goes_on_from_its_checkpoint(tiny_model_folder, tmp_path, plain, step) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    for moment in ("after_update", "before_update"):
        with pytest.raises(RuntimeError):
            train(load_model(tiny_model_folder), out, settings, **{moment: at(step, crash)})
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def test_run_stopped_again_before_its_first_line_keeps_its_metrics_clean(
    tiny_model_folder, tmp_path, plain
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):  # lines after the checkpoint of step 6 are written and lost
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, settings, before_update=at(6, stop))
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def test_second_signal_does_not_wait(tiny_model, tmp_path) -> None:
    def twice() -> None:
        stop()
        stop()

    with pytest.raises(KeyboardInterrupt):
        train(tiny_model, tmp_path / "out", config(), before_update=at(0, twice))


def test_a_run_keeps_the_memory_it_frees(tiny_model, tmp_path, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: asked.append(1))
    TrainRun("toy", tmp_path / "out", config(), tiny_model, {tiny_model.reader: 1.0})
    assert asked == [1]


def test_signal_handlers_are_given_back(tiny_model, tmp_path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    train(tiny_model, tmp_path / "out", config())
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


class PowerCut(BaseException):
    """Nobody catches it."""


def test_checkpoint_that_dies_while_written_leaves_the_old_one(
    tiny_model_folder, tmp_path, plain, monkeypatch
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    save = torch.save

    def die(states, file) -> None:
        save(states, file)
        if states["step"] == 6:
            file.truncate(1000)
            raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", die)
        with pytest.raises(PowerCut):
            train(load_model(tiny_model_folder), out, settings)
    assert (tmp_path / "out.training" / "checkpoint-00000006.pt.writing").stat().st_size == 1000
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def checkpoints(out: Path) -> list[str]:
    return sorted(file.name for file in out.with_name(out.name + ".training").glob("checkpoint-*"))


def test_last_checkpoints_are_kept_and_remember_their_state(tiny_model, tmp_path) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    part = tiny_model.embedder.query.projection
    seen = []
    with TrainRun("toy", out, settings, tiny_model, {part: 0.1}) as run:
        run.after_checkpoint = lambda: seen.append((run.step, run.checkpointed("mark")))
        for step in run.steps():
            run.state["mark"] = step + 1
            run.update(part(DATA).square().mean(), {})
    assert seen == [(3, [3]), (6, [3, 6]), (9, [6, 9]), (12, [9, 12])]
    assert checkpoints(out) == ["checkpoint-00000009.pt", "checkpoint-00000012.pt"]


def test_damaged_checkpoint_is_passed_over_for_the_one_before_it(
    tiny_model_folder, tmp_path, plain, capsys
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    newest = tmp_path / "out.training" / "checkpoint-00000006.pt"
    os.truncate(newest, newest.stat().st_size // 2)
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)
    said = capsys.readouterr().err
    assert f"{newest} cannot be read" in said and "going on from checkpoint-00000003.pt" in said


def flip_in_the_middle(file: Path) -> None:
    """One bit among the numbers of a tensor, which torch does not notice."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    torch.load(file, weights_only=True)


def test_checkpoint_with_a_flipped_bit_is_passed_over(tiny_model_folder, tmp_path, plain, capsys) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    flip_in_the_middle(tmp_path / "out.training" / "checkpoint-00000006.pt")
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)
    assert "checksum says; going on from checkpoint-00000003.pt" in capsys.readouterr().err


def test_checkpoint_under_the_name_of_another_is_passed_over(
    tiny_model_folder, tmp_path, plain, capsys
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    folder = tmp_path / "out.training"
    shutil.copy(folder / "checkpoint-00000003.pt", folder / "checkpoint-00000006.pt")
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)
    assert "it is of step 3; going on from checkpoint-00000003.pt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [None, b"", b"[1]", b"{", b"\xff\xfe", b'{"seed": "\\ud800"}', b"[" * 100_000]
)
def test_run_whose_settings_are_damaged_says_so_and_keeps_its_checkpoints(
    tiny_model_folder, tmp_path, plain, content
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    file = tmp_path / "out.training" / "settings.json"
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RealmError, match=r"settings\.json cannot be read .*put the file back") as error:
        train(load_model(tiny_model_folder), out, settings)
    assert "\n" not in str(error.value)
    file.write_bytes(before)
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def damaged_runs_go_on_as_before_or_not_at_all(model: Path, tmp_path: Path, count: int, seed: int) -> None:
    """Damages of an interrupted run's folder; its metrics are its own account, and nothing is computed from them."""
    settings = config(checkpoint_seconds=0.0)
    before, plain = tmp_path / "before", tmp_path / "plain"
    with pytest.raises(RuntimeError):
        train(load_model(model), before, settings, after_update=at(8, crash))
    train(load_model(model), plain, settings)
    draw, out, went_on = random.Random(seed), tmp_path / "out", 0
    for number in range(count):
        folder = shutil.copytree(tmp_path / "before.training", tmp_path / "out.training")
        what = damage(draw, sorted(path for path in folder.iterdir() if path.name != "lock"))
        try:
            train(load_model(model), out, settings)
        except RealmError as error:
            said = str(error)
            shutil.rmtree(folder)
        else:
            said, mine = "", load_model(out)
            for name, part in load_model(plain).parts().items():
                for key, value in part.state_dict().items():
                    same = torch.equal(mine.parts()[name].state_dict()[key], value)
                    assert same, f"seed {seed}, damage {number}: {what}"
            shutil.rmtree(out)
            went_on += 1
        assert "\n" not in said
    assert count // 4 < went_on < count


def test_a_damaged_run_goes_on_as_before_or_not_at_all(tiny_model_folder, tmp_path) -> None:
    damaged_runs_go_on_as_before_or_not_at_all(tiny_model_folder, tmp_path, 6, 3)


@pytest.mark.slow
def test_many_damaged_runs_go_on_as_before_or_not_at_all(tiny_model_folder, tmp_path, trials) -> None:
    damaged_runs_go_on_as_before_or_not_at_all(tiny_model_folder, tmp_path, trials.count(200), trials.seed)


def test_metrics_that_lost_their_end_are_said_and_not_filled_up(tiny_model_folder, tmp_path, capsys) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    os.truncate(tmp_path / "out.training" / "metrics.jsonl", 0)
    train(load_model(tiny_model_folder), out, settings)
    assert [line["step"] for line in lines(out)] == [8, 9, 12, 12]
    assert "has lost its end" in capsys.readouterr().err


def test_run_whose_checkpoints_are_all_damaged_says_so(tiny_model_folder, tmp_path) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    for name in checkpoints(out):
        (tmp_path / "out.training" / name).write_bytes(b"torn")
    with pytest.raises(RealmError, match=r"cannot be read.*remove .*out\.training to start anew") as error:
        train(load_model(tiny_model_folder), out, settings)
    assert "\n" not in str(error.value)


def test_run_killed_while_it_tidied_up_is_complete(tiny_model_folder, tmp_path, monkeypatch, plain) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(loop.shutil, "rmtree", lambda folder, **_: folder.suffix != ".training" or crash())
        with pytest.raises(RuntimeError):
            train(load_model(tiny_model_folder), out, config())
    assert out.exists() and (tmp_path / "out.training").exists()
    with pytest.raises(RealmError, match="exists: name another --out"):  # another run's command
        train(load_model(tiny_model_folder), out, config(seed=1))
    with pytest.raises(AlreadyDone, match="is complete"):
        train(load_model(tiny_model_folder), out, config())
    assert_same_result(out, plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


# -- a full disk


def limited_to(size: int):
    """No file may grow beyond this; Python gets EFBIG, as it would get ENOSPC from a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_checkpoint_that_does_not_fit_is_one_line_and_loses_nothing_earlier(
    tiny_model_folder, tmp_path, plain
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(run) -> None:
        size = (run.folder / "checkpoint-00000003.pt").stat().st_size
        limited_to(size // 2)

    try:
        with pytest.raises(
            RealmError, match=r"checkpoint-00000006\.pt cannot be written: File too large"
        ) as error:
            train(
                load_model(tiny_model_folder), out, settings, before_update=lambda r: r.step == 4 and fill(r)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value) and "checkpoint-00000003.pt stays" in str(error.value)
    assert checkpoints(out) == ["checkpoint-00000003.pt"]
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def test_model_that_does_not_fit_is_one_line_and_the_run_stays(tiny_model_folder, tmp_path, plain) -> None:
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(RealmError, match="out cannot be written: ") as error:
            train(
                load_model(tiny_model_folder), out, config(), after_update=at(12, lambda: limited_to(20_000))
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.training"]
    train(load_model(tiny_model_folder), out, config())
    assert_same_result(out, plain)


def test_metrics_that_do_not_fit_are_one_line_and_lose_nothing_earlier(
    tiny_model_folder, tmp_path, plain
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(run) -> None:
        limited_to((run.folder / "metrics.jsonl").stat().st_size + 5)

    try:
        with pytest.raises(RealmError, match=r"metrics\.jsonl cannot be written: File too large") as error:
            train(
                load_model(tiny_model_folder), out, settings, before_update=lambda r: r.step == 4 and fill(r)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value) and "checkpoint-00000003.pt stays" in str(error.value)
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


@pytest.mark.slow
def test_a_full_disk_at_any_step_of_a_run_is_one_line_and_the_run_goes_on(
    tiny_model_folder, tmp_path, plain, monkeypatch
) -> None:
    settings = config(checkpoint_seconds=0.0)
    for number in itertools.count():
        out, model = tmp_path / f"out{number}", load_model(tiny_model_folder)
        try:
            with full_disk_at(number, monkeypatch) as steps:
                train(model, out, settings)
        except (RealmError, OSError) as error:  # the command line makes one line of both
            said = str(error)
        else:
            break
        assert "No space left on device" in said and "\n" not in said, steps
        assert not out.exists(), steps
        train(load_model(tiny_model_folder), out, settings)
        assert_same_result(out, plain)
        shutil.rmtree(out)
        assert not list(tmp_path.iterdir()), steps
    assert number > 40


@pytest.mark.slow
def test_full_disk_is_one_line_of_the_command_and_the_run_goes_on_when_there_is_room(
    tiny_kb, tiny_model_folder, tmp_path
) -> None:
    """A real small file system, where the system lets an ordinary user mount one."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this system mounts nothing for an ordinary user")
    sets = "steps=30 batch_size=4 log_every=1 checkpoint_seconds=0 device=cpu refresh.every=10".split()
    command = (
        f"{sys.executable} -m realm pretrain --kb {tiny_kb.folder} --model {tiny_model_folder} --config tiny"
    )
    command += "".join(f" --set {one}" for one in sets) + f" --out {tmp_path}/disk/out"
    (tmp_path / "disk").mkdir()
    script = f"""
        cd {tmp_path}; mount -t tmpfs -o size=30m none disk || exit 99
        (until ls disk/out.training/checkpoint-*.pt; do sleep 0.05; done; dd if=/dev/zero of=disk/filler) 2> /dev/null &
        {command}; echo "first $?" >&2; ls disk/out.training >&2; kill %1; rm -f disk/filler
        {command}; echo "second $?" >&2; ls disk >&2
    """
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    said = ran.stderr
    assert "first 2" in said and "second 0" in said, said
    assert "No space left on device" in said and "Traceback" not in said
    assert len([line for line in said.splitlines() if line.startswith("realm:")]) == 1
    assert "checkpoint-" in said.split("first 2")[1].split("second 0")[0]
    assert said.split("second 0")[1].split() == ["out"]


# -- what a run refuses


def test_folder_of_a_run_that_lives_is_refused(tiny_model, tiny_model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "LOCK_PATIENCE", 0.2)
    parts = {tiny_model.embedder.query: 0.1}
    with (
        TrainRun("toy", tmp_path / "out", config(), tiny_model, parts),
        pytest.raises(RealmError, match="is in use by another run"),
    ):
        TrainRun("toy", tmp_path / "out", config(), tiny_model, parts)
    TrainRun("toy", tmp_path / "out", config(), tiny_model, parts).__exit__()


def test_run_that_saves_what_it_made_is_not_gone_on_with(tiny_model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "LOCK_PATIENCE", 0.2)
    save, refused = Model.save, []

    def while_saving(*args, **named) -> None:
        with pytest.raises(RealmError, match="is in use by another run"):
            train(load_model(tiny_model_folder), tmp_path / "out", config())
        refused.append(True)
        save(*args, **named)

    monkeypatch.setattr(Model, "save", while_saving)
    train(load_model(tiny_model_folder), tmp_path / "out", config())
    assert refused == [True]


@pytest.mark.parametrize(("complete", "message"), [(True, "exists: name another"), (False, "was removed")])
def test_run_that_waited_for_one_that_took_its_folder_away_does_not_start_in_nothing(
    complete, message, tiny_model, tmp_path, monkeypatch
) -> None:
    take_lock = TrainRun._take_lock

    def after_the_other_has_ended(run: TrainRun) -> None:
        shutil.rmtree(run.folder)
        if complete:
            run.out.mkdir()
        take_lock(run)

    monkeypatch.setattr(TrainRun, "_take_lock", after_the_other_has_ended)
    with pytest.raises(RealmError, match=message):
        TrainRun("toy", tmp_path / "out", config(), tiny_model, {tiny_model.embedder.query: 0.1})
    assert not (tmp_path / "out.training").exists()


def test_run_does_not_go_on_in_another_precision(tiny_model_folder, tmp_path, monkeypatch) -> None:
    """As on a machine where "auto" means another one."""
    out, given = tmp_path / "out", config(precision="auto")
    monkeypatch.setattr(device, "multiplies_bf16", lambda kind: False)
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, given, before_update=at(4, stop))
    monkeypatch.setattr(device, "multiplies_bf16", lambda kind: True)
    with pytest.raises(RealmError, match=r"other settings \(precision\)"):
        train(load_model(tiny_model_folder), out, given)
    train(load_model(tiny_model_folder), out, config(precision="fp32"))
    assert json.loads((out / "realm.json").read_text())["stages"][-1]["precision"] == "fp32"


def test_run_of_a_version_that_knew_fewer_settings_goes_on_with_their_defaults(
    tiny_model_folder, tmp_path
) -> None:
    out, file = tmp_path / "out", tmp_path / "out.training" / "settings.json"
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, config(clip=2.0), before_update=at(4, stop))
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in saved.items() if k not in ("clip", "data")}))
    with pytest.raises(RealmError, match=r"other settings \(clip\)"):
        train(load_model(tiny_model_folder), out, config(clip=2.0))
    file.write_text(json.dumps({k: v for k, v in saved.items() if k not in ("cached_rows", "data")}))
    train(load_model(tiny_model_folder), out, config(clip=2.0))


def test_run_with_other_settings_does_not_go_on(tiny_model_folder, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, config(), before_update=at(4, stop))
    with pytest.raises(RealmError, match=r"other settings \(dropout, seed\)") as error:
        train(load_model(tiny_model_folder), out, config(seed=1, dropout=0.0))
    assert "\n" not in str(error.value)
    train(load_model(tiny_model_folder), out, config())


def test_existing_out_is_refused_and_left_alone(tiny_model, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(RealmError, match="exists: name another --out"):
        train(tiny_model, tmp_path / "out", config())
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_loss_that_is_no_number_is_one_line_and_changes_nothing(tiny_model, tmp_path) -> None:
    part = tiny_model.embedder.query.projection
    before = part.weight.detach().clone()
    with TrainRun("toy", tmp_path / "out", config(), tiny_model, {part: 0.1}) as run:
        next(run.steps())
        with pytest.raises(RealmError, match="loss is nan at step 0") as error:
            run.update(part(DATA).mean() * torch.nan, {})
    assert "\n" not in str(error.value)
    assert torch.equal(part.weight, before)


def test_gradient_that_is_no_number_is_one_line_and_changes_nothing(tiny_model, tmp_path) -> None:
    """A loss can be finite and its gradient not: sqrt(x) at 0."""
    part = tiny_model.embedder.query.projection
    before = part.weight.detach().clone()
    with TrainRun("toy", tmp_path / "out", config(), tiny_model, {part: 0.1}) as run:
        next(run.steps())
        with pytest.raises(RealmError, match=r"gradient is (nan|inf) at step 0"):
            run.update((part(DATA) * 0).square().sum().sqrt(), {})
    assert torch.equal(part.weight, before)


@pytest.mark.parametrize(
    "values",
    [
        {"steps": -1},
        {"batch_size": 0},
        {"log_every": 0},
        {"checkpoints": 0},
        {"seed": -1},
        {"seed": 2**40},
        {"cached_rows": -1},
        {"dropout": 1.0},
        {"dropout": -0.1},
    ],
)
def test_impossible_settings_are_one_line(values) -> None:
    with pytest.raises(RealmError, match=next(iter(values))) as error:
        config_from(RunConfig, values, "here")
    assert "\n" not in str(error.value)


# -- what a run leaves


def test_metrics_are_means_over_logged_steps_with_the_keys_of_the_contract(plain) -> None:
    rows = lines(plain)
    assert [row["step"] for row in rows] == [3, 4, 6, 8, 9, 12, 12]
    assert [row["retrieval_utility"] for row in rows if row["loss"] is not None] == [1.0, 4.0, 7.0, 10.0]
    assert all(
        {"step", "loss", "retrieval_utility", "null_probability", "index_age"} <= row.keys() for row in rows
    )
    seconds = [json.loads(line)["seconds"] for line in (plain / "metrics.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)


def test_the_last_line_of_a_stage_names_the_folder_of_the_model(tiny_model, tmp_path, capfd) -> None:
    train(tiny_model, tmp_path / "out", config())
    line = rf"toy: 12 steps in \d+:\d\d; the model is in {re.escape(str(tmp_path / 'out'))}\n"
    assert re.fullmatch(line, capfd.readouterr().err)


def test_progress_line_shows_what_a_build_cost_until_the_next_one(tiny_model, tmp_path) -> None:
    shown = []
    with TrainRun(
        "ict", tmp_path / "out", config(steps=4, log_every=2), tiny_model, {tiny_model.embedder: 1e-3}
    ) as run:
        for step in run.steps():
            if step == 1:
                run.log({"build_seconds": 12.345, "build_passages_per_second": 678.9, "index_step": 1})
            loss = sum(p.sum() for p in tiny_model.embedder.parameters())
            run.update(loss, {"index_age": float(step)})
            shown.append(getattr(run._bar, "postfix", None))
    assert shown[0] is None
    for line, age in ((shown[1], "0.5"), (shown[3], "2.5")):
        assert f"index_age={age}, build_seconds=12.3, build_passages_per_second=679" in line


def test_tensorboard_has_the_numbers_of_metrics_jsonl(tiny_model_folder, tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, settings = tmp_path / "out", config(tensorboard=True)
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, settings, before_update=at(5, stop))
    train(load_model(tiny_model_folder), out, settings)
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    seen = [(event.step, pytest.approx(event.value, rel=1e-4)) for event in events.Scalars("loss")]
    assert [(row["step"], row["loss"]) for row in lines(out) if row["loss"] is not None] == seen
    assert [event.step for event in events.Scalars("total")] == [4, 8, 12]


def test_finished_model_says_where_it_comes_from(tiny_model, tmp_path) -> None:
    tiny_model.stages = [{"stage": "mlm", "steps": 5}]
    train(tiny_model, tmp_path / "out", config())
    loaded = load_model(tmp_path / "out")
    assert loaded.step == 12
    assert [record["stage"] for record in loaded.stages] == ["mlm", "toy"]
    assert loaded.stages[1]["warmup"] == 3 and loaded.stages[1]["data"] == "rows"


def test_a_stage_that_is_repeated_keeps_both_records(tiny_model, tmp_path) -> None:
    train(tiny_model, tmp_path / "one", config(steps=2))
    train(load_model(tmp_path / "one"), tmp_path / "two", config(steps=3))
    stages = load_model(tmp_path / "two").stages
    assert [(record["stage"], record["steps"]) for record in stages] == [("toy", 2), ("toy", 3)]


def test_run_of_no_steps_saves_what_came_in(tiny_model, tiny_model_folder, tmp_path) -> None:
    train(tiny_model, tmp_path / "out", config(steps=0))
    before = load_model(tiny_model_folder).embedder.state_dict()
    assert all(
        torch.equal(v, before[k]) for k, v in load_model(tmp_path / "out").embedder.state_dict().items()
    )
    assert lines(tmp_path / "out") == []


def test_random_numbers_belong_to_their_key() -> None:
    assert generator(1, 2).random() == generator(1, 2).random()
    assert len({generator(*key).random() for key in [(1, 2), (2, 1), (1, 3), (1, 7, 2)]}) == 4
