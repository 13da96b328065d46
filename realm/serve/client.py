"""A client of `realm serve`. The client needs only the standard library, so that it starts fast."""

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from realm import __version__
from realm.errors import InputError, RealmError, check_encodable, shown
from realm.model.calibration import Method
from realm.qa.answers import Answer, Answers, Hit
from realm.text.fields import json_value, with_nested

NDJSON = "application/x-ndjson"


class ServerError(InputError):
    """The server refused a request. The error has the HTTP status and the message of the server."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Client:
    """The server at a URL.

    >>> client = Client("http://127.0.0.1:8000")
    >>> client.answer("Who wrote The Tempest?").text  # doctest: +SKIP
    'William Shakespeare'

    The methods that `realm.Workspace` has too take the same arguments, and those for questions return the same.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0, patience: float = 60.0):
        """Makes a client, without a request to the server.

        Args:
            url: address of the server.
            token: token for writing, or for reading from a private server.
            timeout: a request fails after this number of seconds without data from the server.
            patience: if the server is busy (429), a request is repeated for this number of seconds.

        Raises:
            InputError: the URL is not an http or https address, or the token has a line break or a character that is not ASCII.
        """
        if not _is_address(url):
            raise InputError(f"{url} is not the address of a server: write it like http://127.0.0.1:8000")
        if token is not None and not re.fullmatch(r"[ -~]*", token):  # the message must not contain the token
            raise InputError("the token has a line break or a character that is not ASCII: remove it")
        self.url = url.rstrip("/")
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._token, self._timeout, self._patience = token, timeout, patience

    def answer(
        self,
        question: str,
        *,
        method: Method | None = None,
        top_k: int | None = None,
        where: str | None = None,
    ) -> Answer:
        """The best answer to a question, with its passage. The answer may be a guess; see `answers`.

        Raises:
            InputError: there is no passage to read.
        """
        return self.answers(question, method=method, top_k=top_k, where=where).best(self.url, where)

    def answers(
        self,
        question: str,
        *,
        method: Method | None = None,
        top_k: int | None = None,
        where: str | None = None,
    ) -> Answers:
        """The answers to a question, from the `top_k` best passages. If `top_k` is None, the default of the server is used.

        With a filter `where`, only passages that match the filter are read.
        """
        row = self._json("POST", "/v1/answer", _question_body(question, method, top_k, where))
        with _readable_errors(self.url):
            return Answers.from_json(row)

    def answer_many(
        self,
        questions: Iterable[str],
        *,
        method: Method | None = None,
        top_k: int | None = None,
        where: str | None = None,
    ) -> Iterator[Answers]:
        """The answers to many questions, in order. Each item is returned as soon as it arrives.

        Raises:
            InputError: `questions` is one text.
        """
        if isinstance(questions, str):
            raise InputError("questions is one text: give a list of questions")
        return self._answer_many(list(questions), method, top_k, where)

    def _answer_many(
        self, questions: list[str], method: Method | None, top_k: int | None, where: str | None
    ) -> Iterator[Answers]:
        with _readable_errors(self.url):
            most = int(self.health()["limits"]["questions"])
        for start in range(0, len(questions), most):
            part = questions[start : start + most]
            body = _question_body(part, method, top_k, where)
            with self._open("POST", "/v1/answer", body, NDJSON) as response:
                lines = _lines(response)
                for number in range(len(part)):
                    with _readable_errors(self.url):
                        line = next(lines, None)
                        if line is None:
                            raise InputError(
                                f"the response of {self.url} ended after {number} of {len(part)} answers"
                            )
                        if "error" in line:
                            raise ServerError(line["error"]["status"], line["error"]["detail"])
                        answers = Answers.from_json(line)
                    yield answers

    def search(
        self, question: str, top_k: int = 10, *, method: Method | None = None, where: str | None = None
    ) -> list[Hit]:
        """The `top_k` best passages for a question, with the scores by which they were ranked."""
        row = self._json("POST", "/v1/retrieve", _question_body(question, method, top_k, where))
        with _readable_errors(self.url):
            return [Hit(*(one[name] for name in Hit._fields)) for one in row["passages"]]

    def fill(self, sentence: str, target: str | None = None) -> dict[str, Any]:
        """Predictions for each [MASK] of a sentence, and the effect of each passage on the predictions or on `target`."""
        body = {"sentence": sentence}
        return self._json("POST", "/v1/fill", body if target is None else body | {"target": target})

    def passage(self, id: str) -> dict[str, Any]:
        """A passage by its id."""
        return self._json("GET", f"/v1/passages/{_in_path(id)}")

    def document(self, id: str) -> dict[str, Any]:
        """A document by its id, with its passages."""
        return self._json("GET", f"/v1/documents/{_in_path(id)}")

    def documents(
        self, start: int = 0, count: int = 100, prefix: str = "", where: str | None = None
    ) -> dict[str, Any]:
        """`{"documents": [{"id", "title", "passages", "fields"}], "next"}` from document number `start` on.

        `next` is the `start` of the following part.
        """
        given = {"start": start, "count": count, "prefix": prefix, "where": where}
        query = urllib.parse.urlencode({name: value for name, value in given.items() if value is not None})
        return self._json("GET", f"/v1/documents?{query}")

    def corpus(self) -> dict[str, Any]:
        """Name and size of the corpus, titles of a few documents, the fields with an example filter.

        The keys are "name", "documents", "passages", "titles", "fields" and "filter".
        """
        return self._json("GET", "/v1/corpus")

    def examples(self) -> list[str]:
        """A few questions about the documents, made from their sentences by rules."""
        row = self._json("GET", "/v1/examples")
        with _readable_errors(self.url):
            found: list[str] = row["questions"]
            return found

    def versions(self) -> dict[str, Any]:
        """Versions of the passages and of their index on disk, and the versions in use."""
        return self._json("GET", "/v1/versions")

    def runs(self) -> list[dict[str, Any]]:
        """The training runs that the server shows, the run with the latest change first."""
        row = self._json("GET", "/v1/runs")
        with _readable_errors(self.url):
            found: list[dict[str, Any]] = row["runs"]
            return found

    def run(self, name: str, after: int = 0) -> dict[str, Any]:
        """Metrics of a training run from byte `after` on; `next` is the value of `after` for the next call."""
        return self._json("GET", f"/v1/runs/{urllib.parse.quote(name, safe='')}?after={after}")

    def add(self, documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Adds documents `{"title"?, "text", "id"?}`. On return, the documents are on disk and can be found.

        All other keys of a document, and those of a mapping `metadata` or `fields`, are its fields. Dates become texts.

        Raises:
            InputError: one document is given instead of a list, or a field is not JSON.
        """
        if isinstance(documents, Mapping):
            raise InputError("documents is one document: give a list of documents")
        return self._json("POST", "/v1/documents", {"documents": [_document_body(one) for one in documents]})

    def delete(self, id: str) -> int:
        """Deletes a document by its id -> number of removed passages."""
        row = self._json("DELETE", f"/v1/documents/{_in_path(id)}")
        with _readable_errors(self.url):
            return int(row["passages_removed"])

    def feedback(self, question: str, verdict: str, passage: str, start: int, end: int) -> dict[str, Any]:
        """Stores whether `text[start:end]` of a passage is a "right", "wrong" or "better" answer -> `{"id", "new"}`."""
        body = {"question": question, "verdict": verdict, "passage": passage, "start": start, "end": end}
        return self._json("POST", "/v1/feedback", body)

    def health(self) -> dict[str, Any]:
        """State, version and limits of the server."""
        return self._json("GET", "/health")

    def _json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        with self._open(method, path, body) as response:
            for line in _lines(response):
                return line
        raise InputError(f"the response of {self.url} is empty")

    def _open(
        self, method: str, path: str, body: object = None, accept: str = "application/json"
    ) -> http.client.HTTPResponse:
        headers = {"Accept": accept, "User-Agent": f"realm/{__version__}"}
        data = None
        if body is not None:
            try:
                data = json.dumps(body, default=json_value).encode()
            except (TypeError, ValueError, OverflowError) as error:
                raise InputError(f"the request cannot be written as JSON: {error}") from None
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
                after = error.headers.get("Retry-After", "")
                wait = max(0.1, float(after)) if after.isdecimal() else 1.0  # a proxy may send 0, or a date
                if error.code == 429 and time.monotonic() + wait < until:
                    time.sleep(wait)
                    continue
                raise ServerError(error.code, f"{self.url}: {_detail(error)}") from None
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                raise InputError(
                    f"{self.url} cannot be reached: {reason}; is `realm serve` running?"
                ) from None


def _question_body(
    question: str | list[str], method: Method | None, top_k: int | None, where: str | None
) -> dict[str, Any]:
    given = {"method": method, "top_k": top_k, "where": where}
    body: dict[str, Any] = {"question" if isinstance(question, str) else "questions": question}
    return body | {name: value for name, value in given.items() if value is not None}


def _document_body(document: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise InputError(f"a document is {shown(document)}: it must be a mapping with a text")
    parts = {name: value for name, value in document.items() if name in ("id", "title", "text")}
    others = with_nested({name: value for name, value in document.items() if name not in parts})
    return parts | ({"fields": others} if others else {})


def _in_path(id: str) -> str:
    """An id as part of an address."""
    if not isinstance(id, str):
        raise InputError(f"the id is {shown(id)}: it must be a text")
    check_encodable(id, "the id: ")
    return urllib.parse.quote(id, safe="")


def _lines(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    with _readable_errors(response.url):
        try:
            yield from map(json.loads, response)
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"the response of {response.url} broke off: {error}") from None


@contextmanager
def _readable_errors(url: str) -> Iterator[None]:
    """Replaces errors in reading the JSON of a response by an InputError: the response is not one of `realm serve`."""
    try:
        yield
    except RealmError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"the response of {url} is not that of `realm serve`: {error!r}") from None


def _detail(error: urllib.error.HTTPError) -> str:
    if 300 <= error.code < 400:
        return f"{error.code} {error.reason}: use the address {error.headers.get('Location')}"
    try:
        return " ".join(str(json.loads(error.read())["detail"]).split())
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"{error.code} {error.reason}"


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket is not closed, or the port is not a number
        return False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because a redirect would send the token to another host, and would change a POST to a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None
