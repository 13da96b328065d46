"""The REST API through a real socket: the same answers as in the process, limits, problems, metrics, writes."""

import asyncio
import http.client
import json
import logging
import re
import socket
import threading
import time
import urllib.parse
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from realm import cli
from realm.qa.filling import Filler
from realm.qa.pipeline import Answerer
from realm.retrieval.index import IndexConfig, build_index
from realm.retrieval.knowledge_base import KnowledgeBase
from realm.serve import app
from realm.serve.client import ServerError
from realm.serve.knowledge import LivingKnowledge
from realm.text.corpus import Document
from tests.conftest import RIVERS, TOWNS
from tests.retrieval.tiny import TinyTagger
from tests.serve.conftest import CONFIG, TOKEN, Served, running

QUESTION = "who built a tower in Arden?"
OAKHAM = {"id": "new", "title": "Oakham", "text": "Oakham lies on the Tarn. Berthe sold the bells of Oakham."}


def post(served: Served, path: str, body: Any = None, **more: Any) -> httpx.Response:
    return httpx.post(served.url + path, json=body, timeout=30, **more)


def titles(served: Served, question: str, method: str = "dense") -> set[str]:
    """Of all that can be found; with random weights, what comes first means little."""
    return {one["title"] for one in served.client().retrieve(question, method, 100)}


# -- answers


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_the_server_says_what_the_pipeline_says(served, method) -> None:
    answerer = Answerer.load(str(served.kb), str(served.model), CONFIG)
    (expected,) = answerer.answer_batch([QUESTION], method, 4)
    said = post(served, "/answer", {"question": QUESTION, "method": method, "top_k": 4}).json()
    contract = expected.to_json()
    assert said["question"] == QUESTION
    assert [a["text"] for a in said["answers"]] == [a["text"] for a in contract["answers"]]
    assert said["answers"][0].keys() == contract["answers"][0].keys()
    assert said["answers"][0]["passage"].keys() == contract["answers"][0]["passage"].keys()
    for mine, theirs in zip(said["answers"], contract["answers"], strict=True):
        assert mine["score"] == pytest.approx(theirs["score"], rel=1e-4)
        assert mine["passage"]["text"][mine["start"] : mine["end"]] == mine["text"]
    assert [p["id"] for p in said["passages"]] == [e.passage.id for e in expected.read]
    best = max(said["passages"], key=lambda passage: passage["span"]["score"])
    assert best["id"] == said["answers"][0]["passage"]["id"]
    assert best["span"] == {name: said["answers"][0][name] for name in best["span"]}
    for passage in said["passages"]:
        span = passage["span"]
        assert passage["text"][span["start"] : span["end"]] == span["text"]
    assert said["null_probability"] == pytest.approx(expected.null_probability, rel=1e-4)
    assert said["index"]["version"] == 1 and said["index"]["step"] == 3 and said["index"]["created"]
    assert said["ms"].keys() == {"queue", "embed", "search", "read"}


def test_many_questions_are_answered_in_their_order_as_one_object_or_line_by_line(served) -> None:
    questions = [f"on which river lies {town}?" for town in TOWNS] * 3
    whole = post(served, "/answer", {"questions": questions}).json()["results"]
    assert [one["question"] for one in whole] == questions
    with httpx.stream(
        "POST",
        served.url + "/answer",
        json={"questions": questions},
        headers={"Accept": "application/x-ndjson"},
    ) as response:
        assert response.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in response.iter_lines()]
    assert [one["question"] for one in lines] == questions
    assert [one["answers"][0]["text"] for one in lines] == [one["answers"][0]["text"] for one in whole]


def test_fill_says_what_the_filler_says(served) -> None:
    sentence = "Arden lies on the river [MASK] between [MASK] and the hills."
    expected = Filler.load(str(served.kb), str(served.model), CONFIG).fill(sentence).to_json()
    said = post(served, "/fill", {"sentence": sentence}).json()
    assert said["masks"][0][0]["text"] == expected["masks"][0][0]["text"]
    for mine, theirs in zip(said["passages"], expected["passages"], strict=True):
        assert mine["id"] == theirs["id"]
        np.testing.assert_allclose(
            [mine[k] for k in ("probability", "likelihood", "utility")],
            [theirs[k] for k in ("probability", "likelihood", "utility")],
            rtol=1e-3,
            atol=1e-5,
        )


