"""The systemd unit and the site of nginx: checked by these programs, and nginx before a running server."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import pytest

from realm import cli
from realm.serve.settings import ServeConfig
from realm.settings import read_config
from tests.qa.conftest import qa_folder
from tests.serve.process import serving

__all__ = ["qa_folder"]
DEPLOY = Path(__file__).parent.parent.parent / "deploy"
UNIT = (DEPLOY / "realm.service").read_text()
NAME = "answers.example.org"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")


def test_the_command_of_the_unit_is_accepted_by_the_parser(tmp_path: Path) -> None:
    for part in ("kb", "model"):
        (tmp_path / "manual" / part).mkdir(parents=True)
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    program, *words = shlex.split(line.replace("/srv/realm/manual", str(tmp_path / "manual")))
    assert program == "/srv/realm/venv/bin/realm"
    args = cli._parser().parse_args(words)
    assert read_config(ServeConfig, None, "serve", args.set).hosts == (NAME,)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "realm.service"
    unit.write_text(UNIT.replace("/srv/realm/venv/bin/realm", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@contextmanager
def nginx(folder: Path, servers: Sequence[str], writer: str) -> Iterator[str]:
    """The address of nginx with the site of `deploy/`, before servers that accept only the host name of the site."""
    if NGINX is None:
        pytest.skip("no nginx here")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
    subprocess.run([*words, "-keyout", "key", "-out", "pem"], cwd=folder, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    site = (DEPLOY / "nginx.conf").read_text()
    (line,) = re.findall(r"upstream realm \{\n(.*\n)", site)
    lines = "".join(line.replace("127.0.0.1:8000", urlsplit(url).netloc) for url in servers)
    for old, new in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("    listen [::]:443 ssl;\n", ""),
        ("/etc/ssl/answers.example.org.pem", f"{folder}/pem"),
        ("/etc/ssl/private/answers.example.org.key", f"{folder}/key"),
        (line, lines),
        ("    server 127.0.0.1:8000;\n", f"    server {urlsplit(writer).netloc};\n"),
    ):
        assert site.count(old) == 1
        site = site.replace(old, new)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; error_log {folder}/errors; daemon off; master_process off; events {{}}\n"
        f"http {{ access_log off;\n{temporary}{site} }}\n"
    )
    command = [NGINX, "-p", str(folder), "-e", f"{folder}/errors", "-c", f"{folder}/nginx.conf"]
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stderr
    assert "warn" not in tested.stderr, tested.stderr
    with subprocess.Popen(command) as process:
        try:
            for _ in range(100):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"https://127.0.0.1:{port}"
        finally:
            process.terminate()


SETTINGS = ("--set", "device=cpu", "--set", f'hosts=["{NAME}"]')


@pytest.fixture(scope="module")
def proxied(tiny_kb, qa_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of nginx before one server."""
    folder = tmp_path_factory.mktemp("nginx")
    with (
        serving(tiny_kb.folder, qa_folder, *SETTINGS, OMP_NUM_THREADS="1") as (url, _),
        nginx(folder, [url], url) as address,
    ):
        yield address


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, verify=False, headers={"Host": NAME}, timeout=60)


def test_the_server_answers_behind_nginx(proxied: str) -> None:
    with client(proxied) as http:
        assert http.get("/health").json()["status"] == "ok"
        assert http.post("/v1/answer", json={"question": "who built a tower?"}).json()["answers"]
        assert http.get("/").headers["content-type"].startswith("text/html")


def test_each_line_of_a_stream_passes_nginx_at_once(proxied: str) -> None:
    """Answers to 200 questions take many batches; the first line arrives long before the last."""
    body = {"questions": [f"who built tower {n}?" for n in range(200)]}
    headers = {"Accept": "application/x-ndjson"}
    began = time.monotonic()
    with client(proxied) as http, http.stream("POST", "/v1/answer", json=body, headers=headers) as response:
        arrived = [time.monotonic() - began for _ in response.iter_lines()]
    assert len(arrived) == 200 and arrived[0] < 0.5 * arrived[-1]


