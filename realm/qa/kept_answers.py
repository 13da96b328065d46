"""Keeps the answers of an evaluation that is not finished, so that the same command continues after a kill.

PREDICTIONS.unfinished    answers by the hash of the question and of all on which its answer depends (`realm.kept_values`)
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from realm.kept_values import KeptValues
from realm.model.calibration import NO_FEATURES, Features
from realm.qa.predictions import Prediction
from realm.qa.question_files import Question


class Certainty(NamedTuple):
    """What the calibration of a model needs to know of the best answer to a question."""

    probability: float = 0.0
    """0 if there is no answer."""
    features: Features = NO_FEATURES


class Outcome(NamedTuple):
    """The best answer to a question."""

    prediction: Prediction
    certainty: Certainty | None = None
    """None for the answer of a system that is not a REALM model."""
    without: Certainty | None = None
    """Certainty of the answer if the positives are left out; None if this answer was not computed."""


class OutcomeJson(TypedDict):
    """A value of the database."""

    prediction: dict[str, Any]
    """The fields of `Prediction`."""
    certainty: list[float] | None
    """The probability, and the features."""
    without: list[float] | None


class KeptAnswers:
    """The answers that an earlier call found. `identity` differs if answers to the same question can differ."""

    def __init__(self, database: KeptValues, identity: str):
        self._database, self._identity = database, identity

    def find(self, questions: Sequence[Question]) -> list[Outcome] | None:
        """The answers to all questions; None if one of them is not known."""
        found: list[Outcome] = []
        for question in questions:
            value = self._database.find(self._key(question))
            one = None if value is None else _decoded(value)
            if one is None:
                return None
            found.append(one)
        return found

    def keep(self, questions: Sequence[Question], outcomes: Sequence[Outcome]) -> None:
        """Keeps the answers to questions."""
        for question, outcome in zip(questions, outcomes, strict=True):
            self._database.keep(self._key(question), _encoded(outcome))

    def _key(self, question: Question) -> bytes:
        return hashlib.blake2b(f"{self._identity}\n{question!r}".encode(), digest_size=16).digest()


@contextmanager
def kept_answers(predictions: str | None, *identity: object) -> Iterator[KeptAnswers | None]:
    """A context with the answers that are kept until the block has written the file `predictions`.

    After an error or a kill, the answers stay. The result is None if `predictions` is None.
    """
    if predictions is None:
        yield None
        return
    file = Path(f"{predictions}.unfinished")
    with closing(KeptValues(file, "answers", "the evaluation cannot be continued after a kill")) as database:
        yield KeptAnswers(database, repr(identity))
    file.unlink(missing_ok=True)


def _encoded(outcome: Outcome) -> bytes:
    value: OutcomeJson = {
        "prediction": asdict(outcome.prediction),
        "certainty": _numbers(outcome.certainty),
        "without": _numbers(outcome.without),
    }
    return json.dumps(value).encode()


def _numbers(certainty: Certainty | None) -> list[float] | None:
    return None if certainty is None else [certainty.probability, *certainty.features]


def _decoded(value: bytes) -> Outcome | None:
    """None if the value is damaged."""
    try:
        found: OutcomeJson = json.loads(value)
        passages = tuple(found["prediction"]["passages"])
        prediction = Prediction(**{**found["prediction"], "passages": passages})
        return Outcome(prediction, _certainty(found["certainty"]), _certainty(found["without"]))
    except (ValueError, TypeError, KeyError):
        return None


def _certainty(numbers: list[float] | None) -> Certainty | None:
    return None if numbers is None else Certainty(numbers[0], Features(*numbers[1:]))
