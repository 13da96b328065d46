"""The components for Haystack, in pipelines."""

import pytest
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

import realm
from realm.errors import InputError
from realm.toolkits.haystack import RealmReader, RealmRetriever

QUESTION = "who built a tower in Arden?"


def test_a_pipeline_reads_the_answers_that_the_workspace_gives(workspace: str) -> None:
    """The reader computes the vectors of the passages again, which the index has in 16 bits."""
    manual = realm.load(workspace)
    pipeline = Pipeline()
    pipeline.add_component("retriever", RealmRetriever(manual, top_k=5))
    pipeline.add_component("reader", RealmReader(manual, top_k=3))
    pipeline.connect("retriever.documents", "reader.documents")
    stored = pipeline.dumps()
    again = Pipeline.loads(stored, allowed_modules=["realm.toolkits.haystack"])
    wanted = manual.answers(QUESTION).answers[:3]
    for one in (pipeline, again):
        result = one.run({"retriever": {"query": QUESTION}, "reader": {"query": QUESTION}})
        answers = result["reader"]["answers"]
        assert [(a.data, a.document.id) for a in answers] == [(a.text, a.passage.id) for a in wanted]
        assert [a.score for a in answers] == pytest.approx([a.probability for a in wanted], rel=1e-2)
        for answer in answers:
            span = answer.document_offset
            assert answer.document.content[span.start : span.end] == answer.data


def test_a_filter_limits_the_documents_whose_fields_are_metadata(dated: realm.Workspace) -> None:
    retriever = RealmRetriever(dated, where="year > 2000")
    again = RealmRetriever.from_dict(retriever.to_dict())
    for one in (retriever, again):
        (found,) = one.run(QUESTION)["documents"]
        assert found.meta == {"year": 2020, "score": "b", "title": "Zebulon", "document": "z2020"}


def test_the_reader_reads_documents_of_another_store(workspace: str) -> None:
    store = InMemoryDocumentStore()
    texts = ["Zebulon built a lighthouse in Oakham.", "Oakham sells bells to Marlow.", ""]
    store.write_documents([Document(content=text, meta={"title": "Oakham"}) for text in texts])
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=3))
    pipeline.add_component("reader", RealmReader(workspace))
    pipeline.connect("retriever.documents", "reader.documents")
    question = "who built a lighthouse?"
    answers = pipeline.run({"retriever": {"query": question}, "reader": {"query": question, "top_k": 2}})[
        "reader"
    ]["answers"]
    assert len(answers) == 2 and all(one.document.content in texts for one in answers)
    assert RealmReader(workspace).run(question, [])["answers"] == []


def test_a_server_cannot_read(workspace: str) -> None:
    with pytest.raises(InputError, match="is a server, but the reader needs a workspace"):
        RealmReader("http://127.0.0.1:1")