def test_passages_and_documents_are_found_by_their_ids_and_nothing_else_is(served) -> None:
    passages = list(KnowledgeBase.open(served.kb))
    client = served.client()
    of_d3 = [one for one in passages if one.document_id == "d3"]
    found = client.passage(of_d3[0].id)
    assert (found["text"], found["document"], found["previous"]) == (of_d3[0].text, "d3", None)
    assert found["next"] == of_d3[1].id
    document = httpx.get(served.url + "/documents/d3").json()
    assert document["passages"] == [one.id for one in of_d3]
    for path in (
        "passages/0000000000000000",
        "passages/xyz",
        "passages/-1",
        "passages/" + "f" * 40,
        "documents/d99",
    ):
        assert httpx.get(f"{served.url}/{path}").status_code == 404


def test_questions_of_many_clients_share_batches(served) -> None:
    count, total = 'realm_batch_questions_count{kind="answer"}', 'realm_batch_questions_sum{kind="answer"}'
    post(served, "/answer", {"question": QUESTION})
    before = metric(served, count), metric(served, total)

    async def everybody() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as client:
            return await asyncio.gather(
                *(client.post(served.url + "/answer", json={"question": f"what of {t}?"}) for t in TOWNS * 4)
            )

    responses = asyncio.run(everybody())
    assert [r.json()["question"] for r in responses] == [f"what of {t}?" for t in TOWNS * 4]
    assert metric(served, total) - before[1] == 4 * len(TOWNS)
    assert metric(served, count) - before[0] < 2 * len(TOWNS)


def test_a_client_object_answers_as_the_command_line_does(served, capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        logging.getLogger("realm"), "handlers", []
    )  # the command line would leave capsys' stream there
    client = served.client()
    answers = client.answer(QUESTION)
    assert [a.text for one in client.answer_many([QUESTION, "why?"]) for a in one.answers][:5] == [
        a.text for a in answers.answers
    ]
    assert cli.main(["answer", QUESTION, "--server", served.url + "/", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert list(row) == ["question", "answers", "index", "ms"]
    assert [a["text"] for a in row["answers"]] == [a.text for a in answers.answers]
    assert cli.main(["answer", QUESTION, "--server", served.url]) == 0
    assert capsys.readouterr().out.splitlines() == answers.lines()


# -- limits and problems


def assert_problem(response: httpx.Response, status: int, says: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status and problem["title"] and re.search(says, problem["detail"]), problem
    assert "\n" not in problem["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/answer", {}, 422, "give `question` or `questions`"),
        ("/answer", {"question": "a", "questions": ["b"]}, 422, "one of the two"),
        ("/answer", {"question": "  "}, 422, "question"),
        ("/answer", {"question": "x" * 2001}, 422, "2000"),
        ("/answer", {"question": 5}, 422, "string"),
        ("/answer", {"question": "\ud800"}, 422, "question"),
        ("/answer", {"questions": []}, 422, "questions"),
        ("/answer", {"questions": ["a"] * 257}, 422, "257, the limit is 256"),
        ("/answer", {"question": "a", "top_k": 21}, 422, "21, the limit is 20"),
        ("/answer", {"question": "a", "top_k": 0}, 422, "top_k"),
        ("/answer", {"question": "a", "method": "magic"}, 422, "method"),
        ("/answer", {"question": "a", "colour": 1}, 422, "colour"),
        ("/answer", [[]], 422, "body"),
        ("/retrieve", {"question": "a", "top_k": 101}, 422, "101, the limit is 100"),
        ("/fill", {"sentence": "no mask here"}, 400, r"no \[MASK\]"),
        ("/fill", {"sentence": "wool " * 40 + "[MASK]"}, 400, "shorten the sentence"),
        ("/nothing", {}, 405, ""),
        ("/health", {}, 405, ""),
    ],
)
def test_what_cannot_be_served_is_a_problem_that_says_why(served, path, body, status, says) -> None:
    data = json.dumps(body)
    response = httpx.post(served.url + path, content=data, headers={"Content-Type": "application/json"})
    assert_problem(response, status, says)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"question": NaN}', b"null"])
