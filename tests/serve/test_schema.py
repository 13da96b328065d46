"""Schemathesis against the OpenAPI description: what fits it, and what does not, is answered as it says."""

import shutil
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.serve.conftest import TOKEN, running

schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis here: `pip install schemathesis`")
positive_data_acceptance = pytest.importorskip("schemathesis.specs.openapi.checks").positive_data_acceptance


@pytest.fixture(scope="module")
def api(tiny_kb: Any, qa_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("schema")
    shutil.copytree(tiny_kb.folder, folder / "kb")
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with running(folder / "kb", qa_model, runs=folder) as served:
        described = schemathesis.openapi.from_url(served.url + "/openapi.json")
        rejection = described.config.checks.negative_data_rejection
        rejection.expected_statuses = [*rejection.expected_statuses, "431"]  # of an address that is too long
        yield described


def call_all(api: Any, mode: Any, examples: int) -> set[str]:
    """Calls every operation with generated input, as the writer, and checks each response -> the operations."""
    called = set()
    for found in api.get_all_operations():
        operation = found.ok()

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def call(case: Any) -> None:
            case.call_and_validate(
                headers={"Authorization": f"Bearer {TOKEN}"},
                # Limits are settings, and a model's lengths its own: not all that fits the description is accepted.
                excluded_checks=[positive_data_acceptance],
            )

        try:
            call()
        except hypothesis.errors.Unsatisfiable:
            assert mode is schemathesis.GenerationMode.NEGATIVE, (
                operation.label
            )  # without input, none can be wrong
        called.add(operation.label)
    return called


OPERATIONS = {
    "POST /v1/answer",
    "POST /v1/retrieve",
    "POST /v1/fill",
    "GET /v1/passages/{id}",
    "GET /v1/documents",
    "GET /v1/documents/{id}",
    "POST /v1/documents",
    "DELETE /v1/documents/{id}",
    "POST /v1/feedback",
    "GET /v1/corpus",
    "GET /v1/examples",
    "GET /v1/versions",
    "GET /health",
    "GET /metrics",
    "GET /v1/runs",
    "GET /v1/runs/{name}",
}


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_every_operation_keeps_to_its_description(api, mode) -> None:
    assert call_all(api, schemathesis.GenerationMode[mode], 4) == OPERATIONS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_every_operation_keeps_to_its_description_for_long(api, mode) -> None:
    assert call_all(api, schemathesis.GenerationMode[mode], 150) == OPERATIONS
