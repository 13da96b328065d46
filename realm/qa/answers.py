"""What an answer is: values, their JSON, their lines on a terminal. Without torch, so that a client of a server needs none."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypedDict

from realm.text.corpus import Passage


class EvidenceJson(TypedDict):
    """A passage that was read."""

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


class AnswerJson(SpanJson):
    """A span and its passage."""

    passage: EvidenceJson


class IndexJson(TypedDict):
    """Which index answered."""

    version: int
    step: int


class AnswersJson(TypedDict):
    """What `realm answer --json` prints."""

    question: str
    answers: list[AnswerJson]
    index: IndexJson
    ms: dict[str, float]


class Evidence(NamedTuple):
    """A retrieved passage; `probability` is p(z|x) among the passages that were read."""

    passage: Passage
    rank: int
    probability: float

    def to_json(self) -> EvidenceJson:
        passage = self.passage
        return {
            "id": passage.id,
            "title": passage.title,
            "text": passage.text,
            "rank": self.rank,
            "probability": self.probability,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The document, sentences and spans of the passage are not in the JSON, and stay empty."""
        passage = Passage(row["id"], "", row["title"], row["text"], (), ())
        return cls(passage, row["rank"], row["probability"])


class Answer(NamedTuple):
    """A span of a passage: `evidence.passage.text[start:end]`; `probability` is over all spans of all passages read.

    `score` is the span's and its passage's retrieval score together.
    """

    text: str
    score: float
    probability: float
    start: int
    end: int
    evidence: Evidence

    def to_json(self) -> AnswerJson:
        return {**self.span_json(), "passage": self.evidence.to_json()}

    def span_json(self) -> SpanJson:
        """Without the passage."""
        return {
            "text": self.text,
            "score": self.score,
            "probability": self.probability,
            "start": self.start,
            "end": self.end,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any], evidence: Evidence) -> Self:
        """From either of the two."""
        return cls(row["text"], row["score"], row["probability"], row["start"], row["end"], evidence)


class Answers(NamedTuple):
    """What `realm answer` says; the JSON of `to_json` is a contract (docs and DESIGN section 4)."""

    question: str
    answers: list[Answer]
    version: int
    step: int
    ms: dict[str, float]
    read: list[Evidence]
    """All passages that were read, best first; not in the JSON."""
    spans: list[Answer | None]
    """The best span of each of them, if it has any; not in the JSON."""
    null_probability: float | None
    """p(z|x) of the null passage, had it been one of them: how little the model expects of what it found. Not in the JSON."""

    def to_json(self) -> AnswersJson:
        return {
            "question": self.question,
            "answers": [answer.to_json() for answer in self.answers],
            "index": {"version": self.version, "step": self.step},
            "ms": {stage: round(value, 2) for stage, value in self.ms.items()},
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        answers = [Answer.from_json(one, Evidence.from_json(one["passage"])) for one in row["answers"]]
        passages = row.get("passages", [])
        read = [Evidence.from_json(one) for one in passages]
        spans = [
            Answer.from_json(one["span"], evidence) if one["span"] else None
            for one, evidence in zip(passages, read, strict=True)
        ]
        index = row["index"]
        return cls(
            row["question"],
            answers,
            index["version"],
            index["step"],
            dict(row["ms"]),
            read,
            spans,
            row.get("null_probability"),
        )

    def lines(self) -> list[str]:
        lines = []
        for answer in self.answers:
            passage = answer.evidence.passage
            marked = f"{passage.text[: answer.start]}[[{answer.text}]]{passage.text[answer.end :]}"
            lines += [
                f"{answer.text}   (probability {answer.probability:.2f})",
                f"    {passage.title or passage.document_id}, rank {answer.evidence.rank}, "
                f"p(z|x) {answer.evidence.probability:.2f}",
                f"    {_around(marked, answer.start)}",
            ]
        return lines or ["no answer: the knowledge base has no passage to read"]


def _around(text: str, place: int, width: int = 160) -> str:
    """The part of a passage around its answer, on one line."""
    first = max(0, place - width // 2)
    part = " ".join(text[first : first + 2 * width].split())
    return ("... " if first else "") + part + (" ..." if first + 2 * width < len(text) else "")
