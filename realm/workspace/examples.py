"""Chooses example questions among those that rules have made.

Questions that are answered as expected come first, because nobody would ask some of the others.
"""

from collections.abc import Sequence

import numpy as np

from realm.model.calibration import Method
from realm.qa.answers import Answers
from realm.qa.pipeline import Answerer
from realm.qa.scoring.metrics import exact_match
from realm.questions import MadeQuestion

SHOWN = 3
"""Number of examples."""
_TRIED = 12
"""Number of made questions among which the examples are chosen."""
_SHORT = 90
"""Preferred maximum length of an example, in characters."""


def drawn(made: Sequence[MadeQuestion]) -> list[MadeQuestion]:
    """Up to `_TRIED` of the questions, from different documents, drawn at random but equal for each call.

    Longer questions are drawn only if all are long.
    """
    short = [one for one in made if len(one.question) <= _SHORT] or list(made)
    shuffled = [short[n] for n in np.random.default_rng(0).permutation(len(short))]
    return list({one.document_id: one for one in reversed(shuffled)}.values())[::-1][:_TRIED]


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
