"""Every JSON that the project writes holds exactly what its type says, and no JSON is written without one."""

import json
import re
from pathlib import Path
from typing import Any, TypedDict

import pytest

import realm
from realm import cli
from realm.cli import knowledge_base as kb_command
from realm.model.encoders import EmbedderConfig
from realm.model.folder import SummedManifest
from realm.qa.answers import AnswersJson
from realm.qa.evaluation import ReportFile, ReportJson
from realm.qa.filling import FilledJson
from realm.qa.made_questions import MadeQuestion
from realm.qa.pipeline import RetrievedJson
from realm.qa.probe import ProbeFile, ProbeJson
from realm.retrieval.add import AddResult
from realm.retrieval.build import BuildResult, KnowledgeBaseConfig, Settings, SettingsJson
from realm.retrieval.index import IndexReport
from realm.retrieval.knowledge_base import DocumentEntry
from realm.retrieval.vectors import VectorsInfo
from realm.text.inputs import Lengths
from realm.text.readers import LeftOut
from realm.train import loop
from realm.train.ict import IctConfig
from realm.train.loop import WATCHED
from tests.qa.conftest import qa_folder
from tests.schemas import assert_holds

__all__ = ["qa_folder"]

WRITERS = {
    "cli/answering.py": "evaluate, probe",
    "cli/arguments.py": "what each command reports, below",
    "cli/demo.py": "the demo's reports: tests/test_demo.py",
    "cli/knowledge_base.py": "kb list, left out documents, made questions",
    "config.py": "the writers themselves",
    "demo/__init__.py": "report.json: tests/test_demo.py",
    "demo/telling.py": "stages.json: tests/test_demo.py",
    "model/bert_files.py": "transformers' config.json: tests/model/test_bert.py loads it there",
    "model/folder.py": "the manifest",
    "model/published/export.py": "transformers' files: tests/published loads them there",
    "model/sharing.py": "transformers' and sentence-transformers' files: tests/model/test_sharing.py loads them there",
    "qa/pipeline.py": "retrieve",
    "retrieval/build.py": "what a knowledge base says about itself",
    "retrieval/merged.py": "merged.jsonl of a knowledge base: tests/retrieval/test_merged.py reads it back",
    "retrieval/vectors.py": "what an index says about itself",
    "serve/app.py": "problems and answers: tests/serve/test_schema.py, against OpenAPI",
    "serve/client.py": "requests: tests/serve/test_schema.py",
    "text/inputs.py": "what a fingerprint is of: never written",
    "train/loop.py": "metrics.jsonl, settings.json",
}
"""The files that write JSON, and what of it."""


def test_no_json_is_written_that_no_test_knows() -> None:
    root = Path(realm.__file__).parent
    found = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if re.search(r"\b(write_json|write_json_lines|json\.dumps?)\(", file.read_text(encoding="utf-8"))
    }
    assert found == set(WRITERS), "say what it writes, and add a type and its check"


def test_the_check_refuses_what_is_missing_too_much_or_of_another_type() -> None:
    made = {"train": 3, "dev": 1}
    assert_holds(kb_command.MadeJson, made)
    for wrong in ({"train": 3}, made | {"test": 1}, made | {"dev": "1"}, made | {"dev": 1.5}):
        with pytest.raises(AssertionError):
            assert_holds(kb_command.MadeJson, wrong)


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


class Indexes(TypedDict):
    """What `realm kb info` says last."""

    indexes: list[VectorsInfo]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    def say(*words: object) -> dict[str, Any]:
        assert cli.main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return say


