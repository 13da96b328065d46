"""A retriever for LangChain."""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import PrivateAttr

from realm.model.calibration import Method
from realm.toolkits.sources import metadata, opened


class RealmRetriever(BaseRetriever):
    """Retrieves passages from a workspace or a server.

    retriever = RealmRetriever(source="manual", k=5)
    documents = retriever.invoke("when does the warranty end?")

    The metadata of a document have the fields, the title and the id of the document, and the score by which the passage was
    ranked. `title`, `document` and `score` replace fields with these names.
    """

    source: Any
    """The folder of a workspace, the address of a server, an open `realm.Workspace`, or a `realm.serve.client.Client`."""
    k: int = 5
    """Number of passages."""
    method: Method | None = None
    """Method of ranking passages; None: the default of the model."""
    where: str | None = None
    """Filter over the fields of documents, such as "year >= 2020"; None: all passages are searched."""
    _opened: Any = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Opens the source."""
        self._opened = opened(self.source)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = self._opened.search(query, self.k if k is None else k, method=self.method, where=self.where)
        return [Document(hit.text, id=hit.id, metadata=metadata(hit) | {"score": hit.score}) for hit in found]
