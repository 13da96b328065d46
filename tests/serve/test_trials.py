"""Thousands of requests at 16 clients, slow, cut off and senseless ones among them, while documents come and go.

More of it: `python -m pytest -m slow tests/serve/test_trials.py --trials 20000 --trials-seed 7`.
"""

import json
import logging
import os
import random
import re
import resource
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realm.serve.http import connections
from realm.store.knowledge_base import KnowledgeBase
from tests.conftest import RIVERS, TOWNS
from tests.serve.asking import wait_for
from tests.serve.conftest import CONFIG, TOKEN, Served, running

CLIENTS = 16
REFUSED = {400, 404, 405, 408, 411, 413, 421, 422, 429, 431, 501, 503}
METHODS = ("dense", "bm25", "hybrid")
SENSELESS: list[Any] = [None, 0, -1, 1e308, "", " ", "\ud800", "x" * 3000, [], {}, [[]], True, "[MASK] " * 40]


class Client:
    """One client: draws what it does, and keeps what came of it."""

    def __init__(self, served: Served, number: int, seed: int):
        self.served, self.number = served, number
        self.draw = random.Random(f"{seed}/{number}")
        address = urllib.parse.urlsplit(served.url)
        self.address = (address.hostname, address.port)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.added = 0
        self.there: set[str] = set()
        self.texts: set[str] = set()
        """Of all documents that this client ever added."""

    def act(self) -> None:
        """One request."""
        kinds: list[tuple[Callable[[], str], int]] = [
            (self.ask, 60), (self.senseless, 15), (self.noise, 5), (self.slow_head, 3), (self.slow_body, 3),
            (self.half_closed, 5), (self.leave, 5), (self.add, 3), (self.delete, 1),
        ]  # fmt: skip
        (kind,) = self.draw.choices([one for one, _ in kinds], [weight for _, weight in kinds])
        try:
            self.outcomes[f"{kind.__name__} {kind()}"] += 1
        except Exception as error:
            self.wrong.append(f"{kind.__name__}: {error!r}")

    def ask(self) -> str:
        town = self.draw.choice([*TOWNS, "Place"])
        question = f"which river is at {town} {self.draw.randrange(10**9)}?"
        body = {"question": question, "method": self.draw.choice(METHODS), "top_k": self.draw.randint(1, 20)}
        status, said = self.whole("POST", "/v1/answer", json.dumps(body).encode())
        if status == 200:
            assert said["question"] == question
            for answer in said["answers"]:
                assert answer["passage"]["text"][answer["start"] : answer["end"]] == answer["text"]
            self.texts.update(passage["text"] for passage in said["passages"])
        return str(status)

    def senseless(self) -> str:
        path = self.draw.choice(["/v1/answer", "/v1/retrieve", "/v1/fill", "/v1/documents", "/v1/nothing"])
        names = ["question", "questions", "sentence", "documents", "method", "top_k", "colour"]
        body = {
            name: self.draw.choice(SENSELESS) for name in self.draw.sample(names, self.draw.randint(0, 3))
        }
        return str(self.whole("POST", path, json.dumps(body).encode(), token=TOKEN)[0])

    def noise(self) -> str:
        head = self.draw.choice(
            [b"", b"GET / HTTP/1.1\r\n", b"POST /v1/answer HTTP/1.1\r\nHost: localhost\r\n"]
        )
        return self.status_of([head + self.draw.randbytes(self.draw.randint(1, 3000)) + b"\r\n\r\n"])

    def slow_head(self) -> str:
        pieces = [b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n", b"X: y\r\n", b"\r\n"]
        return self.status_of(pieces[: self.draw.randint(1, 4)], pause=self.draw.choice([0.01, 0.3]))

    def slow_body(self) -> str:
        pieces = [self.head("POST", "/v1/answer", 17), b'{"quest', b'ion"', b': "a"}']
        return self.status_of(pieces[: self.draw.randint(1, 4)], pause=self.draw.choice([0.01, 0.5]))

    def half_closed(self) -> str:
        request = self.head("POST", "/v1/answer", 17) + b'{"question": "a"}'
        return self.status_of([request], then=lambda connection: connection.shutdown(socket.SHUT_WR))

    def leave(self) -> str:
        body = json.dumps({"questions": ["a"] * self.draw.randint(1, 30)}).encode()
        with socket.create_connection(self.address, timeout=60) as connection:
            connection.sendall(self.head("POST", "/v1/answer", len(body)) + body)
        return "left"

    def add(self) -> str:
        self.added += 1
        id = f"place {self.number}-{self.added}"
        text = f"Place {1000 * self.number + self.added} lies on the {self.draw.choice(RIVERS)}."
        body = {"documents": [{"id": id, "title": "Place", "text": text}]}
        status, _ = self.whole("POST", "/v1/documents", json.dumps(body).encode(), token=TOKEN)
        if status == 200:
            self.there.add(id)
        return str(status)

    def delete(self) -> str:
        if not self.there:
            return "nothing to delete"
        id = self.draw.choice(sorted(self.there))
        status, _ = self.whole("DELETE", f"/v1/documents/{urllib.parse.quote(id)}", token=TOKEN)
        if status == 200:
            self.there.remove(id)
        return str(status)

    def head(self, method: str, path: str, length: int, token: str | None = None) -> bytes:
        shown = f"Authorization: Bearer {token}\r\n" if token else ""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length}\r\nConnection: close\r\n{shown}\r\n"
        ).encode()

    def whole(self, method: str, path: str, body: bytes = b"", token: str | None = None) -> tuple[int, Any]:
        """A complete request has a complete answer: what was asked for, or a problem."""
        with socket.create_connection(self.address, timeout=60) as connection:
            connection.sendall(self.head(method, path, len(body), token) + body)
            said = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, content = said.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        value = json.loads(content)
        if status != 200:
            assert status in REFUSED, (status, value)
            assert value["status"] == status and value["detail"], value
        return status, value

    def status_of(
        self,
        pieces: list[bytes],
        pause: float = 0.0,
        then: Callable[[socket.socket], None] = lambda connection: None,
    ) -> str:
        """Of a request that may be no complete one: its status, or that the connection was closed."""
        said = b""
        with socket.create_connection(self.address, timeout=60) as connection:
            try:
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause)
                then(connection)
                said = b"".join(iter(lambda: connection.recv(65536), b""))
            except (ConnectionResetError, BrokenPipeError):
                pass
        found = re.match(rb"HTTP/1\.1 (\d+) ", said)
        if found is None:
            assert not said, said[:200]
            return "closed"
        assert int(found[1]) in REFUSED | {200}, said[:300]
        return found[1].decode()


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_slow_senseless_and_changing_requests_get_right_answers_or_clear_refusals(
    own_kb, qa_model, caplog, trials, monkeypatch
) -> None:
    wanted = trials.count(5000)
    monkeypatch.setattr(connections, "CONNECTIONS", 24)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    config = replace(CONFIG, seconds=5.0, queue=256)
    with running(own_kb.folder, qa_model, config) as served:
        original = {passage.text for passage in KnowledgeBase.open(own_kb.folder)}
        clients = [Client(served, number, trials.seed) for number in range(CLIENTS)]

        def act(requests: int) -> None:
            def all_of(client: Client) -> None:
                for _ in range(requests // CLIENTS):
                    client.act()

            threads = [threading.Thread(target=all_of, args=(client,)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        act(wanted // 5)
        files, megabytes = open_files(), resident_mb()
        act(wanted - wanted // 5)
        wait_for(lambda: open_files() <= files + 8, 30)
        assert resident_mb() - megabytes < 200
        outcomes = sum((client.outcomes for client in clients), Counter())
        assert [wrong for client in clients for wrong in client.wrong] == [], outcomes
        assert outcomes["ask 200"] > 0.4 * wanted, outcomes
        assert served.client().health()["status"] == "ok" and served.client().answers("which river?").answers
        there = set().union(*(client.there for client in clients))
        kept = {p.document_id: p.text for p in KnowledgeBase.open(own_kb.folder)}
        assert there == {id for id in kept if id.startswith("place ")}
        seen = set().union(*(client.texts for client in clients)) - original
        added = re.compile(r"Place \d+ lies on the \w+\.")
        assert [text for text in seen if not added.fullmatch(text)] == []
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) < 100