def test_a_body_that_is_no_json_is_a_problem(served, body) -> None:
    response = httpx.post(served.url + "/answer", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_one_bad_sentence_does_not_spoil_the_batch_it_is_in(served) -> None:
    results: dict[int, int] = {}

    def fill(number: int) -> None:
        sentence = "Arden lies on [MASK]." if number % 2 else "Arden lies."
        results[number] = post(served, "/fill", {"sentence": sentence}).status_code

    threads = [threading.Thread(target=fill, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: 200 if n % 2 else 400 for n in range(12)}


def test_a_body_over_the_limit_is_refused_whether_or_not_it_says_its_length(tiny_kb, qa_model) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, body_bytes=1000)) as served:
        big = json.dumps({"question": "x" * 1500}).encode()
        assert_problem(httpx.post(served.url + "/answer", content=big), 413, "longer than 1000 bytes")

        def in_pieces():
            for start in range(0, len(big), 100):
                yield big[start : start + 100]

        assert_problem(httpx.post(served.url + "/answer", content=in_pieces()), 413, "longer than 1000 bytes")


def test_a_body_that_does_not_come_is_given_up(tiny_kb, qa_model) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.3)) as served:
        address = urllib.parse.urlsplit(served.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
        connection.putrequest("POST", "/answer")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b'{"ques')
        response = connection.getresponse()
        assert response.status == 408 and b"took longer than 0.3 s" in response.read()
        connection.close()


def test_a_client_that_never_ends_does_not_keep_the_server_from_ending(tiny_kb, qa_model, caplog) -> None:
    with socket.socket() as client:
        with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=60, write_seconds=0.5)) as served:
            address = urllib.parse.urlsplit(served.url)
            client.connect((address.hostname, address.port))
            client.sendall(b'POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"ques')
            served.client().answer(QUESTION)  # by now the other request is in the server's hands
            told = time.monotonic()
        assert time.monotonic() - told < 15
        assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith("Cancel 1 running task")


