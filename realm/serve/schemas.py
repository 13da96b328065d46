"""Bodies of requests and responses as pydantic models, from which FastAPI makes the OpenAPI description."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from realm.errors import shortened
from realm.model.calibration import Method
from realm.qa.answers import AnswersJson, ReadPassage
from realm.qa.filling import FilledJson
from realm.qa.question_files import MAX_QUESTION_CHARACTERS
from realm.serve.feedback import Verdict
from realm.serve.runs import State
from realm.serve.settings import MOST_DOCUMENTS, MOST_FIELDS, MOST_QUESTIONS
from realm.store.fields.filters import LONGEST_FILTER
from realm.text.fields import LONGEST_NAME, LONGEST_VALUE, RESERVED, clean_fields

Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_QUESTION_CHARACTERS, pattern=r"\S")]
Filter = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_FILTER, pattern=r"\S")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"\S")]


_MOST_KEYS = 20
"""Most keys of a request; more than any request has."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, found: Any) -> Any:
        # pydantic would make an error of each unknown key: gigabytes for a request of a few megabytes.
        if isinstance(found, dict) and len(found) > _MOST_KEYS:
            raise ValueError(f"it has {len(found):,} keys, and may have {_MOST_KEYS}")
        return found


class _Out(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


def _example(*values: dict[str, Any], **more: Any) -> ConfigDict:
    """Examples and further keys for a schema of the OpenAPI description."""
    return ConfigDict(json_schema_extra={"examples": list(values), **more})


_ONE_OF_BOTH = [
    {"required": [name], "properties": {name: {"type": kind}}}
    for name, kind in (("question", "string"), ("questions", "array"))
]


class Asked(_Body):
    """One question or several questions."""

    question: Text | None = None
    questions: list[Text] | None = Field(None, min_length=1, max_length=MOST_QUESTIONS)
    method: Method | None = None
    """Method of ranking passages: by vectors (dense), words (bm25) or both (hybrid). If null, the `method` of `/health`."""
    where: Filter | None = None
    """Filter over the fields of documents, such as `year >= 2020 and source = 'handbook'`. If null, all passages are used."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.question is None) == (self.questions is None):
            raise ValueError("give either `question` or `questions`")
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
    """Number of passages per question that are searched for answers. If null, the limit `read` of `/health`."""


class RetrieveRequest(Asked):
    """Questions for which passages are retrieved."""

    model_config = _example(
        {"question": "Mount Fuji", "method": "bm25", "top_k": 3},
        {"question": "Mount Fuji", "where": "year >= 2020"},
        oneOf=_ONE_OF_BOTH,
    )

    top_k: int = Field(10, ge=1)
    """Number of passages per question."""


class FillRequest(_Body):
    """A sentence with at least one [MASK]; with a target, the sentence has exactly one [MASK]."""

    model_config = _example(
        {"sentence": "The [MASK] is the currency of the UK."},
        {"sentence": "The [MASK] is the currency of the UK.", "target": "pound"},
    )

    # The pattern is only described: the error message of the filler for a sentence without [MASK] is better.
    sentence: Annotated[Text, Field(json_schema_extra={"pattern": r"\[MASK\]"})]
    target: Text | None = None
    """A word whose probability at the [MASK] is computed, with and without retrieval."""


class DocumentIn(_Body):
    """A document to add, which replaces a document with the same id. If `id` is missing, the title is the id."""

    id: Name | None = None
    title: Annotated[str, StringConstraints(max_length=1000)] = ""
    text: Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]
    fields: dict[str, Any] = Field(default_factory=dict, max_length=MOST_FIELDS)
    """Metadata of the document, such as `{"year": 2020, "url": "https://example.org"}`. Fields that are null are left out."""

    @field_validator("fields")
    @classmethod
    def _can_be_stored(cls, fields: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        refused = []
        for name, value in fields.items():
            cleaned = clean_fields({name: value})
            if value is not None and (not cleaned or cleaned.keys() & found.keys()):
                refused.append(name)
            found |= cleaned
        if refused:
            raise ValueError(
                f"cannot be stored: {shortened(', '.join(map(repr, refused)))}; give each field a name of its own of at most "
                f"{LONGEST_NAME} characters, which is not {', '.join(sorted(RESERVED))}, and a value of at most "
                f"{LONGEST_VALUE} characters"
            )
        return found


class DocumentsRequest(_Body):
    """Documents to add. Either all documents are added or none."""

    model_config = _example({"documents": [{"title": "Oakham", "text": "Oakham is a town."}]})

    documents: list[DocumentIn] = Field(min_length=1, max_length=MOST_DOCUMENTS)


class FeedbackRequest(_Body):
    """What a person thinks of an answer, which is a piece of a passage, to a question."""

    model_config = _example(
        {
            "question": "In which country is Mount Fuji?",
            "verdict": "right",
            "passage": "5d41402abc4b2a76",
            "start": 51,
            "end": 56,
        }
    )

    question: Text
    verdict: Verdict
    """`right` or `wrong`: the answer of the server is right or wrong. `better`: a person has selected a better answer."""
    passage: Name
    """Id of the passage that contains the answer."""
    start: int = Field(ge=0, le=2**31)
    """The first character of the answer in the text of the passage."""
    end: int = Field(ge=1, le=2**31)
    """The character after the last character of the answer."""


class FeedbackOut(_Out):
    """The id of the stored line, and whether it is new; equal feedback is stored once."""

    id: str
    new: bool


class CorpusOut(_Out):
    """Describes the corpus to a person who sees it for the first time."""

    name: str
    documents: int
    passages: int
    titles: list[str]
    """Titles of a few documents."""
    fields: dict[str, str]
    """Fields of the documents: the name of each field, and what its values are, such as "whole number"."""
    filter: str | None
    """Example of a filter over these fields; null if there is none."""


class ExamplesOut(_Out):
    """Questions that rules made from the documents."""

    questions: list[str]


class IndexOut(_Out):
    """The versions from which a response was computed."""

    version: int
    """Version of the index."""
    step: int
    """Training step of the model that built the index."""
    created: str
    """Time at which the index was built (ISO 8601)."""
    knowledge: int
    """Version of the passages."""


_SPAN = {"text": "Japan", "score": 14.2, "probability": 0.91, "start": 51, "end": 56}
_READ = {
    "id": "5d41402abc4b2a76",
    "title": "Mount Fuji",
    "text": "Mount Fuji is the highest mountain of its country, Japan.",
    "rank": 1,
    "probability": 0.83,
    "document": "Mount Fuji",
    "fields": {"url": "https://example.org/fuji"},
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


class AnswersOut(AnswersJson):
    """The output of `realm answer --json`, and all passages that were read.

    `found` is true if the probability of the best answer reaches the model's threshold; otherwise the answer is a guess."""

    index: IndexOut  # type: ignore[misc]  # with two more keys
    passages: list[ReadPassage]
    null_probability: float

    __pydantic_config__ = _example(_ANSWERS)  # type: ignore[misc]


class _PassageOut(_Out):
    id: str
    document: str
    title: str
    text: str
    fields: dict[str, Any]
    """Fields of the document."""


class HitOut(_PassageOut):
    """A retrieved passage."""

    score: float


class HitsOut(_Out):
    """The passages that were found for a question, the best passage first."""

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


class FilledOut(FilledJson):
    """The output of `realm fill --json`: predictions for each [MASK], and the effect of each passage."""

    index: IndexOut
    ms: dict[str, float]


class WholePassageOut(_PassageOut):
    """A passage, its document, and the ids of the previous and the next passage of this document."""

    previous: str | None
    next: str | None


class DocumentOut(_Out):
    """A document and its passages."""

    id: str
    title: str
    passages: list[str]
    """Ids of the passages, in order."""
    text: str
    """Text of all passages, one per line."""
    fields: dict[str, Any]


class ListedOut(_Out):
    """A document in the list of documents."""

    id: str
    title: str
    passages: int
    """Number of passages of the document, without passages whose text an earlier document also has."""
    fields: dict[str, Any]


class DocumentsOut(_Out):
    """A part of the list of all documents."""

    documents: list[ListedOut]
    next: int | None
    """The `start` of the following part; null at the end of the list."""

    model_config = _example(
        {
            "documents": [{"id": "Oakham", "title": "Oakham", "passages": 1, "fields": {"year": 2020}}],
            "next": None,
        }
    )


class AddedOut(_Out):
    """Numbers of documents and passages that an addition changed, and the ids of the documents."""

    added: int
    replaced: int
    unchanged: int
    passages_added: int
    passages_removed: int
    merged: dict[str, str]
    """Documents that were merged with another document of the same title and text: id -> id of the other document. Only the
    other document can be found."""
    ids: list[str]
    index: IndexOut


class DeletedOut(_Out):
    """Number of passages that were removed with a document."""

    passages_removed: int
    index: IndexOut


class VersionOut(_Out):
    """A version on disk, and the time at which the version was committed."""

    version: int
    created: str


class VersionsOut(_Out):
    """The versions of the passages and of their index that are on disk, the newest version first."""

    knowledge: list[VersionOut]
    index: list[VersionOut]
    in_use: IndexOut


class HealthOut(_Out):
    """State and limits of the server."""

    status: Literal["ok", "stale"]
    problem: str | None
    """The reason why the newest version on disk is not in use; null if this version is in use."""
    version: str
    model: str
    answers: bool
    """Whether the model has a span reader. Without a span reader, the server cannot answer, only fill and retrieve."""
    passages: int
    documents: int
    index: IndexOut
    method: Method
    """Default method of ranking passages: the method with which the model was calibrated, else dense."""
    words: bool
    """Whether bm25 and hybrid are ready. If not, the first request with one of these methods starts the preparation."""
    queue: int
    writable: bool
    private: bool
    """Whether reading needs a token."""
    runs: bool
    limits: dict[str, float]


class RunOut(_Out):
    """A training run. The state is "training" (a process trains this run), "finished", or "stopped" (neither)."""

    name: str
    state: State
    changed: float


class RunsOut(_Out):
    """The training runs, the run with the latest change first."""

    runs: list[RunOut]


class MetricsOut(_Out):
    """Lines of the metrics of a run. `next` is the byte at which the following lines begin."""

    state: State
    rows: list[dict[str, Any]]
    damaged: int
    """Number of lines that are left out, because they are not JSON objects."""
    next: int
