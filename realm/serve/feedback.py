"""Stores feedback on answers as question files, which `realm finetune` and `realm evaluate` read.

FILE            questions with an answer that a person marked as right, or selected in a passage instead of the answer
FILE.rejected   questions with an answer that a person marked as wrong

The files have the format of `realm questions --review`. The answer is always a piece of a passage: clients send only the
position of the answer.
"""

import hashlib
import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from realm.errors import RealmError, WriteFailed, reason
from realm.files import write_lines
from realm.text.corpus import Passage

Verdict = Literal["right", "wrong", "better"]
MOST_ANSWER_CHARACTERS = 300
"""Largest length of an answer in characters."""
MOST_BYTES = 4_194_304
"""Largest size of a file of feedback in bytes."""


class FeedbackLine(TypedDict):
    """A line of a file of feedback, which `read_questions` reads."""

    id: str
    question: str
    answers: list[str]
    document_id: str
    verdict: Verdict
    title: str
    passage: str
    """Id of the passage."""
    start: int
    end: int
    created: str


class FeedbackFull(RealmError):
    """A file of feedback would become larger than allowed."""


class Stored(NamedTuple):
    """Id of a line of feedback, and whether the line is new."""

    id: str
    new: bool


class Feedback:
    """The two files of feedback. Each file is complete after each change."""

    def __init__(self, file: Path):
        self.file = file
        self._lock = threading.Lock()

    def add(self, question: str, verdict: Verdict, passage: Passage, start: int, end: int) -> Stored:
        """Stores a verdict on `passage.text[start:end]` as an answer to a question. Equal feedback is stored once.

        Raises:
            RealmError: the span is not a piece of the passage, is blank, or is too long.
            FeedbackFull: the file would become larger than allowed.
            WriteFailed: the file cannot be read or written.
        """
        answer = passage.text[start:end]
        if not 0 <= start < end <= len(passage.text) or not answer.strip():
            raise RealmError(
                f"the characters {start} to {end} of passage {passage.id} are not an answer: give the place of a piece of its "
                f"text, which has {len(passage.text)} characters"
            )
        if len(answer) > MOST_ANSWER_CHARACTERS:
            raise RealmError(
                f"the answer has {len(answer)} characters: at most {MOST_ANSWER_CHARACTERS} are allowed"
            )
        key = json.dumps([question, verdict, passage.id, start, end])
        line: FeedbackLine = {
            "id": hashlib.sha256(key.encode()).hexdigest()[:16],
            "question": question,
            "answers": [answer],
            "document_id": passage.document_id,
            "verdict": verdict,
            "title": passage.title,
            "passage": passage.id,
            "start": start,
            "end": end,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        rejected = self.file.with_name(f"{self.file.name}.rejected")
        with self._lock:
            return self._append(rejected if verdict == "wrong" else self.file, line)

    def _append(self, file: Path, line: FeedbackLine) -> Stored:
        added = json.dumps(line, ensure_ascii=False)
        try:
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            lines = [one for one in text.split("\n") if one.strip()]
            start = added[: added.index(",")]  # `{"id": "..."`
            if any(one.startswith(start) for one in lines):
                return Stored(line["id"], False)
            if len(text.encode()) + len(added.encode()) + 1 > MOST_BYTES:
                raise FeedbackFull(
                    f"the file of feedback has reached {MOST_BYTES:,} bytes: move {file.name} away"
                )
            write_lines(file, [*lines, added])
        except (OSError, UnicodeError) as error:
            raise WriteFailed(f"{file} cannot be written: {reason(error)}") from error
        return Stored(line["id"], True)