class Gate:
    """Holds the batcher's thread until it is opened."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch):
        self.open, self.entered = threading.Event(), threading.Event()
        answer = Answerer.answer_batch

        def wait(*args: Any) -> Any:
            self.entered.set()
            self.open.wait(20)
            return answer(*args)

        monkeypatch.setattr(Answerer, "answer_batch", wait)


def test_a_full_queue_is_429_with_a_time_and_the_client_comes_back(tiny_kb, qa_model, monkeypatch) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, queue=3, questions=3, batch=1)) as served:
        gate = Gate(served, monkeypatch)
        answers: list[int] = []
        ask = lambda: answers.append(post(served, "/answer", {"question": "a"}).status_code)  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(4)]
        threads[0].start()
        assert gate.entered.wait(10)
        for thread in threads[1:]:
            thread.start()
        while httpx.get(served.url + "/health").json()["queue"] < 3:
            time.sleep(0.01)
        refused = post(served, "/answer", {"question": "b"})
        assert_problem(refused, 429, "try again in 1 s")
        assert refused.headers["retry-after"] == "1"
        with pytest.raises(ServerError, match="too many requests wait"):
            served.client(patience=0).answer("c")
        threading.Timer(0.3, gate.open.set).start()
        assert served.client().answer("c").question == "c"
        for thread in threads:
            thread.join()
        assert answers == [200] * 4


def test_no_answer_in_time_is_503_and_leaves_no_work_behind(tiny_kb, qa_model, monkeypatch) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.5, batch=1)) as served:
        gate = Gate(served, monkeypatch)
        assert_problem(post(served, "/answer", {"questions": ["a", "b", "c"]}), 503, "time limit")
        assert httpx.get(served.url + "/health").json()["queue"] in (0, 2)
        gate.open.set()
        assert post(served, "/answer", {"question": "d"}).status_code == 200


def metric(served: Served, name: str) -> float:
    text = httpx.get(served.url + "/metrics").text
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
def test_what_a_client_asked_that_has_gone_is_not_answered(tiny_kb, qa_model, monkeypatch, accept) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, batch=1)) as served:
        gate = Gate(served, monkeypatch)
        address = urllib.parse.urlsplit(served.url)
        body = json.dumps({"questions": ["a"] * 50}).encode()
        with socket.create_connection((address.hostname, address.port)) as client:
            head = f"Host: localhost\r\nContent-Type: application/json\r\nAccept: {accept}"
            client.sendall(
                f"POST /answer HTTP/1.1\r\n{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            assert gate.entered.wait(10)
        wait_for(lambda: served.client().health()["queue"] == 0)
        gate.open.set()
        assert served.client().answer("d").question == "d"
        assert metric(served, 'realm_batch_questions_sum{kind="answer"}') == 2


def test_questions_that_nobody_waits_for_leave_their_places(tiny_kb, qa_model, monkeypatch) -> None:
    with running(
        tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.5, queue=3, questions=3, batch=1)
    ) as served:
        gate = Gate(served, monkeypatch)
        for _ in range(3):  # taken in each time, and given up; a place that was kept would make it 429
            assert_problem(post(served, "/answer", {"questions": ["a", "b", "c"]}), 503, "time limit")
        gate.open.set()


def test_an_error_amid_a_stream_is_its_last_line(served, monkeypatch) -> None:
    answer = Answerer.answer_batch

    def broken(self: Any, questions: Any, *more: Any) -> Any:
        if "break" in questions:
            raise ZeroDivisionError("secret of the house")
        return answer(self, questions, *more)

    questions = ["a"] * CONFIG.batch + ["break", "b", "c"]
    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "answer_batch", broken)
        response = post(
            served, "/answer", {"questions": questions}, headers={"Accept": "application/x-ndjson"}
        )
        with pytest.raises(ServerError, match="in its log") as error:
            list(served.client().answer_many(questions))
    lines = [json.loads(line) for line in response.iter_lines()]
    assert [one.get("question") for one in lines] == ["a"] * CONFIG.batch + [None]
    assert lines[-1]["error"]["status"] == error.value.status == 500 and "secret" not in response.text


NEEDS_WORDS = {"questions": ["a"] * 5, "method": "bm25"}
AS_LINES = {"Accept": "application/x-ndjson"}


def test_a_stream_waits_no_longer_than_a_request_may_for_words(tiny_kb, qa_model, monkeypatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(LivingKnowledge, "read_words", lambda self: gate.wait(20))
    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.5)) as served:
        assert_problem(post(served, "/answer", NEEDS_WORDS, headers=AS_LINES), 503, "time limit")
        gate.set()


def test_questions_that_wait_for_words_count_as_waiting(tiny_kb, qa_model, monkeypatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(LivingKnowledge, "read_words", lambda self: gate.wait(20))
    with running(tiny_kb.folder, qa_model, replace(CONFIG, queue=8, questions=8)) as served:
        statuses: list[int] = []
        ask = lambda: statuses.append(post(served, "/answer", NEEDS_WORDS).status_code)  # noqa: E731
        first = threading.Thread(target=ask)
        first.start()
        wait_for(lambda: served.client().health()["queue"] == 5)
        assert_problem(post(served, "/answer", NEEDS_WORDS, headers=AS_LINES), 429, "try again")
        gate.set()
        first.join()
        assert statuses == [200]


def test_a_bug_is_a_500_without_its_insides_and_the_next_question_is_answered(served, monkeypatch) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("secret of the house")

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "answer_batch", broken)
        response = post(served, "/answer", {"question": QUESTION})
    assert_problem(response, 500, "in its log")
    assert "secret" not in response.text and "content-security-policy" in response.headers
    assert post(served, "/answer", {"question": QUESTION}).status_code == 200


def test_on_loopback_only_its_own_names_are_answered(served) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example"):
        assert_problem(httpx.get(served.url + "/health", headers={"Host": host}), 421, "not '")
    for host in ("localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.1:9"):
        assert httpx.get(served.url + "/health", headers={"Host": host}).status_code == 200


def test_head_says_what_get_would_without_the_body(served) -> None:
    for path in ("/", "/style.css", "/health", "/documents/d3", "/documents/d99"):
        told, got = httpx.head(served.url + path), httpx.get(served.url + path)
        assert (told.status_code, told.content) == (got.status_code, b"")
        assert told.headers["content-type"] == got.headers["content-type"]


def test_a_page_of_another_version_is_not_kept(served) -> None:
    for path in ("/", "/main.js", "/health"):
        assert httpx.get(served.url + path).headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/", "/health", "/nothing", "/openapi.json", "/app.js"])
def test_every_response_forbids_scripts_from_elsewhere(served, path) -> None:
    policy = httpx.get(served.url + path).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy


# -- knowledge that lives


def test_an_added_document_answers_when_the_call_returns_and_after_a_restart(own_server, qa_model) -> None:
    client = own_server.client(TOKEN)
    assert "Oakham" not in titles(own_server, "bells of Oakham", "bm25")
    said = client.add([OAKHAM])
    assert (said["added"], said["passages_added"], said["ids"]) == (1, 1, ["new"])
    for method in ("dense", "bm25", "hybrid"):
        assert "Oakham" in titles(own_server, OAKHAM["text"], method)
    assert said["index"]["version"] == 2 == client.health()["index"]["version"]
    assert client.add([OAKHAM])["unchanged"] == 1
    changed = OAKHAM | {"text": "Oakham has no bells."}
    assert client.add([changed])["replaced"] == 1
    assert httpx.get(own_server.url + "/documents/new").json()["text"] == "Oakham has no bells."
    with running(own_server.kb, qa_model) as again:
        assert "Oakham has no bells." in {p["text"] for p in again.client().retrieve("Oakham", top_k=100)}


def test_an_index_left_on_disk_answers_and_changes_as_one_in_memory(own_kb, qa_model) -> None:
    with running(own_kb.folder, qa_model, replace(CONFIG, mapped_index=True)) as served:
        client = served.client(TOKEN)
        expected = Answerer.load(str(own_kb.folder), str(qa_model), CONFIG).answer(QUESTION)
        assert [a.text for a in client.answer(QUESTION).answers] == [a.text for a in expected.answers]
        client.add([OAKHAM])
        assert "Oakham" in titles(served, OAKHAM["text"])
        assert client.delete("new") == 1 and client.delete("d0") == 2
        assert not {"Oakham", "Arden"} & titles(served, OAKHAM["text"])


def test_a_deleted_document_is_in_no_answer_any_more(own_server) -> None:
    client = own_server.client(TOKEN)
    everything = {p["title"] for p in client.retrieve("Arden", "hybrid", 100)}
    assert "Arden" in everything
    assert client.delete("d0") == 2
    for method in ("dense", "bm25", "hybrid"):
        assert "Arden" not in {p["title"] for p in client.retrieve("Arden", method, 100)}
    with pytest.raises(ServerError, match="no document has the id 'd0'") as error:
        client.delete("d0")
    assert error.value.status == 404
    with pytest.raises(ServerError, match="no document has the id 'Bexley'"):
        client.delete("Bexley")  # a title is not an id here: two documents may share one


@pytest.mark.parametrize("id", ["a/b", "../etc", "ä ö?#%", "<script>"])
def test_any_id_can_be_written_read_and_deleted(own_server, id) -> None:
    client = own_server.client(TOKEN)
    assert client.add([{"id": id, "title": "T", "text": "Text of it."}])["ids"] == [id]
    path = own_server.url + "/documents/" + urllib.parse.quote(id, safe="")
    assert httpx.get(path).json()["id"] == id
    assert client.delete(id) == 1


def test_documents_of_a_request_come_together_or_not_at_all(own_server) -> None:
    before = own_server.client().health()
    twice = [OAKHAM, OAKHAM | {"text": "Another text."}]
    assert_problem(
        post(own_server, "/documents", {"documents": twice}, headers={"Authorization": f"Bearer {TOKEN}"}),
        400,
        "new",
    )
    after = own_server.client().health()
    assert (after["passages"], after["index"]) == (before["passages"], before["index"])


def test_only_who_has_the_token_writes(own_server, own_kb, qa_model) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        refused = post(own_server, "/documents", {"documents": [OAKHAM]}, headers=headers)
        assert_problem(refused, 401, "needs the server's token")
        assert refused.headers["www-authenticate"] == "Bearer"
        assert_problem(httpx.delete(own_server.url + "/documents/d0", headers=headers), 401, "token")
    with running(own_kb.folder, qa_model, token=None) as reading:
        assert reading.client().health()["writable"] is False
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert_problem(httpx.delete(reading.url + "/documents/d0", headers=headers), 403, "--writable")


def wait_for(condition: Any, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


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
    before = client.answer(QUESTION)
    own_kb.add([Document(OAKHAM["title"], OAKHAM["text"], "new")], TinyTagger())
    wait_for(lambda: client.health()["passages"] == len(own_kb))
    manifests = sorted((own_kb.folder / "passages.lance" / "_versions").glob("*.manifest"))
    newer = manifests[0].with_name(f"{int(manifests[0].stem) - 1:020d}.manifest")
    newer.write_bytes(b"not a manifest")
    wait_for(lambda: client.health()["status"] == "stale")
    assert client.health()["problem"]
    assert client.answer(QUESTION).answers[0].text == before.answers[0].text
    newer.unlink()
    wait_for(lambda: client.health()["status"] == "ok")


def test_writes_and_builds_under_load_lose_no_request_and_no_document(own_server) -> None:
    """Four clients ask, one writes ten documents, another process's builds go on; all that was acknowledged is there."""
    stop, problems, asked = threading.Event(), [], []

    def ask(number: int) -> None:
        client = own_server.client()
        while not stop.is_set():
            try:
                answers = client.answer(
                    f"which river is at {TOWNS[number]}?", ("dense", "hybrid")[number % 2]
                )
                for one in answers.answers:
                    if one.evidence.passage.text[one.start : one.end] != one.text:
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
                    IndexConfig(device="cpu", keep=50),
                )
            except ValueError as error:
                if "another process" not in str(error):
                    problems.append(error)
            time.sleep(0.02)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)] + [threading.Thread(target=build)]
    for thread in threads:
        thread.start()
    client = own_server.client(TOKEN)
    for number in range(10):
        text = f"Place {number} lies on the {RIVERS[number % 4]}, far from place {number + 1}."
        client.add([{"id": f"place {number}", "title": f"Place {number}", "text": text}])
        assert f"place {number}" in {p["document"] for p in client.retrieve(text, "dense", 100)}
        if number % 5 == 4:
            client.delete(f"place {number}")
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
    with running(own_kb.folder, qa_model, replace(CONFIG, changes=8)) as served:
        statuses: list[int] = []

        def write(number: int) -> None:
            body = {"documents": [{"id": f"n{number}", "text": f"Text {number}."}]}
            statuses.append(
                post(served, "/documents", body, headers={"Authorization": f"Bearer {TOKEN}"}).status_code
            )

        threads = [threading.Thread(target=write, args=(n,)) for n in range(9)]
        for thread in threads:
            thread.start()
        wait_for(lambda: statuses == [429])
        first = own_kb.ids[0]
        assert served.client().passage(first)["id"] == first and served.client().answer(QUESTION).answers
        gate.set()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] * 8 + [429]
        assert served.client().health()["documents"] == len(TOWNS) + 8


