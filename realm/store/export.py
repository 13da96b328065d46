"""Writes a knowledge base back as documents, one JSON object per document."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NotRequired, TypedDict

import numpy as np

from realm.store.knowledge_base import KnowledgeBase
from realm.store.merged import read_merged
from realm.text.corpus import Passage
from realm.text.fields import Fields

_AT_ONCE = 1024
"""Passages that are read at a time."""


class ExportedPassageJson(TypedDict):
    """A passage of a document."""

    title: str
    text: str


class ExportedJson(TypedDict):
    """A line of the file that `realm kb export` writes."""

    id: str
    title: str
    text: str
    """Texts of all passages, with blank lines between them."""
    passages: NotRequired[list[ExportedPassageJson]]
    """The passages, if there are several; a build from this record makes the same passages."""
    metadata: NotRequired[dict[str, Any]]
    """Fields of the document, if it has fields."""


def exported(kb: KnowledgeBase, where: str | None = None) -> Iterator[ExportedJson]:
    """The documents in the order of their first passages, or only those whose first passage matches the filter `where`.

    A merged document follows the document that has its text.

    Raises:
        InputError: the filter cannot be used.
    """
    chosen_N = np.ones(len(kb), dtype=bool) if where is None else kb.matching(where)
    _, first_D, document_N = np.unique(kb.document_keys_N, return_index=True, return_inverse=True)
    first_N = first_D[document_N]
    number_n = np.lexsort((np.arange(len(kb)), first_N))
    return _records(kb, number_n[chosen_N[first_N[number_n]]])


def _records(kb: KnowledgeBase, number_n: np.ndarray) -> Iterator[ExportedJson]:
    merged = read_merged(kb.folder, kb.table.version)
    copies: dict[str, list[str]] = {}
    for name, original in kb.merged().items():
        copies.setdefault(original, []).append(name)
    for document, group in groupby(_passages(kb, number_n), key=lambda one: one.document_id):
        passages = list(group)
        yield _record(document, passages, passages[0].fields)
        for name in copies.get(document, []):
            yield _record(name, passages, merged[name].fields)


def _passages(kb: KnowledgeBase, number_n: np.ndarray) -> Iterator[Passage]:
    for start in range(0, len(number_n), _AT_ONCE):
        yield from kb.passages(number_n[start : start + _AT_ONCE])


def _record(name: str, passages: list[Passage], fields: Fields) -> ExportedJson:
    text = "\n\n".join(one.text for one in passages)
    record: ExportedJson = {"id": name, "title": passages[0].title, "text": text}
    if len(passages) > 1:
        record["passages"] = [{"title": one.title, "text": one.text} for one in passages]
    if fields:
        record["metadata"] = dict(fields)
    return record
