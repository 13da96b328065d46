"""Traces: what requests leave in OpenTelemetry's exporter in memory, and what a collector on loopback receives."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from realm import cli
from realm.serve.client import Client
from tests.serve.asking import QUESTION
from tests.serve.conftest import Served, running
from tests.serve.process import serving

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@contextmanager
def traced(served: Served) -> Iterator[tuple[str, InMemorySpanExporter]]:
    """The address of a server, and the spans that it has finished."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with running(served.kb, served.model, traces=provider) as server:
        yield server.url, spans


def children(spans: InMemorySpanExporter, parent: ReadableSpan) -> list[ReadableSpan]:
    own = parent.context
    found = [one for one in spans.get_finished_spans() if one.parent and one.parent.span_id == own.span_id]
    assert all(one.context.trace_id == own.trace_id for one in found)
    return sorted(found, key=lambda one: one.start_time)


def test_the_span_of_a_request_has_the_stages_of_its_question_as_children(served: Served) -> None:
    with traced(served) as (url, spans):
        response = httpx.post(
            f"{url}/v1/answer", json={"question": QUESTION, "method": "bm25"}, headers=PARENT, timeout=60
        )
    (request,) = [one for one in spans.get_finished_spans() if one.name == "POST /v1/answer"]
    assert (request.context.trace_id, request.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/answer",
        "http.response.status_code": 200,
    }
    stages = children(spans, request)
    assert [one.name for one in stages] == ["queue", "retrieve", "read"]
    assert all(one.attributes == {"realm.method": "bm25", "realm.passages": 5} for one in stages)
    assert all(one.end_time == two.start_time for one, two in itertools.pairwise(stages))
    assert request.start_time <= stages[0].start_time + 5_000_000  # the batcher has another clock
    assert stages[-1].end_time <= request.end_time
    lasted = [(one.end_time - one.start_time) / 1e6 for one in stages]
    ms = response.json()["ms"]
    worked = sum(ms.values()) - ms["queue"]
    assert lasted[2] / sum(lasted[1:]) == pytest.approx(ms["read"] / worked, rel=0.02)
    assert sum(lasted[1:]) >= 0.98 * worked


def test_each_question_of_a_request_and_each_kind_of_request_has_its_stages(served: Served) -> None:
    with traced(served) as (url, spans):
        httpx.post(f"{url}/v1/retrieve", json={"questions": ["a", "b"]}, timeout=60)
        httpx.post(f"{url}/v1/fill", json={"sentence": "Arden sells [MASK]."}, timeout=60)
        stream = {"Accept": "application/x-ndjson"}
        httpx.post(f"{url}/v1/answer", json={"questions": ["a"]}, headers=stream, timeout=60)
        httpx.get(f"{url}/v1/passages/none")
        httpx.get(f"{url}/health")
        httpx.get(f"{url}/metrics")
    requests = [one for one in spans.get_finished_spans() if " /" in one.name]
    assert [(one.name, sorted(child.name for child in children(spans, one))) for one in requests] == [
        ("POST /v1/retrieve", ["queue", "queue", "retrieve", "retrieve"]),
        ("POST /v1/fill", ["fill", "queue"]),
        ("POST /v1/answer", ["queue", "read", "retrieve"]),
        ("GET /v1/passages/{id}", []),
    ]
    assert requests[-1].attributes["http.response.status_code"] == 404


def test_the_command_sends_traces_to_a_collector(served: Served) -> None:
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        where = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}"}
        words = ("--traces", "--set", "device=cpu")
        with serving(served.kb, served.model, *words, OMP_NUM_THREADS="1", **where) as (url, process):
            Client(url).answers(QUESTION)
            process.terminate()
            assert process.wait(60) in (0, -15)
            assert process.stderr is not None and process.stderr.read() == ""
        collector.shutdown()
    assert {path for path, _ in received} == {"/v1/traces"}
    resources = [one for _, message in received for one in message.resource_spans]
    named = {attribute.key: attribute.value.string_value for attribute in resources[0].resource.attributes}
    assert named["service.name"] == "realm"
    names = {span.name for one in resources for scope in one.scope_spans for span in scope.spans}
    assert names == {"POST /v1/answer", "queue", "retrieve", "read"}


@pytest.mark.slow
def test_a_collector_that_cannot_be_reached_disturbs_nobody(served: Served) -> None:
    where = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
    }
    words = ("--traces", "--set", "device=cpu")
    with serving(served.kb, served.model, *words, OMP_NUM_THREADS="1", **where) as (url, process):
        for _ in range(20):
            assert Client(url).answers(QUESTION).answers
        process.terminate()
        assert process.wait(60) in (0, -15)
        assert process.stderr is not None and len(process.stderr.readlines()) <= 15


def test_without_the_extra_the_error_names_it(monkeypatch, capsys) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http", None)
    assert cli.main(["serve", "--kb", "absent", "--model", "absent", "--traces"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'realm-lm[otel]'" in error
