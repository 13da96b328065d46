"""Commands where Ray is not installed: they run on one machine, and with `--engine ray` they end with one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import tiny_documents

MISSING = """raise ModuleNotFoundError("No module named 'ray'", name="ray")"""
"""A module `ray` that fails as a missing one does, also in the processes that the commands start."""

RUN = """
import contextlib, io, json, sys
from realm.cli import main
ended = []
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        ended.append((main(words), said.getvalue()))
print(json.dumps(ended))
"""


def test_commands_run_on_one_machine_without_ray(tiny_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text(MISSING)
    documents, questions = tmp_path / "towns.jsonl", tmp_path / "questions.jsonl"
    lines = [json.dumps({"title": one.title, "text": one.text}) for one in tiny_documents()]
    documents.write_text("\n".join(lines))
    questions.write_text('{"question": "Who built a tower in Kelso?", "answers": ["Alaric"]}')
    kb, found = tmp_path / "kb", tmp_path / "found.jsonl"
    build = ["kb", "build", str(documents), "--out", str(kb), "--tagger", "rules"]
    build += ["--tokenizer", str(tiny_model_folder), "--set", "passage_tokens=48"]
    index = ["index", "--kb", str(kb), "--model", str(tiny_model_folder), "--set", "device=cpu"]
    retrieve = ["retrieve", *index[1:], "--questions", str(questions), "--top-k", "3", "--out", str(found)]
    ray = ["--engine", "ray"]
    commands = [
        [*build, *ray],
        build,
        [*index, *ray],
        index,
        [*retrieve, "--set", "search=ray"],
        retrieve,
    ]
    ended = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(commands),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(ended.stdout.splitlines()[-1])
    assert results[::2] == [[2, 'realm: "ray" needs Ray: pip install "realm-lm[ray]"\n']] * 3
    assert [code for code, _ in results[1::2]] == [0, 0, 0], results
    assert len(json.loads(found.read_text())["passages"]) == 3
