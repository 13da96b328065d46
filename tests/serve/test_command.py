"""`realm serve` as a process, and its bad input in one line."""

import itertools
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from realm import cli
from realm.errors import InputError
from realm.serve.client import Client, ServerError
from realm.serve.http.middleware import own_hosts
from tests.serve.asking import wait_for
from tests.serve.process import serving
from tests.serve.test_connections import UNFINISHED, connect

TOKEN = "sixteen-characters"


def test_the_command_serves_until_a_signal_ends_it(tiny_kb, qa_model) -> None:
    with serving(tiny_kb.folder, qa_model, "--set", "device=cpu", OMP_NUM_THREADS="1") as (url, process):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        assert Client(url).answers("who built a tower in Arden?").answers
        assert httpx.get(url).headers["content-type"].startswith("text/html")
        questions = [f"who built tower {n}?" for n in range(200)]
        answers = Client(url).answer_many(questions)
        first = next(answers)
        process.send_signal(signal.SIGTERM)  # what was asked before is answered
        assert [one.question for one in (first, *answers)] == questions
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert process.stderr is not None and process.stderr.read() == ""


@pytest.fixture(scope="module")
def limited(tiny_kb: Any, qa_model: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server's address and process, which may open 128 files."""
    with serving(tiny_kb.folder, qa_model, "--set", "device=cpu", files=128, OMP_NUM_THREADS="1") as started:
        yield started


def test_responses_on_an_open_connection_do_not_wait_for_an_acknowledgement(limited) -> None:
    """Linux delays those by 40 ms."""
    with httpx.Client(base_url=limited[0]) as client:
        took = sorted(client.get("/health").elapsed.total_seconds() for _ in range(20))
        assert took[10] < 0.03


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_few_files_and_many_unfinished_heads_stop_nobody(limited) -> None:
    """300 of them at 128 files; then no file at all for a while."""
    url, process = limited
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(url, UNFINISHED))
        assert httpx.get(url + "/health", timeout=10).status_code == 200
        began = cpu_seconds(process.pid)
        time.sleep(1)
        assert cpu_seconds(process.pid) - began < 0.5
        assert open_files(process.pid) < 120
    wait_for(lambda: open_files(process.pid) < 64, 30)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (open_files(process.pid), 128))
    with connect(url, UNFINISHED + b"\r\n\r\n") as client:
        time.sleep(1.5)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 128))
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    process.terminate()
    process.wait(30)
    assert process.stderr is not None
    written = process.stderr.read()
    assert "out of system resource" in written and len(written) < 20_000


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize(
    ("words", "token", "says"),
    [
        (["--port", "65536"], None, "'65536' is not a port"),
        (["--writable"], None, "needs a token of 16 or more"),
        (["--writable"], "short", "needs a token of 16 or more"),
        (["--writable"], "with a space in it, long", "needs a token of 16 or more"),
        (["--writable", "--token-file", "absent"], None, "--token-file absent is not a file"),
        (["--token-file", "absent"], None, "add --writable"),
        (["--private"], None, "--private needs a token of 16 or more ASCII characters in REALM_READ_TOKEN"),
        (["--read-token-file", "absent"], None, "add --private"),
        (["--runs", "absent"], None, "--runs absent is not a folder"),
        (["--set", "batch=0"], None, "batch is 0: it must be 1 or more"),
        (["--set", "read=30"], None, "read is 30: it must be at most 20"),
        (["--set", "seconds=0"], None, "seconds is 0.0: it must be above 0"),
        (["--set", "seconds=nan"], None, "seconds is nan: it must be a finite number"),
        (["--set", "seconds=inf"], None, "seconds is inf: it must be a finite number"),
        (["--host", "no.such.host.invalid"], None, "choose another --host or --port"),
        (["--port", "0"], None, "absent is not a knowledge base"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(words, token, says, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REALM_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("REALM_TOKEN", token)
    assert cli.main(["serve", "--kb", "absent", "--model", "absent", *words]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"realm: [^\n]+\n", error) and says in error


def test_a_port_that_is_taken_is_one_line(tiny_kb, qa_model, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--kb", str(tiny_kb.folder), "--model", str(qa_model), "--port", port]) == 2
    assert re.fullmatch(
        rf"realm: cannot listen on 127.0.0.1 port {port}: .*in use; .*\n", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --kb and --model, or --in WORKSPACE, or --server URL"),
        (["--kb", "x"], "give --kb and --model"),
        (["--server", "http://127.0.0.1:1", "--kb", "x"], "leave out --kb, --model"),
        (["--server", "http://127.0.0.1:1", "--set", "read=3"], "leave out --kb, --model"),
        (["--server", "127.0.0.1:8000"], "is not the address of a server"),
        (["--server", "ftp://x"], "is not the address of a server"),
        (["--server", "http://[::1"], "is not the address of a server"),
        (["--server", "http://127.0.0.1:http"], "is not the address of a server"),
        (["--server", "http://:80"], "is not the address of a server"),
        (["--server", f"http://{'a' * 70}.example"], "cannot be reached"),
        (["--server", "http://127.0.0.1:1/über"], "cannot be reached"),
        (["--server", "http://127.0.0.1:1"], "cannot be reached"),
    ],
)
def test_asking_a_server_wrongly_is_one_line(words, says, capsys) -> None:
    assert cli.main(["answer", "why?", *words]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"realm: [^\n]+\n", error) and says in error


def whole_request(connection: socket.socket) -> bytes:
    """To its end: a connection that is closed with bytes unread is reset, and the answer lost."""
    with connection.makefile("rb") as sent:
        head = b"".join(itertools.takewhile(lambda line: line != b"\r\n", sent))
        length = re.search(rb"(?im)^content-length: (\d+)", head)
        return head + sent.read(int(length[1]) if length else 0)


@contextmanager
def saying(*responses: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that is not ours: it says these, a connection each, and keeps what it was sent."""
    heard: list[bytes] = []

    def serve() -> None:
        for response in responses:
            connection, _ = listening.accept()
            with connection:
                heard.append(whole_request(connection))
                connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", heard
        thread.join(10)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "is not that of `realm serve`"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"ok": 1}', "is not that of `realm serve`"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n[{}]", "is not that of `realm serve`"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n", "is empty"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "is empty"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 2\r\n\r\n\n\n", "502 Bad"),
        (b"SSH-2.0-x\r\n", "cannot be reached"),
    ],
)
def test_a_server_that_is_no_realm_is_one_line(response, says, capsys) -> None:
    with saying(response) as (url, _):
        assert cli.main(["answer", "why?", "--server", url]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"realm: [^\n]+\n", error) and says in error


@pytest.mark.parametrize("token", [TOKEN + "\n", "sëcret-" + TOKEN])
def test_a_token_that_no_server_has_is_refused_without_showing_it(token: str, monkeypatch, capsys) -> None:
    with pytest.raises(InputError, match="the token has a line break") as refused:
        Client("http://127.0.0.1:1", token)
    assert TOKEN not in str(refused.value)
    monkeypatch.setenv("REALM_READ_TOKEN", token)
    assert cli.main(["answer", "why?", "--server", "http://127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("realm: the token has a line break") and TOKEN not in error


def test_a_redirect_is_not_followed_with_the_token(capsys) -> None:
    with saying() as (elsewhere, heard):
        moved = f"HTTP/1.1 301 Moved\r\nLocation: {elsewhere}/\r\nContent-Length: 0\r\n\r\n".encode()
        with (
            saying(moved) as (url, _),
            pytest.raises(ServerError, match=f"use the address {elsewhere}/"),
        ):
            Client(url, TOKEN).answers("why?")
    assert heard == []


def test_a_busy_server_that_gives_a_date_is_asked_again() -> None:
    busy = b"HTTP/1.1 429 Busy\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\nContent-Length: 0\r\n\r\n"
    health = b'{"status": "ok"}'
    with saying(busy, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(health), health)) as (url, _):
        assert Client(url).health() == {"status": "ok"}


def test_a_busy_server_that_asks_for_no_wait_is_not_flooded() -> None:
    busy = b"HTTP/1.1 429 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n"
    health = b'{"status": "ok"}'
    done = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(health), health)
    with saying(*[busy] * 5, done) as (url, heard):
        since = time.monotonic()
        assert Client(url).health() == {"status": "ok"} and len(heard) == 6
        assert time.monotonic() - since >= 0.5


def test_a_stream_that_ends_early_is_no_complete_answer() -> None:
    health = b'{"limits": {"questions": 5}}'
    limits = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(health), health)
    ended = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    with saying(limits, ended) as (url, _), pytest.raises(InputError, match="ended after 0 of 2 answers"):
        list(Client(url).answer_many(["a", "b"]))


def test_on_loopback_a_server_has_its_own_names_elsewhere_any() -> None:
    assert own_hosts("127.0.0.1", ("a.example",)) == {"localhost", "127.0.0.1", "::1", "a.example"}
    assert own_hosts("::1", ()) == {"localhost", "127.0.0.1", "::1"}
    assert (
        own_hosts("0.0.0.0", ()) is None
        and own_hosts("10.0.0.1", ()) is None
        and own_hosts("box", ()) is None
    )


def test_elsewhere_a_server_with_a_list_of_names_answers_to_no_others() -> None:
    assert own_hosts("0.0.0.0", ("a.example",)) == {"localhost", "127.0.0.1", "::1", "0.0.0.0", "a.example"}
