"""Answers as Python objects, as JSON and as lines on a terminal, for programs without torch such as the client of a server."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Self, TypeVar

from typing_extensions import TypedDict  # before Python 3.12, pydantic does not accept typing.TypedDict

from realm.errors import InputError
from realm.model.calibration import NO_FEATURES, Features
from realm.text.corpus import Passage

T = TypeVar("T")
LIKELY = 0.05
"""Least probability of an answer that a terminal shows beside the best answer; the page (`words.js`) has the same number."""
SHOWN = 3
"""Largest number of passages that a terminal shows if no answer was found."""


class IndexJson(TypedDict):
    """The version of the index from which the passages were retrieved."""

    version: int
    step: int


class Hit(NamedTuple):
    """A passage that was found for a question, and the score by which it was ranked; a higher score is better."""

    id: str
    document: str
    title: str
    text: str
    score: float
    fields: Mapping[str, Any]
    """Fields of the document, such as a year or an address."""


@dataclass(frozen=True)
class RankedPassage:
    """A passage retrieved for a question; `probability` is p(z|x), normalised over the retrieved passages."""

    id: str
    title: str
    text: str
    rank: int
    probability: float
    document: str
    """Id of the document."""
    fields: dict[str, Any]
    """Fields of the document, such as a year or an address."""

    @property
    def name(self) -> str:
        """The title, or the id of the document if the title is empty, on one line."""
        return " ".join((self.title.strip() or self.document).split())

    def place(self) -> str:
        """The name and the rank, and the file of the document if there is one."""
        file = self.fields.get("path")
        return f"{self.name}, rank {self.rank}" + (f", {file}" if file else "")

    @classmethod
    def of(cls, passage: Passage, rank: int, probability: float) -> "RankedPassage":
        id, document, title, text = passage[:4]
        return RankedPassage(id, title, text, rank, probability, document, dict(passage.fields))


@dataclass(frozen=True)
class Span:
    """A span of a passage, `text[start:end]` of the passage.

    `score` is the span score plus the retrieval score of the passage. `probability` is the calibrated probability that the text
    of the span is right, with a few words more or less. The softmax probabilities of all spans with the same answer
    (`stands_for`) are added up, and the sum is calibrated. The softmax is over the spans of all passages read, and over "no
    answer" if the reader scores "no answer".
    """

    text: str
    score: float
    probability: float
    start: int
    end: int


@dataclass(frozen=True)
class ReadPassage(RankedPassage):
    """A passage that was read, and its best span, which is None if the passage has no span."""

    span: Span | None


@dataclass(frozen=True)
class Answer(Span):
    """A span and its passage: `passage.text[start:end]`."""

    passage: RankedPassage

    def lines(self, words: str = "") -> list[str]:
        """Lines for a terminal: the answer with `words` before its probability, the title, rank and file of the passage, and
        the evidence."""
        said = ", ".join(filter(None, (words, f"probability {self.probability:.2f}")))
        return [
            f"{' '.join(self.text.split())}   ({said})",
            f"    {self.passage.place()}",
            f"    {self.evidence()}",
        ]

    def evidence(self) -> str:
        """The part of the passage around the answer, on one line, with the answer in [[ ]]."""
        text = self.passage.text
        return _around(f"{text[: self.start]}[[{self.text}]]{text[self.end :]}", self.start)


@dataclass(frozen=True)
class AnsweringIndex:
    """The version of the index from which the passages were retrieved.

    `created` (date of the build) and `knowledge` (version of the passages) are only in the JSON of a server.
    """

    version: int
    step: int
    created: str | None = None
    knowledge: int | None = None

    def to_json(self) -> IndexJson:
        return {"version": self.version, "step": self.step}


class AnswersJson(TypedDict):
    """The output of `realm answer --json`."""

    question: str
    found: bool
    answers: list[Answer]
    index: IndexJson
    ms: dict[str, float]


@dataclass(frozen=True)
class Answers:
    """The answers to one question, in the order of the scores of their best spans. The JSON of `to_json` is a stable interface.

    The probabilities of all spans with the same answer are added up, so a later answer can have a higher probability.
    """

    question: str
    answers: list[Answer]
    index: AnsweringIndex
    ms: dict[str, float]
    passages: list[ReadPassage]
    """All passages that were read, best first. Only the JSON of a server has this field."""
    null_probability: float | None
    """p(z|x) of the null passage, normalised over the null passage and the passages read; high if the passages do not fit the
    question. Only the JSON of a server has this field."""
    found: bool
    """Whether the probability of the best answer reaches the threshold; if not, the best answer is a guess."""
    features: Features = NO_FEATURES
    """The inputs of the calibration besides the share of the best answer; not in the JSON."""

    def to_json(self) -> dict[str, Any]:
        """An object with the keys of `AnswersJson`."""
        return {
            "question": self.question,
            "found": self.found,
            "answers": [asdict(answer) for answer in self.answers],
            "index": self.index.to_json(),
            "ms": {stage: round(value, 2) for stage, value in self.ms.items()},
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Answers from the JSON of `to_json`, or from the JSON of a server, which has more fields."""
        index = row["index"]
        return cls(
            row["question"],
            [_from(Answer, one, passage=_from(RankedPassage, one["passage"])) for one in row["answers"]],
            AnsweringIndex(index["version"], index["step"], index.get("created"), index.get("knowledge")),
            dict(row["ms"]),
            [
                _from(ReadPassage, one, span=one["span"] and _from(Span, one["span"]))
                for one in row.get("passages", [])
            ],
            row.get("null_probability"),
            row["found"],
        )

    def best(self, place: str, where: str | None) -> Answer:
        """The best answer. Errors name the `place` of the passages and the filter `where`.

        Raises:
            InputError: there was no passage to read.
        """
        if not self.answers:
            which = "" if where is None else f" that matches the filter {where}"
            raise InputError(f"no answer: {place} has no passage to read{which}")
        return self.answers[0]

    def lines(self) -> list[str]:
        """Lines for a terminal: the best answer with its evidence, and other answers that are not unlikely.

        If no answer was found, the best answer is shown as a guess, without others, and the beginning of the best passages.
        """
        if not self.answers:
            return ["no answer: the knowledge base has no passage to read, or none that matches the filter"]
        best, *others = self.answers
        if not self.found:
            shown = [
                f"    {line}"
                for one in self.passages[:SHOWN]
                for line in (one.place(), f"    {_around(one.text, 0)}")
            ]
            return [
                "no answer found; the best guess:",
                *best.lines(),
                *(["the best passages:", *shown] if shown else []),
            ]
        more = [line for answer in others if answer.probability >= LIKELY for line in answer.lines()]
        return [*best.lines(sureness(best.probability)), *more]


