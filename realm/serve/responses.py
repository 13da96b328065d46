"""Responses of the server as JSON values; `realm.serve.schemas` describes them."""

from dataclasses import asdict
from typing import Any

from realm.qa.answers import Answers
from realm.store.fields.filters import BUILT_IN
from realm.workspace.living import Snapshot


def index_json(snapshot: Snapshot) -> dict[str, Any]:
    """The value of `index` in a response."""
    version = snapshot.answerer.version
    return {
        "version": version.number,
        "step": version.step,
        "created": version.created,
        "knowledge": snapshot.stamp.passages_version,
    }


def corpus_json(snapshot: Snapshot) -> dict[str, Any]:
    """The response of `/v1/corpus` without the name of the corpus."""
    fields = {name: kind for name, kind in snapshot.kb.fields.items() if name not in BUILT_IN}
    return {
        "documents": snapshot.documents,
        "passages": len(snapshot.kb),
        "titles": snapshot.titles,
        "fields": fields,
        "filter": snapshot.example_filter,
    }


def answers_json(answers: Answers, snapshot: Snapshot, waited_ms: float) -> dict[str, Any]:
    """The output of `realm answer --json`, with the index, times, passages and null probability that the page shows."""
    row = answers.to_json()
    return row | {
        "index": index_json(snapshot),
        "ms": {"queue": round(waited_ms, 2)} | row["ms"],
        "passages": [asdict(one) for one in answers.passages],
        "null_probability": answers.null_probability,
    }


def whole_passage_json(snapshot: Snapshot, id: str) -> dict[str, Any]:
    """A passage as JSON, with the ids of its neighbours in the document.

    Raises:
        UnknownPassage: there is no passage with this id.
    """
    found = snapshot.passage(id)
    family = [one.id for one in snapshot.passages_of(found.document_id)]
    place = family.index(found.id)
    return {
        "id": found.id,
        "document": found.document_id,
        "title": found.title,
        "text": found.text,
        "fields": dict(found.fields),
        "previous": family[place - 1] if place else None,
        "next": family[place + 1] if place + 1 < len(family) else None,
    }
