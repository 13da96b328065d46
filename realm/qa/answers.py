"""Answers as Python objects, as JSON and as lines on a terminal, for programs without torch such as the client of a server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import TypedDict  # before Python 3.12, pydantic does not accept typing.TypedDict

from realm.model.calibration import NO_FEATURES, Features
from realm.text.corpus import Passage


class RankedPassageJson(TypedDict):
    """A passage retrieved for a question."""

    id: str
    title: str
    text: str
    rank: int
    probability: float
    document: str
    """Id of the document."""
    fields: dict[str, Any]
    """Fields of the document, such as a year or an address."""


class SpanJson(TypedDict):
    """A span of a passage, `text[start:end]` of the passage."""

    text: str
    score: float
    probability: float
    start: int
    end: int


class ReadPassageJson(RankedPassageJson):
    """A passage that was read, and its best span, which is null if the passage has no span."""

    span: SpanJson | None


class AnswerJson(SpanJson):
    """A span and its passage."""

    passage: RankedPassageJson


class IndexJson(TypedDict):
    """The version of the index from which the passages were retrieved."""

    version: int
    step: int


class AnswersJson(TypedDict):
    """The output of `realm answer --json`."""

    question: str
    found: bool
    answers: list[AnswerJson]
    index: IndexJson
    ms: dict[str, float]


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
    fields: Mapping[str, Any]
    """Fields of the document, such as a year or an address."""

    @classmethod
    def of(cls, passage: Passage, rank: int, probability: float) -> "RankedPassage":
        id, document, title, text = passage[:4]
        return RankedPassage(id, title, text, rank, probability, document, passage.fields)

    def to_json(self) -> RankedPassageJson:
        return {
            "id": self.id,
            "title": self.title,
            "text": self.text,
            "rank": self.rank,
            "probability": self.probability,
            "document": self.document,
            "fields": dict(self.fields),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "RankedPassage":
        """A passage from JSON; a server of an earlier version sends no `document` and no `fields`."""
        return RankedPassage(
            row["id"],
            row["title"],
            row["text"],
            row["rank"],
            row["probability"],
            row.get("document", ""),
            row.get("fields", {}),
        )


@dataclass(frozen=True)
class Span:
    """A span of a passage, `text[start:end]` of the passage.

    `score` is the span score plus the retrieval score of the passage. `probability` is the calibrated probability that the text
    of the span is the answer: the softmax probabilities of all spans with this text are added up and then calibrated. The
    softmax is over the spans of all passages read, and over "no answer" if the reader scores "no answer".
    """

    text: str
    score: float
    probability: float
    start: int
    end: int

    def to_json(self) -> SpanJson:
        return {
            "text": self.text,
            "score": self.score,
            "probability": self.probability,
            "start": self.start,
            "end": self.end,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Span":
        return Span(row["text"], row["score"], row["probability"], row["start"], row["end"])


@dataclass(frozen=True)
class ReadPassage(RankedPassage):
    """A passage that was read, and its best span, which is None if the passage has no span."""

    span: Span | None

    def to_json(self) -> ReadPassageJson:
        return {**super().to_json(), "span": None if self.span is None else self.span.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "ReadPassage":
        span = row["span"]
        return ReadPassage(**vars(RankedPassage.from_json(row)), span=span and Span.from_json(span))


@dataclass(frozen=True)
class Answer(Span):
    """A span and its passage: `passage.text[start:end]`."""

    passage: RankedPassage

    def evidence(self) -> str:
        """The part of the passage around the answer, on one line, with the answer in [[ ]]."""
        text = self.passage.text
        return _around(f"{text[: self.start]}[[{self.text}]]{text[self.end :]}", self.start)

    def to_json(self) -> AnswerJson:
        return {**super().to_json(), "passage": self.passage.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Answer":
        return Answer(**vars(Span.from_json(row)), passage=RankedPassage.from_json(row["passage"]))


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


@dataclass(frozen=True)
class Answers:
    """The answers to one question, best first. The JSON of `to_json` is a stable interface."""

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

    def to_json(self) -> AnswersJson:
        return {
            "question": self.question,
            "found": self.found,
            "answers": [answer.to_json() for answer in self.answers],
            "index": self.index.to_json(),
            "ms": {stage: round(value, 2) for stage, value in self.ms.items()},
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Answers from the JSON of `to_json`, or from the JSON of a server, which has more fields."""
        index = row["index"]
        return cls(
            row["question"],
            [Answer.from_json(one) for one in row["answers"]],
            AnsweringIndex(index["version"], index["step"], index.get("created"), index.get("knowledge")),
            dict(row["ms"]),
            [ReadPassage.from_json(one) for one in row.get("passages", [])],
            row.get("null_probability"),
            row["found"],
        )

    def lines(self) -> list[str]:
        """Lines for a terminal: the answers with their evidence; if no answer was found, only the best guess."""
        if not self.answers:
            return ["no answer: the knowledge base has no passage to read, or none that matches the filter"]
        lines = [] if self.found else ["no answer found; the best guess:"]
        for answer in self.answers if self.found else self.answers[:1]:
            passage = answer.passage
            lines += [
                f"{answer.text}   (probability {answer.probability:.2f})",
                f"    {passage.title or passage.document}, rank {passage.rank}, p(z|x) {passage.probability:.2f}",
                f"    {answer.evidence()}",
            ]
        return lines


def _around(text: str, place: int, width: int = 160) -> str:
    """About 2 * `width` characters of a text around `place`, on one line."""
    first = max(0, place - width // 2)
    part = " ".join(text[first : first + 2 * width].split())
    return ("... " if first else "") + part + (" ..." if first + 2 * width < len(text) else "")