def sureness(probability: float) -> str:
    """Words for the probability of an answer that is not a guess; the page (`words.js`) has the same words."""
    if probability >= 0.8:
        return "very likely right"
    return "probably right" if probability >= 0.5 else "unsure"


def _from(kind: type[T], row: Mapping[str, Any], **parts: Any) -> T:
    """A dataclass from the keys of an object, of which `parts` are replaced; further keys are ignored."""
    return kind(**{field.name: row[field.name] for field in fields(kind)} | parts)  # type: ignore[arg-type]


def _around(text: str, place: int, width: int = 160) -> str:
    """About 2 * `width` characters of a text around `place`, on one line, with " / " in place of line breaks.

    A line that begins with a small letter continues the line above it, if this is not blank. The part begins and ends between
    words, unless a word is very long.
    """
    first = max(0, place - width // 2)
    end = first + 2 * width
    part = text[first:end]
    if first and not text[first - 1].isspace():
        part = re.sub(r"^\S{1,30}(?=\s)", "", part)
    if end < len(text) and not text[end].isspace():
        part = re.sub(r"(?<=\s)\S{1,30}$", "", part)
    lines: list[str] = []
    above = ""
    for line in (" ".join(line.split()) for line in part.splitlines()):
        if above and line.lstrip("[")[:1].islower():
            lines[-1] += f" {line}"
        elif line:
            lines.append(line)
        above = line
    return ("... " if first else "") + " / ".join(lines) + (" ..." if end < len(text) else "")
