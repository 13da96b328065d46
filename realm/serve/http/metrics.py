"""Metrics for Prometheus. Each app has a registry of its own."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Scope

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters of requests and batches, and gauges of the versions in use."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "realm_requests", "Requests", ["method", "route", "status"], registry=registry
        )
        self._latency = Histogram(
            "realm_request_seconds", "Time of a request", ["route"], buckets=SECONDS, registry=registry
        )
        self._batches = Histogram(
            "realm_batch_questions",
            "Questions per batch",
            ["kind"],
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self._batch_seconds = Histogram(
            "realm_batch_seconds", "Time of a batch", ["kind"], buckets=SECONDS, registry=registry
        )
        self.documents = Counter(
            "realm_documents", "Documents added, replaced or deleted", ["change"], registry=registry
        )
        self.swaps = Counter("realm_swaps", "Snapshots that replaced another", registry=registry)
        self.queue = Gauge("realm_queue_questions", "Waiting questions", registry=registry)
        self.passages = Gauge("realm_passages", "Passages in use", registry=registry)
        self.index = Gauge("realm_index_version", "Version of the index in use", registry=registry)
        self.step = Gauge("realm_index_step", "Training step of the index in use", registry=registry)
        self.created = Gauge(
            "realm_index_created_seconds",
            "Time at which the index was built, in seconds since 1970",
            registry=registry,
        )

    def request(self, scope: Scope, status: int, seconds: float) -> None:
        """Counts a request under the pattern of its route. With the path instead, clients could create any number of labels."""
        route = getattr(scope.get("route"), "path", None) or "none"
        method = scope["method"] if scope["method"] in ("GET", "POST", "DELETE") else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def batch(self, kind: Any, count: int, seconds: float) -> None:
        """Counts a batch of a kind of questions."""
        self._batches.labels(kind.name).observe(count)
        self._batch_seconds.labels(kind.name).observe(seconds)
