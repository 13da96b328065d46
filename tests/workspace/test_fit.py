"""A fit: the parts of the workspace, updates after file changes, and continuing after any interruption."""

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import realm
from realm import cli
from realm.documents.child_process import ReaderProcess
from realm.errors import ConflictError, DamagedError, InputError, WriteFailed
from realm.files import write_json_lines
from realm.folders import one_writer
from realm.model.folder import load_model
from realm.model.manifest import read_manifest
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.question_files import read_questions
from realm.qa.question_sets import evaluate_bm25, evaluate_retrieval
from realm.qa.scoring.significance import PairedDifference, paired_difference
from realm.store.knowledge_base import KnowledgeBase, build
from realm.train import loop
from realm.workspace import fit as fit_module
from realm.workspace import judging
from realm.workspace import sync as sync_module
from realm.workspace.fit import run
from realm.workspace.report import FitJson, lines
from realm.workspace.settings import FitConfig
from realm.workspace.sources import DocumentsJson
from tests.conftest import TOWNS
from tests.documents.writers import pdf, word
from tests.schemas import assert_holds
from tests.workspace.conftest import PARTS, Tagger, text_of

WS = Path("towns")


def content(workspace: Path) -> set[tuple[str, str]]:
    return {(passage.document_id, passage.text) for passage in KnowledgeBase.open(workspace / "kb")}


def without_time(report: FitJson) -> dict[str, object]:
    return {name: value for name, value in report.items() if name not in ("seconds", "stamp", "kb_version")}


def saved(workspace: Path = WS) -> FitJson:
    found: FitJson = json.loads((workspace / "report.json").read_text())
    return found


def test_a_fit_reads_the_named_keys_and_refuses_other_names_later(
    config: FitConfig, fresh: Path, light: None
) -> None:
    rows = [{"headline": path.stem, "content": path.read_text()} for path in Path("docs").rglob("*.txt")]
    write_json_lines(Path("towns.jsonl"), rows)
    named = replace(config, minutes=0, title_field="headline", text_field="content")
    run(WS, ["towns.jsonl"], named)
    assert {name for name, _ in content(WS)} == {row["headline"] for row in rows}
    Path("towns.jsonl").touch()
    with pytest.raises(ConflictError, match="made with title_field = 'headline', but this call has '': use"):
        run(WS, ["towns.jsonl"], replace(named, title_field=""))


def test_a_workspace_holds_its_parts_and_a_report_of_its_type(fitted: Path) -> None:
    workspace = fitted / "towns"
    assert {path.name for path in workspace.iterdir()} == PARTS
    report = saved(workspace)
    assert_holds(FitJson, report)
    assert_holds(DocumentsJson, json.loads((workspace / "documents.json").read_text()))
    assert report["documents"] == len(TOWNS) and report["left_out"] == {
        "empty": 1,
        "of a type that is not read": 1,
    }
    assert {name: test["n"] >= 10 for name, test in report["tests"].items()} == {
        "masked_facts": True, "made_questions": True,
    }  # fmt: skip
    assert len(report["examples"]) == 3 == len({example["question"] for example in report["examples"]})


def test_the_questions_that_judged_the_models_are_kept_and_give_the_same_recall(home: Path) -> None:
    asked = read_questions(WS / "questions.jsonl")
    judged = saved()["tests"]["made_questions"]
    assert len(asked) == judged["n"]
    found = evaluate_bm25(KnowledgeBase.open(WS / "kb"), asked).as_dict()["recall"]
    assert [found[k] for k in ("1", "5", "20")] == [judged["bm25"][k] for k in ("1", "5", "20")]
    used = "adapted" if saved()["adaptation"]["kept"] else "start"
    for method, key in (("dense", used), ("hybrid", f"{used}_hybrid")):
        answerer = Answerer.load(str(WS / "kb"), str(WS / "model"), AnswerConfig())
        found = evaluate_retrieval(answerer, asked, method).as_dict()["recall"]
        assert [found[k] for k in ("1", "5", "20")] == [judged[key][k] for k in ("1", "5", "20")]


