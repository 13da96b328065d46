"""The interface of a model that `TrainRun` can train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch


class Trainable(Protocol):
    """A model that a run can train and save: a REALM model, or the network of a compared system."""

    step: int
    """Number of optimizer steps of the last stage."""
    stages: list[dict[str, Any]]
    """Settings of each stage, oldest first."""

    def to(self, device: torch.device) -> object:
        """Moves all weights to a device."""

    def save(self, folder: Path, extra: Sequence[Path]) -> None:
        """Writes the model into `folder`, with copies of the `extra` files and folders. The folder appears only when it is
        complete."""

    @staticmethod
    def saved_stages(folder: Path) -> list[dict[str, Any]]:
        """The `stages` of the model in `folder`; empty if `folder` does not contain a model."""
