"""A retriever for LlamaIndex."""

import asyncio

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from realm.model.calibration import Method
from realm.toolkits.sources import Source, metadata, opened


class RealmRetriever(BaseRetriever):
    """Retrieves passages from a workspace or a server, with the fields of their documents as metadata.

    engine = RetrieverQueryEngine.from_args(RealmRetriever("manual"), llm=llm)
    """

    def __init__(
        self,
        source: Source,
        similarity_top_k: int = 5,
        method: Method | None = None,
        where: str | None = None,
    ):
        """Opens the source.

        Args:
            source: the folder of a workspace, the address of a server, an open workspace, or a client.
            similarity_top_k: number of passages.
            method: method of ranking passages; None: the default of the model.
            where: filter over the fields of documents, such as "year >= 2020"; None: all passages are searched.
        """
        super().__init__()
        self._source, self._top_k, self._method, self._where = opened(source), similarity_top_k, method, where

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._source.search(
            query_bundle.query_str, self._top_k, method=self._method, where=self._where
        )
        return [
            NodeWithScore(node=TextNode(id_=hit.id, text=hit.text, metadata=metadata(hit)), score=hit.score)
            for hit in found
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        # LlamaIndex would call `_retrieve`, and nothing else would run in its event loop meanwhile.
        return await asyncio.to_thread(self._retrieve, query_bundle)
