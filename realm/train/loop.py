"""`TrainRun`: what every training stage needs and none should spell out.

It owns the device, mixed precision, the optimizer and its schedule, clipping, metrics, the progress bar, checkpoints and
resuming. A stage owns its data, its forward pass and its loss, and reads:

    with TrainRun("ict", out, config, model, rates) as run:
        for step in run.steps():
            loss = ...
            run.update(loss, {"accuracy": ...})
    run.finish(...)

Everything random in a step is drawn from (seed, step), so a checkpoint needs no generator states: weights, optimizer and
step number say it all, and a rerun of the same command goes on as if nothing had happened. What a killed run wrote after
its last checkpoint is forgotten: metrics are cut off there, and so are index versions (`realm.train.refresh.refresher`).

    OUT.training/settings.json               what must match on resume
    OUT.training/checkpoint-00000120.pt      weights, optimizer, step, metrics offset, the stage's own state; the last few
    OUT.training/metrics.jsonl               cut back to the checkpoint's offset on resume
    OUT.training/tensorboard/                the same numbers, where asked for
    OUT.training/lock                        held while the run lives: two runs cannot share a folder
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from realm import distributed
from realm.errors import (
    AlreadyDone,
    ConflictError,
    DivergedError,
    InputError,
    RealmError,
    WriteFailed,
    reason,
    way_out,
)
from realm.files import read_json, sync_folder, write_json
from realm.model.device import Precision, autocast, choose_device, chosen, keep_freed_memory
from realm.model.folder import Model, is_model, read_manifest, save_model
from realm.model.modes import cache_rows, set_dropout
from realm.progress import duration, progress
from realm.store.knowledge_base import TrainingRecord

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
SHOWN = (
    "loss", "retrieval_utility", "index_age", "building", "build_seconds", "build_passages_per_second", "build_slowdown",
    "accuracy", "recall_read", "retriever_loss",
)  # fmt: skip
"""What the progress line shows of what was logged last, where a stage has it."""
CHECKPOINTS = 2
"""Newest checkpoints that stay on disk; a damaged checkpoint is skipped for the one before it."""
LOCK_PATIENCE = 10.0
"""Seconds that a run waits for another one to leave its folder: a killed one may take a moment to die."""
WATCHED = ("loss", "retrieval_utility", "null_probability", "index_age")
"""Keys of every line of metrics.jsonl, null where a stage or a line has none."""

BETAS, EPSILON = (0.9, 0.999), 1e-6
"""Of Adam, as BERT's released optimizer has them."""
UNCORRECTED = 1e9
"""A step of Adam's at which both bias corrections are 1 in float32, and stay so: one more is the same number."""


class MetricsLine(TypedDict):
    """What every line of metrics.jsonl has; stages add numbers of their own."""

    step: int
    seconds: float
    loss: float | None
    retrieval_utility: float | None
    null_probability: float | None
    index_age: float | None


class StartedFrom(TrainingRecord):
    """What a stage saves in settings.json, and with its model, beside its settings."""

    init: str | None
    """The model or encoder that it started from."""


class StageRecord(TypedDict):
    """What `TrainRun` adds to that."""

    stage: str
    seconds: NotRequired[float]
    """How long it took, with the model that it made."""


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
    """Adam's bias correction; the released optimizer leaves it out, for every parameter and at every step."""
    dropout: float = 0.1
    """Dropout of every network while it trains; 0 suits runs of a few hundred steps."""
    cached_rows: int = 0
    """Rows whose activations towers and masked reader keep at a time; the others' are computed again for the backward pass,
    so that a batch of any size fits, for a forward pass more. 0: all are kept."""
    seed: int = 0
    """Everything random follows from it."""
    device: str = "auto"
    """"auto": a GPU when there is one, else the CPU; or any torch device."""
    precision: Precision = "auto"
    """Of matrix products; weights, norms and losses stay float32."""
    log_every: int = 10
    """Steps averaged into one line of metrics.jsonl."""
    checkpoint_seconds: float = 60.0
    """Least time between two checkpoints; they fall on logged steps."""
    tensorboard: bool = False
    """Writes what goes to metrics.jsonl as TensorBoard events too (needs the package `tensorboard`)."""

    def __post_init__(self) -> None:
        least_values = (
            ("steps", 0), ("batch_size", 1), ("log_every", 1), ("cached_rows", 0), ("seed", 0),
        )  # fmt: skip
        for name, least in least_values:
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be {least} or more")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: it must be 0 or more, and less than 1")
        if self.seed >= 2**31:
            raise ValueError(f"seed is {self.seed}: it must be below {2**31}")


