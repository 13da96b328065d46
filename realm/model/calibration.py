"""From the share of an answer among all spans to the probability that it is right."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Method = Literal["dense", "bm25", "hybrid"]
"""How passages are ranked: by vectors, by words, or by both."""
HIGHEST = 1 - 1e-7
"""Largest share that is used: a share of 1, which float32 can produce, has infinite log-odds."""


class Features(NamedTuple):
    """Features of a question's best answer beside its share among all spans. The share compares the span with other spans; the
    features measure whether the passages are about the question and hold an answer."""

    inner: float = 0.0
    """Inner product of the question with the answer's passage."""
    ranking: float = 0.0
    """Hybrid score of the answer's passage, or 0 if another method ranked the passage."""
    span: float = 0.0
    """The reader's score of the span."""


NO_FEATURES = Features()


@dataclass(frozen=True)
class Calibration:
    """A logistic curve over log-odds and features, fitted on questions with known answers: `realm calibrate`.

    The default leaves the share unchanged and accepts every answer.
    """

    slope: float = 1.0
    """Weight of an answer's log-odds; the next three are the weights of the features."""
    inner: float = 0.0
    ranking: float = 0.0
    span: float = 0.0
    offset: float = 0.0
    threshold: float = 0.0
    """An answer with a lower probability counts as a guess: no confident answer was found."""
    method: Method = "dense"
    """Method that ranked the passages of these questions, and the default method of the model."""

    def __post_init__(self) -> None:
        others = (self.inner, self.ranking, self.span, self.offset)
        if not (0 < self.slope < math.inf and all(map(math.isfinite, others)) and 0 <= self.threshold <= 1):
            raise ValueError(
                f"slope is {self.slope}, inner, ranking, span and offset {others}, threshold {self.threshold}: the slope must "
                "be above 0, the next four finite, the threshold between 0 and 1"
            )

    def probability(self, share: float, features: Features = NO_FEATURES) -> float:
        """Probability that an answer with this share, between 0 and 1, and these features is right.

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
        """Factor for the shares of all other answers to a question whose best answer has the share `best`.

        The curve is fitted to best answers. All other answers keep their ratios, and the probabilities sum to at most 1.
        """
        if best <= 0:
            return 0.0
        probability = self.probability(best, features)
        if best >= HIGHEST:  # nothing is left for other answers
            return probability / best
        return min(probability / best, (1 - probability) / (1 - best))
