"""What goes over the wire: the bodies of requests and responses, as pydantic models, which make the OpenAPI description."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from realm.model.calibration import Method
from realm.qa.answers import Answers
from realm.qa.question_files import MAX_QUESTION_CHARACTERS
from realm.serve.runs import State
from realm.text.corpus import Passage
from realm.workspace.living import Snapshot

Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_QUESTION_CHARACTERS, pattern=r"\S")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"\S")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class _Out(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


def _example(*values: dict[str, Any], **more: Any) -> ConfigDict:
    """Examples for the OpenAPI description, and what else the schema says."""
    return ConfigDict(json_schema_extra={"examples": list(values), **more})


_ONE_OF_BOTH = [
    {"required": [name], "properties": {name: {"type": kind}}}
    for name, kind in (("question", "string"), ("questions", "array"))
]


class Asked(_Body):
    """One question, or several."""

    question: Text | None = None
    questions: list[Text] | None = Field(None, min_length=1)
    method: Method | None = None
    """What ranks the passages: vectors, words, or both; none: what `/health` names."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.question is None) == (self.questions is None):
            raise ValueError("give `question` or `questions`, one of the two")
        return self

    @property
    def all(self) -> list[str]:
        return self.questions if self.questions is not None else [self.question or ""]


class AnswerRequest(Asked):
    """Questions to answer."""

    model_config = _example(
        {"question": "In which country is Mount Fuji?"},
        {"questions": ["Who wrote The Tempest?", "Where is Oakham?"], "method": "hybrid", "top_k": 10},
        oneOf=_ONE_OF_BOTH,
    )

    top_k: int | None = Field(None, ge=1)
    """Passages that are read for each."""


class RetrieveRequest(Asked):
    """Questions to find passages for."""

    model_config = _example({"question": "Mount Fuji", "method": "bm25", "top_k": 3}, oneOf=_ONE_OF_BOTH)

    top_k: int = Field(10, ge=1)
    """Passages for each."""


class FillRequest(_Body):
    """A sentence with [MASK] in it, once or several times; exactly once where there is a target."""

    model_config = _example(
        {"sentence": "The [MASK] is the currency of the UK."},
        {"sentence": "The [MASK] is the currency of the UK.", "target": "pound"},
    )

    sentence: Annotated[
        Text, Field(json_schema_extra={"pattern": r"\[MASK\]"})
    ]  # refused where it is read, in better words
    target: Text | None = None
    """A word to score in place of the [MASK], with retrieval and without."""


class DocumentIn(_Body):
    """A document to add; one with the id of another takes its place. No id means: the title."""

    id: Name | None = None
    title: Annotated[str, StringConstraints(max_length=1000)] = ""
    text: Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]


class DocumentsRequest(_Body):
    """Documents to add, all of them or none."""

    model_config = _example({"documents": [{"title": "Oakham", "text": "Oakham is a town."}]})

    documents: list[DocumentIn] = Field(min_length=1)


class ExamplesOut(_Out):
    """Questions that the documents answer, made from them by rules."""

    questions: list[str]


class IndexOut(_Out):
    """What answered: the index, and the version of the passages in it."""

    version: int
    step: int
    created: str
    knowledge: int


class PassageOut(_Out):
    """A passage and its share of p(z|x) among those that were read."""

    id: str
    title: str
    text: str
    rank: int
    probability: float


_SPAN = {"text": "Japan", "score": 14.2, "probability": 0.91, "start": 51, "end": 56}
_READ = {
    "id": "5d41402abc4b2a76",
    "title": "Mount Fuji",
    "text": "Mount Fuji is the highest mountain of its country, Japan.",
    "rank": 1,
    "probability": 0.83,
}
_INDEX = {"version": 2, "step": 300, "created": "2026-11-22T12:00:00+00:00", "knowledge": 7}
_ANSWERS = {
    "question": "In which country is Mount Fuji?",
    "found": True,
    "answers": [_SPAN | {"passage": _READ}],
    "index": _INDEX,
    "ms": {"queue": 0.1, "embed": 4.2, "search": 0.9, "read": 31.5},
    "passages": [_READ | {"span": _SPAN}],
    "null_probability": 0.04,
}


class SpanOut(_Out):
    """A span of a passage: its `text[start:end]`, counted in Unicode characters."""

    text: str
    score: float
    probability: float
    start: int
    end: int


class AnswerOut(SpanOut):
    """A span and its passage: `passage.text[start:end] == text`."""

    passage: PassageOut


class ReadPassageOut(PassageOut):
    """A passage and the best span in it, if it has any."""

    span: SpanOut | None


class AnswersOut(_Out):
    """The answers to one question, best first, and all passages that were read for them."""

    question: str
    found: bool = Field(description="whether the best answer is more than a guess")
    answers: list[AnswerOut]
    index: IndexOut
    ms: dict[str, float]
    passages: list[ReadPassageOut]
    null_probability: float

    model_config = _example(_ANSWERS)


