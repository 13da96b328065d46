"""Calibration: computes the probability that an answer is right from the share of the answer and from features.

The *share* of an answer is the softmax probability of the answer's spans among all spans of the passages read.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Method = Literal["dense", "bm25", "hybrid"]
"""How passages are ranked: by vectors ("dense"), by words ("bm25"), or by both ("hybrid")."""
HIGHEST = 1 - 1e-7
"""Upper limit of a share: float32 can round a share to 1, and the log-odds of 1 are infinite."""


class Features(NamedTuple):
    """Inputs of the calibration besides the share of the best answer.

    The share compares a span with other spans. The features measure whether the passages fit the question and hold an answer.
    """

    inner: float = 0.0
    """Inner product of the vectors of the question and of the answer's passage."""
    ranking: float = 0.0
    """Hybrid score of the answer's passage, or 0 if another method ranked the passage: then the calibration uses `typical`."""
    span: float = 0.0
    """The reader's score of the span."""


NO_FEATURES = Features()


@dataclass(frozen=True)
class Calibration:
    """Weights of a logistic regression, which `realm calibrate` fits on questions with known answers.

    With the default values, the probability is the share, and every answer is accepted.
    """

    slope: float = 1.0
    """Weight of the log-odds of the share. `inner`, `ranking` and `span` are the weights of the features; `offset` is added."""
    inner: float = 0.0
    ranking: float = 0.0
    span: float = 0.0
    offset: float = 0.0
    typical: float = 0.0
    """The mean of the feature `ranking` over the questions of the fit, which replaces the feature if another method ranked."""
    threshold: float = 0.0
    """If the best answer has a lower probability, the answer is reported as a guess and not as found."""
    method: Method = "dense"
    """The method that ranked the passages when the calibration was fitted, and the default method of the model."""

    def __post_init__(self) -> None:
        others = (self.inner, self.ranking, self.span, self.offset, self.typical)
        if not (0 < self.slope < math.inf and all(map(math.isfinite, others)) and 0 <= self.threshold <= 1):
            raise ValueError(
                f"slope is {self.slope}, (inner, ranking, span, offset, typical) is {others}, threshold is {self.threshold}: "
                "slope must be above 0 and finite, threshold must be between 0 and 1, and the other values must be finite"
            )

    def probability(self, share: float, features: Features = NO_FEATURES) -> float:
        """The probability that an answer is right, given its share (between 0 and 1) and its features.

        >>> Calibration().probability(0.25)
        0.25
        >>> round(Calibration(slope=0.5).probability(0.8), 3)
        0.667
        """
        if share <= 0:
            return 0.0
        inner, ranking, span = features
        added = self.offset + self.inner * inner + self.ranking * (ranking or self.typical) + self.span * span
        if self.slope == 1 and added == 0:
            return share
        share = min(share, HIGHEST)
        odds = added + self.slope * math.log(share / (1 - share))
        return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0

    def scale(self, best: float, features: Features) -> float:
        """The factor by which the share of every answer except the best is multiplied; `best` is the share of the best answer.

        The regression is fitted to best answers only. The ratios between all other answers stay the same, and the
        probabilities of all answers add up to at most 1.
        """
        if best <= 0:
            return 0.0
        probability = self.probability(best, features)
        if best >= HIGHEST:  # the shares of all other answers are almost 0
            return probability / best
        return min(probability / best, (1 - probability) / (1 - best))
