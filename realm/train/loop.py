"""`TrainRun`: the loop that every training stage shares.

`TrainRun` owns the device, mixed precision, the optimizer and its schedule, metrics, the progress bar, checkpoints and
resuming. A stage owns its data, its forward pass and its loss:

    with TrainRun("ict", out, config, model, rates) as run:
        for step in run.steps():
            loss = ...
            run.update(loss, {"accuracy": ...})
        run.finish()

All random numbers of a step are computed from (seed, step), so a checkpoint contains no states of random generators, and a
repeated command continues the run exactly. What a killed run wrote after its last checkpoint is removed: lines of
metrics.jsonl, and index versions (`realm.train.refresh.refresher`). `realm.train.run_folder` describes the files of a run.
"""

import contextlib
import copy
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from realm import distributed
from realm.errors import DivergedError, RealmError, no_rank
from realm.model.device import autocast, choose_device, chosen, keep_freed_memory
from realm.model.folder import Model
from realm.model.modes import cache_rows, set_dropout
from realm.progress import counted, duration, progress, values_that_fit
from realm.store.knowledge_base import TrainingRecord
from realm.train.metrics import METRICS, REQUIRED, TENSORBOARD, MetricsLog, StepMeans
from realm.train.optimizer import Optimizer
from realm.train.run_config import RunConfig
from realm.train.run_folder import RunFolder, plain
from realm.train.sharding import gathered, load_weights, shard_weights, whole_model
from realm.train.trainable import Trainable

SHOWN = (
    "loss", "retrieval_utility", "index_age", "building", "build_seconds", "build_passages_per_second", "build_slowdown",
    "accuracy", "recall_read", "retriever_loss",
)  # fmt: skip
"""Numbers that the progress bar shows, if a stage logs them."""


class StartedFrom(TrainingRecord):
    """What a stage saves in settings.json and with the model, in addition to the settings."""

    init: str | None
    """The model or encoder that the stage started from."""