class HitOut(_Out):
    """A passage that was found."""

    id: str
    document: str
    title: str
    text: str
    score: float


class HitsOut(_Out):
    """The passages found for one question, best first."""

    question: str
    passages: list[HitOut]
    index: IndexOut
    ms: dict[str, float]


class ManyAnswersOut(_Out):
    """One result per question, in the order of the questions."""

    results: list[AnswersOut]


class ManyHitsOut(_Out):
    """One result per question, in the order of the questions."""

    results: list[HitsOut]


class PredictionOut(_Out):
    """A word for a [MASK], with p(y|x)."""

    text: str
    probability: float


class TargetOut(PredictionOut):
    """The word that was asked about; `without_retrieval` is its p(y|z,x) beside the null passage alone."""

    without_retrieval: float


class NullOut(_Out):
    """The null passage: p(z|x), and p(y|z,x) of the target or the best words."""

    probability: float
    likelihood: float


class EffectOut(PassageOut):
    """What a passage did: p(y|z,x) of the target or the best words, and its gain over the null passage in nats."""

    likelihood: float
    utility: float


class FilledOut(_Out):
    """Predictions for each [MASK], and what each passage did for the target, or else for the best of them."""

    sentence: str
    masks: list[list[PredictionOut]]
    null: NullOut
    passages: list[EffectOut]
    target: TargetOut | None = None
    """Left out where the request has none."""
    index: IndexOut
    ms: dict[str, float]


class WholePassageOut(_Out):
    """A passage, its document, and the passages before and after it in that document."""

    id: str
    document: str
    title: str
    text: str
    previous: str | None
    next: str | None


class DocumentOut(_Out):
    """A document as it is kept: its passages."""

    id: str
    title: str
    passages: list[str]
    """Their ids."""
    text: str
    """Of all passages."""


class ListedOut(_Out):
    """A document in the list of documents."""

    id: str
    title: str
    passages: int
    """How many belong to it: a text that another document brought first is counted there."""


class DocumentsOut(_Out):
    """A part of the list of documents."""

    documents: list[ListedOut]
    next: int | None
    """The `start` of the part after this one; null where there is none."""

    model_config = _example({"documents": [{"id": "Oakham", "title": "Oakham", "passages": 1}], "next": None})


class AddedOut(_Out):
    """What became of the documents, which are searchable now."""

    added: int
    replaced: int
    unchanged: int
    passages_added: int
    passages_removed: int
    ids: list[str]
    index: IndexOut


class DeletedOut(_Out):
    """How many passages went with the document."""

    passages_removed: int
    index: IndexOut


class VersionOut(_Out):
    """A version on disk and when it was committed."""

    version: int
    created: str


class VersionsOut(_Out):
    """The versions of the passages and of their index that are on disk, newest first."""

    knowledge: list[VersionOut]
    index: list[VersionOut]
    in_use: IndexOut


class HealthOut(_Out):
    """What is served, and within which limits."""

    status: Literal["ok", "stale"]
    problem: str | None
    """Why the newest version on disk is not in use, where that is so."""
    version: str
    model: str
    answers: bool
    """Whether the model has a span reader; without one it fills and retrieves."""
    passages: int
    documents: int
    index: IndexOut
    method: Method
    """What ranks passages for a request that names no method: what did when the model was calibrated, else vectors."""
    words: bool
    """Whether passages can be ranked by words (bm25, hybrid) at once; else the first request has it prepared."""
    queue: int
    writable: bool
    private: bool
    """Whether reading needs a token too."""
    runs: bool
    limits: dict[str, float]


class RunOut(_Out):
    """A training run. `training`: a process trains it now; `stopped`: none does, and it is not finished."""

    name: str
    state: State
    training: bool
    changed: float


class RunsOut(_Out):
    """The training runs of the folder that is shown, the latest first."""

    runs: list[RunOut]


class MetricsOut(_Out):
    """Lines of a run's metrics, and where the next ones begin."""

    state: State
    training: bool
    rows: list[dict[str, Any]]
    damaged: int
    """Lines that are no JSON objects, and are left out."""
    next: int


def index_out(snapshot: Snapshot) -> dict[str, Any]:
    """The `index` of every response."""
    version = snapshot.answerer.version
    return {
        "version": version.number,
        "step": version.step,
        "created": version.created,
        "knowledge": snapshot.stamp.passages_version,
    }


def answers_out(answers: Answers, snapshot: Snapshot, waited_ms: float) -> dict[str, Any]:
    """`realm answer --json`, and what a page shows besides."""
    row = answers.to_json()
    return row | {
        "index": index_out(snapshot),
        "ms": {"queue": round(waited_ms, 2)} | row["ms"],
        "passages": [one.to_json() for one in answers.passages],
        "null_probability": answers.null_probability,
    }


def hit_out(passage: Passage, score: float) -> dict[str, Any]:
    """A passage that was found."""
    return {
        "id": passage.id,
        "document": passage.document_id,
        "title": passage.title,
        "text": passage.text,
        "score": score,
    }
