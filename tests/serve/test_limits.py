"""What the REST API refuses, and how it bears clients that are many, slow or gone."""

import http.client
import json
import logging
import socket
import threading
import time
import urllib.parse
from dataclasses import replace
from typing import Any

import httpx
import pytest

from realm import cli
from realm.qa.pipeline import Answerer
from realm.serve.client import ServerError
from realm.serve.http import connections
from realm.workspace.living import LivingKnowledge
from tests.serve.asking import QUESTION, assert_problem, metric, post, wait_for
from tests.serve.conftest import CONFIG, TOKEN, Served, running

READ = "the readers' own token"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/answer", {}, 422, "give either `question` or `questions`"),
        ("/v1/answer", {"question": "a", "questions": ["b"]}, 422, "give either `question` or `questions`"),
        ("/v1/answer", {"question": "  "}, 422, "^question: the text is empty or white space"),
        ("/v1/answer", {"question": "x" * 2001}, 422, "^question: 2001 characters are too many: .* 2000$"),
        ("/v1/answer", {"question": 5}, 422, "string"),
        ("/v1/answer", {"question": "\ud800"}, 422, "question"),
        ("/v1/answer", {"questions": []}, 422, "questions"),
        ("/v1/answer", {"questions": ["a"] * 257}, 422, "is 257, but must be at most 256"),
        ("/v1/answer", {"question": "a", "top_k": 21}, 422, "is 21, but must be at most 20"),
        ("/v1/answer", {"question": "a", "top_k": 0}, 422, "top_k"),
        ("/v1/answer", {"question": "a", "method": "magic"}, 422, "method"),
        ("/v1/answer", {"question": "a", "colour": 1}, 422, "colour"),
        ("/v1/answer", {"questions": [0] * 400_000}, 422, "^questions: their number is 400000, but must"),
        ("/v1/answer", {f"k{n}": 1 for n in range(50_000)}, 422, "^body: it has 50,000 keys"),
        ("/v1/answer", [[]], 422, "body"),
        ("/v1/retrieve", {"question": "a", "top_k": 101}, 422, "is 101, but must be at most 100"),
        ("/v1/fill", {"sentence": "no mask here"}, 400, r"no \[MASK\]"),
        ("/v1/fill", {"sentence": "wool " * 40 + "[MASK]"}, 400, "shorten the sentence"),
        ("/nothing", {}, 405, ""),
        ("/health", {}, 405, "^/health needs the method GET$"),
    ],
)
def test_what_cannot_be_served_is_a_problem_with_its_reason(served, path, body, status, says) -> None:
    data = json.dumps(body)
    start = time.perf_counter()
    response = httpx.post(
        served.url + path, content=data, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert_problem(response, status, says)
    assert (
        time.perf_counter() - start < 10
    )  # an error for each of many values would take minutes and gigabytes


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/answer", "POST"),
        ("PUT", "/v1/documents", "GET, POST"),
        ("POST", "/v1/documents/a%2Fb", "DELETE, GET"),
        ("POST", "/v1/passages/1", "GET"),
        ("DELETE", "/health", "GET"),
    ],
)
def test_another_method_is_refused_with_the_methods_of_the_path(served, method, path, allowed) -> None:
    response = httpx.request(method, served.url + path)
    assert_problem(response, 405, f"needs the method {allowed}$")
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/v1/answer", {"question": "a", "top_k": 21}, "top_k"),
        ("/v1/retrieve", {"question": "a", "top_k": 101}, "top_k"),
        ("/v1/answer", {"questions": ["a"] * 257}, "questions"),
    ],
)
def test_a_value_over_a_limit_is_a_problem_that_names_the_parameter(served, path, body, parameter) -> None:
    response = post(served, path, body)
    assert_problem(response, 422, "but must be at most")
    assert response.json()["parameter"] == parameter


