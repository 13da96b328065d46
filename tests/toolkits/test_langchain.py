"""The retriever for LangChain: the conformance tests of LangChain, a chain, and a server as the source."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_tests.integration_tests import RetrieversIntegrationTests

import realm
from realm.errors import InputError
from realm.serve.client import Client
from realm.toolkits.langchain import RealmRetriever
from tests.serve.conftest import Served, running

QUESTION = "who built a tower in Arden?"


class TestConformance(RetrieversIntegrationTests):
    """LangChain's own tests of a retriever."""

    folder: str

    @pytest.fixture(autouse=True)
    def _of(self, workspace: str) -> None:
        type(self).folder = workspace

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RealmRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"source": self.folder, "k": 2}

    @property
    def retriever_query_example(self) -> str:
        return QUESTION


def test_a_chain_gets_the_passages_of_the_workspace(workspace: str) -> None:
    manual = realm.load(workspace)
    retriever = RealmRetriever(source=manual, k=2, method="bm25")
    prompts = []

    def read(documents: list[Document]) -> str:
        return "\n".join(f"{one.metadata['title']}: {one.page_content}" for one in documents)

    def kept(prompt: Any) -> Any:
        prompts.append(prompt.to_string())
        return prompt

    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    model = FakeListChatModel(responses=["Alaric"])
    inputs = {"context": retriever | read, "question": RunnablePassthrough()}
    chain = inputs | prompt | kept | model | StrOutputParser()
    assert chain.invoke(QUESTION) == "Alaric"
    wanted = manual.search(QUESTION, 2, method="bm25")
    assert len(wanted) == 2
    assert all(f"{hit.title}: {hit.text}" in prompts[0] for hit in wanted)


@pytest.mark.parametrize("method", ["dense", "bm25"])
def test_a_server_gives_the_same_documents_as_a_workspace(workspace: str, served: Served, method) -> None:
    here = RealmRetriever(source=workspace, k=4, method=method).invoke(QUESTION)
    for source in (served.url, Client(served.url)):
        there = RealmRetriever(source=source, k=4, method=method).invoke(QUESTION)
        assert [(one.id, one.page_content) for one in there] == [(one.id, one.page_content) for one in here]
        for mine, theirs in zip(there, here, strict=True):
            assert mine.metadata.keys() == {"document", "title", "score"}
            assert mine.metadata["score"] == pytest.approx(theirs.metadata["score"], rel=1e-4)


def test_a_filter_limits_the_documents_whose_fields_are_metadata(dated: realm.Workspace) -> None:
    (found,) = RealmRetriever(source=dated, where="year > 2000").invoke(QUESTION)
    (hit,) = dated.search(QUESTION, where="year > 2000")
    assert found.metadata == {"year": 2020, "title": "Zebulon", "document": "z2020", "score": hit.score}


def test_the_address_of_a_private_server_is_enough_with_the_token_of_the_environment(
    workspace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Path(workspace, "kb"), Path(workspace, "model")
    with running(*parts, token=None, read_token="sixteen-characters") as private:
        monkeypatch.delenv("REALM_READ_TOKEN", raising=False)
        with pytest.raises(InputError, match="needs the server's token"):
            RealmRetriever(source=private.url).invoke(QUESTION)
        monkeypatch.setenv("REALM_READ_TOKEN", "sixteen-characters")
        assert len(RealmRetriever(source=private.url, k=3).invoke(QUESTION)) == 3


def test_with_a_server_the_retriever_needs_no_torch(served: Served) -> None:
    code = (
        "import sys; from realm.toolkits.langchain import RealmRetriever; "
        f"print(len(RealmRetriever(source={served.url!r}, k=3).invoke('Arden')), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "False"]


def test_a_folder_that_is_no_workspace_is_an_error_with_the_reason(tmp_path) -> None:
    with pytest.raises(ValueError, match="is not a workspace"):
        RealmRetriever(source=tmp_path)
