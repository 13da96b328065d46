"""Predictions of a system in a file, one JSON object per question, so that the predictions can be scored and compared later."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import tee
from pathlib import Path

from realm.errors import InputError, shown
from realm.files import write_json_lines
from realm.progress import progress
from realm.qa.question_files import Question, json_lines
from realm.qa.scoring import evaluation
from realm.qa.scoring.evaluation import Report
from realm.qa.scoring.metrics import OURS, Scoring
from realm.store.knowledge_base import KnowledgeBase

DEPTH = 100
"""Largest number of retrieved passages that a prediction lists, and the largest k of recall@k."""


@dataclass(frozen=True)
class Prediction:
    """The best answer of a system to one question, with its evidence: a line of a predictions file."""

    id: str
    """Id of the question in its file."""
    question: str
    answer: str
    """Empty if the system found no answer."""
    score: float = 0.0
    """Score of the answer by the system; scores of different systems cannot be compared."""
    passage_id: str = ""
    """Id of the passage that the answer is a part of; empty for an answer without evidence."""
    start: int = 0
    """Position of the first character of the answer in the text of the passage."""
    end: int = 0
    """Position after the last character of the answer in the text of the passage."""
    passages: tuple[str, ...] = ()
    """Ids of the retrieved passages, best first, at most `DEPTH`."""
    read: int = 0
    """Number of passages that were read for the answer."""
    ms: float = 0.0
    """Time for the question in milliseconds; if questions are answered in batches, the mean of the batch."""


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Writes a predictions file; the file appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(path, (asdict(one) for one in predictions))


def read_predictions(path: str | Path) -> list[Prediction]:
    """The predictions of a file; only `id` and `answer` are required, so that files of other programs can be scored.

    Raises:
        InputError: the file or a line cannot be used, or an id occurs twice.
    """
    found: dict[str, Prediction] = {}
    for where, record in json_lines(path, "predictions file"):
        if not isinstance(record, dict) or "id" not in record or "answer" not in record:
            raise InputError(
                f"{where}: {shown(record)} is not a prediction: write an object with id and answer"
            )
        given = {field.name: record[field.name] for field in fields(Prediction) if field.name in record}
        try:
            one = Prediction(
                **{
                    **given,
                    "id": str(record["id"]),
                    "question": _text(record.get("question", "")),
                    "answer": _text(record["answer"]),
                    "passages": tuple(map(_text, record.get("passages", ()))),
                }
            )
        except TypeError:
            raise InputError(
                f"{where}: {shown(record)} is not a prediction: question, answer and passages must be texts"
            ) from None
        if one.id in found:
            raise InputError(
                f"{where} is a second prediction for question {one.id!r}: keep only one prediction"
            )
        found[one.id] = one
    if not found:
        raise InputError(f"{path} holds no predictions: write one JSON object per line with id and answer")
    return list(found.values())


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def in_order(
    predictions: Sequence[Prediction], questions: Sequence[Question], path: str | Path
) -> list[Prediction]:
    """The predictions in the order of the questions; predictions with other ids are left out.

    Raises:
        InputError: a question has no prediction, or the prediction with its id has the text of another question.
    """
    by_id = {one.id: one for one in predictions}
    ordered = []
    for question in questions:
        one = by_id.get(question.id)
        if one is None:
            raise InputError(
                f"{path} has no prediction for question {question.id!r}: {shown(question.question)}"
            )
        if one.question and one.question != question.question:
            raise InputError(
                f"question {question.id!r} is {shown(one.question)} in {path}, but {shown(question.question)} in the question "
                "file: the files do not belong together"
            )
        ordered.append(one)
    return ordered


def score_predictions(
    kb: KnowledgeBase,
    predictions: Sequence[Prediction],
    questions: Sequence[Question],
    scoring: Scoring = OURS,
) -> Report:
    """Scores the answers and the retrieved passages of predictions, which have the order of the questions.

    Raises:
        InputError: a passage is not in the knowledge base.
    """
    shown = progress(predictions, total=len(predictions), description="score", unit="question", leave=False)
    passages, again = tee(kb.passages(kb.passage_numbers(one.passages[:DEPTH])) for one in shown)
    texts = ([passage.text for passage in row] for row in passages)
    titles = ([passage.title for passage in row] for row in again)
    return evaluation.evaluate([one.answer for one in predictions], texts, questions, DEPTH, scoring, titles)
