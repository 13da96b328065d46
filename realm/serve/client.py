"""A client of `realm serve`, in the standard library alone: no torch, no framework, starts at once."""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from realm import __version__
from realm.errors import InputError, RealmError
from realm.qa.answers import Answers

Method = Literal["dense", "bm25", "hybrid"]
NDJSON = "application/x-ndjson"


class ServerError(InputError):
    """The server refused a request: `status` is HTTP's, the message the server's own."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Client:
    """The server at a URL.

    >>> client = Client("http://127.0.0.1:8000")
    >>> client.answer("Who wrote The Tempest?").answers[0].text  # doctest: +SKIP
    'William Shakespeare'
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0, patience: float = 60.0):
        """`token` is for writing, and for reading where the server is private. `timeout` seconds without a word from the
        server are an error; a busy server (429) is asked again for `patience` seconds.

        Raises:
            InputError: the URL is not one of http or https.
        """
        if not _is_address(url):
            raise InputError(f"{url} is no address of a server: write it as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._token, self._timeout, self._patience = token, timeout, patience

    def answer(self, question: str, method: Method | None = None, top_k: int | None = None) -> Answers:
        """The answers to a question, from the `top_k` best passages (none: as many as the server reads by itself)."""
        row = self._json("POST", "/v1/answer", _asked(question, method, top_k))
        with _said_by_realm(self.url):
            return Answers.from_json(row)

    def answer_many(
        self, questions: Sequence[str], method: Method | None = None, top_k: int | None = None
    ) -> Iterator[Answers]:
        """The answers to many questions, in their order, each as soon as it is there."""
        with _said_by_realm(self.url):
            most = int(self.health()["limits"]["questions"])
        for start in range(0, len(questions), most):
            part = list(questions[start : start + most])
            with self._open("POST", "/v1/answer", _asked(part, method, top_k), NDJSON) as response:
                lines = _lines(response)
                for number in range(len(part)):
                    with _said_by_realm(self.url):
                        line = next(lines, None)
                        if line is None:
                            raise InputError(f"{self.url} ended after {number} of {len(part)} answers")
                        if "error" in line:
                            raise ServerError(line["error"]["status"], line["error"]["detail"])
                        answers = Answers.from_json(line)
                    yield answers

    def retrieve(self, question: str, method: Method | None = None, top_k: int = 10) -> list[dict[str, Any]]:
        """The best passages for a question: `{"id", "document", "title", "text", "score"}` each."""
        row = self._json("POST", "/v1/retrieve", _asked(question, method, top_k))
        with _said_by_realm(self.url):
            found: list[dict[str, Any]] = row["passages"]
            return found

    def fill(self, sentence: str, target: str | None = None) -> dict[str, Any]:
        """Predictions for each [MASK] of a sentence, and what each passage did for them, or for a `target` word."""
        body = {"sentence": sentence}
        return self._json("POST", "/v1/fill", body if target is None else body | {"target": target})

    def passage(self, id: str) -> dict[str, Any]:
        """A passage by its id."""
        return self._json("GET", f"/v1/passages/{urllib.parse.quote(id, safe='')}")

    def document(self, id: str) -> dict[str, Any]:
        """A document by its id, as its passages."""
        return self._json("GET", f"/v1/documents/{urllib.parse.quote(id, safe='')}")

    def documents(self, start: int = 0, count: int = 100, prefix: str = "") -> dict[str, Any]:
        """`{"documents": [{"id", "title", "passages"}], "next"}` from the `start`-th on; `next` is the next `start`."""
        query = urllib.parse.urlencode({"start": start, "count": count, "prefix": prefix})
        return self._json("GET", f"/v1/documents?{query}")

    def examples(self) -> list[str]:
        """A few questions that the documents answer, made from them by rules."""
        row = self._json("GET", "/v1/examples")
        with _said_by_realm(self.url):
            found: list[str] = row["questions"]
            return found

    def versions(self) -> dict[str, Any]:
        """Versions of the passages and of their index on disk, and those in use."""
        return self._json("GET", "/v1/versions")

    def runs(self) -> list[dict[str, Any]]:
        """The training runs that the server shows, the latest first."""
        row = self._json("GET", "/v1/runs")
        with _said_by_realm(self.url):
            found: list[dict[str, Any]] = row["runs"]
            return found

    def run(self, name: str, after: int = 0) -> dict[str, Any]:
        """A training run's metrics behind byte `after`; `next` is where the ones after them begin."""
        return self._json("GET", f"/v1/runs/{urllib.parse.quote(name, safe='')}?after={after}")

    def add(self, documents: Iterable[Mapping[str, str]]) -> dict[str, Any]:
        """Adds documents `{"id"?, "title", "text"}`; when this returns they are searchable, and on disk."""
        return self._json("POST", "/v1/documents", {"documents": [dict(one) for one in documents]})

    def delete(self, id: str) -> int:
        """Deletes a document by its id -> how many passages went with it."""
        row = self._json("DELETE", f"/v1/documents/{urllib.parse.quote(id, safe='')}")
        with _said_by_realm(self.url):
            return int(row["passages_removed"])

    def health(self) -> dict[str, Any]:
        """What is served, by which version, within which limits."""
        return self._json("GET", "/health")

    def _json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        with self._open(method, path, body) as response:
            for line in _lines(response):
                return line
        raise InputError(f"{self.url} gave no answer")

    def _open(
        self, method: str, path: str, body: object = None, accept: str = "application/json"
    ) -> http.client.HTTPResponse:
        headers = {"Accept": accept, "User-Agent": f"realm/{__version__}"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        until = time.monotonic() + self._patience
        while True:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            try:
                response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout)
                return response
            except urllib.error.HTTPError as error:
                said = error.headers.get("Retry-After", "")
                wait = float(said) if said.isdecimal() else 1.0  # else a date, which no server of ours sends
                if error.code == 429 and time.monotonic() + wait < until:
                    time.sleep(wait)
                    continue
                raise ServerError(error.code, f"{self.url}: {_detail(error)}") from None
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                raise InputError(
                    f"{self.url} cannot be reached: {reason}; is `realm serve` running?"
                ) from None


def _asked(question: str | list[str], method: Method | None, top_k: int | None) -> dict[str, Any]:
    given = {"method": method, "top_k": top_k}
    body: dict[str, Any] = {"question" if isinstance(question, str) else "questions": question}
    return body | {name: value for name, value in given.items() if value is not None}


def _lines(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    with _said_by_realm(response.url):
        try:
            yield from map(json.loads, response)
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"{response.url} broke off: {error}") from None


@contextmanager
def _said_by_realm(url: str) -> Iterator[None]:
    """Turns what comes of reading another server's JSON into one line."""
    try:
        yield
    except RealmError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{url} is not speaking as a realm server does: {error!r}") from None


def _detail(error: urllib.error.HTTPError) -> str:
    if 300 <= error.code < 400:
        return f"{error.code} {error.reason}, to {error.headers.get('Location')}: name that address"
    try:
        return " ".join(str(json.loads(error.read())["detail"]).split())
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"{error.code} {error.reason}"


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        return False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Following one would hand the token to whoever it names, and make a GET of a POST."""

    def redirect_request(self, *_: Any) -> None:
        return None
