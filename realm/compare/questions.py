"""The questions of a table: read from files, and split into training and dev questions by the rule of ORQA."""

import hashlib
from collections.abc import Collection, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from farmhash import fingerprint64

from realm.errors import InputError
from realm.qa.question_files import Question, read_questions
from realm.qa.scoring.metrics import normalise_answer


class Split(NamedTuple):
    """Questions for training, and questions for choosing the best weights."""

    train: list[Question]
    dev: list[Question]
    dropped: int
    """Number of questions that were left out because they are also in a test."""


def split_questions(
    train: Sequence[tuple[str, Question]], dev: Sequence[tuple[str, Question]], tests: Sequence[Question]
) -> Split:
    """Training and dev questions from several files. The name of the file is added before the id of each question.

    Questions that are also in a test are left out; questions are compared as normalised texts. If there are no dev questions,
    the training questions with `is_dev` become dev questions.
    """
    asked = {normalise_answer(question.question) for question in tests}

    def kept(named: Sequence[tuple[str, Question]]) -> list[Question]:
        return [
            question._replace(id=f"{name}:{question.id}")
            for name, question in named
            if normalise_answer(question.question) not in asked
        ]

    training, choosing = kept(train), kept(dev)
    dropped = len(train) + len(dev) - len(training) - len(choosing)
    if not choosing:
        choosing = [one for one in training if is_dev(one.question)]
        training = [one for one in training if not is_dev(one.question)]
    return Split(training, choosing, dropped)


def contents(questions: Sequence[Question]) -> list[tuple[Any, ...]]:
    """What stays the same in the folder of a table. Ids are not part of it, because they change if a file is renamed."""
    return [(one.question, one.answers, one.regex, one.document_id) for one in questions]


def ordered_digest(questions: Sequence[Question], of_a_file: bool) -> str:
    """Digest of `contents`, and of the ids if the questions are those `of_a_file`, by which its reports are read.

    It depends on the order of the questions, unlike the digest of a published set.
    """
    ids = [question.id for question in questions] if of_a_file else []
    return hashlib.sha256(repr((contents(questions), ids)).encode()).hexdigest()[:32]


def is_dev(question: str) -> bool:
    """Whether a training question becomes a dev question, by the rule of ORQA (`create_data_splits.py`): one in ten does."""
    return bool(fingerprint64(question) % 100_000 % 10 == 0)


def held_out_questions(files: Sequence[str]) -> list[Question]:
    """The questions with `is_dev` of several files. The name of the file is added before the id of each question."""
    return [one._replace(id=f"{name}:{one.id}") for name, one in read_all(files) if is_dev(one.question)]


def read_all(files: Sequence[str], held_out: Collection[str] = ()) -> list[tuple[str, Question]]:
    """Pairs of the name of a file and a question, for all questions of several files, without those with `is_dev` of the files
    `held_out`.

    Raises:
        InputError: a file is listed twice.
    """
    return [
        (name, question)
        for name, file in zip(_names(files), files, strict=True)
        for question in read_questions(file)
        if file not in held_out or not is_dev(question.question)
    ]


def _names(files: Sequence[str]) -> list[str]:
    """The name of each file, without a colon, so that no two questions have the same id after the name and a colon are added.

    Of files with the same name, all but the first get a number: `train`, `train-2`.
    """
    names: dict[Path, str] = {}
    for file in map(Path, files):
        if file.resolve() in names:
            raise InputError(f"{file} is listed twice: list each question file once")
        name = file.stem.replace(":", "-")
        numbered = (f"{name}-{number}" for number in count(2))
        names[file.resolve()] = next(one for one in chain([name], numbered) if one not in names.values())
    return list(names.values())
