"""A folder of training runs with damaged and hostile ones among them: those are left out or null, the others are shown."""

import json
import os
from pathlib import Path

import httpx
import pytest

from realm.serve import runs as reading
from realm.serve.runs import read_metrics, runs
from tests.serve.conftest import running

GOOD = b'{"step": 1, "loss": 2.5}\n'


def write(folder: Path, metrics: bytes) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(metrics)
    return folder


@pytest.fixture(scope="module")
def get(tiny_kb, qa_model, tmp_path_factory):
    """Asks a server whose folder of runs has one good run and many others."""
    folder = tmp_path_factory.mktemp("runs")
    outside = write(tmp_path_factory.mktemp("outside") / "secret", b'{"step": 7}\n')
    write(folder / "good", GOOD)
    write(folder / os.fsdecode(b"name \xff\xfe"), GOOD)
    write(folder / "large", b'{"step": 1e999, "loss": -1e999, "count": 1' + b"0" * 4000 + b"}\n" + GOOD)
    write(folder / "digits", b'{"step": ' + b"1" * 5000 + b"}\n" + GOOD)
    write(folder / "deep", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n" + GOOD)
    write(folder / "nested", b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}\n" + GOOD)
    write(folder / "half", rb'{"\ud800": "\udfff"}' + b"\n" + GOOD)
    write(folder / "bytes", b"\xff\xfe\x00\n[1]\nnull\n" + GOOD)
    (folder / "linked").symlink_to(outside)
    (folder / "file linked").mkdir()
    (folder / "file linked" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    (folder / "fifo").mkdir()
    os.mkfifo(folder / "fifo" / "metrics.jsonl")
    with running(tiny_kb.folder, qa_model, runs=folder) as served:
        yield lambda path: httpx.get(served.url + path, timeout=10)


def test_damaged_runs_are_listed_and_links_are_not_followed(get) -> None:
    names = {run["name"] for run in get("/v1/runs").json()["runs"]}
    assert names == {"good", "name \ufffd\ufffd", "large", "digits", "deep", "nested", "half", "bytes"}
    assert get("/v1/runs/linked").status_code == get("/v1/runs/file%20linked").status_code == 404


@pytest.mark.parametrize(
    ("name", "damaged", "first"),
    [
        ("good", 0, {"step": 1, "loss": 2.5}),
        ("name \ufffd\ufffd", 0, {"step": 1, "loss": 2.5}),
        ("large", 0, {"step": None, "loss": None, "count": None}),
        ("digits", 1, {"step": 1, "loss": 2.5}),
        ("deep", 1, {"step": 1, "loss": 2.5}),
        ("nested", 0, {"a": [[[[[[[None]]]]]]]}),
        ("half", 0, {"\ufffd\ufffd\ufffd": "\ufffd\ufffd\ufffd"}),
        ("bytes", 3, {"step": 1, "loss": 2.5}),
    ],
)
def test_metrics_that_json_cannot_hold_are_null_and_damaged_lines_are_counted(
    get, name, damaged, first
) -> None:
    said = get(f"/v1/runs/{name}").json()
    assert (said["damaged"], said["rows"][0], said["rows"][-1]["step"]) == (damaged, first, 1)


def test_long_metrics_are_read_in_parts_and_a_line_without_end_is_passed_over(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "_AT_ONCE", 100)
    lines = [json.dumps({"step": step}).encode() + b"\n" for step in range(50)]
    write(tmp_path / "run", b"".join(lines[:25]) + b"x" * 1000 + b"\n" + b"".join(lines[25:]))
    (run,), steps, after, damaged = runs(tmp_path), [], 0, 0
    while (part := read_metrics(run, after)).next != after:
        steps += [row["step"] for row in part.rows]
        after, damaged = part.next, damaged + part.damaged
    assert steps == list(range(50)) and damaged > 0


def test_a_folder_of_runs_that_is_gone_is_an_error_on_the_page(tiny_kb, qa_model, tmp_path) -> None:
    (tmp_path / "runs").mkdir()
    with running(tiny_kb.folder, qa_model, runs=tmp_path / "runs") as served:
        (tmp_path / "runs").rmdir()
        refused = httpx.get(served.url + "/v1/runs")
    assert refused.status_code == 503 and "cannot be read: No such file" in refused.json()["detail"]


def test_runs_are_found_in_subfolders_but_not_inside_runs_links_or_hidden_folders(tmp_path) -> None:
    outside = write(tmp_path / "outside", GOOD)
    root = tmp_path / "runs"
    for name in (
        "table/one",
        "table/two.training",
        "a/b/c/d/e/f",
        "a/b/c/d/e/far/g",
        ".hidden/h",
        "kb/x.lance/i",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write(root / name, GOOD)
    write(root / "table/one/inner", GOOD)
    (root / "linked").symlink_to(outside.parent)
    (root / "table/linked").symlink_to(outside)
    found = {run.name: run for run in runs(root)}
    assert found.keys() == {"table/one", "table/two", "a/b/c/d/e/f"}
    assert found["table/two"].state == "stopped"
    assert read_metrics(found["a/b/c/d/e/f"], 0).rows == [{"step": 1, "loss": 2.5}]


def test_a_folder_that_becomes_a_link_after_the_listing_is_not_followed(tmp_path) -> None:
    (tmp_path / "runs" / "table").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    write(tmp_path / "runs" / "table" / "one", GOOD)
    write(tmp_path / "other" / "one", b'{"step": 7}\n')
    (run,) = runs(tmp_path / "runs")
    (tmp_path / "runs" / "table").rename(tmp_path / "moved")
    (tmp_path / "runs" / "table").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="table"):
        read_metrics(run, 0)


def test_the_search_for_runs_ends_in_a_large_tree(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "_FOLDERS", 4)
    for name in "abcdef":
        write(tmp_path / name, GOOD)
    assert [run.name for run in sorted(runs(tmp_path))] == ["a", "b", "c"]


def test_a_run_in_a_subfolder_is_requested_by_its_path(tiny_kb, qa_model, tmp_path) -> None:
    (tmp_path / "table").mkdir()
    write(tmp_path / "table" / "one", GOOD)
    with running(tiny_kb.folder, qa_model, runs=tmp_path) as served:
        client = served.client()
        assert [run["name"] for run in client.runs()] == ["table/one"]
        assert client.run("table/one")["rows"] == [{"step": 1, "loss": 2.5}]
        assert httpx.get(f"{served.url}/v1/runs/table/%2e%2e/one").status_code == 404
