"""A person reviews questions in the terminal: accepts, corrects or rejects each question.

OUT            the accepted and corrected questions, a question file in JSON Lines, which `realm evaluate` reads
OUT.rejected   the rejected questions, in the same format

Each line also has the text of the question before the review, as `original`. Both files are complete after each decision. A
review that was stopped continues with the first question without a decision.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from realm.errors import InputError, reason, shown
from realm.files import write_json_lines
from realm.qa.question_files import Question

HELP = "a: accept, c: correct, r: reject, u: undo the last decision, q: stop (a later review continues here)"


class ReviewJson(TypedDict):
    """The output of `realm questions --review`: numbers of questions."""

    accepted: int
    """Accepted questions, including corrected questions."""
    rejected: int
    left: int
    """Questions without a decision."""


ORIGINAL = "original"
"""Key of the text that a question had before the review."""


class _Decision(NamedTuple):
    line: dict[str, Any]
    accepted: bool


def rejected_file(out: Path) -> Path:
    """The file of the rejected questions, beside the file of the accepted questions."""
    return out.with_name(f"{out.name}.rejected")


class Review:
    """The decisions about some questions, and the files that keep these decisions."""

    def __init__(self, questions: Sequence[Question], out: Path):
        self._questions, self._out = questions, out
        self._rejected = rejected_file(out)
        self._decisions = [
            *(_Decision(line, True) for line in _lines(out)),
            *(_Decision(line, False) for line in _lines(self._rejected)),
        ]
        self._earlier = len(self._decisions)
        self._text = {question.id: question.question for question in questions}
        for line in (decision.line for decision in self._decisions):
            if line["id"] not in self._text:
                raise InputError(
                    f"{out} has the question {line['id']!r}, which is not among the questions to review: give another --out"
                )
            text = self._text[line["id"]]
            if (original := line.get(ORIGINAL, line.get("question"))) != text:
                raise InputError(
                    f"{out} has a decision about the question {shown(original)}, but the question {line['id']!r} to review "
                    f"is {shown(text)}: give another --out"
                )

    def left(self) -> list[Question]:
        """The questions without a decision, in their order."""
        decided = {decision.line["id"] for decision in self._decisions}
        return [question for question in self._questions if question.id not in decided]

    def decide(self, question: Question, accepted: bool) -> None:
        """Records a decision. The id of `question` is that of a question to review; its text and answers may be corrected."""
        line = {**question.to_json(), ORIGINAL: self._text[question.id]}
        self._decisions.append(_Decision(line, accepted))
        self._write(accepted)

    def undo(self) -> bool:
        """Removes the last decision that was made through this object; False if there is none."""
        if len(self._decisions) == self._earlier:
            return False
        self._write(self._decisions.pop().accepted)
        return True

    def _write(self, accepted: bool) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        lines = (decision.line for decision in self._decisions if decision.accepted == accepted)
        write_json_lines(self._out if accepted else self._rejected, lines)

    def as_dict(self) -> ReviewJson:
        """The numbers of decisions."""
        accepted = sum(decision.accepted for decision in self._decisions)
        return {
            "accepted": accepted,
            "rejected": len(self._decisions) - accepted,
            "left": len(self._questions) - len(self._decisions),
        }


def review(
    decisions: Review,
    read: Callable[[str], str],
    show: Callable[[str], None],
    evidence_of: Callable[[Question], str],
) -> None:
    """Shows one question after the other, and reads a decision for each, until none is left or the person stops.

    Args:
        read: prints a prompt and reads a line; an EOFError ends the review.
        show: prints a line.
        evidence_of: the text in which the answer is found; "" if it is unknown.
    """
    show(HELP)
    try:
        while left := decisions.left():
            question = left[0]
            show(f"\n{len(left):,} left. {question.question}")
            show(f"    answer: {' | '.join(question.answers)}")
            if evidence := evidence_of(question):
                show(f"    {marked(evidence, question)}")
            match read("[a/c/r/u/q] ").strip().lower():
                case "a":
                    decisions.decide(question, True)
                case "c":
                    decisions.decide(_corrected(question, read), True)
                case "r":
                    decisions.decide(question, False)
                case "u":
                    if not decisions.undo():
                        show("there is no decision to undo")
                case "q":
                    return
                case _:
                    show(HELP)
    except EOFError:
        return


def _corrected(question: Question, read: Callable[[str], str]) -> Question:
    """The question with the text and the answers that the person enters; an empty line keeps what was there."""
    text = read("question (empty: unchanged): ").strip() or question.question
    entered = read("answers, separated by | (empty: unchanged): ").split("|")
    answers = tuple(answer.strip() for answer in entered if answer.strip()) or question.answers
    return question._replace(question=text, answers=answers)


def marked(text: str, question: Question) -> str:
    """The text with the answer in double brackets: at the place from which the question was made, which is at the end of its
    id; if there is no such place, where an answer first stands as whole words.

    >>> marked("Kenya's president was Jomo Kenyatta, of Kenya.", Question("p1:40-45", "where?", ("Kenya",)))
    "Kenya's president was Jomo Kenyatta, of [[Kenya]]."
    >>> marked("Jomo Kenyatta led Kenya.", Question("1", "where?", ("Kenya",)))
    'Jomo Kenyatta led [[Kenya]].'
    """
    made = re.search(r":(\d+)-(\d+)$", question.id)
    places = [(int(made[1]), int(made[2]))] if made else []
    for answer in question.answers:
        places += [match.span() for match in re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text)]
    for start, end in places:
        if text[start:end] in question.answers:  # not so if a person corrected the answer of a made question
            return f"{text[:start]}[[{text[start:end]}]]{text[end:]}"
    return text


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        # splitlines() would also split at U+2028 and other Unicode line ends, which JSON strings may contain.
        text = file.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.removesuffix("\n").split("\n")] if text else []
        if all(isinstance(line["id"], str) for line in lines):
            return lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not a file of reviewed questions: {reason(error)}") from None
    raise InputError(f"{file} is not a file of reviewed questions: an id is not a string")