def test_nginx_shows_no_metrics_and_refuses_long_bodies(proxied: str) -> None:
    with client(proxied) as http:
        assert http.get("/metrics").status_code == 403
        assert http.post("/v1/answer", content=b"x" * (8 * 2**20 + 1)).status_code == 413


class Stub(BaseHTTPRequestHandler):
    """A server that is busy while `busy` is set, and keeps the paths of its requests.

    The next requests to all servers have the statuses `coming`.
    """

    protocol_version = "HTTP/1.1"
    busy = threading.Event()
    paths: ClassVar[list[str]] = []
    coming: ClassVar[list[int]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.paths.append(self.path)
        self.send_response(self.coming.pop(0) if self.coming else 503 if self.busy.is_set() else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_POST


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[str]:
    """The address of nginx before two stubs."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Stub) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    try:
        with nginx(tmp_path, urls, urls[0]) as address:
            yield address
    finally:
        Stub.busy.clear()
        for server in servers:
            server.shutdown()
            server.server_close()


def test_servers_that_were_all_busy_are_asked_again_at_once(stubs: str) -> None:
    with client(stubs) as http:
        Stub.busy.set()
        assert [http.post("/v1/answer", json={}).status_code for _ in range(3)] == [503] * 3
        Stub.busy.clear()
        assert http.post("/v1/answer", json={}).status_code == 200


@pytest.mark.parametrize("status", [429, 503])
def test_another_server_answers_if_a_server_is_busy(stubs: str, status: int) -> None:
    """429: the queue is full; 503: no answer within the time limit."""
    Stub.paths.clear()
    Stub.coming.append(status)
    with client(stubs) as http:
        assert http.post("/v1/answer", json={}).status_code == 200
    assert Stub.paths == ["/v1/answer"] * 2


@pytest.mark.parametrize("path", ["https%3A%2F%2Fa.b%2Fc.md", "a%2F..%2Fb", "q%3Fx%23y%25z"])
def test_nginx_does_not_change_the_id_of_a_document(stubs: str, path: str) -> None:
    Stub.paths.clear()
    with client(stubs) as http:
        assert http.delete(f"/v1/documents/{path}").status_code == 200
    assert Stub.paths == [f"/v1/documents/{path}"]


@pytest.mark.slow
def test_two_servers_behind_nginx_have_every_change_and_one_can_be_killed(
    rules_kb: Path, qa_folder: Path, tmp_path: Path
) -> None:
    """Requests go to the two servers in turn, so six requests that find a new document were answered by both."""
    token = "0123456789abcdef"
    words = (rules_kb, qa_folder, *SETTINGS)
    with (
        serving(*words, OMP_NUM_THREADS="1") as (reader, process),
        serving(*words, "--writable", OMP_NUM_THREADS="1", REALM_TOKEN=token) as (writer, _),
        nginx(tmp_path, [reader, writer], writer) as address,
        client(address) as http,
    ):

        def found() -> list[str]:
            body = {"question": "who sold the bells of Oakham?", "method": "bm25", "top_k": 1}
            hits = http.post("/v1/retrieve", json=body).raise_for_status().json()["passages"]
            return [hit["title"] for hit in hits]

        document = {"id": "new", "title": "Oakham", "text": "Berthe sold the bells of Oakham."}
        headers = {"Authorization": f"Bearer {token}"}
        http.post("/v1/documents", json={"documents": [document]}, headers=headers).raise_for_status()
        for _ in range(100):
            if all(found() == ["Oakham"] for _ in range(6)):
                break
            time.sleep(0.1)
        else:
            pytest.fail("a server did not load the new document")
        process.kill()
        process.wait()
        assert [found() for _ in range(6)] == 6 * [["Oakham"]]