def test_versions_are_listed_with_their_dates(own_server) -> None:
    own_server.client(TOKEN).add([OAKHAM])
    said = httpx.get(own_server.url + "/versions").json()
    assert [v["version"] for v in said["index"]] == [2, 1]
    assert (
        said["knowledge"][0]["version"] == said["in_use"]["knowledge"] == said["knowledge"][1]["version"] + 1
    )
    assert all(re.match(r"\d{4}-\d\d-\d\dT", v["created"]) for v in said["knowledge"])


# -- training runs


def test_a_run_is_followed_line_by_line_while_it_grows(tiny_kb, qa_model, tmp_path) -> None:
    (tmp_path / "realm.training").mkdir()
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    metrics = tmp_path / "realm.training" / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "lo')
    with running(tiny_kb.folder, qa_model, runs=tmp_path) as served:
        get = lambda path: httpx.get(served.url + path).json()  # noqa: E731
        assert {(r["name"], r["training"]) for r in get("/runs")["runs"]} == {
            ("realm", True),
            ("done", False),
        }
        first = get("/runs/realm")
        assert first["rows"] == [{"step": 1, "loss": 3.5}] and first["training"]
        with metrics.open("a") as file:
            file.write('ss": 3.25}\nnonsense\n')
        second = get(f"/runs/realm?after={first['next']}")
        assert second["rows"] == [{"step": 2, "loss": 3.25}]
        assert get(f"/runs/realm?after={second['next']}")["rows"] == []
        metrics.write_text('{"step": 1, "loss": 9.0}\n')  # begun anew
        assert get(f"/runs/realm?after={second['next']}")["rows"] == [{"step": 1, "loss": 9.0}]
        assert httpx.get(served.url + "/runs/%2e%2e").status_code == 404
        assert_problem(httpx.get(served.url + "/runs/absent"), 404, "no run is called 'absent'")


def test_a_run_that_went_wrong_or_ended_just_now_is_shown_as_far_as_it_is(
    tiny_kb, qa_model, tmp_path, monkeypatch
) -> None:
    (tmp_path / "realm").mkdir()
    metrics = tmp_path / "realm" / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": NaN, "grad": -Infinity}\n')
    with running(tiny_kb.folder, qa_model, runs=tmp_path) as served:
        assert httpx.get(served.url + "/runs/realm").json()["rows"] == [
            {"step": 1, "loss": None, "grad": None}
        ]
        found = app.runs(tmp_path)
        monkeypatch.setattr(app, "runs", lambda folder: found)
        metrics.unlink()  # as when a run's working folder goes between two looks
        assert_problem(httpx.get(served.url + "/runs/realm"), 404, "'realm' has just ended")
        monkeypatch.undo()
        assert app.runs(tmp_path) == []
