"""Settings of `realm fit`, and default times of `realm watch`."""

from dataclasses import dataclass

from realm.errors import InputError, at_least
from realm.text.corpus import Cuts, PassagesConfig

EVERY = 2.0
"""Seconds from one check of the files by a watcher to the next."""
SETTLE = 2.0
"""Seconds for which a file must stay the same before a watcher applies its change."""


@dataclass(frozen=True)
class FitConfig(PassagesConfig):
    """Settings of a fit."""

    cut: Cuts = "rows"
    """As in `PassagesConfig`, with another default: people ask about single rows of their tables."""
    start: str = "package:realm-small"
    """The start model, which is adapted to the documents: a folder, package:NAME or hf:OWNER/NAME."""
    minutes: float = 10.0
    """Time limit of the adaptation to the documents in minutes. With 0, the model is not adapted."""
    held_out: float = 0.1
    """Share of passages that are not used to train the adapted model, but to compare it with the start model. If the start
    model was trained with another share, the share of the start model is used."""
    questions: int = 500
    """Largest number of questions, made from the documents, on which the models are compared."""
    device: str = "auto"
    """"auto" (a GPU if there is one, else the CPU), or a torch device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, minutes=0, questions=1, held_out=0)
        if not 0 < self.held_out < 1:
            raise InputError(f"held_out is {self.held_out}: it must be above 0, and less than 1")
