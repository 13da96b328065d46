"""What tests ask a server, and how."""

import re
import time
from typing import Any

import httpx

from tests.serve.conftest import Served

QUESTION = "who built a tower in Arden?"
OAKHAM = {"id": "new", "title": "Oakham", "text": "Oakham lies on the Tarn. Berthe sold the bells of Oakham."}


def post(served: Served, path: str, body: Any = None, **more: Any) -> httpx.Response:
    return httpx.post(served.url + path, json=body, timeout=30, **more)


def titles(served: Served, question: str, method: str = "dense") -> set[str]:
    """Of all that can be found; with random weights, what comes first means little."""
    return {one.title for one in served.client().search(question, 100, method=method)}


def assert_problem(response: httpx.Response, status: int, says: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status and problem["title"] and re.search(says, problem["detail"]), problem
    assert "\n" not in problem["detail"]


def metric(served: Served, name: str) -> float:
    text = httpx.get(served.url + "/metrics").text
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def wait_for(condition: Any, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
