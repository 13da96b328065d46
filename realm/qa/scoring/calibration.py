"""Calibration of answer probabilities: calibration error, report, and fit.

Axis letters: N questions, M questions with an answer although their positives were left out, F inputs of the logistic
regression (log-odds and features).
"""

from dataclasses import replace
from typing import NamedTuple, TypedDict

import numpy as np

from realm.errors import InputError
from realm.model.calibration import HIGHEST, Calibration, Features
from realm.qa.scoring.significance import percent, wilson_interval

BINS = 10
RIGHT_LOST = 0.14
"""Share of the right answers, on the questions of the fit, whose probability is below the fitted threshold."""
LEAST_QUESTIONS = 50
"""A fit needs at least this number of right answers, and at least this number of wrong answers."""


class BinJson(TypedDict):
    """A bin of answers with similar probability: mean probability and share of right answers, both in percent."""

    probability: float
    right: float
    n: int


class UnanswerableJson(TypedDict):
    """Questions that were answered without positives; `declined` is the percentage of best answers below the threshold."""

    n: int
    declined: float
    declined_ci95: list[float]


class ConfidenceJson(TypedDict):
    """Quality of the probabilities, in percent. An answer is right if it `is_acceptable`.

    `right_declined` and `wrong_declined` are the percentages of right and of wrong answers below the threshold; null if there
    are no such answers. `unanswerable` is null if no questions were answered without their positives.
    """

    right: float
    """Percentage of the questions whose answer is right."""
    ece: float
    """Expected calibration error: mean difference between probability and accuracy of the bins, weighted by their sizes."""
    bins: list[BinJson]
    right_declined: float | None
    wrong_declined: float | None
    unanswerable: UnanswerableJson | None


class Confidence(NamedTuple):
    """The probability of the best answer to each question, 0 if there is no answer."""

    probability_N: np.ndarray
    threshold: float
    """Answers with a lower probability are guesses."""
    without_N: np.ndarray | None = None
    """The probability of the best answer to each question if the positives are left out; None if this was not measured."""

    def as_dict(self, right_N: np.ndarray) -> ConfidenceJson:
        """The summary as JSON; `right_N` is True for the right answers."""
        return {
            "right": percent(right_N.mean()),
            "ece": percent(calibration_error(self.probability_N, right_N)),
            "bins": [
                {"probability": percent(p.mean()), "right": percent(right.mean()), "n": len(p)}
                for p, right in _bins(self.probability_N, right_N)
            ],
            "right_declined": self._declined(self.probability_N[right_N]),
            "wrong_declined": self._declined(self.probability_N[~right_N]),
            "unanswerable": self._unanswerable(),
        }

    def _declined(self, probability_n: np.ndarray) -> float | None:
        return percent(self._guesses(probability_n).mean()) if len(probability_n) else None

    def _unanswerable(self) -> UnanswerableJson | None:
        if self.without_N is None:
            return None
        n, declined = len(self.without_N), int(self._guesses(self.without_N).sum())
        low, high = wilson_interval(declined, n)
        return {"n": n, "declined": percent(declined / n), "declined_ci95": [percent(low), percent(high)]}

    def _guesses(self, probability_n: np.ndarray) -> np.ndarray:
        return (probability_n < self.threshold) | (probability_n == 0)

    def lines(self, right_N: np.ndarray) -> list[str]:
        """A reliability diagram, and the percentages of answers below the threshold."""
        summary = self.as_dict(right_N)
        lines = [
            f"calibration error {summary['ece']:.1f} points, where {summary['right']:.1f}% of the answers count as right",
            "answers by their probability:",
            "  prob  right      n",
        ]
        lines += [
            f"{one['probability']:5.0f}% {one['right']:5.0f}% {one['n']:6,d}  {_bar(one['probability'], one['right'])}"
            for one in summary["bins"]
        ]
        named = (("right", summary["right_declined"]), ("wrong", summary["wrong_declined"]))
        lines += [
            f"reported as guesses: {share:.1f}% of the {which} answers"
            for which, share in named
            if share is not None
        ]
        if (without := summary["unanswerable"]) is not None:
            low, high = without["declined_ci95"]
            lines.append(
                f"reported as guesses if all passages with an answer are left out: {without['declined']:.1f}% of the answers "
                f"to {without['n']:,} questions (95% interval {low:.1f} to {high:.1f})"
            )
        return lines


def _bar(probability: float, right: float) -> str:
    """A bar for the share of right answers, 40 characters for 100 %, with a mark at the probability."""
    bar = ("#" * round(right / 2.5)).ljust(41)
    place = min(40, round(probability / 2.5))
    return f"{bar[:place]}|{bar[place + 1 :]}".rstrip()


def calibration_error(probability_N: np.ndarray, right_N: np.ndarray) -> float:
    """Expected calibration error, between 0 and 1, over ten bins of equal width (Guo et al. 2017, eq. 3).

    >>> calibration_error(np.array([0.8, 0.8, 0.8, 0.8]), np.array([True, True, True, False]))
    0.05
    """
    distances = [len(p) * abs(p.mean() - right.mean()) for p, right in _bins(probability_N, right_N)]
    return round(float(sum(distances)) / len(probability_N), 6)