def test_what_a_knowledge_base_says_and_holds(tiny_kb, tiny_model_folder, tmp_path, said) -> None:
    source, kb = tmp_path / "some.jsonl", tmp_path / "kb"
    texts = [
        {"title": f"Town{n}", "text": f"Town{n} is a city. It was founded in {1000 + n}."} for n in range(4)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in texts) + "no JSON\n")
    named = ["--tokenizer", tiny_kb.folder / "tokenizer", "--tagger", "rules"]
    built = said("kb", "build", source, "--out", kb, *named)
    assert_holds(BuildResult, built, kb_command.SourcesJson)
    (left_out,) = lines(kb / kb_command.LEFT_OUT)
    assert_holds(LeftOut, left_out)
    source.write_text(json.dumps({"title": "U", "text": "Bexley lies on the Tarn."}))
    assert_holds(AddResult, said("kb", "add", source, "--kb", kb), kb_command.SourcesJson)
    assert_holds(DocumentEntry, said("kb", "list", "U", "--kb", kb))
    assert_holds(kb_command.DeletedJson, said("kb", "delete", "Town0", "--kb", kb))
    assert_holds(IndexReport, said("index", "--kb", kb, "--model", tiny_model_folder, "--set", "device=cpu"))
    info = said("kb", "info", "--kb", kb)
    assert_holds(kb_command.FactsJson, info, KnowledgeBaseConfig, Indexes)
    assert len(info["indexes"]) == 1
    assert_holds(kb_command.SoundJson, said("kb", "verify", "--kb", kb))
    assert_holds(SettingsJson, json.loads(Settings(tiny_kb.config, tiny_kb.tokenizer.fingerprint).to_json()))
    assert_holds(kb_command.MadeJson, said("questions", "--kb", kb, "--out", tmp_path / "made"))
    made = [row for part in ("train", "dev") for row in lines(tmp_path / "made" / f"{part}.jsonl")]
    for row in made:
        assert_holds(MadeQuestion, row)
    assert made


def test_what_is_said_of_questions_and_answers(tiny_kb, qa_folder, tiny_model_folder, tmp_path, said) -> None:
    on = ["--kb", tiny_kb.folder, "--set", "device=cpu"]
    asked, out = tmp_path / "q.jsonl", tmp_path / "out.json"
    asked.write_text('{"question": "on which river lies Arden?", "answers": ["Ouse"]}')
    reads, realm_model = ["--model", qa_folder], ["--model", tiny_model_folder]
    assert_holds(ReportJson, said("evaluate", *on, *reads, "--questions", asked, "--out", out))
    assert_holds(ReportFile, json.loads(out.read_text()))
    words = ["--questions", asked, "--method", "bm25", "--out", out]
    assert_holds(ReportJson, said("evaluate", *on, *words))
    assert_holds(ReportFile, json.loads(out.read_text()))
    limits = ["--set", "queries=2", "--set", "read=2"]
    assert_holds(ProbeJson, said("probe", *on, *realm_model, *limits, "--out", out))
    assert_holds(ProbeFile, json.loads(out.read_text()))
    assert_holds(AnswersJson, said("answer", "on which river lies Arden?", *on, *reads))
    sentence = "Arden lies on the [MASK]."
    assert_holds(FilledJson, said("fill", sentence, *on, *realm_model))
    assert_holds(FilledJson, said("fill", sentence, *on, *realm_model, "--target", "salt"))
    bm25 = ["--method", "bm25", "--questions", asked, "--out", out]
    assert cli.main([*map(str, ["retrieve", "--kb", tiny_kb.folder, *bm25])]) == 0
    for row in lines(out):
        assert_holds(RetrievedJson, row)


class Took(TypedDict):
    """What a stage that is complete remembers besides."""

    seconds: float


class Line(TypedDict):
    """What every line of metrics.jsonl has."""

    step: int
    seconds: float
    loss: float | None
    retrieval_utility: float | None
    null_probability: float | None
    index_age: float | None


class Remembered(TypedDict):
    """What a stage remembers beside its settings."""

    stage: str
    kb: str
    held_out: float
    passage_tokens: int
    init: str


def test_what_a_training_run_writes_and_its_model_remembers(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    kept: dict[str, Any] = {}
    write = loop.write_json

    def keep(path: Path, value: Any) -> None:
        kept[Path(path).name] = value
        write(path, value)

    monkeypatch.setattr(loop, "write_json", keep)
    words = ["ict", "--kb", tiny_kb.folder, "--init", tiny_model_folder, "--out", tmp_path / "ict"]
    words += ["--config", "tiny", "--set", "steps=2", "--set", "log_every=1", "--set", "batch_size=4"]
    assert cli.main([*map(str, words)]) == 0
    assert_holds(IctConfig, kept["settings.json"], Remembered)
    rows = lines(tmp_path / "ict" / "metrics.jsonl")
    assert len(rows) >= 2 and set(WATCHED) < set(Line.__annotations__)
    for row in rows:
        assert_holds(Line, {name: row[name] for name in Line.__annotations__})
        assert all(isinstance(value, int | float | None) for value in row.values())
    manifest = json.loads((tmp_path / "ict" / "realm.json").read_text())
    assert_holds(SummedManifest, manifest)
    assert_holds(Lengths, manifest["lengths"])
    assert_holds(EmbedderConfig, manifest["embedder"])
    assert_holds(IctConfig, manifest["stages"][-1], Remembered, Took)
