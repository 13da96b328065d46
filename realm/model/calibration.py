"""From the share of an answer among all spans to the probability that it is right."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Method = Literal["dense", "bm25", "hybrid"]
"""What ranks the passages that are read: vectors, words, or both."""
HIGHEST = 1 - 1e-7
"""A share above it counts as this much: in float32 a certain span has the share 1, whose log-odds are infinite."""


class Features(NamedTuple):
    """Of a question's best answer: what its share does not tell. The share says how far this span is ahead of the others,
    these say whether the passages are about the question and have an answer at all."""

    inner: float = 0.0
    """Inner product of the question with the answer's passage."""
    ranking: float = 0.0
    """That passage's hybrid score, 0 where another method ranked it."""
    span: float = 0.0
    """The reader's own score of the span."""


NO_FEATURES = Features()


@dataclass(frozen=True)
class Calibration:
    """A logistic curve over log-odds and features, fitted on questions with known answers: `realm calibrate`.

    The default changes nothing and takes every answer.
    """

    slope: float = 1.0
    """Of an answer's log-odds; the next three are the weights of its question's features."""
    inner: float = 0.0
    ranking: float = 0.0
    span: float = 0.0
    offset: float = 0.0
    threshold: float = 0.0
    """An answer of a lower probability counts as a guess: no answer was found."""
    method: Method = "dense"
    """What ranked the passages of those questions, and ranks them where nobody names a method."""

    def __post_init__(self) -> None:
        others = (self.inner, self.ranking, self.span, self.offset)
        if not (0 < self.slope < math.inf and all(map(math.isfinite, others)) and 0 <= self.threshold <= 1):
            raise ValueError(
                f"slope is {self.slope}, inner, ranking, span and offset {others}, threshold {self.threshold}: the slope must "
                "be above 0, the next four finite, the threshold between 0 and 1"
            )

    def probability(self, share: float, features: Features = NO_FEATURES) -> float:
        """Of an answer with this share, which is between 0 and 1, to a question with these features.

        >>> Calibration().probability(0.25)
        0.25
        >>> round(Calibration(slope=0.5).probability(0.8), 3)
        0.667
        """
        if share <= 0:
            return 0.0
        inner, ranking, span = features
        added = self.offset + self.inner * inner + self.ranking * ranking + self.span * span
        if self.slope == 1 and added == 0:
            return share
        share = min(share, HIGHEST)
        odds = added + self.slope * math.log(share / (1 - share))
        return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0

    def scale(self, best: float, features: Features) -> float:
        """What the shares of a question's other answers are multiplied by, where the best one has the share `best`.

        The curve is that of best answers. Others keep their ratio to it, and with it have at most the probability 1.
        """
        if best <= 0:
            return 0.0
        probability = self.probability(best, features)
        if best >= HIGHEST:  # nothing is left for others
            return probability / best
        return min(probability / best, (1 - probability) / (1 - best))
