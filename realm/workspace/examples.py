"""Chooses example questions. Rules also make questions that nobody would ask, so those with the expected answer come first."""

from collections.abc import Sequence

from realm.model.calibration import Method
from realm.qa.answers import Answers
from realm.qa.pipeline import Answerer
from realm.qa.scoring.metrics import exact_match
from realm.questions import MadeQuestion

TRIED = 12
"""Number of made questions among which the examples are chosen."""


def right_first(
    answerer: Answerer, asked: Sequence[MadeQuestion], method: Method | None = None
) -> list[tuple[MadeQuestion, Answers]]:
    """The questions with their answers, first those that are answered as expected; the order stays otherwise.

    `method` ranks the passages; None: the method of the answerer. The answerer needs a span reader.
    """
    answered = answerer.answer_batch([one.question for one in asked], method)
    return sorted(zip(asked, answered, strict=True), key=lambda pair: not _is_right(*pair))


def _is_right(made: MadeQuestion, answers: Answers) -> bool:
    """Whether a question has the expected answer, and the answer is not a guess."""
    return answers.found and exact_match(answers.answers[0].text, list(made.answers))
