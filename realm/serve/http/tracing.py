"""OpenTelemetry traces: a span for each request of the API, and spans of the stages of each question.

The stages of a question are `queue` (the question waits), `retrieve` (passages are found), `read` (answers are extracted) and
`fill`. The times of the stages after `queue` are those of the batch of the question. A span never contains the text of a
question.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realm import __version__
from realm.serve.batching import Done
from realm.serve.http.logs import LineLimit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

NAME = "realm"
"""Name of the service, unless the environment has another name, and of the tracer."""
PREFIX = "/v1/"
"""Beginning of the paths of requests that are traced."""


@contextmanager
def exported(wanted: bool, by_libraries: bool = False) -> Iterator["TracerProvider | None"]:
    """A provider of tracers whose spans are sent to a collector (OTLP over HTTP) until the block ends.

    The environment variables of OpenTelemetry determine the address of the collector and the name of the service.

    Args:
        wanted: if False, the provider is None.
        by_libraries: whether libraries such as `mcp` send their spans too.
    """
    if not wanted:
        yield None
        return
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource.create({"service.name": NAME, "service.version": __version__})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    logger, lines = logging.getLogger("opentelemetry"), logging.StreamHandler()
    lines.addFilter(LineLimit())  # if the collector cannot be reached, each batch of spans causes a few lines
    logger.addHandler(lines)
    logger.propagate = False
    if by_libraries:
        trace.set_tracer_provider(provider)
    try:
        yield provider
    finally:
        provider.shutdown()


def traced(app: ASGIApp, traces: "TracerProvider | None") -> ASGIApp:
    """The app with a span for each request of the API, which continues the trace of the client (`traceparent`)."""
    if traces is None:
        return app
    tracer = traces.get_tracer(NAME)
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind, Status, StatusCode

    async def with_span(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method = scope["method"]
        with tracer.start_as_current_span(
            method, extract(headers), SpanKind.SERVER, {"http.request.method": method}
        ) as span:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            await app(scope, receive, send_and_note)
            if route := getattr(scope.get("route"), "path", None):
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)

    return with_span


def trace_question(
    tracer: "Tracer", name: str, attributes: dict[str, Any], future: "asyncio.Future[Done]"
) -> None:
    """Adds the spans of the stages of a finished question to the current span.

    Args:
        tracer: the tracer.
        name: name of the kind of question (`realm.serve.service.Kind`).
        attributes: attributes of the spans.
        future: the result of the question.
    """
    if future.cancelled() or future.exception() is not None:
        return
    done, end = future.result(), time.time_ns()
    shares = {name: 1.0}
    if name == "answer":
        answers = done.value[1]
        total = sum(answers.ms.values())
        shares = {"retrieve": 1 - answers.ms["read"] / total, "read": answers.ms["read"] / total}
    start = end - round(1e9 * done.batch_seconds)
    stages = [("queue", start - round(1e6 * done.waited_ms), start)]
    for stage, share in shares.items():
        until = start + round(1e9 * done.batch_seconds * share)
        stages.append((stage, start, until))
        start = until
    for stage, since, until in stages:
        tracer.start_span(stage, start_time=since, attributes=attributes).end(until)
