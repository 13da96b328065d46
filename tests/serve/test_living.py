"""Knowledge that changes while the REST API answers."""

import errno
import re
import threading
import time
import urllib.parse
from dataclasses import replace
from typing import Any

import httpx
import pytest

from realm.index import versions
from realm.index.embedding import IndexConfig
from realm.index.versions import build_index
from realm.qa.pipeline import Answerer
from realm.serve import service
from realm.serve.client import ServerError
from realm.store.knowledge_base import KnowledgeBase
from realm.store.tables import table
from realm.text.corpus import Document
from realm.workspace.living import LivingKnowledge
from tests.conftest import RIVERS, TOWNS
from tests.serve.asking import OAKHAM, QUESTION, assert_problem, post, titles, wait_for
from tests.serve.conftest import CONFIG, TOKEN, running
from tests.store.tiny import TinyTagger


def test_an_added_document_answers_when_the_call_returns_and_after_a_restart(own_server, qa_model) -> None:
    client = own_server.client(TOKEN)
    assert "Oakham" not in titles(own_server, "bells of Oakham", "bm25")
    said = client.add([OAKHAM])
    assert (said["added"], said["passages_added"], said["ids"]) == (1, 1, ["new"])
    described = httpx.get(own_server.url + "/openapi.json").json()["components"]["schemas"]["AddedOut"]
    assert said.keys() == described["properties"].keys()
    for method in ("dense", "bm25", "hybrid"):
        assert "Oakham" in titles(own_server, OAKHAM["text"], method)
    assert said["index"]["version"] == 2 == client.health()["index"]["version"]
    assert client.add([OAKHAM])["unchanged"] == 1
    changed = OAKHAM | {"text": "Oakham has no bells."}
    assert client.add([changed])["replaced"] == 1
    assert httpx.get(own_server.url + "/v1/documents/new").json()["text"] == "Oakham has no bells."
    with running(own_server.kb, qa_model) as again:
        assert "Oakham has no bells." in {p.text for p in again.client().search("Oakham", 100)}


def test_an_index_left_on_disk_answers_and_changes_as_one_in_memory(own_kb, qa_model) -> None:
    with running(own_kb.folder, qa_model, replace(CONFIG, mapped_index=True)) as served:
        client = served.client(TOKEN)
        expected = Answerer.load(str(own_kb.folder), str(qa_model), CONFIG).answer(QUESTION)
        assert [a.text for a in client.answers(QUESTION).answers] == [a.text for a in expected.answers]
        client.add([OAKHAM])
        assert "Oakham" in titles(served, OAKHAM["text"])
        assert client.delete("new") == 1 and client.delete("d0") == 2
        assert not {"Oakham", "Arden"} & titles(served, OAKHAM["text"])


def test_a_deleted_document_is_in_no_answer_any_more(own_server) -> None:
    client = own_server.client(TOKEN)
    everything = {p.title for p in client.search("Arden", 100, method="hybrid")}
    assert "Arden" in everything
    assert client.delete("d0") == 2
    for method in ("dense", "bm25", "hybrid"):
        assert "Arden" not in {p.title for p in client.search("Arden", 100, method=method)}
    with pytest.raises(ServerError, match="no document has the id 'd0'") as error:
        client.delete("d0")
    assert error.value.status == 404
    with pytest.raises(ServerError, match="no document has the id 'Bexley'"):
        client.delete("Bexley")  # a title is not an id here: two documents may share one


@pytest.mark.parametrize("last", ["one", "two"])
def test_of_two_documents_with_one_text_either_can_be_deleted_or_replaced_and_the_text_stays(
    own_server, last
) -> None:
    client = own_server.client(TOKEN)
    text = "Oakham has three bells and a ford."
    one, two = ({"id": id, "title": "Oakham", "text": text} for id in ("one", "two"))
    assert client.add([one, two])["unchanged"] == 1
    first = "two" if last == "one" else "one"
    assert client.delete(first) == 0  # its text stays
    with pytest.raises(ServerError, match=f"no document has the id '{first}'"):
        client.delete(first)
    assert httpx.get(f"{own_server.url}/v1/documents/{last}").json()["text"] == text
    client.add([one | {"id": first}])
    changed = {"id": last, "title": "Oakham", "text": "It has no bells."}
    assert client.add([changed])["passages_removed"] == 0
    assert httpx.get(f"{own_server.url}/v1/documents/{first}").json()["text"] == text
    assert text in {p.text for p in client.search(text, 100)}
    assert client.delete(first) == 1


