"""Feedback on answers: who may send it, what is stored, and what other commands read of it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from realm import cli
from realm.qa.question_files import read_questions
from realm.serve import feedback
from realm.serve.client import Client
from realm.serve.feedback import FeedbackLine
from realm.serve.settings import ServeConfig
from tests.schemas import assert_holds
from tests.serve.asking import QUESTION, assert_problem, post
from tests.serve.conftest import TOKEN, Served, running

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def file(own_server) -> Path:
    return own_server.kb.with_name(f"{own_server.kb.name}.feedback.jsonl")


def body_of(served: Served, verdict: str = "right", **more: Any) -> dict[str, Any]:
    best = served.client().answers(QUESTION).answers[0]
    place = {"passage": best.passage.id, "start": best.start, "end": best.end}
    return {"question": QUESTION, "verdict": verdict} | place | more


def test_right_and_better_answers_are_a_question_file_and_wrong_ones_are_kept_apart(own_server, file) -> None:
    client = own_server.client(TOKEN)
    best = client.answers(QUESTION).answers[0]
    first = client.feedback(QUESTION, "right", best.passage.id, best.start, best.end)
    other = next(one for one in client.search("Bexley", 5, method="bm25") if one.title != best.passage.title)
    client.feedback("which first word?", "better", other.id, 0, len(other.text.split()[0]))
    client.feedback(QUESTION, "wrong", best.passage.id, best.start, best.end)
    found = read_questions(file)
    assert [(one.question, one.answers) for one in found] == [
        (QUESTION, (best.text,)),
        ("which first word?", (other.text.split()[0],)),
    ]
    assert first == {"id": found[0].id, "new": True}
    assert found[1].document_id == other.document
    for line in file.read_text().splitlines():
        assert_holds(FeedbackLine, json.loads(line))
    (rejected,) = read_questions(f"{file}.rejected")
    assert (rejected.question, rejected.answers) == (QUESTION, (best.text,))


def test_evaluate_reads_the_file_of_feedback(own_server, file, capsys) -> None:
    assert post(own_server, "/v1/feedback", body_of(own_server), headers=HEADERS).status_code == 200
    kb, model = str(own_server.kb), str(own_server.model)
    command = ["evaluate", "--kb", kb, "--model", model, "--questions", str(file), "--set", "device=cpu"]
    assert cli.main([*command, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["n"] == 1 and row["em"] == 100.0  # the answer of the server was marked as right


def test_equal_feedback_is_stored_once_also_by_many_clients_at_once(own_server, file) -> None:
    bodies = [body_of(own_server, question=f"question {n % 3}?") for n in range(12)]

    async def everybody() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30, headers=HEADERS) as client:
            return await asyncio.gather(
                *(client.post(f"{own_server.url}/v1/feedback", json=b) for b in bodies)
            )

    rows = [response.json() for response in asyncio.run(everybody())]
    assert sum(row["new"] for row in rows) == 3
    assert {one.question for one in read_questions(file)} == {"question 0?", "question 1?", "question 2?"}


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"Authorization": "Bearer wrong"}, 401)])
def test_feedback_needs_the_token_for_writing(own_server, file, headers, status) -> None:
    response = post(own_server, "/v1/feedback", body_of(own_server), headers=headers)
    assert_problem(response, status, "writing needs the server's token")
    assert not file.exists()


def test_a_server_that_is_not_writable_stores_no_feedback(tiny_kb, qa_model) -> None:
    with running(tiny_kb.folder, qa_model, token=None) as served:
        assert_problem(post(served, "/v1/feedback", body_of(served)), 403, "read-only")


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"end": 10**6}, 400, "not an answer: give the place"),
        ({"start": 9, "end": 9}, 400, "not an answer: give the place"),
        ({"start": 9, "end": 3}, 400, "not an answer: give the place"),
        ({"start": -1}, 422, "start"),
        ({"start": 0, "end": 2**40}, 422, "end"),
        ({"start": "0"}, 422, "start"),
        ({"passage": "0000000000000000"}, 404, "no passage has the id"),
        ({"passage": "../../etc/passwd"}, 404, "no passage has the id"),
        ({"question": " "}, 422, "question"),
        ({"question": "x" * 2001}, 422, "question.*2000"),
        ({"verdict": "maybe"}, 422, "verdict"),
        ({"answer": "<script>"}, 422, "answer"),
    ],
)
def test_feedback_that_is_no_piece_of_a_passage_is_refused_in_one_line(
    own_server, file, change, status, says
) -> None:
    response = post(own_server, "/v1/feedback", body_of(own_server, **change), headers=HEADERS)
    assert_problem(response, status, says)
    assert not file.exists()


def test_a_long_answer_is_refused_and_a_line_break_in_a_question_stays_in_one_line(own_server, file) -> None:
    client = own_server.client(TOKEN)
    client.add([{"id": "long", "title": "Long", "text": "word" * 80 + " ends."}])
    passage = client.document("long")["passages"][0]
    body = body_of(own_server, passage=passage, start=0, end=301)
    assert_problem(post(own_server, "/v1/feedback", body, headers=HEADERS), 400, "at most 300")
    question = 'which\n{"question": "forged", "answers": ["x"]}\u2028word?'
    client.feedback(question, "right", passage, 0, 4)
    (found,) = read_questions(file)
    assert (found.question, found.answers) == (question, ("word",))


def test_the_files_never_grow_beyond_their_limit(own_kb, qa_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(feedback, "MOST_BYTES", 1000)
    file = tmp_path / "own.jsonl"
    config = ServeConfig(device="cpu", feedback=str(file))
    with running(own_kb.folder, qa_model, config) as served:
        body, full = body_of(served), None
        for n in range(10):
            full = post(served, "/v1/feedback", body | {"question": f"{n}?"}, headers=HEADERS)
            if full.status_code != 200:
                break
        assert full is not None
        assert_problem(full, 507, "has reached 1,000 bytes: move own.jsonl away")
        assert 0 < file.stat().st_size <= 1000 and len(read_questions(file)) == n > 0
        assert post(served, "/v1/feedback", body | {"question": "0?"}, headers=HEADERS).json()["new"] is False


def test_lines_of_a_person_stay_and_a_file_that_cannot_be_used_is_left_alone(own_server, file) -> None:
    file.write_text('{"question": "mine?", "answers": ["yes"]}')  # without a line break at its end
    assert post(own_server, "/v1/feedback", body_of(own_server), headers=HEADERS).json()["new"]
    assert [one.question for one in read_questions(file)] == ["mine?", QUESTION]
    file.write_bytes(b"\xff\xfe")
    again = post(own_server, "/v1/feedback", body_of(own_server, question="other?"), headers=HEADERS)
    assert_problem(again, 503, "cannot write")
    assert file.read_bytes() == b"\xff\xfe"


def test_the_python_client_reports_a_refusal(own_server) -> None:
    with pytest.raises(Exception, match="writing needs the server's token"):
        Client(own_server.url).feedback("why?", "right", "0000000000000000", 0, 1)
