"""How far the probability of an answer can be relied on, and the curve that makes it so.

Letters: N questions.
"""

from typing import NamedTuple, TypedDict

import numpy as np

from realm.config import InputError
from realm.model.calibration import HIGHEST, Calibration
from realm.qa.significance import percent, wilson_interval

BINS = 10
RIGHT_LOST = 0.12
"""Share of the right answers that the chosen threshold calls guesses, on the questions that it is chosen on."""
LEAST_QUESTIONS = 50
"""Questions of either outcome that two numbers can be fitted on."""


class BinJson(TypedDict):
    """Answers of similar probability: their mean probability, and the share of them that is right, both in percent."""

    probability: float
    right: float
    n: int


class UnanswerableJson(TypedDict):
    """Questions asked without the passages that hold their answers; `declined` in percent: no answer was found."""

    n: int
    declined: float
    declined_ci95: list[float]


class ConfidenceJson(TypedDict):
    """What probabilities were worth, in percent; null where there was nothing to measure it on."""

    ece: float
    """Expected calibration error: mean distance between a bin's two numbers."""
    bins: list[BinJson]
    right_declined: float | None
    wrong_declined: float | None
    unanswerable: UnanswerableJson | None


class Confidence(NamedTuple):
    """Per question the probability of the best answer, 0 where there is none."""

    probability_N: np.ndarray
    threshold: float
    """Answers of a lower probability are guesses."""
    without_N: np.ndarray | None = None
    """The best answer's without the passages that hold an answer; None where that was not tried."""

    def as_dict(self, correct_N: np.ndarray) -> ConfidenceJson:
        """The summary; `correct_N` says which answers are right."""
        return {
            "ece": percent(calibration_error(self.probability_N, correct_N)),
            "bins": [
                {"probability": percent(p.mean()), "right": percent(right.mean()), "n": len(p)}
                for p, right in _bins(self.probability_N, correct_N)
            ],
            "right_declined": self._declined(self.probability_N[correct_N]),
            "wrong_declined": self._declined(self.probability_N[~correct_N]),
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

    def lines(self, correct_N: np.ndarray) -> list[str]:
        """A reliability diagram, and how many answers are called guesses."""
        said = self.as_dict(correct_N)
        lines = [
            f"calibration error {said['ece']:.1f} points; answers by their probability:",
            "  said  right      n",
        ]
        lines += [
            f"{one['probability']:5.0f}% {one['right']:5.0f}% {one['n']:6,d}  {_bar(one['probability'], one['right'])}"
            for one in said["bins"]
        ]
        named = (("right", said["right_declined"]), ("wrong", said["wrong_declined"]))
        lines += [
            f"called guesses: {share:.1f}% of the {which} answers"
            for which, share in named
            if share is not None
        ]
        if (without := said["unanswerable"]) is not None:
            low, high = without["declined_ci95"]
            lines.append(
                f"without the passages that hold an answer: {without['declined']:.1f}% of {without['n']:,} questions "
                f"declined (95% interval {low:.1f} to {high:.1f})"
            )
        return lines


def _bar(probability: float, right: float) -> str:
    """The share that is right as a bar of 40 characters to 100 %, with a mark where the probability is."""
    bar = ("#" * round(right / 2.5)).ljust(41)
    place = min(40, round(probability / 2.5))
    return f"{bar[:place]}|{bar[place + 1 :]}".rstrip()


def calibration_error(probability_N: np.ndarray, correct_N: np.ndarray) -> float:
    """Expected calibration error over ten bins of equal width (Guo et al. 2017, eq. 3), a share.

    >>> calibration_error(np.array([0.8, 0.8, 0.8, 0.8]), np.array([True, True, True, False]))
    0.05
    """
    distances = [len(p) * abs(p.mean() - right.mean()) for p, right in _bins(probability_N, correct_N)]
    return round(float(sum(distances)) / len(probability_N), 6)


def _bins(probability_N: np.ndarray, correct_N: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The probabilities and outcomes of each bin that has any."""
    bin_N = np.minimum((probability_N * BINS).astype(int), BINS - 1)
    return [(probability_N[bin_N == n], correct_N[bin_N == n]) for n in np.unique(bin_N)]


def fit(share_N: np.ndarray, correct_N: np.ndarray) -> Calibration:
    """The curve of greatest likelihood (Platt 1999, with his targets), and a threshold that few right answers miss.

    Raises:
        InputError: too few right or wrong answers.
    """
    rights, wrongs = int(correct_N.sum()), int((~correct_N).sum())
    if min(rights, wrongs) < LEAST_QUESTIONS:
        raise InputError(
            f"of {len(correct_N)} answers {rights} are right and {wrongs} wrong: calibration needs {LEAST_QUESTIONS} of each"
        )
    share_N = np.clip(share_N.astype(np.float64), 1 - HIGHEST, HIGHEST)
    odds_N2 = np.stack([np.log(share_N / (1 - share_N)), np.ones(len(share_N))], axis=1)
    target_N = np.where(correct_N, (rights + 1) / (rights + 2), 1 / (wrongs + 2))
    weight_2 = np.array([1.0, 0.0])
    if np.ptp(odds_N2[:, 0]) == 0:
        raise InputError(f"all {len(share_N)} answers have one probability: there is nothing to calibrate")
    for _ in range(100):  # Newton's method; the likelihood has one maximum
        chance_N = 1 / (1 + np.exp(-(odds_N2 @ weight_2)))
        gradient_2 = odds_N2.T @ (target_N - chance_N)
        hessian_22 = (odds_N2 * (chance_N * (1 - chance_N))[:, None]).T @ odds_N2
        step_2 = np.linalg.solve(hessian_22, gradient_2)
        weight_2 = weight_2 + step_2
        if np.abs(step_2).max() < 1e-9:
            break
    slope, offset = weight_2.tolist()
    if not slope > 0:
        raise InputError(
            "answers of a higher probability are not right more often here: there is nothing to calibrate"
        )
    curve = Calibration(slope, offset)
    right_n = [curve.probability(share) for share in share_N[correct_N].tolist()]
    return Calibration(slope, offset, round(float(np.quantile(right_n, RIGHT_LOST)), 3))
