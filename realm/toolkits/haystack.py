"""A retriever and an extractive reader for Haystack."""

from typing import Any

from haystack import Document, ExtractedAnswer, component, default_from_dict, default_to_dict

import realm
from realm.errors import InputError
from realm.model.calibration import Method
from realm.serve.client import Client
from realm.toolkits.sources import Source, metadata, name_of, opened


@component
class RealmRetriever:
    """Retrieves passages from a workspace or a server, with the fields of their documents as metadata."""

    def __init__(
        self, source: Source, top_k: int = 5, method: Method | None = None, where: str | None = None
    ):
        """Opens the source.

        Args:
            source: the folder of a workspace, the address of a server, an open workspace, or a client.
            top_k: number of passages.
            method: method of ranking passages; None: the default of the model.
            where: filter over the fields of documents, such as "year >= 2020"; None: all passages are searched.
        """
        self._source, self.top_k, self.method, self.where = opened(source), top_k, method, where

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        """The best passages for a question."""
        found = self._source.search(
            query, self.top_k if top_k is None else top_k, method=self.method, where=self.where
        )
        return {
            "documents": [
                Document(id=hit.id, content=hit.text, meta=metadata(hit), score=hit.score) for hit in found
            ]
        }

    def to_dict(self) -> dict[str, Any]:
        """The component in the description of a pipeline."""
        return default_to_dict(
            self, source=name_of(self._source), top_k=self.top_k, method=self.method, where=self.where
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RealmRetriever":
        """The component from the description of a pipeline."""
        return default_from_dict(cls, data)


@component
class RealmReader:
    """Extracts answers from documents, with the span reader of a workspace. The documents need not be in the workspace.

    The reader reads only the beginning of a document that is longer than its input, so split long documents first.
    """

    def __init__(self, source: "str | realm.Workspace", top_k: int = 5):
        """Opens the workspace.

        Args:
            source: the folder of a workspace, or an open workspace.
            top_k: largest number of answers.
        """
        found = opened(source)
        if isinstance(found, Client):
            raise InputError(f"{source} is a server, but the reader needs a workspace: give its folder")
        self._workspace, self.top_k = found, top_k

    @component.output_types(answers=list[ExtractedAnswer])
    def run(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, list[ExtractedAnswer]]:
        """The best answers in the documents, the best answer first; the score of an answer is its probability."""
        texts = [one for one in documents if one.content]
        rows = [{"title": str(one.meta.get("title") or ""), "text": str(one.content)} for one in texts]
        found = self._workspace.read(query, rows).answers[: self.top_k if top_k is None else top_k]
        return {
            "answers": [
                ExtractedAnswer(
                    query=query,
                    score=one.probability,
                    data=one.text,
                    document=texts[one.passage.rank - 1],
                    document_offset=ExtractedAnswer.Span(one.start, one.end),
                )
                for one in found
            ]
        }

    def to_dict(self) -> dict[str, Any]:
        """The component in the description of a pipeline."""
        return default_to_dict(self, source=name_of(self._workspace), top_k=self.top_k)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RealmReader":
        """The component from the description of a pipeline."""
        return default_from_dict(cls, data)