class TrainRun(AbstractContextManager["TrainRun"]):
    """A run of one stage. The folder `out` appears when the run is complete; until then the files of the run are in
    `out`.training."""

    def __init__(
        self,
        stage: str,
        out: Path,
        config: RunConfig,
        model: Trainable,
        rates: Mapping[nn.Module, float],
        settings: Mapping[str, Any] | None = None,
        *,
        shares: bool = False,
    ):
        """`rates` maps each part of the model that is trained to its learning rate. A run can be resumed only with the same
        `config` and `settings`. `shares` is True if the stage divides its batch among the ranks (`realm.distributed`).

        Raises:
            InputError: there are several ranks, and the stage does not divide its batch, or the ranks cannot share it evenly.
            ConflictError: `out` exists, or `out`.training contains a run with other settings or a run that is still running.
            DamagedError: the files in `out`.training cannot be read.
            AlreadyDone: this run was complete, and was killed while it removed `out`.training.
        """
        self.stage, self.out, self.config, self.model = stage, out, config, model
        self.device = distributed.initialize(choose_device(config.device))
        # The precision that "auto" stands for is saved, because it may be another precision on another machine.
        precision = {"precision": chosen(self.device, config.precision)}
        self.settings = plain({"stage": stage, **asdict(config), **(settings or {}), **precision})
        self._run_folder = RunFolder(out, self.settings, model.saved_stages)
        self.folder, self._checkpoints = self._run_folder.path, self._run_folder.checkpoints
        if distributed.world_size() > 1 and not shares:
            raise no_rank(stage)
        distributed.check_batch(config.batch_size)
        if distributed.is_main_process():
            self._run_folder.check_out()
        if self.device.type == "cpu":
            keep_freed_memory()
        model.to(self.device)
        for part in rates:
            set_dropout(part, config.dropout)
            cache_rows(part, config.cached_rows)
        self.sharded = config.shard_weights and distributed.world_size() > 1
        """Whether the weights are sharded among the ranks."""
        if self.sharded:
            assert isinstance(model, Model)  # all stages that divide their batch train such a model
            shard_weights(model, self.device)
        self._bar: Any = None  # before the first step
        self.optimizer = Optimizer(rates, config)
        self._parts = list(rates)
        # The backward pass of sharded weights averages their gradients too.
        self._averaging = (lambda loss: loss) if self.sharded else distributed.averaging(self._parts)
        self.step = 0
        self.state: dict[str, Any] = {}
        """State of the stage that a checkpoint saves beside the weights; plain values and tensors."""
        self.after_checkpoint: Callable[[], None] = lambda: None
        """Called after a checkpoint was written; may remove files that only older checkpoints needed."""
        self._means = StepMeans()
        self._shown: dict[str, float] = {}
        self._stop_signal: int | None = None
        self._stop_agreed = False
        self._old_handlers: dict[int, Any] = {}
        self._open_folder()

    # -- the loop -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps.

        In each step, the parts that are trained are in training mode, and torch's generator is seeded with (seed, step).
        """
        self._checkpointed = time.monotonic()
        self._bar = progress(
            total=self.config.steps, description=self.stage, unit="step", done=self.step,
            shown=distributed.is_main_process(),
        )  # fmt: skip
        with self._bar:
            while self.step < self.config.steps:
                for part in self._parts:
                    part.train()
                # Without dropout, all ranks draw the same numbers as a single process. With dropout, each rank draws its own
                # dropout masks.
                own = distributed.rank() << 26 if self.config.dropout else 0
                torch.manual_seed((self.config.seed << 32) + own + self.step)
                yield self.step
                self._bar.update(1)
                # Not in `update`, because a checkpoint includes what the stage does after `update`: an evaluation, a new index.
                stop = self._stop_agreed if distributed.world_size() > 1 else self.stop_requested
                if stop or (self.step % self.config.log_every == 0 and self._checkpoint_is_due()):
                    self._save_checkpoint()
                if stop:
                    raise KeyboardInterrupt

    def update(self, loss: Tensor, metrics: Mapping[str, Tensor | float]) -> None:
        """Makes one optimizer step on `loss`. The means of `metrics` over `log_every` steps are written to metrics.jsonl.

        On a GPU, the loss and the metrics are read only when a line or a checkpoint is written, so that the CPU can prepare the
        next step while the GPU computes.

        Raises:
            DivergedError: the loss or its gradient was not finite at this step or, on a GPU, at a step since the last line of
                metrics; the last checkpoint stays.
        """
        # A signal reaches the ranks at different steps.
        self._stop_agreed = distributed.any_rank(self.stop_requested)
        self._averaging(loss).backward()
        norm = self.optimizer.clip()
        self._means.add(self.step, {"loss": loss, **metrics, "gradient_norm": norm})
        if self.device.type == "cpu":
            self.check_finite()
        self.optimizer.step(self.step)
        self.step += 1
        if self.step % self.config.log_every == 0 or self.step == self.config.steps:
            self.check_finite()
            self.log(self._means.take())
            shown = {name: f"{self._shown[name]:.3g}" for name in SHOWN if name in self._shown}
            # The next update of the bar shows the numbers.
            self._bar.set_postfix(values_that_fit(shown), refresh=False)

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.device, self.config.precision)

    def log(self, values: Mapping[str, Any]) -> None:
        """Writes one line of metrics.jsonl for the current step."""
        if not distributed.is_main_process():
            return
        line = {"step": self.step, "seconds": self.seconds(), **dict.fromkeys(REQUIRED), **values}
        try:
            written = self._metrics.write(line)
        except OSError as error:
            raise self._checkpoints.write_failed(self._metrics.file, error) from error
        self._shown |= {name: written[name] for name in SHOWN if written.get(name) is not None}

    @property
    def stop_requested(self) -> bool:
        """Whether the process has received SIGINT or SIGTERM; the run then saves a checkpoint after the step, and ends."""
        return self._stop_signal is not None

    def report(self, text: str) -> None:
        """Prints one line on standard error, above the progress bar if there is one."""
        if not distributed.is_main_process():
            return
        line = f"{self.stage}, step {self.step}: {text}"
        if self._bar is None:
            print(line, file=sys.stderr)
        else:
            self._bar.write(line, file=sys.stderr)

    def seconds(self) -> float:
        """Training time so far, including time before interruptions."""
        return self._seconds_before + time.monotonic() - self._started

    def finish(self) -> Path:
        """Saves the model and the metrics in `out`, and removes `out`.training -> `out`."""
        if self.sharded:
            assert isinstance(self.model, Model)
            self.model = whole_model(self.model)
        self.model.step = self.step
        record = {**self.settings, "seconds": round(self.seconds(), 1)}
        self.model.stages = [*self.model.stages, record]
        for part in self._parts:
            part.eval()
        self._close_logs()
        if distributed.is_main_process():
            logs = [self.folder / name for name in (METRICS, TENSORBOARD)]
            self.model.save(self.out, [log for log in logs if log.exists()])
            self._run_folder.remove()
            took = f"{counted(self.step, 'step')} in {duration(self.seconds())}"
            print(f"{self.stage}: {took}; the model is in {self.out}", file=sys.stderr, flush=True)
        distributed.barrier()
        return self.out

    def checkpointed(self, name: str) -> list[Any]:
        """The value of `state[name]` in each checkpoint on disk, oldest first."""
        return self._checkpoints.states(name)

    # -- start, resume, end ---------------------------------------------------------------------------------------

    def __enter__(self) -> "TrainRun":
        def note(number: int, frame: FrameType | None) -> None:
            if self._stop_signal is not None:  # a second Ctrl-C does not wait for the step to end
                raise KeyboardInterrupt
            self._stop_signal = number

        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, note)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._close_logs()
        if distributed.is_main_process():
            refused = kind is not None and issubclass(kind, RealmError)
            if refused and self.step == 0:
                self._run_folder.remove_traces()
            self._run_folder.close()
        del self._averaging  # holds the process group
        distributed.shutdown()

    def _open_folder(self) -> None:
        """Locks the folder of the run, and resumes from the newest checkpoint."""
        self._seconds_before, self._started = 0.0, time.monotonic()
        main = distributed.is_main_process()
        with contextlib.ExitStack() as undo:
            if main:
                self._run_folder.open()
                undo.callback(self._run_folder.close)
            distributed.barrier()
            # The whole weights of a checkpoint may be too large for one device.
            device = torch.device("cpu") if self.sharded else self.device
            saved, note = self._checkpoints.load_newest(device, may_remove=main, mapped=self.sharded)
            if note and main:
                print(f"{self.stage}: {note}", file=sys.stderr)
            length = self._resume(saved) if saved is not None else 0
            if main:
                self._metrics = MetricsLog(self.folder, length, self.step, self.config.tensorboard)
                if self._metrics.lost_lines:
                    file = self._metrics.file
                    print(
                        f"{self.stage}: {file} is shorter than at the last checkpoint: lines of metrics are missing",
                        file=sys.stderr,
                    )
            undo.pop_all()

    def _resume(self, saved: dict[str, Any]) -> int:
        """Loads a checkpoint into the parts and the optimizer -> length of metrics.jsonl at the checkpoint."""
        for part, states in zip(self._parts, saved["parts"], strict=True):
            load_weights(part, states)
        self.optimizer.load_state_dict(saved["optimizer"])
        # The file of a sharded run is mapped, and will be removed.
        state = copy.deepcopy(saved["state"]) if self.sharded else saved["state"]
        self.step, self.state, self._means.sums = saved["step"], state, saved["sums"]
        self._seconds_before = saved["seconds"]
        return int(saved["metrics_offset"])

    def _close_logs(self) -> None:
        if distributed.is_main_process():
            self._metrics.close()

    def check_finite(self) -> None:
        """Reads the losses and gradients of the steps so far. All ranks call this together.

        `update` checks them on a GPU only when a line of metrics is written, so a stage calls this before it uses the weights.

        Raises:
            DivergedError: one of them is not finite.
        """
        for step, numbers in self._means.read():
            for what, value in (("loss", numbers["loss"]), ("gradient", numbers["gradient_norm"])):
                if not math.isfinite(value):
                    advice = "lower the learning rate"
                    if distributed.is_main_process() and self._checkpoints.files():
                        advice += f", and name another --out: {self.folder} has the last checkpoint before this step"
                    raise DivergedError(f"{what} is {value} at step {step}: {advice}")

    def _checkpoint_is_due(self) -> bool:
        """Whether the last checkpoint is old enough, by the clock of rank 0: all ranks save sharded weights together."""
        return distributed.broadcast(time.monotonic() - self._checkpointed > self.config.checkpoint_seconds)

    def _save_checkpoint(self) -> None:
        """Saves weights, optimizer and state.

        Raises:
            DivergedError: the loss or its gradient was not finite; earlier checkpoints stay.
            WriteFailed: the checkpoint cannot be written; earlier checkpoints stay.
        """
        self._checkpointed = time.monotonic()
        self.check_finite()
        values = gathered(
            {
                "parts": [part.state_dict() for part in self._parts],
                "optimizer": self.optimizer.state_dict(),
                "state": self.state,
            }
        )
        if not distributed.is_main_process():
            return
        try:
            length = self._metrics.sync()
        except OSError as error:
            raise self._checkpoints.write_failed(self._metrics.file, error) from error
        self._checkpoints.save(
            self.step,
            {
                **values,
                "step": self.step,
                "sums": self._means.sums,
                "metrics_offset": length,
                "seconds": self.seconds(),
            },
        )
        self.after_checkpoint()
