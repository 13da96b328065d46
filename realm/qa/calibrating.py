"""Fits the calibration of a model on a set of questions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypedDict

from realm.errors import InputError
from realm.model.calibration import Calibration, Method
from realm.model.manifest import set_calibration
from realm.qa.pipeline import NEEDS_READER, AnswerConfig, Answerer
from realm.qa.question_files import Question
from realm.qa.question_sets import ask, probability_N
from realm.qa.scoring import evaluation
from realm.qa.scoring.calibration import Confidence, Evidence, fit
from realm.qa.scoring.evaluation import ReportJson


class CalibrationJson(TypedDict):
    """The output of `realm calibrate`."""

    calibration: dict[str, float | str]
    """The calibration as in `realm.json`."""
    before: ReportJson
    after: ReportJson


@dataclass(frozen=True)
class Calibrated:
    """A fitted calibration, and two reports on the questions of the fit: without and with this calibration."""

    calibration: Calibration
    before: evaluation.Report
    after: evaluation.Report

    def to_json(self) -> CalibrationJson:
        return {
            "calibration": asdict(self.calibration),
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
        }

    def lines(self) -> list[str]:
        fitted, was = self.calibration, self.before.as_dict()["confidence"]
        assert was is not None
        return [
            *self.after.lines(),
            f"before the fit, the calibration error was {was['ece']:.1f} points; all numbers are measured on the questions of "
            "the fit",
            f"answers with a probability below {fitted.threshold:g} are guesses; log-odds of the probability = "
            f"{fitted.slope:.3f} x log-odds of the share + {fitted.inner:.3f} x inner product + {fitted.ranking:.3f} x hybrid "
            f"score + {fitted.span:.3f} x span score + {fitted.offset:.3f}",
            f"the default retrieval method of the model is now {fitted.method}",
        ]


def calibrate(
    kb: str, model: str, questions: Sequence[Question], method: Method | None, config: AnswerConfig
) -> Calibrated:
    """Fits the calibration of a model folder, and writes it into the folder together with the retrieval method.

    The calibrated probability estimates how likely an answer counts as right (`is_acceptable`).

    Raises:
        InputError: the model is not a local folder, or has no span reader; the setting `reader` is used; or see
            `realm.qa.scoring.calibration.fit`.
    """
    if ":" in model and not Path(model).is_dir():
        raise InputError(
            f"{model} is not a local folder, and cannot be changed: copy the model, and calibrate the copy"
        )
    if config.reader is not None:
        raise InputError(
            "a calibration is saved in the folder of the model that contains the reader: make such a model with `realm convert "
            f"{config.reader} OUT --retriever {model}`, and calibrate OUT without the setting `reader`"
        )
    answerer = Answerer.load(kb, model, config)
    if answerer.model.span_reader is None:
        raise InputError(NEEDS_READER)
    method = method or answerer.method
    answerer.model.calibration = Calibration()
    asked = ask(answerer, questions, method, unanswerable=True)
    assert asked.without is not None
    before = asked.report(questions, threshold=0.0)
    assert before.acceptable_N is not None
    with_positives, without = (
        Evidence(probability_N(certainties), [one.features for one in certainties])
        for certainties in (asked.certainties, asked.without)
    )
    fitted = replace(fit(with_positives, before.acceptable_N, without), method=method)
    set_calibration(Path(model), fitted)
    after = Confidence(with_positives.probability_N(fitted), fitted.threshold, without.probability_N(fitted))
    return Calibrated(fitted, before, before._replace(confidence=after))
