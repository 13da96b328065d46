"""What an answer is: values, their JSON, their lines on a terminal. Without torch, so that a client of a server needs none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict

from realm.model.calibration import NO_FEATURES, Features
from realm.text.corpus import Passage


class RankedPassageJson(TypedDict):
    """A passage among those that were found for a question."""

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
    """A passage and the best span in it, if it has any."""

    span: SpanJson | None


class AnswerJson(SpanJson):
    """A span and its passage."""

    passage: RankedPassageJson


class IndexJson(TypedDict):
    """Which index answered."""

    version: int
    step: int


class AnswersJson(TypedDict):
    """What `realm answer --json` prints."""

    question: str
    found: bool
    answers: list[AnswerJson]
    index: IndexJson
    ms: dict[str, float]


@dataclass(frozen=True)
class RankedPassage:
    """A passage among those that were found for a question; `probability` is its share of p(z|x) among them."""

    id: str
    title: str
    text: str
    rank: int
    probability: float
    document: str
    """Its document's id. Not in the JSON, so empty in what a server answered."""

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

    `score` is the span's, and what its passage's retrieval score adds. `probability` is that of its text as the answer: the
    share of all spans with this text among the spans of all passages read, "no answer" among them where the reader may find
    none, as the model's calibration has it.
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
    """A passage that was read, and the best span in it, if it has any."""

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
        """The part of the passage around the answer, which stands in [[ ]], on one line."""
        text = self.passage.text
        return _around(f"{text[: self.start]}[[{self.text}]]{text[self.end :]}", self.start)

    def to_json(self) -> AnswerJson:
        return {**super().to_json(), "passage": self.passage.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Answer":
        return Answer(**vars(Span.from_json(row)), passage=RankedPassage.from_json(row["passage"]))


@dataclass(frozen=True)
class AnsweringIndex:
    """Which index answered, when it was made, and the version of the passages in it.

    The last two are in a server's JSON alone; the version of the passages is not known elsewhere.
    """

    version: int
    step: int
    created: str | None = None
    knowledge: int | None = None

    def to_json(self) -> IndexJson:
        return {"version": self.version, "step": self.step}


@dataclass(frozen=True)
class Answers:
    """The answers to one question, best first; the JSON of `to_json` is a contract (docs and DESIGN section 4)."""

    question: str
    answers: list[Answer]
    index: AnsweringIndex
    ms: dict[str, float]
    passages: list[ReadPassage]
    """All passages that were read, best first. In a server's JSON alone, as is the next one."""
    null_probability: float | None
    """p(z|x) of the null passage, had it been one of them: how little the model expects of what it found."""
    found: bool
    """Whether the best answer's probability reaches the threshold. Below it that answer is a guess."""
    features: Features = NO_FEATURES
    """What the probabilities were found by, beside the spans' shares; not in the JSON."""

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
        """From the JSON of `to_json`, or that of a server, which has more."""
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
        """Of the answers with their evidence, or of the best guess."""
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
    """The part of a passage around its answer, on one line."""
    first = max(0, place - width // 2)
    part = " ".join(text[first : first + 2 * width].split())
    return ("... " if first else "") + part + (" ..." if first + 2 * width < len(text) else "")
