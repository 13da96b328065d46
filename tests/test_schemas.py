"""Every JSON that the project writes holds exactly what its type says, and no JSON is written without one."""

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pytest

import realm
from realm import cli
from realm.checksums import CHECKSUMS
from realm.cli import documents as documents_command
from realm.cli import knowledge_base as kb_command
from realm.cli import questions as questions_command
from realm.cli.converting import CompactJson, MadeFolderJson
from realm.documents.reading import LEFT_OUT, LeftOut
from realm.hub import encoder_folder
from realm.index.versions import IndexReport
from realm.interop.blocks import ConvertedJson
from realm.interop.blocks import ExportedJson as ExportedCheckpointJson
from realm.model.embedder import EmbedderConfig
from realm.model.manifest import HELD_OUT, HeldOutFile, SummedManifest
from realm.qa.answers import AnswersJson
from realm.qa.filling import FilledJson
from realm.qa.probe import ProbeFile, ProbeJson
from realm.qa.question_sets import RetrievedJson
from realm.qa.scoring.evaluation import ReportFile, ReportJson
from realm.questions import MadeQuestion
from realm.store.add import AddResult
from realm.store.export import ExportedJson
from realm.store.ingest import TABLE, BuildResult, ReadSoFar
from realm.store.knowledge_base import DocumentEntry
from realm.store.merged import MERGED, MergedLine
from realm.store.settings import KnowledgeBaseConfig, Settings, SettingsJson
from realm.store.tables.table import open_table
from realm.store.vectors import VectorsInfo
from realm.tokens.layouts import Lengths
from realm.train import run_folder
from realm.train.adapt import AdaptConfig
from realm.train.finetune import FinetuneConfig, FinetunedFrom
from realm.train.ict import IctConfig
from realm.train.loop import StartedFrom
from realm.train.metrics import REQUIRED
from realm.train.mlm import MlmConfig
from realm.train.pretrain import PretrainConfig, PretrainedFrom
from tests.interop.reference_environment import FIXTURES
from tests.qa.conftest import qa_folder
from tests.schemas import assert_holds

__all__ = ["qa_folder"]

