"""A Hugging Face hub on loopback, which huggingface_hub uploads to and downloads from, for tests without a network."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_the_token_of_the_test"


class Repository:
    """A repository: whether it is private, and the files of each commit."""

    def __init__(self, private: bool):
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.head = self.commit({})

    def commit(self, files: dict[str, bytes]) -> str:
        self.head = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[self.head] = files
        return self.head

    def at(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.head if revision == "main" else revision]


class Hub(NamedTuple):
    """A running hub."""

    url: str
    repositories: dict[str, Repository]


@contextmanager
def local_hub() -> Iterator[Hub]:
    """A hub, until the block ends. Everybody may read; uploads need the token."""
    repositories: dict[str, Repository] = {}
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"repositories": repositories})
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_address[1]}", repositories)
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    repositories: dict[str, Repository]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        match path:
            case ["api", "models" | "datasets", owner, name, *rest] if f"{owner}/{name}" in self.repositories:
                repository = self.repositories[f"{owner}/{name}"]
                files = repository.at(rest[1] if len(rest) > 1 else "main")
                if rest[:1] == ["tree"]:
                    everything = "recursive=true" in urlsplit(self.path).query.lower()
                    self._send(_tree(files, "/".join(rest[2:]), everything))
                    return
                siblings = [{"rfilename": place} for place in files]
                row = {"id": f"{owner}/{name}", "sha": repository.head, "private": repository.private}
                self._send(row | {"siblings": siblings})
            case ["datasets", owner, name, "resolve", revision, *place] | [
                owner,
                name,
                "resolve",
                revision,
                *place,
            ] if f"{owner}/{name}" in self.repositories:
                repository = self.repositories[f"{owner}/{name}"]
                content = repository.at(revision).get("/".join(place))
                commit = repository.head if revision == "main" else revision
                if content is None:
                    self._send({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"})
                else:
                    tag = f'"{hashlib.sha1(content).hexdigest()}"'
                    self._send(content, headers={"ETag": tag, "X-Repo-Commit": commit})
            case _:
                self._send({"error": "no such repository"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self._body()
        match unquote(urlsplit(self.path).path).strip("/").split("/"):
            case ["api", "datasets", owner, name, "paths-info", revision]:
                files = self.repositories[f"{owner}/{name}"].at(revision)
                wanted = parse_qs(body.decode())["paths"]
                self._send([_entry(place, files[place]) for place in wanted if place in files])
                return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send({"error": "who are you?"}, 401)
            return
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        match path:
            case ["api", "repos", "create"]:
                wanted = json.loads(body)
                full = f"{wanted['organization']}/{wanted['name']}"
                if full in self.repositories:
                    self._send({"error": "exists", "url": f"{self._home}/{full}"}, 409)
                    return
                self.repositories[full] = Repository(wanted.get("visibility") == "private")
                self._send({"url": f"{self._home}/{full}", "name": full, "id": full})
            case ["api", "validate-yaml"]:
                self._send({"errors": [], "warnings": []})
            case ["api", "models", owner, name, "preupload", _]:
                rows = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for one in json.loads(body)["files"]
                ]
                self._send({"files": rows})
            case ["api", "models", owner, name, "commit", revision]:
                repository = self.repositories[f"{owner}/{name}"]
                files = dict(repository.at(revision))
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    elif line["key"] == "deletedFile":
                        del files[line["value"]["path"]]
                commit = repository.commit(files)
                url = f"{self._home}/{owner}/{name}/commit/{commit}"
                self._send({"success": True, "commitOid": commit, "commitUrl": url})
            case _:
                self._send({"error": f"not of this hub: {self.path}"}, 404)

    @property
    def _home(self) -> str:
        return f"http://{self.headers['Host']}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _tree(files: dict[str, bytes], folder: str, everything: bool) -> list[dict[str, Any]]:
    """The files and folders in a folder; with `everything`, also those in its subfolders."""
    folders = {str(parent) for place in files for parent in PurePosixPath(place).parents} - {"."}
    entries = [_entry(*one) for one in files.items()]
    entries += [{"type": "directory", "path": one, "size": 0, "oid": "0" * 40} for one in folders]
    inside = [one for one in entries if PurePosixPath(folder) in PurePosixPath(one["path"]).parents]
    return [one for one in inside if everything or PurePosixPath(one["path"]).parent == PurePosixPath(folder)]


def _entry(place: str, content: bytes) -> dict[str, Any]:
    return {
        "type": "file",
        "path": place,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }
