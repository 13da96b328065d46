"""Keeps the answers of an evaluation until its predictions are written, so that the same command continues after a kill.

PREDICTIONS.unfinished    answers by the hash of the question and of all on which its answer depends (`realm.kept_values`)
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from realm import __version__
from realm.kept_values import KeptValues
from realm.model.calibration import NO_FEATURES, Features
from realm.qa.predictions import Prediction
from realm.qa.question_files import Question

_log = logging.getLogger(__name__)


class Certainty(NamedTuple):
    """What the calibration of a model needs to know of the best answer to a question."""

    probability: float = 0.0
    """0 if there is no answer."""
    features: Features = NO_FEATURES


class BestAnswer(NamedTuple):
    """The best answer to a question, with its evidence."""

    prediction: Prediction
    certainty: Certainty = Certainty()
    """Only for a REALM model."""
    without: Certainty | None = None
    """Certainty of the answer if the positives are left out; None if this answer was not computed."""


class BestAnswerJson(TypedDict):
    """A value of the database."""

    prediction: dict[str, Any]
    """The fields of `Prediction`."""
    certainty: list[float]
    """The probability, and the features."""
    without: list[float] | None


class KeptAnswers:
    """The answers that this evaluation and an interrupted earlier evaluation found.

    `identity` differs if the answers to a question can differ.
    """

    def __init__(self, database: KeptValues, identity: str):
        self._database, self._identity = database, identity
        self.known = 0
        """Number of answers that the earlier evaluation found."""

    def find(self, questions: Sequence[Question]) -> list[BestAnswer] | None:
        """The answers to all questions; None if one of them is not known."""
        found: list[BestAnswer] = []
        for question in questions:
            value = self._database.find(self._key(question))
            one = None if value is None else _decoded(value)
            if one is None:
                return None
            found.append(one)
        self.known += len(found)
        return found

    def keep(self, questions: Sequence[Question], answers: Sequence[BestAnswer]) -> None:
        """Writes the answers to questions."""
        for question, answer in zip(questions, answers, strict=True):
            self._database.keep(self._key(question), _encoded(answer))
        self._database.write()

    def _key(self, question: Question) -> bytes:
        return hashlib.blake2b(f"{self._identity}\n{question!r}".encode(), digest_size=16).digest()


def known_or_new(
    kept: KeptAnswers | None,
    questions: Sequence[Question],
    answer: Callable[[Sequence[Question]], list[BestAnswer]],
) -> list[BestAnswer]:
    """The answers to questions that are asked at once; `answer` is called if they are not known."""
    found = None if kept is None else kept.find(questions)
    if found is None:
        found = answer(questions)
        if kept is not None:
            kept.keep(questions, found)
    return found


@contextmanager
def kept_answers(predictions: str, *identity: object) -> Iterator[KeptAnswers]:
    """A context with the answers that are kept until the end of the block, which writes the file `predictions`.

    After an error or a kill in the block, the answers stay.
    """
    file = Path(f"{predictions}.unfinished")
    database = KeptValues(file, "answers", "an interrupted evaluation cannot continue")
    with closing(database):
        kept = KeptAnswers(database, repr((__version__, *identity)))
        yield kept
        if kept.known:
            _log.info("%d answers were known from an interrupted evaluation", kept.known)
        database.discard()


def _encoded(answer: BestAnswer) -> bytes:
    value: BestAnswerJson = {
        "prediction": asdict(answer.prediction),
        "certainty": _numbers(answer.certainty),
        "without": None if answer.without is None else _numbers(answer.without),
    }
    return json.dumps(value).encode()


def _numbers(certainty: Certainty) -> list[float]:
    return [certainty.probability, *certainty.features]


def _decoded(value: bytes) -> BestAnswer | None:
    """None if the value is damaged."""
    try:
        found: BestAnswerJson = json.loads(value)
        passages = tuple(found["prediction"]["passages"])
        prediction = Prediction(**{**found["prediction"], "passages": passages})
        without = found["without"]
        return BestAnswer(
            prediction, _certainty(found["certainty"]), None if without is None else _certainty(without)
        )
    except (ValueError, TypeError, KeyError, IndexError):
        return None


def _certainty(numbers: list[float]) -> Certainty:
    return Certainty(numbers[0], Features(*numbers[1:]))