WRITERS = {
    "cli/arguments.py report_outcomes": ["evaluate, probe"],
    "cli/arguments.py report": ["what each command reports"],
    "cli/arguments.py settings": ["a string of TOML, which is read again"],
    "cli/demo.py _demo": ["report.json of either demo: tests/demo"],
    "cli/documents.py _list": ["kb list"],
    "cli/questions.py _questions": ["made questions"],
    "cli/documents.py _preview": ["kb preview"],
    "cli/documents.py _plain_field": ["a value of a field, printed"],
    "store/export.py _write_json_lines": ["kb export"],
    "store/export.py _cells": ["a value in a column of texts"],
    "distributed.py check_machine_names": ["a value for the other processes, which read it again"],
    "text/fields.py clean_fields": ["fields, which are read again"],
    "text/fields.py column_value": ["a list or an object in a column of texts"],
    "text/kept_names.py _encoded": ["annotations: tests/text/test_kept_names.py"],
    "qa/kept_answers.py _encoded": ["an answer: tests/qa/test_kept_answers.py"],
    "text/fields.py to_json": ["fields of any names: tests/store/test_fields.py"],
    "model/manifest.py set_calibration": ["realm.json"],
    "model/tensor_files.py save_tensors": ["what a compact file takes: tests/model/test_compact.py"],
    "settings.py config_from": ["settings, to be checked: never written"],
    "files.py read_json": ["what was read, to be checked: never written"],
    "files.py write_json": ["the writer itself"],
    "files.py write_json_lines": ["the writer itself"],
    "questions/review.py Review._write": ["accepted and rejected questions: tests/questions/test_review.py"],
    "demo/__init__.py run": ["report.json: tests/demo/test_demo.py"],
    "demo/__init__.py _check_settings": ["settings.json: tests/demo/test_demo.py"],
    "demo/stages.py DemoRun._write_later": ["documents: tests/demo/test_demo.py"],
    "stages/runner.py _run": ["a report, copied"],
    "demo/from_text/__init__.py _run_corpus": ["report.json: tests/demo/test_from_text.py"],
    "stages/runner.py Record.timing": ["stages.json: tests/demo/test_from_text.py"],
    "model/bert_files.py save_bert": ["transformers' config.json: tests/model/test_bert.py loads it there"],
    "model/folder.py Model.compute_passage_fingerprint": ["what a fingerprint is of: never written"],
    "model/manifest.py weights_checksum": ["what a checksum is of: never written"],
    "model/manifest.py manifest_checksum": ["what a checksum is of: never written"],
    "checksums.py record_checksums": ["checksums.json"],
    "model/folder.py _write": ["held_out.json", "realm.json"],
    "interop/export.py write_checkpoint": ["transformers' config.json: tests/interop loads it there"],
    "interop/export.py write_safetensors": ["its header: tests/interop loads it there"],
    "interop/export.py write_tokenizer": ["transformers' files: tests/interop loads them there"] * 2,
    "interop/object_storage/copying.py _publish": ["copy.json: tests/interop/object_storage/test_copying.py"],
    "interop/object_storage/copying.py pull": ["pulled.json: tests/interop/object_storage/test_copying.py"],
    "interop/sharing.py card": ["numbers in the text of a model card"],
    "interop/sharing.py write_hub": ["transformers' config.json: tests/interop/test_sharing.py"],
    "interop/as_sentence_transformers.py write_sentence_transformers": [
        "its files: tests/interop/test_sharing.py loads them there"
    ]
    * 3,
    "interop/as_sentence_transformers.py _write_tower": ["the same"],
    "interop/as_sentence_transformers.py _write_tower.add": ["the same"],
    "interop/as_sentence_transformers.py _write_words": ["the same"],
    "qa/question_sets.py retrieve_to_file": ["retrieve"],
    "qa/predictions.py write_predictions": ["predictions: tests/qa/test_predictions.py"],
    "systems/knn_lm.py measure": ["report.json: what the command prints, tests/systems/test_knn_lm.py"],
    "systems/knn_lm.py _write_datastore": ["written.json, which is read again: tests/systems/test_knn_lm.py"],
    "folders.py make_once": [
        "what a folder was made of: test_graph.py, test_drqa.py, test_knn_lm.py of tests/systems"
    ],
    "systems/drqa.py Vocabulary.save": ["words.json: a list of words"],
    "compare/table.py run": [
        "data.json: tests/compare/test_table.py",
        "the same",
        "table1.json: tests/compare/test_table.py",
    ],
    "compare/table.py _write_documents": [
        "documents that `realm kb build` reads: tests/compare/test_table_data.py"
    ],
    "compare/table.py _write_questions": ["questions: tests/compare/test_table.py reads them"],
    "cli/comparing.py _table": ["table1.json, printed"],
    "systems/system.py SystemModel.save": ["system.json: tests/systems/test_system.py"],
    "store/schema.py links_digest": ["what a digest is of: never written"],
    "store/settings.py Settings.to_json": ["what a knowledge base says about itself"],
    "store/ingest.py _in_few_files": ["how far a build has read, in its commits"],
    "store/ingest.py commit_rows": ["the same"],
    "store/ingest.py _commit": ["the same"],
    "search/postgres_table.py _digest": ["what a hash is of: never written"],
    "search/postgres_table.py Table.describe": [
        "what a table says about itself: tests/search/test_postgres.py"
    ],
    "search/postgres_table.py Table.put": ["fields of any names: tests/search/test_postgres.py"],
    "store/schema.py state_of": ["what a hash is of: never written"],
    "store/merged.py change_merged": ["merged.jsonl"],
    "store/merged.py write_merged": ["merged.jsonl"],
    "store/vectors.py schema_of": ["what an index says about itself"],
    "serve/app.py _stream": ["answers and problems: tests/serve/test_schema.py, against OpenAPI"] * 2,
    "serve/feedback.py Feedback.add": ["what an id is made of: never written"],
    "serve/feedback.py Feedback._append": ["feedback: tests/serve/test_feedback.py"],
    "serve/client.py Client._open": ["requests: tests/serve/test_schema.py"],
    "documents/child_process.py ReaderProcess.read": ["requests to its own child"],
    "documents/child_process.py main.answer": ["the child's answers: tests/documents/test_pdf_word_epub.py"],
    "documents/kept_records.py KeepingReader.read": [
        "a value of its own database: tests/documents/test_kept_records.py"
    ],
    "documents/kept_records.py _key": ["what a hash is of: never written"],
    "documents/kept_blocks.py _encoded": [
        "a value of its own database: tests/documents/test_parallel_reading.py"
    ],
    "train/refresh/cached_states.py _name": ["what a hash is of: never written"],
    "documents/kept_blocks.py _hash": ["what a hash is of: never written"],
    "documents/wikipedia/dumps.py _Workers._answer": [
        "a line to a process: tests/documents/wikipedia/test_dumps.py"
    ],
    "documents/wikipedia/dumps.py main": ["a line from a process: tests/documents/wikipedia/test_dumps.py"],
    "tokens/tokenizer.py _fingerprint": ["what a fingerprint is of: never written"],
    "documents/reading.py ReadingReport.keep": ["left_out.jsonl"],
    "workspace/fit.py _Fit._judged": ["made questions: tests/workspace/test_fit.py reads them"],
    "workspace/fit.py _Fit._write": ["report.json: tests/workspace/test_fit.py"],
    "workspace/sync.py Sync._write_ids": ["documents.json: tests/workspace/test_fit.py"],
    "workspace/watch.py Watcher._write": ["watched.json: tests/workspace/test_watch.py"],
    "workspace/sources.py forget_watched": ["watched.json: tests/workspace/test_watch.py"],
    "train/run_folder.py RunFolder.open": ["settings.json"],
    "train/metrics.py MetricsLog.write": ["metrics.jsonl"],
}
"""The calls that write JSON, by file and function, and what each writes."""


