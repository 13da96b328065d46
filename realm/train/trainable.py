"""What a training run needs of the model that it trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch


class Trainable(Protocol):
    """What a run trains and saves: a REALM model, or the network of a compared system."""

    step: int
    """Optimizer steps of the last stage."""
    stages: list[dict[str, Any]]
    """Settings of each stage, oldest first."""

    def to(self, device: torch.device) -> object:
        """Moves all weights to a device."""

    def save(self, folder: Path, extra: Sequence[Path]) -> None:
        """Writes the folder, with copies of the `extra` files and folders, completely or not at all."""

    @staticmethod
    def saved_stages(folder: Path) -> list[dict[str, Any]]:
        """The stages of a saved folder; empty if it is none."""
