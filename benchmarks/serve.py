"""Measures `realm serve`: questions per second and response times, with few and with many clients.

    PYTHONPATH=. python benchmarks/serve.py --kb demo-from-text/kb --model demo-from-text/models/qa
    PYTHONPATH=. python benchmarks/serve.py --kb demo-from-text/kb --model demo-from-text/models/qa --writes 20  # with changes

The server is a process of its own on loopback, with a copy of the knowledge base. Each client sends its next question when the
answer to its last question has arrived. For comparison, the same questions are answered one at a time in this process without a
server, and by a server without batches. `lost` is the number of documents whose acknowledged addition or deletion did not take
effect. Prints a table, and one JSON object as the last line.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realm.environment import set_torch_environment

set_torch_environment()  # as in the command line

import numpy as np

from realm.serve.client import Client
from realm.store.knowledge_base import KnowledgeBase
from tests.serve.process import serving


def main() -> None:
    """Measures the server with all numbers of clients, and prints the results."""
    parser = argparse.ArgumentParser(
        description="Measures `realm serve`: questions per second and response times."
    )
    parser.add_argument("--kb", required=True, help="knowledge base; the server uses a copy")
    parser.add_argument(
        "--model", required=True, help="model with a span reader and an index in the knowledge base"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="seconds for each measurement (default: 15)"
    )
    parser.add_argument(
        "--writes",
        type=int,
        default=0,
        help="number of documents that are added during a measurement; half of them are deleted again",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kb = Path(folder) / "kb"
        shutil.copytree(args.kb, kb)
        questions = made_up(KnowledgeBase.open(kb), 500)
        rows = [alone(str(kb), args.model, questions, args.seconds)]
        for batch in (16, 1):
            for clients in args.clients:
                if batch > 1 or clients == max(args.clients):
                    writes = args.writes if batch > 1 else 0
                    rows.append(
                        through_server(str(kb), args.model, questions, clients, args.seconds, batch, writes)
                    )
    print(
        f"{'':<34}{'questions/s':>12}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}{'batch':>7}{'errors':>8}{'lost':>6}"
    )
    for row in rows:
        print(
            f"{row['what']:<34}{row['per_second']:>12.1f}{row['p50']:>9.0f}{row['p95']:>9.0f}{row['p99']:>9.0f}"
            f"{row['batch']:>7.1f}{row['errors']:>8}{row.get('lost', 0):>6}"
        )
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    print(json.dumps({"benchmark": "serve", "rows": rows, **machine}))


def made_up(kb: KnowledgeBase, count: int) -> list[str]:
    """One artificial question about each of `count` passages."""
    numbers = np.random.default_rng(0).choice(len(kb), min(count, len(kb)), replace=False)
    return [f"What is known of {p.title}, {' '.join(p.text.split()[3:8])}?" for p in kb.passages(numbers)]


def alone(kb: str, model: str, questions: Sequence[str], seconds: float) -> dict[str, Any]:
    """Answers one question after another in this process, without a server -> a row of the table."""
    from realm.qa.pipeline import AnswerConfig, Answerer

    answerer = Answerer.load(kb, model, AnswerConfig())
    answerer.answer(questions[0])
    began, took = time.perf_counter(), []
    while time.perf_counter() - began < seconds:
        since = time.perf_counter()
        answerer.answer(questions[len(took) % len(questions)])
        took.append(time.perf_counter() - since)
    return row("in process, one at a time", took, time.perf_counter() - began, 1.0, 0)


def through_server(
    kb: str, model: str, questions: Sequence[str], clients: int, seconds: float, batch: int, writes: int
) -> dict[str, Any]:
    """Measures a server with `clients` clients, and with another client that changes documents -> a row of the table."""
    token = secrets.token_hex(16)
    with serving(kb, model, "--writable", "--set", f"batch={batch}", REALM_TOKEN=token) as (url, _):
        Client(url).answers(questions[0])
        before = batches(url)
        took, errors, lasted, written = asyncio.run(load(url, token, questions, clients, seconds, writes))
        count, total = (after - old for after, old in zip(batches(url), before, strict=True))
        lost = [id for id, there in written.items() if there != exists(url, id)]
    what = f"{clients} client{'s' if clients > 1 else ''}" + (", no batches" if batch == 1 else "")
    if writes:
        what += f", {len(written)} writes"
    return row(what, took, lasted, total / max(1.0, count), errors) | {"lost": len(lost)}


async def load(
    url: str, token: str, questions: Sequence[str], clients: int, seconds: float, writes: int
) -> tuple[list[float], int, float, dict[str, bool]]:
    """Sends questions and changes -> seconds of each answer, errors, total seconds, document -> whether it must exist."""
    took: list[float] = []
    errors = 0
    began = time.perf_counter()

    async def ask(number: int) -> None:
        nonlocal errors
        connection = await Connection.open(url)
        place = number
        while time.perf_counter() < began + seconds or not writing.done():
            since = time.perf_counter()
            question = questions[place % len(questions)]
            status, body = await connection.post("/v1/answer", {"question": question})
            if status == 200 and body["question"] == question:
                took.append(time.perf_counter() - since)
            else:
                errors += 1
            place += clients
        connection.close()

    def write() -> dict[str, bool]:
        client, documents = Client(url, token), {}
        for number in range(writes):
            id = f"benchmark {clients}-{number}"
            client.add(
                [{"id": id, "title": id, "text": f"Document {number} came while {clients} were asking."}]
            )
            documents[id] = True
            if number % 2:
                client.delete(id)
                documents[id] = False
        return documents

    writing = asyncio.create_task(asyncio.to_thread(write))
    await asyncio.gather(*(ask(n) for n in range(clients)))
    return took, errors, time.perf_counter() - began, await writing


class Connection:
    """An open HTTP connection with as little work for the client as possible, because clients and server share the cores."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> "Connection":
        address = urllib.parse.urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port, limit=1 << 22))

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        self._writer.write(f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode() + data)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = int(re.search(r"content-length: (\d+)", head, re.IGNORECASE)[1])
        return int(head.split()[1]), json.loads(await self._reader.readexactly(length))

    def close(self) -> None:
        self._writer.close()


def batches(url: str) -> tuple[float, float]:
    """Number of batches so far, and number of questions in these batches."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    found = {
        kind: re.search(rf'realm_batch_questions_{kind}{{kind="answer"}} (\S+)', text)
        for kind in ("count", "sum")
    }
    return tuple(float(one[1]) if one else 0.0 for one in found.values())  # type: ignore[return-value]


def exists(url: str, document: str) -> bool:
    """Whether the server has the document."""
    try:
        urllib.request.urlopen(f"{url}/v1/documents/{urllib.parse.quote(document)}")
    except urllib.error.HTTPError:
        return False
    return True


def row(what: str, took: Sequence[float], lasted: float, batch: float, errors: int) -> dict[str, Any]:
    """A row of the table."""
    if not took:
        raise SystemExit(f"{what}: none of {errors} requests was answered")
    p50, p95, p99 = (1000 * np.percentile(took, [50, 95, 99])).round(1).tolist()
    return {
        "what": what,
        "per_second": round(len(took) / lasted, 2),
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "batch": round(batch, 2),
        "errors": errors,
    }


if __name__ == "__main__":
    main()