def test_questions_can_be_made_of_some_documents_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(out: str, *settings: str) -> list[dict[str, str]]:
        words = ["questions", "--in", "towns", "--out", out, "--set", "dev_share=1.0"]
        assert cli.main([*words, *settings]) == 0
        return [json.loads(line) for line in Path(out, "dev.jsonl").read_text().splitlines()]

    of_north = made("north", "--set", "documents=docs/north")
    assert of_north == [one for one in made("all") if one["document_id"].startswith("docs/north")] != []
    assert cli.main(["questions", "--in", "towns", "--out", "none", "--set", "documents=Nobody"]) == 2
    assert 'no sentence in a document whose id or title begins with "Nobody"' in capsys.readouterr().err


def test_a_workspace_answers_with_the_model_that_it_was_judged_with(home: Path) -> None:
    opened = realm.load(WS)
    (example, *_) = saved()["examples"]
    answer = opened.answer(example["question"])
    assert (answer.text, answer.evidence()) == (example["answer"], example["evidence"])
    assert opened.report == saved()


def test_no_source_one_record_and_a_folder_that_cannot_be_made_are_one_line(
    home: Path, config: FitConfig
) -> None:
    one_record: Any = {"title": "A", "text": "B."}
    with pytest.raises(InputError, match="no source is given: name at least one file or folder"):
        run(Path("new"), [], config)
    with pytest.raises(InputError, match="records is one record: give a list of records"):
        realm.load(WS).add(one_record)
    Path("file").touch()
    with pytest.raises(WriteFailed, match="new cannot be written"):
        run(Path("file/new"), ["docs"], config)


def test_the_report_prints_a_table_the_verdict_and_three_questions(fitted: Path) -> None:
    told = lines(saved(fitted / "towns"))
    rows = [line.partition("  ")[0] for line in told[2:7]]
    assert rows == [
        "BM25 (words)",
        "start (vectors)",
        "start + BM25",
        "adapted (vectors)",
        "adapted + BM25",
    ]
    assert sum(line.startswith("Q  ") for line in told) == sum(line.startswith("A  ") for line in told) == 3
    assert any(line.startswith("the workspace uses the ") for line in told)


def test_the_workspace_answers_before_it_is_adapted_and_logs_the_command(
    fresh: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "realm")
    answered: list[str] = []

    def train(*_: object) -> None:
        answered.append(realm.load(WS).answer("when was arden founded?").text)
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_module.adapt, "train", train)
    with pytest.raises(KeyboardInterrupt):
        run(WS, ["docs"], config)
    assert answered
    assert 'realm answer "..." --in towns' in caplog.text
    assert "left out: 1 empty: docs/empty.md" in caplog.text and "towns/kb/left_out.jsonl" in caplog.text


@pytest.mark.usefixtures("light")
def test_a_fit_of_what_has_not_changed_does_nothing_and_needs_no_torch(home: Path, config: FitConfig) -> None:
    before = run(WS, ["docs"], config)  # the copied files have other times
    files = {path: path.stat().st_mtime_ns for path in WS.rglob("*")}
    words = ["fit", "docs/", "--out", "towns", "--start", config.start]
    for setting in ("tagger=tiny", "held_out=0.3", "device=cpu"):
        words += ["--set", setting]
    code = f"import sys; from realm import cli; print(cli.main({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = f"towns is up to date: {len(TOWNS)} documents, {before['passages']} passages; nothing to do\n"
    assert done.stdout == told + "0 False\n"
    assert {path: path.stat().st_mtime_ns for path in WS.rglob("*")} == files