def test_a_body_that_is_not_declared_as_json_is_a_problem_that_names_the_header(served) -> None:
    """`curl -d` without a header declares a form."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = httpx.post(served.url + "/v1/answer", content=b'{"question": "a"}', headers=headers)
    assert_problem(
        response, 422, "^body: send a JSON object, with the header Content-Type: application/json$"
    )


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"question": NaN}', b"null"])
def test_a_body_that_is_no_json_is_a_problem(served, body) -> None:
    response = httpx.post(
        served.url + "/v1/answer", content=body, headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (400, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_one_bad_sentence_does_not_spoil_the_batch_it_is_in(served) -> None:
    results: dict[int, int] = {}

    def fill(number: int) -> None:
        sentence = "Arden lies on [MASK]." if number % 2 else "Arden lies."
        results[number] = post(served, "/v1/fill", {"sentence": sentence}).status_code

    threads = [threading.Thread(target=fill, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: 200 if n % 2 else 400 for n in range(12)}


def test_a_body_over_the_limit_is_refused_with_and_without_its_length(tiny_kb, qa_model, monkeypatch) -> None:
    monkeypatch.setattr("realm.serve.http.middleware.BODY_BYTES", 1000)
    with running(tiny_kb.folder, qa_model, CONFIG) as served:
        big = json.dumps({"question": "x" * 1500}).encode()
        assert_problem(httpx.post(served.url + "/v1/answer", content=big), 413, "longer than 1000 bytes")

        def in_pieces():
            for start in range(0, len(big), 100):
                yield big[start : start + 100]

        assert_problem(
            httpx.post(served.url + "/v1/answer", content=in_pieces()), 413, "longer than 1000 bytes"
        )


def test_a_body_that_does_not_come_is_given_up(tiny_kb, qa_model) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.3)) as served:
        address = urllib.parse.urlsplit(served.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
        connection.putrequest("POST", "/v1/answer")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b'{"ques')
        response = connection.getresponse()
        assert response.status == 408 and b"took longer than 0.3 s" in response.read()
        connection.close()


def test_a_client_that_never_ends_does_not_keep_the_server_from_ending(
    tiny_kb, qa_model, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.5)
    with socket.socket() as client:
        with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=60)) as served:
            address = urllib.parse.urlsplit(served.url)
            client.connect((address.hostname, address.port))
            client.sendall(
                b'POST /v1/answer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"ques'
            )
            served.client().answers(QUESTION)  # by now the other request is in the server's hands
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
    with running(tiny_kb.folder, qa_model, replace(CONFIG, queue=3, batch=1)) as served:
        gate = Gate(served, monkeypatch)
        answers: list[int] = []
        ask = lambda: answers.append(post(served, "/v1/answer", {"question": "a"}).status_code)  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(4)]
        threads[0].start()
        assert gate.entered.wait(10)
        for thread in threads[1:]:
            thread.start()
        while httpx.get(served.url + "/health").json()["queue"] < 3:
            time.sleep(0.01)
        refused = post(served, "/v1/answer", {"question": "b"})
        assert_problem(refused, 429, "try again in 1 s")
        assert refused.headers["retry-after"] == "1"
        with pytest.raises(ServerError, match="too many requests wait"):
            served.client(patience=0).answers("c")
        threading.Timer(0.3, gate.open.set).start()
        assert served.client().answers("c").question == "c"
        for thread in threads:
            thread.join()
        assert answers == [200] * 4


def test_no_answer_in_time_is_503_and_leaves_no_work_behind(tiny_kb, qa_model, monkeypatch) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.5, batch=1)) as served:
        gate = Gate(served, monkeypatch)
        assert_problem(post(served, "/v1/answer", {"questions": ["a", "b", "c"]}), 503, "time limit")
        assert httpx.get(served.url + "/health").json()["queue"] in (0, 2)
        gate.open.set()
        assert post(served, "/v1/answer", {"question": "d"}).status_code == 200


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
def test_what_a_client_asked_that_has_gone_is_not_answered(tiny_kb, qa_model, monkeypatch, accept) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, batch=1)) as served:
        gate = Gate(served, monkeypatch)
        address = urllib.parse.urlsplit(served.url)
        body = json.dumps({"questions": ["a"] * 50}).encode()
        with socket.create_connection((address.hostname, address.port)) as client:
            head = f"Host: localhost\r\nContent-Type: application/json\r\nAccept: {accept}"
            client.sendall(
                f"POST /v1/answer HTTP/1.1\r\n{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            assert gate.entered.wait(10)
        wait_for(lambda: served.client().health()["queue"] == 0)
        gate.open.set()
        assert served.client().answers("d").question == "d"
        assert metric(served, 'realm_batch_questions_sum{kind="answer"}') == 2


def test_a_request_never_has_more_questions_than_may_wait(tiny_kb, qa_model) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, queue=3)) as served:
        assert served.client().health()["limits"]["questions"] == 3
        assert_problem(
            post(served, "/v1/answer", {"questions": ["a"] * 4}), 422, "is 4, but must be at most 3"
        )


def test_questions_that_nobody_waits_for_leave_their_places(tiny_kb, qa_model, monkeypatch) -> None:
    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.5, queue=3, batch=1)) as served:
        gate = Gate(served, monkeypatch)
        for _ in range(3):  # taken in each time, and given up; a place that was kept would make it 429
            assert_problem(post(served, "/v1/answer", {"questions": ["a", "b", "c"]}), 503, "time limit")
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
            served, "/v1/answer", {"questions": questions}, headers={"Accept": "application/x-ndjson"}
        )
        with pytest.raises(ServerError, match="see the log of the server") as error:
            list(served.client().answer_many(questions))
    lines = [json.loads(line) for line in response.iter_lines()]
    assert [one.get("question") for one in lines] == ["a"] * CONFIG.batch + [None]
    assert lines[-1]["error"]["status"] == error.value.status == 500 and "secret" not in response.text


NEEDS_WORDS = {"questions": ["a"] * 5, "method": "bm25"}
AS_LINES = {"Accept": "application/x-ndjson"}


def test_a_stream_waits_no_longer_than_a_request_may_for_words(tiny_kb, qa_model, monkeypatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(LivingKnowledge, "load_bm25", lambda self: gate.wait(20))
    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.5)) as served:
        assert_problem(post(served, "/v1/answer", NEEDS_WORDS, headers=AS_LINES), 503, "time limit")
        gate.set()


@pytest.mark.parametrize("headers", [{}, AS_LINES])
def test_while_words_are_prepared_a_response_has_the_reason_and_the_work_goes_on(
    tiny_kb, qa_model, monkeypatch, headers
) -> None:
    read, calls, gate = LivingKnowledge.load_bm25, [], threading.Event()

    def slow(self: LivingKnowledge) -> None:
        calls.append(1)
        gate.wait(20)
        read(self)

    monkeypatch.setattr(LivingKnowledge, "load_bm25", slow)
    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.5)) as served:
        for _ in range(2):
            refused = post(served, "/v1/answer", NEEDS_WORDS, headers=headers)
            assert_problem(refused, 503, r"in preparation for \d+ s; try again later, or use method dense")
        assert served.client().answers(QUESTION).answers and not served.client().health()["words"]
        gate.set()
        wait_for(lambda: served.client().health()["words"])
        assert post(served, "/v1/answer", NEEDS_WORDS).status_code == 200 and calls == [1]


def test_a_server_that_only_reads_prepares_words_from_its_start(tiny_kb, qa_model) -> None:
    with running(tiny_kb.folder, qa_model, token=None) as served:
        wait_for(lambda: served.client().health()["words"])
    with running(tiny_kb.folder, qa_model) as served:
        assert not served.client().health()["words"]


def test_questions_that_wait_for_words_count_as_waiting(tiny_kb, qa_model, monkeypatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(LivingKnowledge, "load_bm25", lambda self: gate.wait(20))
    with running(tiny_kb.folder, qa_model, replace(CONFIG, queue=8)) as served:
        statuses: list[int] = []
        ask = lambda: statuses.append(post(served, "/v1/answer", NEEDS_WORDS).status_code)  # noqa: E731
        first = threading.Thread(target=ask)
        first.start()
        wait_for(lambda: served.client().health()["queue"] == 5)
        assert_problem(post(served, "/v1/answer", NEEDS_WORDS, headers=AS_LINES), 429, "try again")
        gate.set()
        first.join()
        assert statuses == [200]


def test_a_bug_is_a_500_without_its_insides_and_the_next_question_is_answered(served, monkeypatch) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("secret of the house")

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "answer_batch", broken)
        response = post(served, "/v1/answer", {"question": QUESTION})
    assert_problem(response, 500, "see the log of the server")
    assert "secret" not in response.text and "content-security-policy" in response.headers
    assert post(served, "/v1/answer", {"question": QUESTION}).status_code == 200


def test_a_private_server_answers_those_who_have_a_token(tiny_kb, qa_model, monkeypatch) -> None:
    with running(tiny_kb.folder, qa_model, read_token=READ) as served:
        get = ("/v1/documents", "/v1/examples", "/v1/versions", "/v1/runs", "/metrics", "/v1/passages/0")
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in get:
                assert_problem(
                    httpx.get(served.url + path, headers=headers), 401, "reading needs the server's token"
                )
            for path in ("/v1/answer", "/v1/retrieve", "/v1/fill"):
                assert_problem(post(served, path, {"question": "a"}, headers=headers), 401, "reading needs")
        assert served.client().health()["private"] and httpx.get(served.url + "/").status_code == 200
        for token in (READ, TOKEN):
            assert served.client(token).answers(QUESTION).answers
        with pytest.raises(ServerError, match="writing needs the server's token"):
            served.client(READ).delete("d0")
        monkeypatch.setattr(logging.getLogger("realm"), "handlers", [])
        assert cli.main(["answer", QUESTION, "--server", served.url]) == 2
        monkeypatch.setenv("REALM_READ_TOKEN", READ)
        assert cli.main(["answer", QUESTION, "--server", served.url]) == 0


def test_on_loopback_only_its_own_names_are_answered(served) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example"):
        assert_problem(
            httpx.get(served.url + "/health", headers={"Host": host}), 421, "does not serve the host '"
        )
    for host in ("localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.1:9"):
        assert httpx.get(served.url + "/health", headers={"Host": host}).status_code == 200


def test_head_has_the_headers_of_get_without_the_body(served) -> None:
    for path in ("/", "/style.css", "/health", "/v1/documents/d3", "/v1/documents/d99"):
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
