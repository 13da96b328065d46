"""`TrainRun`: what every training stage needs and none should spell out.

It owns the device, mixed precision, the optimizer and its schedule, clipping, metrics, the progress bar, checkpoints and
resuming. A stage owns its data, its forward pass and its loss, and reads:

    with TrainRun("ict", out, config, model, rates) as run:
        for step in run.steps():
            loss = ...
            run.update(loss, {"accuracy": ...})
    run.finish(...)

Everything random in a step is drawn from (seed, step), so a checkpoint needs no generator states: weights, optimizer and
step number say it all, and a rerun of the same command goes on as if nothing had happened.
"""

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from realm.config import InputError, progress, write_json
from realm.model.device import autocast, choose_device
from realm.model.encoders import set_dropout
from realm.model.folder import Model, save_model

METRICS = "metrics.jsonl"
WATCHED = ("loss", "retrieval_utility", "null_probability", "index_age")
"""Keys of every line of metrics.jsonl, null where a stage or a line has none."""
BETAS, EPSILON = (0.9, 0.999), 1e-6
"""Of Adam, as BERT's released optimizer has them."""


@dataclass(frozen=True)
class RunConfig:
    """Settings that all stages share."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 16
    """Examples per step."""
    warmup: int | None = None
    """Steps of linear warm-up; none: a tenth of `steps`, at least 100, at most 10,000 (BERT's released rule)."""
    decay: bool = True
    """Linear decay to 0, measured from step 0 (BERT's released rule); False: constant after the warm-up."""
    weight_decay: float = 0.01
    """Decoupled, on matrices only: biases and norms are spared."""
    clip: float = 1.0
    """Largest global gradient norm."""
    bias_correction: bool = True
    """Adam's bias correction; the released optimizer leaves it out."""
    dropout: float = 0.1
    """Dropout of every network while it trains; 0 suits runs of a few hundred steps."""
    seed: int = 0
    """Everything random follows from it."""
    device: str = "auto"
    """"auto": a GPU when there is one, else the CPU; or any torch device."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of matrix products; weights, softmaxes and losses stay float32."""
    log_every: int = 10
    """Steps averaged into one line of metrics.jsonl."""
    checkpoint_seconds: float = 60.0
    """Least time between two checkpoints; they fall on logged steps."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("batch_size", 1), ("log_every", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be {least} or more")
        if self.seed >= 2**31:
            raise ValueError(f"seed is {self.seed}: it must be below {2**31}")


def generator(*key: int) -> np.random.Generator:
    """The random numbers that belong to a (seed, step, ...) key, whatever was drawn elsewhere."""
    return np.random.default_rng(key)


class TrainRun(AbstractContextManager["TrainRun"]):
    """One stage's run into the folder `out`, which appears when the run is complete; until then `out`.training holds it."""

    def __init__(
        self,
        stage: str,
        out: Path,
        config: RunConfig,
        model: Model,
        rates: Mapping[nn.Module, float],
        settings: Mapping[str, Any] | None = None,
    ):
        """`rates` maps each part that trains to its learning rate; `settings` joins the config in what must match on resume.

        Raises:
            InputError: `out` exists, or `out`.training holds a run with other settings.
        """
        if out.exists():
            raise InputError(f"{out} exists: name another --out, or remove it first")
        self.stage, self.out, self.config, self.model = stage, out, config, model
        self.folder = out.with_name(out.name + ".training")
        self.settings = {"stage": stage, **asdict(config), **(settings or {})}
        self.device = choose_device(config.device)
        model.to(self.device)
        for part in rates:
            set_dropout(part, config.dropout)
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(rates, config.weight_decay), betas=BETAS, fused=True
        )
        self._parts = list(rates)
        self.step = 0
        self.state: dict[str, Any] = {}
        """What a stage wants back after an interruption beside the weights; plain values and tensors."""
        self._sums: dict[str, list[float]] = {}
        self._stop_signal: int | None = None
        self._old_handlers: dict[int, Any] = {}
        self._open_folder()

    # -- the loop -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """The steps still to do; the parts that train are in training mode, dropout is seeded by (seed, step)."""
        self._checkpointed = time.monotonic()
        bar = progress(total=self.config.steps, description=self.stage, unit="step")
        bar.update(self.step)
        self._bar = bar
        with bar:
            while self.step < self.config.steps:
                for part in self._parts:
                    part.train()
                torch.manual_seed((self.config.seed << 32) + self.step)
                yield self.step
                bar.update(1)
                # Here and not in `update`: what a stage does after it, an evaluation or a new index, is then saved too.
                due = time.monotonic() - self._checkpointed > self.config.checkpoint_seconds
                if self._stop_signal is not None or (due and self.step % self.config.log_every == 0):
                    self._save_checkpoint()
                if self._stop_signal is not None:
                    raise KeyboardInterrupt

    def update(self, loss: Tensor, metrics: Mapping[str, float]) -> None:
        """One optimizer step on `loss`; `metrics` are averaged over `log_every` steps into metrics.jsonl.

        Raises:
            InputError: the loss or its gradient is not finite; the last checkpoint stays.
        """
        value = loss.item()
        self._check_finite("loss", value)
        loss.backward()
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, self.config.clip).item()
        self._check_finite("gradient", norm)
        self._set_rates()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        for name, number in {"loss": value, "gradient_norm": norm, **metrics}.items():
            self._sums.setdefault(name, []).append(float(number))
        if self.step % self.config.log_every == 0 or self.step == self.config.steps:
            self._log_means()

    def rate(self, step: int) -> float:
        """Multiplier of every learning rate at a step."""
        config = self.config
        warmup = config.warmup if config.warmup is not None else min(10_000, max(100, config.steps // 10))
        factor = 1 - step / config.steps if config.decay else 1.0
        if step < warmup:
            factor = (step + 1) / (warmup + 1)
        return factor

    def scale_rate(self, part: nn.Module, factor: float) -> None:
        """Multiplies the learning rate of one part from now on (a guard that found it too fast)."""
        mine = {id(p) for p in part.parameters()}
        for group in self.optimizer.param_groups:
            if id(group["params"][0]) in mine:
                group["scale"] *= factor

    def forget_momentum(self, part: nn.Module) -> None:
        """Drops the optimizer's averages of one part, after its weights were set back."""
        for parameter in part.parameters():
            self.optimizer.state.pop(parameter, None)

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.device, self.config.precision)

    def log(self, values: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl at the current step, now."""
        line = {"step": self.step, "seconds": self.seconds(), **dict.fromkeys(WATCHED), **values}
        line = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in line.items()}
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    def say(self, text: str) -> None:
        """One line to the person who watches."""
        self._bar.write(f"{self.stage}, step {self.step}: {text}", file=sys.stderr)

    def seconds(self) -> float:
        """Training time so far, earlier sittings included."""
        return self._seconds_before + time.monotonic() - self._started

    def finish(self) -> Path:
        """Saves the model as `out`, with its metrics, and removes the working folder."""
        self.model.step = self.step
        self.model.stages = {
            **self.model.stages,
            self.stage: {**self.settings, "seconds": round(self.seconds(), 1)},
        }
        for part in self._parts:
            part.eval()
        self._metrics.close()
        save_model(self.model, self.out, extra=[self.folder / METRICS])
        shutil.rmtree(self.folder)
        return self.out

    # -- edges ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "TrainRun":
        def note(number: int, frame: FrameType | None) -> None:
            if self._stop_signal is not None:  # a second Ctrl-C does not wait for the step to end
                raise KeyboardInterrupt
            self._stop_signal = number

        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._metrics.close()

    def _open_folder(self) -> None:
        settings_file, checkpoint = self.folder / "settings.json", self.folder / "checkpoint.pt"
        offset = 0
        self._seconds_before = 0.0
        self._started = time.monotonic()
        settings = json.loads(json.dumps(self.settings))
        if settings_file.exists():
            before = json.loads(settings_file.read_text(encoding="utf-8"))
            if before != settings:
                changed = sorted(
                    k for k in before.keys() | settings.keys() if before.get(k) != settings.get(k)
                )
                raise InputError(
                    f"{self.folder} holds an interrupted run with other settings ({', '.join(changed)}): "
                    "repeat its command to go on, or remove the folder to start anew"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(settings_file, settings)
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location=self.device, weights_only=True)
            for part, states in zip(self._parts, saved["parts"], strict=True):
                part.load_state_dict(states)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.state, self._sums = saved["step"], saved["state"], saved["sums"]
            offset = saved["metrics_offset"]
            self._seconds_before = saved["seconds"]
        self._metrics = (self.folder / METRICS).open("a", encoding="utf-8")
        self._metrics.truncate(offset)
        self._metrics.seek(0, os.SEEK_END)  # truncating leaves the place where it was

    def _log_means(self) -> None:
        means = {name: sum(values) / len(values) for name, values in self._sums.items()}
        self._sums = {}
        self.log(means)
        self._bar.set_postfix({k: f"{v:.3g}" for k, v in list(means.items())[:5] if k != "gradient_norm"})

    def _set_rates(self) -> None:
        """This step's learning rates; without bias correction, such that the optimizer's own cancels out."""
        first, second = (1 - beta ** (self.step + 1) for beta in BETAS)
        if self.config.bias_correction:
            first = second = 1.0
        undo = first / math.sqrt(second)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * group["scale"] * self.rate(self.step) * undo
            group["weight_decay"] = group["decay"] / undo
            group["eps"] = EPSILON / math.sqrt(second)

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise InputError(
                f"{what} is {value} at step {self.step}: lower the learning rate; {self.folder} holds the last checkpoint"
            )

    def _save_checkpoint(self) -> None:
        self._metrics.flush()
        aside = self.folder / "checkpoint.pt.writing"
        torch.save(
            {
                "parts": [part.state_dict() for part in self._parts],
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "state": self.state,
                "sums": self._sums,
                "metrics_offset": self._metrics.tell(),
                "seconds": self.seconds(),
            },
            aside,
        )
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(self.folder / "checkpoint.pt")
        self._checkpointed = time.monotonic()


def _parameter_groups(rates: Mapping[nn.Module, float], weight_decay: float) -> Sequence[dict[str, Any]]:
    """Two groups per part: matrices decay, vectors (biases, norms) do not."""
    groups = []
    for part, rate in rates.items():
        trained = [p for p in part.parameters() if p.requires_grad]
        for matrices in (True, False):
            parameters = [p for p in trained if (p.ndim > 1) == matrices]
            decay = weight_decay if matrices else 0.0
            if parameters:
                groups.append({"params": parameters, "base_lr": rate, "scale": 1.0, "decay": decay})
    return groups
