"""Slow heads, many connections, few files: the server answers whoever is there, and its log stays short."""

import logging
import re
import socket
import threading
import time
import urllib.parse
from contextlib import ExitStack
from dataclasses import replace

import httpx

from realm.serve.http import connections, logs
from realm.serve.http.logs import LineLimit, limited_logs
from tests.serve.asking import wait_for
from tests.serve.conftest import CONFIG, running
from tests.serve.test_limits import Gate

UNFINISHED = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


def connect(url: str, says: bytes = b"") -> socket.socket:
    address = urllib.parse.urlsplit(url)
    client = socket.create_connection((address.hostname, address.port), timeout=20)
    client.sendall(says)
    return client


def said_to(client: socket.socket) -> bytes:
    """All that the server says until it closes."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_a_head_that_does_not_come_is_given_up(tiny_kb, qa_model, monkeypatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with running(tiny_kb.folder, qa_model, CONFIG) as served:
        with connect(served.url, UNFINISHED) as client:
            began = time.monotonic()
            said = said_to(client)
            assert 0.2 < time.monotonic() - began < 10
            assert said.startswith(b"HTTP/1.1 408 ") and b"took longer than 0.3 s" in said
            assert b"application/problem+json" in said and b"content-security-policy" in said.lower()
        with connect(served.url) as idle:
            assert said_to(idle) == b""
        with connect(
            served.url, UNFINISHED.replace(b"X-Slow: ", b"\r\n")
        ) as client:  # then a second one, which is slow
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
            client.sendall(UNFINISHED)
            assert b"HTTP/1.1 408 " in said_to(client)


def test_a_head_that_is_too_long_is_refused_in_pieces_and_in_one(served) -> None:
    for path in ("/health?" + "x" * 20_000, "/" + "x" * 20_000):
        whole = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        for head in (whole, whole[:-20]):
            with connect(served.url, head) as client:
                said = said_to(client)
            assert said.startswith(b"HTTP/1.1 431 ") and b"longer than 16384 bytes" in said
    with connect(served.url, b"\x16\x03\x01\x02\x00 TLS?\r\n\r\n") as client:
        assert said_to(client).startswith(b"HTTP/1.1 400 ")


def test_who_keeps_the_server_waiting_longest_makes_room(tiny_kb, qa_model, monkeypatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 8)
    with running(tiny_kb.folder, qa_model, CONFIG) as served, ExitStack() as stack:
        slow = [stack.enter_context(connect(served.url, UNFINISHED)) for _ in range(30)]
        assert httpx.get(served.url + "/health", timeout=5).status_code == 200
        ended = [said_to(client) for client in slow[:22]]
        assert all(one == b"" or b"8 connections are open" in one for one in ended)
        slow[-1].sendall(b"\r\n\r\n")  # the youngest may end its head
        assert slow[-1].recv(65536).startswith(b"HTTP/1.1 200 ")


def test_where_all_are_answered_a_further_connection_is_refused_and_none_is_ended(
    tiny_kb, qa_model, monkeypatch
) -> None:
    head = b"POST /v1/answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 17\r\n"
    request = head + b'Connection: close\r\n\r\n{"question": "a"}'
    monkeypatch.setattr(connections, "CONNECTIONS", 2)
    with running(tiny_kb.folder, qa_model, CONFIG) as served:
        gate = Gate(served, monkeypatch)
        with connect(served.url, request) as first, connect(served.url, request) as second:
            assert gate.entered.wait(10)
            time.sleep(0.2)
            with connect(served.url) as third:
                assert said_to(third).startswith(b"HTTP/1.1 503 ")
            gate.open.set()
            assert said_to(first).startswith(b"HTTP/1.1 200 ") and said_to(second).startswith(
                b"HTTP/1.1 200 "
            )


def test_an_answer_that_nobody_reads_is_dropped(tiny_kb, qa_model, monkeypatch) -> None:
    lost, ended = connections.Connection.connection_lost, threading.Event()

    def watched(self: connections.Connection, error: Exception | None) -> None:
        ended.set()
        lost(self, error)

    with running(tiny_kb.folder, qa_model, replace(CONFIG, seconds=0.5)) as served:
        monkeypatch.setattr(connections.Connection, "connection_lost", watched)
        with connect(served.url, b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400):
            assert ended.wait(20)


def test_a_body_that_is_cut_off_reaches_no_route(served) -> None:
    head = b"POST /v1/answer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n"
    with connect(served.url, head + b'{"question": "a"}'):
        pass
    gone = 'realm_requests_total{method="POST",route="none",status="499"}'
    wait_for(lambda: gone in httpx.get(served.url + "/metrics").text)


def test_a_flood_of_lines_of_one_kind_is_a_few_and_a_count(caplog, monkeypatch) -> None:
    logger = logging.getLogger("uvicorn.error")
    with limited_logs():
        for number in range(1000):
            logger.warning("Invalid request %d", number)
        logger.warning("Another kind")
        monkeypatch.setattr(logs, "SECONDS", 0.0)
        logger.warning("Invalid request %d", 1000)
    assert len(caplog.messages) == logs.LINES + 2
    assert re.fullmatch(
        r"Invalid request 1000 \(995 more lines of this kind were left out\)", caplog.messages[-1]
    )
    limit = LineLimit()
    record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "", (), None)
    for number in range(3000):
        record.msg = f"kind {number}"
        assert limit.filter(record)
    assert len(limit._counts) <= 1000
