"""Settings of `realm fit`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FitConfig:
    """How documents become a workspace."""

    start: str = "package:realm-small"
    """The model that answers at first, and that is adapted: a folder, package:NAME or hf:OWNER/NAME."""
    minutes: float = 10.0
    """How long the adaptation to the documents may take; 0: there is none."""
    tagger: str = "spacy:en_core_web_sm"
    """What finds sentences, names and dates: spacy:MODEL, hf:MODEL, or rules (dates only)."""
    held_out: float = 0.1
    """Share of passages that the adaptation does not learn from, for it to be judged by; a start that was trained with another
    share decides."""
    max_document_chars: int = 1_000_000
    """Longest document that is read; a longer one is most often a mistake."""
    questions: int = 500
    """Most questions made from the documents that models are judged by."""
    device: str = "auto"
    """"auto": a GPU when there is one, else the CPU; or any torch device."""

    def __post_init__(self) -> None:
        if not self.minutes >= 0:
            raise ValueError(f"minutes is {self.minutes}: it must be 0 or more")
        for name in ("questions", "max_document_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}: it must be above 0, and less than 1")