def test_the_number_of_documents_is_that_of_the_knowledge_base(
    config: FitConfig, fresh: Path, light: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    Path("docs/copy.jsonl").write_text(
        '{"title": "A", "text": "A is in B."}\n' * 3 + '{"title": "C", "text": " "}\n'
    )
    report = run(WS, ["docs"], replace(config, minutes=0))
    assert report["documents"] == len(TOWNS) + 1 == len(KnowledgeBase.open(WS / "kb").documents())
    assert f"{len(TOWNS) + 1} documents, " in caplog.text
    assert "(3 other documents without text, or with the text of another)" in caplog.text


@pytest.mark.usefixtures("light")
def test_a_file_that_changes_before_the_fit_has_the_lock_is_read_again(
    home: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any, **more: Any) -> object:
        """Runs after the sources were read, and before the lock is taken."""
        Path("docs/north/Yarm.txt").write_text(text_of("Yarm", 1492))
        return load_model(*given, **more)

    monkeypatch.setattr(fit_module, "load_model", load)
    report = run(WS, ["docs"], config)
    assert any("Yarm was founded in 1492" in text for _, text in content(WS))
    assert report["documents"] == len(TOWNS) + 1
    assert run(WS, ["docs"], config) == report  # nothing has changed since


@pytest.mark.usefixtures("light")
def test_a_fit_adds_replaces_and_deletes_what_changed_in_the_files(
    home: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = realm.load(WS)
    opened.add([{"title": "Note", "text": "A note of the user's own."}])
    monkeypatch.setattr(
        fit_module.adapt, "train", lambda *_: pytest.fail("a small change needs no adaptation")
    )
    Path("docs/Oakham.txt").write_text(text_of("Oakham", 1848))
    Path("docs/Arden.txt").write_text(text_of("Arden", 1066))
    Path("docs/north/Bexley.txt").unlink()
    os.rename("docs/Corvo.txt", "docs/north/Corvo.txt")
    before = saved()
    report = run(WS, ["docs"], config)
    assert {"docs/Oakham.txt", "docs/north/Corvo.txt", "Note"} <= {
        document.id for document in opened.documents()
    }
    build(tmp_path / "anew", fit_module.read_sources(WS, ["docs"], config, False).documents,
          KnowledgeBase.open(WS / "kb").config, load_model(WS / "model").tokenizer, Tagger())  # fmt: skip
    anew = {(p.document_id, p.text) for p in KnowledgeBase.open(tmp_path / "anew")}
    assert content(WS) == anew | {("Note", "A note of the user's own.")}
    assert KnowledgeBase.open(WS / "kb").verify() == [] == KnowledgeBase.open(WS / "kb").lagging()
    assert report["tests"] == before["tests"]
    assert report["adaptation"]["changed"] > 0 and "were added or removed since" in "\n".join(lines(report))
    assert opened.delete("Note") == 1
    assert run(WS, ["docs"], config)["documents"] == len(TOWNS)
    assert content(WS) == anew


@pytest.mark.usefixtures("light")
def test_a_text_that_is_mostly_new_is_adapted_to_again(home: Path, config: FitConfig, caplog) -> None:
    caplog.set_level("INFO", "realm")
    for number in range(30):
        Path(f"docs/{number}.txt").write_text(text_of(f"Town{number}", 1200 + number))
    assert run(WS, ["docs"], config)["adaptation"]["changed"] == 0
    assert saved()["tests"]["made_questions"]["n"] > 30
    assert caplog.text.count("so the model is judged again") == 1


@pytest.mark.usefixtures("light")
def test_minutes_are_an_upper_bound_that_may_be_raised(home: Path, config: FitConfig, monkeypatch) -> None:
    minutes = []
    train = fit_module.adapt.train
    monkeypatch.setattr(
        fit_module.adapt, "train", lambda *given: minutes.append(given[2].minutes) or train(*given)
    )
    for asked in (0, 5, 12, 12, 10):
        run(WS, ["docs"], replace(config, minutes=asked))
    assert minutes == [12]


@pytest.mark.usefixtures("light")
def test_without_minutes_nothing_is_adapted_and_the_start_is_measured(fresh: Path, config: FitConfig) -> None:
    report = run(WS, ["docs"], replace(config, minutes=0))
    assert_holds(FitJson, report)
    assert report["adaptation"] is None
    assert [test["adapted"] for test in report["tests"].values()] == [None, None]
    assert read_manifest(WS / "model")["stages"] == read_manifest(config.start)["stages"]
    assert not any(line.startswith("adapted") for line in lines(report))
    assert run(WS, ["docs"], config)["adaptation"]["minutes"] == 10


@pytest.mark.usefixtures("light")
def test_the_better_model_answers_and_stays_until_a_later_one_is_judged(
    home: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stages() -> list[str]:
        return [stage["stage"] for stage in read_manifest(WS / "model")["stages"]]

    assert not saved()["adaptation"]["kept"] and "adapt" not in stages()
    for kept in (True, False):
        monkeypatch.setattr(judging, "verdict", lambda differences, kept=kept: (kept, "because"))
        Path(f"docs/{kept}.txt").write_text(text_of("Oakham", 1848, str(kept)))
        with monkeypatch.context() as patch:
            patch.setattr("realm.workspace.fit.ADAPT_AGAIN", 0.0)
            report = run(WS, ["docs"], config)
        assert (report["adaptation"]["kept"], report["adaptation"]["why"]) == (kept, "because")
        assert ("adapt" in stages()) == kept
        Path(f"docs/{kept}.txt").unlink()
        run(WS, ["docs"], config)  # a small change
        assert ("adapt" in stages()) == kept
        assert {path.name for path in WS.iterdir()} == PARTS


STAGES = {
    "read": (fit_module, "read_sources"),
    "build": (sync_module, "build"),
    "keep": (sync_module.Sync, "_keep"),
    "copy": (fit_module, "copy_model"),
    "index": (fit_module, "build_index"),
    "report": (fit_module._Fit, "_write"),
    "adapt": (loop.TrainRun, "update"),
    "adapted": (loop.TrainRun, "finish"),
    "judge": (judging, "ranks_of"),
    "settle": (fit_module._Fit, "_settle"),
    "examples": (fit_module, "_examples"),
}


def interrupt(stage: str, after: bool, config: FitConfig) -> None:
    """Runs a fit and interrupts it before or after one of its stages."""
    where, name = STAGES[stage]
    whole = getattr(where, name)

    def interrupted(*args: object, **more: object) -> None:
        if after:
            whole(*args, **more)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(WS, ["docs"], config)


def assert_ends_as(fitted: Path, config: FitConfig) -> None:
    """Repeats the call, and compares the workspace with that of an uninterrupted fit."""
    report = run(WS, ["docs"], config)
    assert without_time(report) == without_time(saved(fitted / "towns"))
    assert {path.name for path in WS.iterdir()} == PARTS
    assert read_manifest(WS / "model")["checksums"] == read_manifest(config.start)["checksums"]


def test_a_fit_that_is_interrupted_at_one_stage_after_the_other_ends_with_the_same_workspace(
    fresh: Path, fitted: Path, config: FitConfig
) -> None:
    for stage in STAGES:
        interrupt(stage, after=stage in ("build", "adapted", "settle"), config=config)
    assert_ends_as(fitted, config)


def test_an_interrupted_fit_reads_pdf_and_word_files_only_once(
    fresh: Path, config: FitConfig, light: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    word(Path("docs/letter.docx"), "A letter")
    pdf(Path("docs/report.pdf"), ["The Arden flows to the sea."])
    config = replace(config, minutes=0)
    for stage, after in (("read", True), ("build", True)):
        interrupt(stage, after, config)
        assert (WS / "parsed.sqlite").exists()
    with monkeypatch.context() as patch:
        patch.setattr(ReaderProcess, "read", None)
        report = run(WS, ["docs"], config)
    assert report["documents"] == len(TOWNS) + 2
    assert not list(WS.glob("parsed*"))


def test_a_daemonic_process_can_fit(fresh: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a process, as of a `multiprocessing.Pool`, may start no processes of `multiprocessing`."""
    for name in ("a", "b"):
        word(Path(f"docs/{name}.docx"), name)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert run(WS, ["docs"], replace(config, minutes=0))["documents"] == len(TOWNS) + 2


def test_a_fit_is_complete_only_when_what_it_kept_of_its_files_is_removed(
    fresh: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    word(Path("docs/letter.docx"), "A letter")
    write, seen = fit_module._Fit._write, []

    def noted(self: Any, report: FitJson) -> None:
        seen.append((bool(report["stamp"]), (WS / "parsed.sqlite").exists()))
        write(self, report)

    monkeypatch.setattr(fit_module._Fit, "_write", noted)
    run(WS, ["docs"], replace(config, minutes=0))
    assert set(seen) == {(False, True), (True, False)}


def test_a_file_whose_name_only_begins_as_that_of_a_workspace_is_not_taken_for_one(
    fresh: Path, config: FitConfig
) -> None:
    WS.mkdir()
    (WS / "parsed.sqlite.backup").write_text("mine")
    with pytest.raises(InputError, match="exists and is not a workspace"):
        run(WS, ["docs"], config)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fit_that_is_interrupted_anywhere_ends_with_the_same_workspace(
    stage: str, after: bool, fresh: Path, fitted: Path, config: FitConfig
) -> None:
    interrupt(stage, after, config)
    assert_ends_as(fitted, config)


def test_a_fit_goes_on_although_the_documents_changed_since_it_was_interrupted(
    fresh: Path, config: FitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = []
    commit = sync_module.build.__globals__["_commit"]

    def killed(*args: object) -> object:
        commits.append(1)
        if len(commits) == 2:
            raise KeyboardInterrupt
        return commit(*args)

    with monkeypatch.context() as patch:
        patch.setitem(sync_module.build.__globals__, "_commit", killed)
        patch.setitem(sync_module.build.__globals__, "_commit_size", lambda *_: 4)
        with pytest.raises(KeyboardInterrupt):
            run(WS, ["docs"], config)
    assert (WS / "kb.building").exists()
    Path("docs/Arden.txt").write_text(text_of("Arden", 1066))
    with monkeypatch.context() as patch:  # now in the middle of the adaptation
        patch.setattr(loop.TrainRun, "finish", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(WS, ["docs"], config)
    assert (WS / "adapted.training").exists()
    Path("docs/Corvo.txt").write_text(text_of("Corvo", 1067))
    assert run(WS, ["docs"], config)["adaptation"]["changed"] == 0
    assert any("1066" in text for _, text in content(WS)) and any("1067" in text for _, text in content(WS))


@pytest.mark.usefixtures("light")
def test_a_workspace_inside_its_own_source_is_not_read(fresh: Path, config: FitConfig) -> None:
    first = run(Path("docs/towns"), ["docs"], replace(config, minutes=0))
    assert first["documents"] == len(TOWNS)
    assert run(Path("docs/towns"), ["docs"], replace(config, minutes=0)) == first


@pytest.mark.usefixtures("light")
def test_a_second_fit_of_a_workspace_waits_for_the_first_before_it_reads(
    home: Path, config: FitConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "realm")
    read, asked = fit_module.read_sources, []

    def noted(*given: Any) -> Any:
        asked.append(given)
        return read(*given)

    monkeypatch.setattr(fit_module, "read_sources", noted)
    with ThreadPoolExecutor(1) as other:
        with one_writer(WS):
            running = other.submit(run, WS, ["docs"], config)
            while "towns: waiting for another fit to end" not in caplog.text:
                assert not running.done()
                time.sleep(0.01)
            assert not asked
        assert running.result()["documents"] == len(TOWNS) and len(asked) == 1


@pytest.mark.usefixtures("light")
def test_too_little_text_is_not_adapted_to(fresh: Path, config: FitConfig, monkeypatch) -> None:
    monkeypatch.setattr(judging, "LEAST", 1000)
    monkeypatch.setattr(fit_module.adapt, "train", lambda *_: pytest.fail("adapted"))
    report = run(WS, ["docs"], config)
    assert not report["adaptation"]["kept"] and "needs 1000 masked facts" in report["adaptation"]["why"]
    shutil.rmtree("docs")
    Path("docs").mkdir()
    Path("docs/a.txt").write_text("ein satz ohne namen.")
    report = run(Path("other"), ["docs"], config)
    assert (report["tests"], report["examples"]) == ({}, [])
    assert lines(report) and run(Path("other"), ["docs"], config) == report


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["absent", "--out", "new"], "absent: no such file or folder"),
        (["docs", "--out", "new", "--minutes", "-1"], "is not a number of minutes"),
        (["docs", "--out", "new", "--start", "absent"], "no model at absent"),
        (["docs", "--out", "docs"], "docs exists and is not a workspace"),
        (["docs", "--out", "docs/Arden.txt"], "docs/Arden.txt is a file"),
        (["docs", "--out", "new", "--strict"], "docs/empty.md is empty"),
        (["docs/empty.md", "--out", "new"], "docs/empty.md is empty"),
        (["docs/north", "--out", "towns"], "towns was made from docs too: give all earlier sources"),
        (
            ["docs/north", "--out", "towns", "--drop", "more"],
            "to delete the documents of these sources, give --drop docs;",
        ),
        (["docs/", "--out", "towns", "--drop", "docs"], "docs is a source and is dropped: give it only once"),
        (
            ["docs", "--out", "towns", "--set", "tagger=other"],
            "made with tagger = 'tiny-1', but this call has 'other-1'",
        ),
    ],
)
def test_bad_use_is_one_line_and_changes_nothing(
    words: list[str], says: str, home: Path, config: FitConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    base = ["--start", config.start] if "--start" not in words else []
    for setting in ("tagger=tiny", "held_out=0.3", "device=cpu"):
        base += ["--set", setting]
    assert cli.main(["fit", *base, *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("realm: ") and says in err[-1]
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("light")
def test_another_start_takes_the_place_of_the_model_and_is_indexed(
    home: Path, config: FitConfig, tiny_model_folder: Path, tmp_path: Path, caplog
) -> None:
    """The second start has no span reader, so the examples hold passages only."""
    import torch

    from realm.model.folder import save_model

    caplog.set_level(logging.INFO, "realm")
    other = load_model(tiny_model_folder)
    with torch.no_grad():
        other.embedder.query.projection.bias += 0.5
    save_model(other, tmp_path / "other")
    report = run(WS, ["docs"], replace(config, start="other"))
    assert "starts again with the new start model other" in caplog.text
    assert read_manifest(WS / "model")["passage_fingerprint"] == other.compute_passage_fingerprint()
    assert report["adaptation"]["changed"] == 0
    assert [example["answer"] for example in report["examples"]] == [None] * 3
    assert realm.load(WS).retrieve("when was arden founded?")


@pytest.mark.usefixtures("light")
def test_from_python_sources_are_paths_and_settings_are_arguments(home: Path, config: FitConfig) -> None:
    workspace = realm.fit(Path("docs"), "towns", start=Path(config.start), minutes=3, config=config)
    assert workspace.report["settings"]["minutes"] == 3
    assert workspace.answer("when was arden founded?").text
    with pytest.raises(InputError, match="docs is a source and is dropped"):
        realm.fit("docs", "towns", drop=Path("docs"), config=config)


D = PairedDifference


def difference(points: float, p: float) -> D:
    only_a, only_b = (9, 0) if points > 0 else (0, 9)
    return {"k": 5, "points": points, "low": 0.0, "high": 0.0, "only_a": only_a, "only_b": only_b, "p": p}


@pytest.mark.parametrize(
    ("facts", "questions", "kept"),
    [
        (difference(5.5, 0.001), difference(0.0, 1.0), True),
        (difference(-0.4, 0.8), difference(2.0, 0.01), True),
        (difference(5.5, 0.001), difference(-2.3, 0.21), False),  # what happened on the Factbook
        (difference(5.5, 0.001), difference(-0.9, 0.04), False),
        (difference(5.5, 0.06), difference(1.0, 0.5), False),
        (difference(0.0, 1.0), difference(0.0, 1.0), False),
        (difference(-3.6, 1.0) | {"only_b": 1}, difference(5.5, 0.01), True),  # one query of 28
        (difference(-3.6, 0.1) | {"only_b": 4}, difference(5.5, 0.01), False),
    ],
)
def test_an_adapted_model_is_kept_when_better_on_one_and_not_worse_on_the_other(
    facts, questions, kept
) -> None:
    found, why = judging.verdict({"masked facts": facts, "made questions": questions})
    assert found == kept and why


def test_differences_are_those_of_the_same_queries() -> None:
    import numpy as np

    adapted, start = np.array([1, 5, 6, 0, 2, 3, 1, 4]), np.array([6, 0, 1, 0, 2, 20, 7, 9])
    found = paired_difference(adapted, start)
    assert (found["only_a"], found["only_b"], found["points"]) == (5, 1, 50.0)
    assert found["low"] <= 50 <= found["high"] and 0 < found["p"] < 1


@pytest.mark.parametrize("content", ["[]", "{}", '{"documents": 5}'])
def test_damaged_lists_of_a_workspace_are_one_line(home: Path, config: FitConfig, content: str) -> None:
    (Path("docs") / "new.txt").write_text(text_of("Newby", 1900))
    for name in ("report.json", "documents.json"):
        before = (WS / name).read_text()
        (WS / name).write_text(content)
        with pytest.raises(DamagedError, match=rf"{name} is damaged"):
            run(WS, ["docs"], config)
        (WS / name).write_text(before)
