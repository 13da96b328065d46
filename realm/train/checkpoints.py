"""Writes and reads the checkpoints of a training run.

A checkpoint is written under a temporary name and then renamed. When a checkpoint is read, its checksums are compared.
"""

import contextlib
import zipfile
from pathlib import Path
from typing import Any

import torch

from realm.errors import DamagedError, WriteFailed, out_of_memory, reason, way_out
from realm.files import new_file, sync

KEPT = 2
"""Number of checkpoints that stay on disk. If the newest checkpoint is damaged, the checkpoint before it is used."""


class Checkpoints:
    """`checkpoint-00000120.pt` and so on in the folder of a run; each is a dictionary of plain values and tensors."""

    def __init__(self, folder: Path):
        self._folder = folder

    def files(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        return sorted(self._folder.glob("checkpoint-*.pt"))

    def remove_unfinished(self) -> None:
        """Removes the incomplete files of a killed run."""
        for aside in self._folder.glob(".*.tmp"):
            aside.unlink()

    def load_newest(
        self, device: torch.device, may_remove: bool, mapped: bool = False
    ) -> tuple[dict[str, Any] | None, str]:
        """The newest checkpoint that can be read, and a note if newer checkpoints are damaged, else "".

        The checkpoint is None if there is no checkpoint. If `may_remove` is True, the damaged newer checkpoints are removed. If
        `mapped` is True, the file is mapped into memory, so that the processes of a machine share one copy.

        Raises:
            DamagedError: there are checkpoints, but no checkpoint can be read.
        """
        problem, files = "", self.files()
        for number in reversed(range(len(files))):
            try:
                saved = _read(files[number], device, mapped)
            except Exception as error:  # the unpickler raises many classes of exceptions for damaged files
                if out_of_memory(error):  # the file may be good
                    raise
                problem = f"{files[number]} cannot be read: {reason(error)}"
                continue
            if problem and may_remove:
                for newer in files[number + 1 :]:
                    newer.unlink()
            return saved, f"{problem}; continuing from {files[number].name}" if problem else ""
        if problem:
            raise DamagedError(f"{problem}: remove {self._folder} to start again")
        return None, ""

    def states(self, name: str) -> list[Any]:
        """The value of `state[name]` in each checkpoint on disk, oldest first."""
        found = []
        for file in self.files():
            with contextlib.suppress(Exception):  # no run can resume from a damaged checkpoint
                found.append(torch.load(file, mmap=True, weights_only=True)["state"])
        return [state[name] for state in found if name in state]

    def save(self, step: int, values: dict[str, Any]) -> None:
        """Writes the checkpoint of a step under a temporary name, renames it, and removes old checkpoints.

        Raises:
            WriteFailed: the checkpoint cannot be written; earlier checkpoints stay.
        """
        file = self._folder / _name(step)
        try:
            with new_file(file) as aside, aside.open("wb") as stream:
                torch.save(values, stream)
            sync(self._folder)
        except (OSError, RuntimeError) as error:
            raise self.write_failed(file, error) from error
        for old in self.files()[:-KEPT]:
            old.unlink()

    def write_failed(self, file: Path, error: Exception) -> WriteFailed:
        """The error for a file of the run that cannot be written; the message has the name of the checkpoint to resume from."""
        last = next((f"{kept.name} stays" for kept in reversed(self.files())), "there is no checkpoint yet")
        return WriteFailed(
            f"{file} cannot be written: {reason(error)}{way_out(file, error)}; {last}: repeat the command when the file can be "
            "written"
        )


def _read(file: Path, device: torch.device, mapped: bool) -> dict[str, Any]:
    """Reads a checkpoint; raises an exception if the file is incomplete, if a byte has changed, or if the step is not that of
    the file name."""
    with zipfile.ZipFile(file) as archive:  # torch writes checksums, but does not compare them
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} differs from its checksum")
    saved: dict[str, Any] = torch.load(file, map_location=device, mmap=mapped, weights_only=True)
    if file.name != _name(saved["step"]):
        raise ValueError(f"the checkpoint in it is of step {saved['step']}")
    return saved


def _name(step: int) -> str:
    return f"checkpoint-{step:08d}.pt"