def _bins(probability_N: np.ndarray, right_N: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The probabilities and outcomes of each non-empty bin."""
    bin_N = np.minimum((probability_N * BINS).astype(int), BINS - 1)
    return [(probability_N[bin_N == n], right_N[bin_N == n]) for n in np.unique(bin_N)]


class Evidence(NamedTuple):
    """Inputs of the calibration: the share and the features of the best answer to each question."""

    share_N: np.ndarray
    features_N: list[Features]

    def odds_NF(self) -> np.ndarray:
        """The inputs of the logistic regression: log-odds of the shares, then the features -> [N, F]."""
        share_N = np.clip(self.share_N.astype(np.float64), 1 - HIGHEST, HIGHEST)
        return np.column_stack([np.log(share_N / (1 - share_N)), np.array(self.features_N).reshape(-1, 3)])

    def probability_N(self, calibration: Calibration) -> np.ndarray:
        """Calibrated probabilities of the best answers -> [N]."""
        pairs = zip(self.share_N.tolist(), self.features_N, strict=True)
        return np.array([calibration.probability(share, features) for share, features in pairs])


def fit(answered: Evidence, right_N: np.ndarray, without: Evidence) -> Calibration:
    """Fits a calibration by maximum likelihood, in two steps, and chooses a threshold.

    Step 1 fits weights of log-odds and features, which separate right answers from wrong answers and from the answers to
    questions `without` their positives. Step 2 fits a factor and an offset for the weighted sum, only on the answers with
    positives (Platt scaling with the targets of Platt 1999), because the share of unanswerable questions in later use is
    unknown. The threshold is the quantile `RIGHT_LOST` of the probabilities of right answers.

    Raises:
        InputError: there are too few right or wrong answers, all probabilities are equal, or answers with a higher probability
            are not right more often.
    """
    rights, wrongs = int(right_N.sum()), int((~right_N).sum())
    if min(rights, wrongs) < LEAST_QUESTIONS:
        raise InputError(
            f"{rights} answers are right and {wrongs} are wrong: calibration needs at least {LEAST_QUESTIONS} of each"
        )
    answered_NF, without_MF = answered.odds_NF(), without.odds_NF()[without.share_N > 0]
    if np.ptp(answered_NF[:, 0]) == 0:
        raise InputError(
            f"all {len(answered_NF)} answers have the same probability: there is nothing to calibrate"
        )
    all_NF = np.concatenate([answered_NF, without_MF])
    weight_F, _ = _logistic(all_NF, np.concatenate([right_N, np.zeros(len(without_MF), dtype=bool)]))
    (scale,), offset = _logistic((answered_NF @ weight_F)[:, None], right_N)
    slope, inner, ranking, span = (scale * weight_F).tolist()
    if not (scale > 0 and slope > 0):
        raise InputError(
            "answers with a higher probability are not right more often: there is nothing to calibrate"
        )
    typical = float(np.mean([one.ranking for one in answered.features_N]))
    curve = Calibration(slope=slope, inner=inner, ranking=ranking, span=span, offset=offset, typical=typical)
    right_n = answered.probability_N(curve)[right_N]
    return replace(curve, threshold=round(float(np.quantile(right_n, RIGHT_LOST)), 3))


def _logistic(value_NF: np.ndarray, right_N: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights [F] and intercept of a logistic regression, by Newton's method.

    The weight of a constant column is 0. With Platt's targets the weights are finite even if the inputs separate the outcomes.
    """
    mean_F, spread_F = value_NF.mean(axis=0), value_NF.std(axis=0)
    differs_F = spread_F > 0
    spread_F = np.where(differs_F, spread_F, 1.0)
    value_NF1 = np.column_stack([(value_NF - mean_F) / spread_F, np.ones(len(value_NF))])
    rights = int(right_N.sum())
    target_N = np.where(right_N, (rights + 1) / (rights + 2), 1 / (len(right_N) - rights + 2))
    kept = [*np.flatnonzero(differs_F), value_NF.shape[1]]
    value_NF1, weight_F1 = value_NF1[:, kept], np.zeros(len(kept))
    for _ in range(100):
        chance_N = 1 / (1 + np.exp(-(value_NF1 @ weight_F1)))
        hessian_F1F1 = (value_NF1 * (chance_N * (1 - chance_N))[:, None]).T @ value_NF1
        step_F1 = np.linalg.lstsq(hessian_F1F1, value_NF1.T @ (target_N - chance_N))[0]
        weight_F1 = weight_F1 + step_F1
        if np.abs(step_F1).max() < 1e-9:
            break
    weight_F = np.zeros(value_NF.shape[1])
    weight_F[differs_F] = weight_F1[:-1] / spread_F[differs_F]
    return weight_F, float(weight_F1[-1] - weight_F @ mean_F)
