"""The checkpoints of a training run: written aside and renamed, read with their checksums compared."""

import contextlib
import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from realm.errors import DamagedError, WriteFailed, reason, way_out
from realm.files import sync_folder

KEPT = 2
"""Newest checkpoints that stay on disk; a damaged checkpoint is skipped for the one before it."""


class Checkpoints:
    """`checkpoint-00000120.pt` and so on in the folder of a run; each is a dictionary of plain values and tensors."""

    def __init__(self, folder: Path):
        self._folder = folder

    def files(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        return sorted(self._folder.glob("checkpoint-*.pt"))

    def remove_unfinished(self) -> None:
        """Removes what a killed run was writing."""
        for aside in self._folder.glob("checkpoint-*.writing"):
            aside.unlink()

    def load_newest(self, device: torch.device, may_remove: bool) -> tuple[dict[str, Any] | None, str]:
        """The newest checkpoint that can be read, None before the first, and a note on newer ones that are damaged.

        Damaged checkpoints that are newer are removed if this process `may_remove` them.

        Raises:
            DamagedError: there are checkpoints, and none can be read.
        """
        problem, files = "", self.files()
        for number in reversed(range(len(files))):
            try:
                saved = _read(files[number], device)
            except Exception as error:  # a torn file makes the unpickler raise exceptions of many classes
                problem = f"{files[number]} cannot be read: {reason(error)}"
                continue
            if problem and may_remove:
                for newer in files[number + 1 :]:
                    newer.unlink()
            return saved, f"{problem}; going on from {files[number].name}" if problem else ""
        if problem:
            raise DamagedError(f"{problem}: remove {self._folder} to start anew")
        return None, ""

    def states(self, name: str) -> list[Any]:
        """The value of `state[name]` in each checkpoint on disk, oldest first."""
        found = []
        for file in self.files():
            with contextlib.suppress(Exception):  # damaged: no run will resume from it
                found.append(torch.load(file, mmap=True, weights_only=True)["state"])
        return [state[name] for state in found if name in state]

    def save(self, step: int, values: dict[str, Any]) -> None:
        """Writes a checkpoint aside, renames it, and removes the oldest ones.

        Raises:
            WriteFailed: the file system refused; earlier checkpoints stay.
        """
        file = self._folder / _name(step)
        aside = file.with_name(file.name + ".writing")
        try:
            with aside.open("wb") as stream:
                torch.save(values, stream)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(file)
            sync_folder(self._folder)
        except (OSError, RuntimeError) as error:
            aside.unlink(missing_ok=True)
            raise self.write_failed(file, error) from error
        for old in self.files()[:-KEPT]:
            old.unlink()

    def write_failed(self, file: Path, error: Exception) -> WriteFailed:
        """The error for a file of the run that cannot be written; names the checkpoint to resume from."""
        last = next((f"{kept.name} stays" for kept in reversed(self.files())), "there is none yet")
        return WriteFailed(
            f"{file} cannot be written: {reason(error)}{way_out(file, error)}; of earlier checkpoints {last}: "
            "then repeat the command"
        )


def _read(file: Path, device: torch.device) -> dict[str, Any]:
    """A checkpoint; raises if it is torn, if a byte has changed, or if it belongs to another step."""
    with zipfile.ZipFile(file) as archive:  # torch writes checksums, but does not compare them
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} differs from its checksum")
    saved: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    if file.name != _name(saved["step"]):
        raise ValueError(f"it is of step {saved['step']}")
    return saved


def _name(step: int) -> str:
    return f"checkpoint-{step:08d}.pt"
