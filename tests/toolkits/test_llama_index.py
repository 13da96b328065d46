"""The retriever for LlamaIndex, in a query engine."""

from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode

import realm
from realm.toolkits.llama_index import RealmRetriever

QUESTION = "who built a tower in Arden?"


def test_a_query_engine_answers_from_the_passages_of_the_workspace(workspace: str) -> None:
    manual = realm.load(workspace)
    engine = RetrieverQueryEngine.from_args(
        RealmRetriever(manual, similarity_top_k=3, method="bm25"), llm=MockLLM()
    )
    response = engine.query(QUESTION)
    wanted = manual.search(QUESTION, 3, method="bm25")
    assert [(one.node_id, one.text, one.score) for one in response.source_nodes] == [
        (hit.id, hit.text, hit.score) for hit in wanted
    ]
    assert all(hit.text in str(response) for hit in wanted)  # the mock model returns its prompt
    assert f"title: {wanted[0].title}" in response.source_nodes[0].get_content(MetadataMode.LLM)


def test_a_filter_limits_the_documents_whose_fields_are_metadata(dated: realm.Workspace) -> None:
    (found,) = RealmRetriever(dated, where="year > 2000").retrieve(QUESTION)
    assert found.node.metadata == {"year": 2020, "score": "b", "title": "Zebulon", "document": "z2020"}
    assert [found.score] == [hit.score for hit in dated.search(QUESTION, where="year > 2000")]


async def test_the_retriever_is_asynchronous_too(workspace: str) -> None:
    retriever = RealmRetriever(workspace, similarity_top_k=2)
    found = await retriever.aretrieve(QUESTION)
    assert [one.node_id for one in found] == [one.node_id for one in retriever.retrieve(QUESTION)]
