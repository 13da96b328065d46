"""`realm serve` as a process, and its bad input in one line."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from realm import cli
from realm.serve.client import Client
from realm.serve.edge import own_hosts

TOKEN = "sixteen-characters"


def test_the_command_serves_until_it_is_told_to_stop(tiny_kb, qa_model) -> None:
    command = [
        sys.executable,
        "-m",
        "realm",
        "serve",
        "--kb",
        tiny_kb.folder,
        "--model",
        qa_model,
        "--port",
        "0",
    ]
    with subprocess.Popen(
        [*command, "--set", "device=cpu"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stderr is not None
        try:
            url = re.fullmatch(r"serving .* on (http://127\.0\.0\.1:\d+)/\n", process.stderr.readline())[1]
            assert Client(url).answer("who built a tower in Arden?").answers
            assert httpx.get(url).headers["content-type"].startswith("text/html")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (0, -signal.SIGTERM)
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "token", "says"),
    [
        (["--port", "65536"], None, "'65536' is not a port"),
        (["--writable"], None, "needs a token of 16 or more"),
        (["--writable"], "short", "needs a token of 16 or more"),
        (["--writable"], "with a space in it, long", "needs a token of 16 or more"),
        (["--writable", "--token-file", "absent"], None, "--token-file absent is no file"),
        (["--token-file", "absent"], None, "say --writable too"),
        (["--runs", "absent"], None, "--runs absent is no folder"),
        (["--set", "batch=0"], None, "batch is 0: it must be 1 or more"),
        (["--set", "read=30"], None, "read is 30, more than most_read, 20"),
        (["--set", "seconds=0"], None, "seconds is 0.0: it must be above 0"),
        (["--host", "no.such.host.invalid"], None, "cannot listen on no.such.host.invalid"),
        (["--port", "0"], None, "absent is no knowledge base"),
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
        ([], "name --kb and --model, or the --server to ask"),
        (["--kb", "x"], "name --kb and --model"),
        (["--server", "http://127.0.0.1:1", "--kb", "x"], "leave out all others"),
        (["--server", "http://127.0.0.1:1", "--set", "read=3"], "leave out all others"),
        (["--server", "127.0.0.1:8000"], "is no address of a server"),
        (["--server", "ftp://x"], "is no address of a server"),
        (["--server", "http://127.0.0.1:1"], "cannot be reached"),
    ],
)
def test_asking_a_server_wrongly_is_one_line(words, says, capsys) -> None:
    assert cli.main(["answer", "why?", *words]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"realm: [^\n]+\n", error) and says in error


def test_a_server_that_is_no_realm_is_one_line(tmp_path: Path, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [
            sys.executable,
            "-c",
            f"""
import socket
s = socket.socket(fileno={listening.fileno()})
c, _ = s.accept()
c.recv(65536)
c.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\nhello")
c.close()
""",
        ]
        with subprocess.Popen(command, pass_fds=[listening.fileno()]):
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            assert cli.main(["answer", "why?", "--server", url]) == 2
    assert "is not speaking as a realm server does" in capsys.readouterr().err


def test_on_loopback_a_server_has_its_own_names_elsewhere_any() -> None:
    assert own_hosts("127.0.0.1", ("a.example",)) == {"localhost", "127.0.0.1", "::1", "a.example"}
    assert own_hosts("::1", ()) == {"localhost", "127.0.0.1", "::1"}
    assert (
        own_hosts("0.0.0.0", ()) is None
        and own_hosts("10.0.0.1", ()) is None
        and own_hosts("box", ()) is None
    )
