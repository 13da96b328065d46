"""`RunFolder`: the folder of a training run, which no other run can use, and which only the same command continues.

OUT.training/settings.json               settings that must match on resume, and a checksum of the weights of the start model
OUT.training/checkpoint-00000120.pt      weights, optimizer, step, length of the metrics, state of the stage
OUT.training/metrics.jsonl               truncated on resume to the length at the checkpoint
OUT.training/tensorboard/                the same numbers as events, if `tensorboard` is set
OUT.training/states-*.npy                states of all passages, if the passage encoder is frozen (`realm.train.refresh`)
OUT.training/judged-*.parquet            judged sentences of `realm adapt`
OUT.training/lock                        held during the run, so that no other run can use the folder
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from realm.errors import (
    AlreadyDone,
    ConflictError,
    DamagedError,
    OtherSettings,
    RealmError,
    reason,
)
from realm.files import read_json, write_json
from realm.model.manifest import weights_checksum
from realm.train.checkpoints import Checkpoints
from realm.train.metrics import METRICS

GIVEN = (
    "init",
    "init_weights",
    "kb",
    "documents",
    "held_out",
    "passage_tokens",
    "text",
    "questions",
    "reading_kb",
    "reading_documents",
)
"""Names of settings that say which model and data a stage was given; the others are settings of the stage."""
LOCK, SETTINGS, JUDGED = "lock", "settings.json", "judged-*.parquet"
LOCK_PATIENCE = 10.0
"""Seconds that a run waits for the lock of its folder, because a killed run may need some seconds to end."""


class RunFolder:
    """The folder `out`.training. It is removed when the run is complete and its model is in `out`."""

    def __init__(
        self,
        out: Path,
        settings: Mapping[str, Any],
        saved_stages: Callable[[Path], list[dict[str, Any]]],
    ):
        """`settings` has everything that must stay the same in a run. `saved_stages` gives the settings of the stages that made
        the model in a folder, oldest first."""
        self.out, self.settings = out, settings
        self.path = out.with_name(out.name + ".training")
        self.checkpoints = Checkpoints(self.path)
        self._saved_stages = saved_stages

    def check_out(self) -> None:
        """Refuses an `out` that exists.

        Raises:
            ConflictError: `out` exists.
            AlreadyDone: this run was complete, and was killed while it removed its folder; the folder is now removed.
        """
        if not self.out.exists():
            return
        if self.path.exists():
            made = self._saved_stages(self.out)[-1:]
            if [{k: v for k, v in record.items() if k != "seconds"} for record in made] == [self.settings]:
                self.remove()
                raise AlreadyDone(f"{self.out} is complete; {self.path} was removed")
        raise ConflictError(f"{self.out} exists: name another --out, or remove it first")

    def open(self) -> None:
        """Makes the folder if it does not exist, locks it, and writes the settings.

        Raises:
            ConflictError: another run uses the folder, or has just removed it.
            OtherSettings: the folder has checkpoints of a run with other settings.
            DamagedError: the settings of these checkpoints cannot be read.
        """
        self._lock = self._opened_lock()
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock.close)
            self._take_lock()
            # If another run has ended while this run was waiting for the lock, the folder no longer exists.
            if os.fstat(self._lock.fileno()).st_nlink == 0:
                self.check_out()
                raise ConflictError(
                    f"{self.path} was removed while this command was starting: repeat the command"
                )
            if self.checkpoints.files():
                self._check_settings()
            else:
                self._remove_judged_with_other_settings()
            self.checkpoints.remove_unfinished()
            write_json(self.path / SETTINGS, self._saved)
            undo.pop_all()

    def close(self) -> None:
        """Gives the lock back."""
        self._lock.close()

    def remove(self) -> None:
        """Removes the folder. A held lock stays held, so that no other run resumes from a checkpoint of a complete run."""
        shutil.rmtree(self.path)

    def remove_traces(self) -> None:
        """Removes what a run without a checkpoint wrote, and the folder if it is then empty. Logs of builds and computed states
        stay."""
        for name in (SETTINGS, METRICS, LOCK):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @cached_property
    def _saved(self) -> Mapping[str, Any]:
        """Content of settings.json. No checkpoint has the weights that are not trained, so the start model must not change."""
        init = self.settings.get("init")
        return {**self.settings, "init_weights": weights_checksum(init)} if init else self.settings

    def _remove_judged_with_other_settings(self) -> None:
        """Removes judged sentences of a run with other settings, or with settings that are not known."""
        try:
            self._check_settings()
        except RealmError:
            for file in self.path.glob(JUDGED):
                file.unlink()

    def _check_settings(self) -> None:
        """Raises OtherSettings if the folder is of a run with other settings, and DamagedError if they cannot be read."""
        settings_file = self.path / SETTINGS
        try:
            before = dict(read_json(settings_file))
        except (RealmError, TypeError, ValueError) as error:
            raise DamagedError(
                f"{settings_file} cannot be read ({reason(error)}), so the settings of the checkpoints are not known: "
                f"put the file back, or remove {self.path} to start again"
            ) from error
        if _same_folder(before.get("init"), self._saved.get("init")):
            before["init"] = self._saved["init"]
        if before != self._saved:
            raise OtherSettings(
                f"{self.path} contains an interrupted run {_differing(before, self._saved)}: repeat the command of that "
                "run to continue it, or remove the folder to start again"
            )

    def _opened_lock(self) -> IO[bytes]:
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a run that ended has just removed the folder
                return (self.path / LOCK).open("ab")

    def _take_lock(self) -> None:
        end = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ConflictError(
                        f"{self.path} is in use by another run: wait until that run has ended, or name another --out"
                    ) from None
                time.sleep(0.1)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as JSON gives them back: tuples become lists."""
    return dict(json.loads(json.dumps(settings)))


def _same_folder(one: Any, other: Any) -> bool:
    """Whether two values of `init` are names of one folder, such as "model" and "./model"."""
    folders = isinstance(one, str) and isinstance(other, str) and os.path.isdir(one) and os.path.isdir(other)
    return folders and os.path.samefile(one, other)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How an interrupted run differs from a command, for the message that refuses to continue it."""
    if before.get("stage") != now["stage"]:
        return f"of `realm {before.get('stage')}`"
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    if set(changed) <= set(GIVEN):
        return f"with another model or other data, or these have changed since ({', '.join(changed)})"
    return f"with other settings ({', '.join(changed)})"
