"""Answers as values, as JSON and as lines on a terminal. Without torch, so that the client of a server does not need it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import TypedDict  # pydantic reads these, not those of typing before Python 3.12

from realm.model.calibration import NO_FEATURES, Features
from realm.text.corpus import Passage


class RankedPassageJson(TypedDict):
    """A passage retrieved for a question."""

    id: str
    title: str
    text: str
    rank: int
    probability: float


class SpanJson(TypedDict):
    """A span of a passage: `text[start:end]`."""

    text: str
    score: float
    probability: float
    start: int
    end: int


class ReadPassageJson(RankedPassageJson):
    """A passage that was read, and the best span in it; None if it has no span."""

    span: SpanJson | None


class AnswerJson(SpanJson):
    """A span and its passage."""

    passage: RankedPassageJson


class IndexJson(TypedDict):
    """The index version that the passages were retrieved from."""

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
    """Id of the document. The JSON does not hold it, so it is empty after `from_json`."""

    @classmethod
    def of(cls, passage: Passage, rank: int, probability: float) -> "RankedPassage":
        return RankedPassage(passage.id, passage.title, passage.text, rank, probability, passage.document_id)

    def to_json(self) -> RankedPassageJson:
        return {
            "id": self.id,
            "title": self.title,
            "text": self.text,
            "rank": self.rank,
            "probability": self.probability,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "RankedPassage":
        return RankedPassage(row["id"], row["title"], row["text"], row["rank"], row["probability"], "")


@dataclass(frozen=True)
class Span:
    """A span of a passage: the passage's `text[start:end]`.

    `score` is the sum of the span's score and the retrieval score of its passage. `probability` is the calibrated probability
    of the span's text as the answer: a softmax over the spans of all passages read (and over "no answer", if the reader
    models it), summed over the spans with this text, then calibrated.
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
    """A passage that was read, and the best span in it; None if it has no span."""

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
    """The index version that the passages were retrieved from.

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
    """All passages that were read, best first. Only in the JSON of a server."""
    null_probability: float | None
    """p(z|x) of the null passage among the passages read; high if these fit badly. Only in the JSON of a server."""
    found: bool
    """Whether the probability of the best answer reaches the threshold; otherwise that answer is a guess."""
    features: Features = NO_FEATURES
    """The inputs of the calibration besides the shares of the spans; not in the JSON."""

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
        """Lines for a terminal: the answers with their evidence, or the best guess."""
        if not self.answers:
            return ["no answer: the knowledge base has no passage to read"]
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