def writers(file: Path) -> Iterator[str]:
    """The functions of a file that write JSON, once for each call; what is only made to be read again is no writing."""

    def walk(node: ast.AST, inside: str) -> Iterator[str]:
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called == "json.loads":
            return
        if called in ("write_json", "write_json_lines", "json.dump", "json.dumps"):
            yield inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{inside}.{node.name}" if inside else node.name
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    text = file.read_text(encoding="utf-8")
    return walk(ast.parse(text), "") if "write_json" in text or "json.dump" in text else iter(())


def test_all_json_that_is_written_has_a_test() -> None:
    root = Path(realm.__file__).parent
    found = Counter(
        f"{file.relative_to(root)} {function}" for file in root.rglob("*.py") for function in writers(file)
    )
    known = {function: len(calls) for function, calls in WRITERS.items()}
    assert found == known, "say what the call writes, and add a type and its check"


def test_the_check_refuses_what_is_missing_too_much_or_of_another_type() -> None:
    made = {"train": 3, "dev": 1}
    assert_holds(questions_command.MadeJson, made)
    for wrong in ({"train": 3}, made | {"test": 1}, made | {"dev": "1"}, made | {"dev": 1.5}):
        with pytest.raises(AssertionError):
            assert_holds(questions_command.MadeJson, wrong)


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


class Indexes(TypedDict):
    """What `realm kb info` says last."""

    indexes: list[VectorsInfo]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    def say(*words: object) -> dict[str, Any]:
        assert cli.main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return say


