"""From the share of an answer among all spans to the probability that it is right."""

import math
from dataclasses import dataclass
from typing import Literal

Method = Literal["dense", "bm25", "hybrid"]
"""What ranks the passages that are read: vectors, words, or both."""
HIGHEST = 1 - 1e-7
"""A share above it counts as this much: in float32 a certain span has the share 1, whose log-odds are infinite."""


@dataclass(frozen=True)
class Calibration:
    """A logistic curve over log-odds (Platt 1999), fitted on questions with known answers: `realm calibrate`.

    The default changes nothing and takes every answer.
    """

    slope: float = 1.0
    offset: float = 0.0
    threshold: float = 0.0
    """An answer of a lower probability counts as a guess: no answer was found."""
    method: Method = "dense"
    """What ranked the passages of those questions, and ranks them where nobody names a method."""

    def __post_init__(self) -> None:
        if not (0 < self.slope < math.inf and math.isfinite(self.offset) and 0 <= self.threshold <= 1):
            raise ValueError(
                f"slope is {self.slope}, offset {self.offset}, threshold {self.threshold}: the slope must be above 0, "
                "the offset finite, the threshold between 0 and 1"
            )

    def probability(self, share: float) -> float:
        """Of an answer with this share, which is between 0 and 1.

        >>> Calibration().probability(0.25)
        0.25
        >>> round(Calibration(slope=0.5).probability(0.8), 3)
        0.667
        """
        if share <= 0:
            return 0.0
        if self.slope == 1 and self.offset == 0:
            return share
        share = min(share, HIGHEST)
        odds = self.offset + self.slope * math.log(share / (1 - share))
        return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0