class OtherSettings(ConflictError):
    """An interrupted run cannot go on: its settings, or the knowledge base and model that it began with, are others."""


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
        shares: bool = False,
    ):
        """`rates` maps each part that trains to its learning rate; `settings` joins the config in what must match on resume.

        `shares` says that the stage splits its batch between ranks (`realm.distributed`).

        Raises:
            InputError: several ranks run a stage that does not share; `out` exists, or `out`.training holds a run with
                other settings, one that still runs, or no checkpoint that can be read.
            AlreadyDone: this very run had ended, and was killed while it tidied up.
        """
        self.stage, self.out, self.config, self.model = stage, out, config, model
        self.folder = out.with_name(out.name + ".training")
        self.device = distributed.initialize(choose_device(config.device))
        self.settings = {"stage": stage, **asdict(config), **(settings or {})}
        # What "auto" means here: on another machine it may be another.
        self.settings["precision"] = chosen(self.device, config.precision)
        if distributed.world_size() > 1 and not shares:
            raise InputError(f"realm {stage} runs in one process: torchrun is for `realm pretrain`")
        distributed.check_batch(config.batch_size)
        if distributed.is_main_process():
            self._check_out()
        if self.device.type == "cpu":
            keep_freed_memory()
        model.to(self.device)
        for part in rates:
            set_dropout(part, config.dropout)
            cache_rows(part, config.cached_rows)
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(rates, config.weight_decay), betas=BETAS, fused=True
        )
        self._parts = list(rates)
        self.step = 0
        self.state: dict[str, Any] = {}
        """What a stage wants back after an interruption beside the weights; plain values and tensors."""
        self.after_checkpoint: Callable[[], None] = lambda: None
        """Called when a checkpoint is on disk: what only older ones needed may go."""
        self._sums: dict[str, list[float]] = {}
        self._shown: dict[str, float] = {}
        self._stop_signal: int | None = None
        self._stop_agreed = False
        self._old_handlers: dict[int, Any] = {}
        self._open_folder()

    # -- the loop -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """The steps still to do; the parts that train are in training mode, dropout is seeded by (seed, step)."""
        self._checkpointed = time.monotonic()
        bar = progress(
            total=self.config.steps, description=self.stage, unit="step", done=self.step,
            shown=distributed.is_main_process(),
        )  # fmt: skip
        self._bar = bar
        with bar:
            while self.step < self.config.steps:
                for part in self._parts:
                    part.train()
                # Without dropout all ranks draw alike, as one process would; with it each has masks of its own.
                own = distributed.rank() << 26 if self.config.dropout else 0
                torch.manual_seed((self.config.seed << 32) + own + self.step)
                yield self.step
                bar.update(1)
                # Here and not in `update`: what a stage does after it, an evaluation or a new index, is then saved too.
                due = time.monotonic() - self._checkpointed > self.config.checkpoint_seconds
                stop = self._stop_agreed if distributed.world_size() > 1 else self.asked_to_stop
                if stop or (due and self.step % self.config.log_every == 0):
                    self._save_checkpoint()
                if stop:
                    raise KeyboardInterrupt

    def update(self, loss: Tensor, metrics: Mapping[str, float]) -> None:
        """One optimizer step on `loss`; `metrics` are averaged over `log_every` steps into metrics.jsonl.

        Raises:
            InputError: the loss or its gradient is not finite; the last checkpoint stays.
        """
        numbers = {"loss": loss.item(), **metrics}
        means = distributed.all_reduce_mean([*map(float, numbers.values()), float(self.asked_to_stop)])
        self._stop_agreed = means.pop() > 0  # ranks hear of a signal at different steps
        numbers = dict(zip(numbers, means, strict=True))
        self._check_finite("loss", numbers["loss"])
        loss.backward()
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        distributed.average_gradients(parameters)
        norm = nn.utils.clip_grad_norm_(parameters, self.config.clip).item()
        self._check_finite("gradient", norm)
        self._set_rates()
        if not self.config.bias_correction:
            self._leave_out_bias_correction(parameters)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        for name, number in {**numbers, "gradient_norm": norm}.items():
            self._sums.setdefault(name, []).append(number)
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
        if not distributed.is_main_process():
            return
        line = {"step": self.step, "seconds": self.seconds(), **dict.fromkeys(WATCHED), **values}
        line = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in line.items()}
        self._shown |= {name: line[name] for name in SHOWN if line.get(name) is not None}
        try:
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise self._not_written(self.folder / METRICS, error) from error
        if self._events is not None:
            for name, value in line.items():
                if name != "step" and isinstance(value, int | float):
                    self._events.add_scalar(name, value, self.step)

    @property
    def asked_to_stop(self) -> bool:
        """Whether a signal came: the run saves a checkpoint after the step, and ends."""
        return self._stop_signal is not None

    def report(self, text: str) -> None:
        """One line to the person who watches."""
        if not distributed.is_main_process():
            return
        self._bar.write(f"{self.stage}, step {self.step}: {text}", file=sys.stderr)

    def seconds(self) -> float:
        """Training time so far, earlier sittings included."""
        return self._seconds_before + time.monotonic() - self._started

    def finish(self) -> Path:
        """Saves the model as `out`, with its metrics, and removes the working folder."""
        self.model.step = self.step
        record = {**self.settings, "seconds": round(self.seconds(), 1)}
        self.model.stages = [*self.model.stages, record]
        for part in self._parts:
            part.eval()
        self._close_logs()
        if distributed.is_main_process():
            logs = [self.folder / name for name in (METRICS, TENSORBOARD)]
            save_model(self.model, self.out, extra=[log for log in logs if log.exists()])
            shutil.rmtree(
                self.folder
            )  # still locked: nobody goes on from a checkpoint of a run that is complete
            took = f"{self.step:,} steps in {duration(self.seconds())}"
            print(f"{self.stage}: {took}; the model is in {self.out}", file=sys.stderr, flush=True)
        distributed.barrier()
        return self.out

    def checkpointed(self, name: str) -> list[Any]:
        """What `state[name]` was in each checkpoint that is kept, oldest first."""
        found = []
        for file in self._checkpoints():
            with contextlib.suppress(Exception):  # a damaged one, which no run goes on from
                found.append(torch.load(file, mmap=True, weights_only=True)["state"])
        return [state[name] for state in found if name in state]

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
        self._close_logs()
        if distributed.is_main_process():
            self._lock.close()
        distributed.shutdown()

    def _check_out(self) -> None:
        if not self.out.exists():
            return
        if self.folder.exists() and is_model(self.out):
            made = read_manifest(self.out)["stages"][-1:]
            if [{k: v for k, v in record.items() if k != "seconds"} for record in made] == [
                json.loads(json.dumps(self.settings))
            ]:
                shutil.rmtree(self.folder)
                raise AlreadyDone(f"{self.out} is complete; the leftovers of its run are gone now")
        raise ConflictError(f"{self.out} exists: name another --out, or remove it first")

    def _open_folder(self) -> None:
        self._seconds_before, self._started, self._events = 0.0, time.monotonic(), None
        offset = 0
        with contextlib.ExitStack() as undo:
            if distributed.is_main_process():
                self._check_settings()
                self._lock = (self.folder / "lock").open("ab")
                undo.callback(self._lock.close)
                self._take_lock()
                if (
                    os.fstat(self._lock.fileno()).st_nlink == 0
                ):  # its positive has ended, and the folder with it
                    self._check_out()
                    raise ConflictError(f"{self.folder} was removed by somebody: repeat the command")
                for aside in self.folder.glob("checkpoint-*.writing"):
                    aside.unlink()
                write_json(self.folder / "settings.json", json.loads(json.dumps(self.settings)))
            distributed.barrier()
            saved = self._load_checkpoint()
            if saved is not None:
                for part, states in zip(self._parts, saved["parts"], strict=True):
                    part.load_state_dict(states)
                self.optimizer.load_state_dict(saved["optimizer"])
                if not self.config.bias_correction:  # an earlier version's checkpoint counts from 0
                    for state in self.optimizer.state.values():
                        state["step"].fill_(UNCORRECTED)
                self.step, self.state, self._sums = saved["step"], saved["state"], saved["sums"]
                offset = saved["metrics_offset"]
                self._seconds_before = saved["seconds"]
            if distributed.is_main_process():
                self._metrics = (self.folder / METRICS).open("a", encoding="utf-8")
                self._metrics.truncate(self._whole_metrics(offset))
                self._metrics.seek(0, os.SEEK_END)  # truncating leaves the place where it was
                if self.config.tensorboard:
                    self._events = _event_writer(self.folder / TENSORBOARD, self.step)
            undo.pop_all()

    def _whole_metrics(self, offset: int) -> int:
        """The metrics' length at the checkpoint, or what is left of them."""
        file = self.folder / METRICS
        size = file.stat().st_size
        if size < offset:
            print(f"{self.stage}: {file} has lost its end: lines are missing in the metrics", file=sys.stderr)
        return min(size, offset)

    def _check_settings(self) -> None:
        settings_file = self.folder / "settings.json"
        settings = json.loads(json.dumps(self.settings))
        if settings_file.exists() or self._checkpoints():
            try:
                before = dict(read_json(settings_file))
            except (RealmError, TypeError, ValueError) as error:
                raise InputError(
                    f"{settings_file} cannot be read ({reason(error)}), so what the run's checkpoints belong to is unknown: "
                    f"put the file back, or remove {self.folder} to start anew"
                ) from error
            # What an earlier version did not save had its default value.
            defaults = json.loads(json.dumps(asdict(type(self.config)())))
            before |= {k: defaults.get(k, settings[k]) for k in settings.keys() - before.keys()}
            if before != settings:
                changed = sorted(
                    k for k in before.keys() | settings.keys() if before.get(k) != settings.get(k)
                )
                raise OtherSettings(
                    f"{self.folder} holds an interrupted run with other settings ({', '.join(changed)}): "
                    "repeat its command to go on, or remove the folder to start anew"
                )
        self.folder.mkdir(parents=True, exist_ok=True)

    def _take_lock(self) -> None:
        end = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ConflictError(
                        f"{self.folder} is in use by another run: wait for it, or name another --out"
                    ) from None
                time.sleep(0.1)

    def _checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("checkpoint-*.pt"))

    def _load_checkpoint(self) -> dict[str, Any] | None:
        """The newest that can be read; newer ones, which cannot, go. None before the first."""
        problem = None
        for file in reversed(self._checkpoints()):
            try:
                saved = self._read_checkpoint(file)
            except Exception as error:  # of many classes: whatever a torn file makes of the unpickler
                problem = f"{file} cannot be read: {reason(error)}"
                continue
            if problem is not None and distributed.is_main_process():
                print(f"{self.stage}: {problem}; going on from {file.name}", file=sys.stderr)
                for newer in self._checkpoints()[self._checkpoints().index(file) + 1 :]:
                    newer.unlink()
            return saved
        if problem is not None:
            raise InputError(f"{problem}: remove {self.folder} to start anew")
        return None

    def _read_checkpoint(self, file: Path) -> dict[str, Any]:
        """A checkpoint as it was written; raises where it is torn, where a byte has changed, or for one of another step."""
        with zipfile.ZipFile(file) as archive:  # torch writes checksums, and does not look at them
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} is not what its checksum says")
        saved: dict[str, Any] = torch.load(file, map_location=self.device, weights_only=True)
        if file.name != _checkpoint_name(saved["step"]):
            raise ValueError(f"it is of step {saved['step']}")
        return saved

    def _close_logs(self) -> None:
        if distributed.is_main_process():
            with contextlib.suppress(OSError):  # what did not fit was an error when it was logged
                self._metrics.close()
            if self._events is not None:
                self._events.close()

    def _log_means(self) -> None:
        means = {name: sum(values) / len(values) for name, values in self._sums.items()}
        self._sums = {}
        self.log(means)
        shown = {name: f"{self._shown[name]:.3g}" for name in SHOWN if name in self._shown}
        self._bar.set_postfix(shown, refresh=False)  # the step that follows shows it

    def _set_rates(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * group["scale"] * self.rate(self.step)
            group["weight_decay"], group["eps"] = group["decay"], EPSILON  # checkpoints of before had others

    def _leave_out_bias_correction(self, parameters: Sequence[nn.Parameter]) -> None:
        """Starts the averages of parameters that move for the first time, or anew, at a step whose correction is 1.

        The optimizer counts the steps of each parameter from its first gradient, so no factor of the run's step undoes its
        correction for all of them.
        """
        for parameter in parameters:
            if parameter.grad is not None and not self.optimizer.state[parameter]:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(UNCORRECTED, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise DivergedError(
                f"{what} is {value} at step {self.step}: lower the learning rate; {self.folder} holds the last checkpoint"
            )

    def _save_checkpoint(self) -> None:
        """Writes aside, then renames in; older checkpoints go last.

        Raises:
            WriteFailed: it could not be written; what was there stays.
        """
        self._checkpointed = time.monotonic()
        if not distributed.is_main_process():
            return
        file = self.folder / _checkpoint_name(self.step)
        aside = file.with_name(file.name + ".writing")
        try:
            self._metrics.flush()
            os.fsync(self._metrics.fileno())  # before the offset into it counts
            states = {
                "parts": [part.state_dict() for part in self._parts],
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "state": self.state,
                "sums": self._sums,
                "metrics_offset": self._metrics.tell(),
                "seconds": self.seconds(),
            }
            with aside.open("wb") as stream:
                torch.save(states, stream)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(file)
            sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            aside.unlink(missing_ok=True)
            raise self._not_written(file, error) from error
        for old in self._checkpoints()[:-CHECKPOINTS]:
            old.unlink()
        self.after_checkpoint()

    def _not_written(self, file: Path, error: Exception) -> WriteFailed:
        last = next((f"{kept.name} stays" for kept in reversed(self._checkpoints())), "there is none yet")
        return WriteFailed(
            f"{file} cannot be written: {reason(error)}{way_out(file, error)}; of earlier checkpoints {last}: "
            "then repeat the command"
        )


def _checkpoint_name(step: int) -> str:
    return f"checkpoint-{step:08d}.pt"


def _event_writer(folder: Path, step: int) -> Any:
    """TensorBoard's, which hides what an earlier sitting wrote from `step` on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "tensorboard is not installed: `pip install realm-lm[tensorboard]`, or leave it off"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)


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