def test_json_of_a_knowledge_base_has_its_types(tiny_kb, tiny_model_folder, tmp_path, said) -> None:
    source, kb = tmp_path / "some.jsonl", tmp_path / "kb"
    texts = [
        {"title": f"Town{n}", "text": f"Town{n} is a city. It was founded in {1000 + n}."} for n in range(4)
    ]
    twice = [*texts, texts[1]]
    source.write_text("".join(json.dumps(row) + "\n" for row in twice) + "no JSON\n")
    named = ["--tokenizer", tiny_kb.folder / "tokenizer", "--tagger", "rules"]
    built = said("kb", "build", source, "--out", kb, *named)
    assert_holds(BuildResult, built, kb_command.SourcesJson)
    (left_out,) = lines(kb / LEFT_OUT)
    assert_holds(LeftOut, left_out)
    (merged,) = lines(kb / MERGED)
    assert_holds(MergedLine, merged)
    assert_holds(ReadSoFar, read_so_far(kb))
    source.write_text(json.dumps({"title": "U", "text": "Bexley lies on the Tarn.", "year": 2020}))
    assert_holds(AddResult, said("kb", "add", source, "--kb", kb), kb_command.SourcesJson)
    assert_holds(DocumentEntry, said("kb", "list", "U", "--kb", kb))
    assert_holds(documents_command.ShownJson, said("kb", "show", "U", "--kb", kb))
    assert_holds(documents_command.PreviewedJson, said("kb", "preview", source, *named))
    assert cli.main(["kb", "export", "--kb", str(kb), "--out", str(tmp_path / "export.jsonl")]) == 0
    for row in lines(tmp_path / "export.jsonl"):
        assert_holds(ExportedJson, row)
    assert_holds(kb_command.DeletedJson, said("kb", "delete", "Town1", "--kb", kb))
    changed = lines(kb / MERGED)[1:]
    assert [line["state"] for line in changed] == [None]  # the other one holds the text now
    for line in changed:
        assert_holds(MergedLine, line)
    assert_holds(IndexReport, said("index", "--kb", kb, "--model", tiny_model_folder, "--set", "device=cpu"))
    info = said("kb", "info", "--kb", kb)
    assert_holds(kb_command.FactsJson, info, KnowledgeBaseConfig, Indexes)
    assert len(info["indexes"]) == 1
    assert_holds(kb_command.SoundJson, said("kb", "verify", "--kb", kb))
    assert_holds(SettingsJson, json.loads(Settings(tiny_kb.config, tiny_kb.tokenizer.fingerprint).to_json()))
    assert_holds(questions_command.MadeJson, said("questions", "--kb", kb, "--out", tmp_path / "made"))
    made = [row for part in ("train", "dev") for row in lines(tmp_path / "made" / f"{part}.jsonl")]
    for row in made:
        assert_holds(MadeQuestion, row)
    assert made


def test_json_of_questions_and_answers_has_its_types(
    tiny_kb, qa_folder, tiny_model_folder, tmp_path, said
) -> None:
    on = ["--kb", tiny_kb.folder, "--set", "device=cpu"]
    asked, out = tmp_path / "q.jsonl", tmp_path / "out.json"
    asked.write_text('{"question": "on which river lies Arden?", "answers": ["Ouse"]}')
    reads, realm_model = ["--model", qa_folder], ["--model", tiny_model_folder]
    assert_holds(ReportJson, said("evaluate", *on, *reads, "--questions", asked, "--out", out))
    assert_holds(ReportFile, json.loads(out.read_text()))
    bm25 = ["--kb", tiny_kb.folder, "--method", "bm25", "--questions", asked, "--out", out]
    assert_holds(ReportJson, said("evaluate", *bm25))
    assert_holds(ReportFile, json.loads(out.read_text()))
    limits = ["--set", "queries=2", "--set", "read=2"]
    assert_holds(ProbeJson, said("probe", *on, *realm_model, *limits, "--out", out))
    assert_holds(ProbeFile, json.loads(out.read_text()))
    assert_holds(AnswersJson, said("answer", "on which river lies Arden?", *on, *reads))
    sentence = "Arden lies on the [MASK]."
    assert_holds(FilledJson, said("fill", sentence, *on, *realm_model))
    assert_holds(FilledJson, said("fill", sentence, *on, *realm_model, "--target", "salt"))
    assert cli.main([*map(str, ["retrieve", *bm25])]) == 0
    for row in lines(out):
        assert_holds(RetrievedJson, row)


@pytest.mark.parametrize(
    ("source", "more"),
    [("openqa/old", []), ("embedder/new", ["--encoder", FIXTURES / "encoder" / "new"])],
)
def test_json_of_a_published_checkpoint_has_its_types(source, more, tmp_path, said) -> None:
    made = said("convert", FIXTURES / source, tmp_path / "ours", *more)
    assert_holds(ConvertedJson, made)
    back = said("convert", made["model"], tmp_path / "back", "--to", "huggingface-realm")
    assert_holds(ExportedCheckpointJson, back)
    if "kb" in made:
        assert_holds(ReadSoFar, read_so_far(Path(made["kb"])))