@pytest.mark.parametrize("id", ["a/b", "../etc", "ä ö?#%", "<script>"])
def test_any_id_can_be_written_read_and_deleted(own_server, id) -> None:
    client = own_server.client(TOKEN)
    assert client.add([{"id": id, "title": "T", "text": "Text of it."}])["ids"] == [id]
    path = own_server.url + "/v1/documents/" + urllib.parse.quote(id, safe="")
    assert httpx.get(path).json()["id"] == id
    assert client.delete(id) == 1


def test_documents_of_a_request_come_together_or_not_at_all(own_server) -> None:
    before = own_server.client().health()
    twice = [OAKHAM, OAKHAM | {"text": "Another text."}]
    assert_problem(
        post(own_server, "/v1/documents", {"documents": twice}, headers={"Authorization": f"Bearer {TOKEN}"}),
        400,
        "new",
    )
    after = own_server.client().health()
    assert (after["passages"], after["index"]) == (before["passages"], before["index"])


def test_only_who_has_the_token_writes(own_server, own_kb, qa_model) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        refused = post(own_server, "/v1/documents", {"documents": [OAKHAM]}, headers=headers)
        assert_problem(refused, 401, "needs the server's token")
        assert refused.headers["www-authenticate"] == "Bearer"
        assert_problem(httpx.delete(own_server.url + "/v1/documents/d0", headers=headers), 401, "token")
    with running(own_kb.folder, qa_model, token=None) as reading:
        assert reading.client().health()["writable"] is False
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert_problem(httpx.delete(reading.url + "/v1/documents/d0", headers=headers), 403, "--writable")


def test_what_another_process_adds_or_builds_is_taken_up(own_server, own_kb) -> None:
    client = own_server.client()
    own_kb.add([Document(OAKHAM["title"], OAKHAM["text"], "new")], TinyTagger())
    wait_for(lambda: client.health()["passages"] == len(own_kb))
    assert "Oakham" in titles(own_server, OAKHAM["text"])
    version = client.health()["index"]["version"]
    own_kb.add([Document("Selby", "Selby is on the Wear.", "more")], TinyTagger())
    build_index(own_kb, str(own_server.model), IndexConfig(device="cpu", precision="fp32"))
    wait_for(lambda: client.health()["index"]["version"] > version)
    assert "Selby" in titles(own_server, "Selby is on the Wear.")


def test_damage_on_disk_leaves_the_old_version_answering(own_server, own_kb) -> None:
    client = own_server.client()
    before = client.answers(QUESTION)
    own_kb.add([Document(OAKHAM["title"], OAKHAM["text"], "new")], TinyTagger())
    wait_for(lambda: client.health()["passages"] == len(own_kb))
    manifests = sorted((own_kb.folder / "passages.lance" / "_versions").glob("*.manifest"))
    newer = manifests[0].with_name(f"{int(manifests[0].stem) - 1:020d}.manifest")
    newer.write_bytes(b"not a manifest")
    wait_for(lambda: client.health()["status"] == "stale")
    assert client.health()["problem"]
    assert client.answers(QUESTION).answers[0].text == before.answers[0].text
    newer.unlink()
    wait_for(lambda: client.health()["status"] == "ok")


def test_writes_and_builds_under_load_lose_no_request_and_no_document(own_server, monkeypatch) -> None:
    """Four clients ask, one writes ten documents, another process's builds go on; all that was acknowledged is there."""
    stop, problems, asked = threading.Event(), [], []
    monkeypatch.setattr(versions, "KEPT_VERSIONS", 50)

    def ask(number: int) -> None:
        client = own_server.client()
        while not stop.is_set():
            try:
                answers = client.answers(
                    f"which river is at {TOWNS[number]}?", method=("dense", "hybrid")[number % 2]
                )
                for one in answers.answers:
                    if one.passage.text[one.start : one.end] != one.text:
                        problems.append(one)
                asked.append(number)
            except Exception as error:
                problems.append(error)

    def build() -> None:
        while not stop.is_set():
            try:
                build_index(
                    KnowledgeBase.open(own_server.kb),
                    str(own_server.model),
                    IndexConfig(device="cpu"),
                )
            except ValueError as error:
                if "another process" not in str(error):
                    problems.append(error)
            time.sleep(0.02)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)] + [threading.Thread(target=build)]
    for thread in threads:
        thread.start()
    client = own_server.client(TOKEN)
    try:
        for number in range(10):
            text = f"Place {number} lies on the {RIVERS[number % 4]}, far from place {number + 1}."
            client.add([{"id": f"place {number}", "title": f"Place {number}", "text": text}])
            assert f"place {number}" in {p.document for p in client.search(text, 100, method="dense")}
            if number % 5 == 4:
                client.delete(f"place {number}")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == [] and len(asked) > 20
    there = {p.document_id for p in KnowledgeBase.open(own_server.kb)}
    assert {f"place {n}" for n in range(10) if n % 5 != 4} <= there
    assert not {f"place {n}" for n in range(10) if n % 5 == 4} & there