def test_json_of_a_folder_for_others_has_its_types(tiny_model_folder, tmp_path, said) -> None:
    to_hub = ["--to", "hub", "--licence", "mit", "--data", "Towns."]
    assert_holds(MadeFolderJson, said("convert", tiny_model_folder, tmp_path / "hub", *to_hub))
    to_others = ["--to", "sentence-transformers"]
    assert_holds(MadeFolderJson, said("convert", tiny_model_folder, tmp_path / "st", *to_others))
    assert_holds(CompactJson, said("convert", tiny_model_folder, tmp_path / "small", "--to", "compact"))


def read_so_far(kb: Path) -> Any:
    """What the newest commit of a build says."""
    table = open_table(kb / TABLE)
    transaction = table.read_transaction(table.version)
    return json.loads(transaction.transaction_properties["realm.read"])


class Checksums(TypedDict):
    """What checksums.json holds, under one name."""

    files: dict[str, str]


def test_what_lies_beside_an_encoder() -> None:
    packaged = Path(encoder_folder("package:realm-mini"))
    assert_holds(HeldOutFile, json.loads((packaged / HELD_OUT).read_text()))
    assert_holds(Checksums, {"files": json.loads((packaged / CHECKSUMS).read_text())})


class StageRecord(TypedDict):
    """What a run adds to the settings of its stage."""

    stage: str
    seconds: NotRequired[float]
    init_weights: NotRequired[str]


class MetricsLine(TypedDict):
    """What every line of metrics.jsonl holds; each stage adds numbers of its own."""

    step: int
    seconds: float
    loss: float | None
    retrieval_utility: float | None
    null_probability: float | None
    index_age: float | None


STAGES = {
    "mlm": (MlmConfig, StartedFrom, "init", []),
    "ict": (IctConfig, StartedFrom, "init", ["batch_size=4"]),
    "pretrain": (PretrainConfig, PretrainedFrom, "model", ["health.queries=4"]),
    "adapt": (AdaptConfig, StartedFrom, "model", []),
    "finetune": (FinetuneConfig, FinetunedFrom, "model", ["dev_every=1"]),
}


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_training_run_writes_and_its_model_remembers(
    stage, own_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    config, remembered, start, settings = STAGES[stage]
    kept: dict[str, Any] = {}
    write = run_folder.write_json

    def keep(path: Path, value: Any) -> None:
        kept[Path(path).name] = value
        write(path, value)

    monkeypatch.setattr(run_folder, "write_json", keep)
    words = [stage, "--kb", own_kb.folder, "--out", tmp_path / "out", "--config", "tiny"]
    words += [f"--{start}", tiny_model_folder] if stage != "mlm" else []
    if stage == "finetune":
        asked = tmp_path / "q.jsonl"
        asked.write_text('{"question": "on which river lies Arden?", "answers": ["Ouse"]}')
        words += ["--train", asked, "--dev", asked]
    for setting in ["steps=2", "log_every=1", "device=cpu", *settings]:
        words += ["--set", setting]
    assert cli.main([*map(str, words)]) == 0
    assert_holds(config, kept["settings.json"], remembered, StageRecord)
    rows = lines(tmp_path / "out" / "metrics.jsonl")
    assert len(rows) >= 2 and set(REQUIRED) < set(MetricsLine.__annotations__)
    for row in rows:
        assert_holds(MetricsLine, {name: row[name] for name in MetricsLine.__annotations__})
        assert all(isinstance(value, int | float | None) for value in row.values())
    manifest = json.loads((tmp_path / "out" / "realm.json").read_text())
    assert_holds(SummedManifest, manifest)
    assert_holds(Lengths, manifest["lengths"])
    assert_holds(EmbedderConfig, manifest["embedder"])
    assert_holds(config, manifest["stages"][-1], remembered, StageRecord)
    if stage != "finetune":
        assert_holds(HeldOutFile, json.loads((tmp_path / "out" / "encoder" / HELD_OUT).read_text()))