def test_changes_that_wait_keep_no_reader_waiting_and_too_many_are_refused(
    own_kb, qa_model, monkeypatch
) -> None:
    gate = threading.Event()
    add = LivingKnowledge.add

    def slow(*args: Any) -> Any:
        gate.wait(20)
        return add(*args)

    monkeypatch.setattr(LivingKnowledge, "add", slow)
    monkeypatch.setattr(service, "MOST_CHANGES", 8)
    with running(own_kb.folder, qa_model, CONFIG) as served:
        statuses: list[int] = []

        def write(number: int) -> None:
            body = {"documents": [{"id": f"n{number}", "text": f"Text {number}."}]}
            statuses.append(
                post(served, "/v1/documents", body, headers={"Authorization": f"Bearer {TOKEN}"}).status_code
            )

        threads = [threading.Thread(target=write, args=(n,)) for n in range(9)]
        for thread in threads:
            thread.start()
        wait_for(lambda: statuses == [429])
        first = own_kb.ids[0]
        assert served.client().passage(first)["id"] == first and served.client().answers(QUESTION).answers
        gate.set()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] * 8 + [429]
        assert served.client().health()["documents"] == len(TOWNS) + 8


@pytest.mark.parametrize(
    ("refusal", "status", "says"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            507,
            "the disk of the server is full: the change may not be saved",
        ),
        (OSError("LanceError(IO): write: No space left on device (os error 28)"), 507, "the server is full"),
        (OSError(errno.EROFS, "Read-only file system"), 503, "cannot write.*Read-only file system"),
    ],
)
def test_a_disk_that_takes_nothing_is_the_servers_fault_and_leaves_the_answers(
    own_server, monkeypatch, refusal, status, says
) -> None:
    def refuse(*args: Any, **more: Any) -> Any:
        raise refusal

    headers, before = {"Authorization": f"Bearer {TOKEN}"}, own_server.client().health()
    with monkeypatch.context() as patch:
        patch.setattr(table, "write_fragments", refuse)
        assert_problem(
            post(own_server, "/v1/documents", {"documents": [OAKHAM]}, headers=headers), status, says
        )
        assert own_server.client().answers(QUESTION).answers
    assert own_server.client().health()["passages"] == before["passages"]
    assert own_server.client(TOKEN).add([OAKHAM])["added"] == 1


@pytest.mark.parametrize(("refusal", "status"), [(errno.ENOSPC, 507), (errno.EMFILE, 503), (errno.EIO, 500)])
def test_a_question_that_the_system_fails_is_not_the_clients_fault(
    served, monkeypatch, refusal, status
) -> None:
    def refuse(*args: Any) -> Any:
        raise OSError(refusal, "what the system says")

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "answer_batch", refuse)
        assert_problem(post(served, "/v1/answer", {"question": QUESTION}), status, "server")
    assert post(served, "/v1/answer", {"question": QUESTION}).status_code == 200


def test_damaged_passages_are_not_the_clients_fault(own_server, own_kb) -> None:
    for file in (own_kb.folder / "passages.lance" / "data").iterdir():
        file.unlink()
    for body in ({"question": QUESTION}, {"question": QUESTION, "where": "title = 'Selby'"}):
        response = post(own_server, "/v1/answer", body)
        assert_problem(response, 500, "a file of the server is damaged")
        assert str(own_kb.folder) not in response.text


def test_versions_are_listed_with_their_dates(own_server) -> None:
    own_server.client(TOKEN).add([OAKHAM])
    said = httpx.get(own_server.url + "/v1/versions").json()
    assert [v["version"] for v in said["index"]] == [2, 1]
    assert (
        said["knowledge"][0]["version"] == said["in_use"]["knowledge"] == said["knowledge"][1]["version"] + 1
    )
    assert all(re.match(r"\d{4}-\d\d-\d\dT", v["created"]) for v in said["knowledge"])
