"""Makes a workspace from documents. These are the steps of a fit:

1. read     reads the documents of the sources into memory
2. build    builds the knowledge base, or updates an existing knowledge base (`realm.workspace.sync`)
3. index    embeds the passages with the start model; after this step, the workspace can answer questions
4. adapt    adapts the start model to the documents, for a limited time (`realm.train.adapt`)
5. judge    compares the adapted model with the start model on queries made from the documents (`realm.workspace.judging`),
            and keeps the better model
6. examples answers questions that were made from the documents, and shows three, first those with the expected answer

A fit continues an interrupted fit, because the files on disk show which steps are complete:

    WORKSPACE/parsed.sqlite       what takes long to read, such as text of PDF files: from step 1 to step 6
    WORKSPACE/kb/                 exists after step 2 (kb.building during step 2)
    WORKSPACE/documents.json      ids of the documents that came from the sources
    WORKSPACE/questions.jsonl     exists after step 3: the made questions for step 5
    WORKSPACE/model/              after step 3 the start model, after step 5 the better model
    WORKSPACE/adapted/            exists from step 4 to step 5 (adapted.training during step 4)
    WORKSPACE/report.json         exists after step 3; updated after steps 5 and 6
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from realm import __version__
from realm.documents.reading import stamp
from realm.errors import InputError, OtherSettings, shortened, writing
from realm.files import write_json, write_json_lines
from realm.folders import KB, LOCK, one_writer, only_holder, remove, replace_folder, restore
from realm.index.embedding import IndexConfig
from realm.index.versions import build_index
from realm.kept_values import PARSED, database_files, remove_database
from realm.model.folder import Model, copy_model, load_model
from realm.model.manifest import is_model, read_manifest
from realm.progress import duration
from realm.qa.answers import Answer, RankedPassage
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.questions import MadeQuestion, make_questions
from realm.settings import checked
from realm.store.ingest import TABLE
from realm.store.knowledge_base import KnowledgeBase
from realm.store.tables.table import newest_version
from realm.train import adapt
from realm.workspace import judging
from realm.workspace.examples import SHOWN, drawn, right_first
from realm.workspace.folder import Workspace
from realm.workspace.report import (
    MODEL,
    REPORT,
    TESTS,
    AdaptationJson,
    ExampleJson,
    FitJson,
    TestJson,
    read_report,
    up_to_date,
)
from realm.workspace.settings import FitConfig
from realm.workspace.sources import WATCH_LOCK, source_names, watched_documents
from realm.workspace.sync import Changes, SourceDocuments, Sync, read_sources

ADAPTED = "adapted"
QUESTIONS = "questions.jsonl"
ADAPT_AGAIN = 0.25
"""A fit adapts again if more than this share of the passages was added or removed since the last adaptation."""
FACTS = 1000
"""Largest number of masked facts, from held-out passages, on which the models are compared."""
_log = logging.getLogger(__name__)


def fit(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    drop: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] = (),
    minutes: float | None = None,
    start: str | os.PathLike[str] | None = None,
    strict: bool = False,
    config: FitConfig | None = None,
) -> Workspace:
    """Makes a workspace from documents, or updates an existing workspace. Returns the open workspace.

        manual = realm.fit(["docs/"], "manual")
        print(manual.answer("when does the warranty end?").text)

    Args:
        sources: files, folders, and `package:` corpora.
        out: the folder of the workspace. If the folder exists, the workspace is updated with files that were added, changed or
            removed, or an interrupted fit continues.
        drop: sources of an earlier fit whose documents are deleted.
        minutes: time limit of the adaptation (default 10). With 0, the model is not adapted.
        start: the start model (default `package:realm-small`).
        strict: if true, a file that cannot be read is an error; otherwise such a file is left out.
        config: all settings; the arguments `minutes` and `start` override the settings of the same names.

    Raises:
        InputError: a source, a setting or the folder cannot be used. The message is one line.
    """
    config = FitConfig() if config is None else checked(FitConfig, config)
    config = replace(
        config,
        minutes=config.minutes if minutes is None else minutes,
        start=config.start if start is None else os.fspath(start),
    )
    run(Path(out), _listed(sources), checked(FitConfig, config), strict, _listed(drop))
    return Workspace(out)


def _listed(sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> list[str]:
    several = [sources] if isinstance(sources, str | os.PathLike) else sources
    return [os.fspath(one) for one in several]


def run(
    folder: Path, sources: Sequence[str], config: FitConfig, strict: bool = False, dropped: Sequence[str] = ()
) -> FitJson:
    """Does the same as `fit`, but returns the report and does not open the workspace."""
    if found := up_to_date(folder, sources, config, dropped):
        return found
    sources, dropped = source_names(sources), source_names(dropped)
    _check_folder(folder)
    report = read_report(folder)
    for one in dropped:
        if one not in (report["sources"] if report is not None else ()) and not watched_documents(
            folder, [one]
        ):
            _log.warning("%s is no source of %s: nothing of it is deleted", one, folder)
    with ExitStack() as stack:
        if dropped and folder.is_dir():
            refusal = f"a source cannot be dropped while `realm watch` runs for {folder}: end it first"
            stack.enter_context(only_holder(folder / WATCH_LOCK, refusal))
        return _run(folder, sources, dropped, config, strict)


def _run(
    folder: Path, sources: Sequence[str], dropped: Sequence[str], config: FitConfig, strict: bool
) -> FitJson:
    seconds: dict[str, float] = {}
    with ExitStack() as stack:

        def lock() -> None:
            waiting = f"{folder}: waiting for another fit to end"
            stack.enter_context(one_writer(folder, lambda: _log.info(waiting)))

        start, exists = load_model(config.start, reader=False), folder.is_dir()
        if exists:
            # At its end, another fit removes the database in which this fit keeps what it reads.
            lock()
            if found := up_to_date(folder, sources, config, dropped):
                return found
        stamped = stamp(sources, (folder,))
        with _timed("read", seconds):
            read = read_sources(folder, sources, config, strict)
        if not exists:  # a fit that fails before this line leaves no folder, unless it has kept something
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            lock()
            # Meanwhile, another fit or `realm watch` can have added a file whose documents this fit would delete.
            if (now := stamp(sources, (folder,))) != stamped:
                stamped = now
                with _timed("read", seconds):
                    read = read_sources(folder, sources, config, strict)
        return _Fit(folder, sources, dropped, config, start, seconds).run(read, stamped)


class _Fit:
    """The steps of one fit."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[str],
        dropped: Sequence[str],
        config: FitConfig,
        start: Model,
        seconds: dict[str, float],
    ):
        self.folder, self.sources, self.dropped = folder, sources, dropped
        self.config, self.start = config, start
        self.seconds = seconds
        self.kb_folder, self.model, self.adapted = (folder / name for name in (KB, MODEL, ADAPTED))
        for part in (self.kb_folder, self.model, self.adapted):
            restore(part)
        self.before = read_report(folder)

    def run(self, read: SourceDocuments, stamped: str) -> FitJson:
        with _timed("build", self.seconds):
            changes = Sync(self.folder, self.sources, self.dropped, self.config, self.start).run(read)
        kb = KnowledgeBase.open(self.kb_folder)
        with _timed("index", self.seconds):
            same_start = self._put_start()
            build_index(kb, str(self.model), IndexConfig(device=self.config.device))
        report = self._report(read, kb, changes, same_start)
        self._write(report)
        spent = duration(sum(self.seconds.values()))
        _log.info('%s answers now, after %s: realm answer "..." --in %s', self.folder, spent, self.folder)
        made = make_questions(kb)
        due = self._is_due(report["adaptation"], len(kb))
        if due or not report["tests"]:
            report = self._judged(report, kb, made, due)
            self._write(report)
        self._settle(report["adaptation"])
        with _timed("examples", self.seconds):
            examples = _examples(self.kb_folder, self.model, made, self.config.device)
        version = newest_version(self.kb_folder / TABLE)
        assert version is not None
        report = {**report, "stamp": stamped, "kb_version": version, "examples": examples}
        with suppress(OSError):
            remove_database(self.folder / PARSED)
        self._write(report)
        return report

    def _put_start(self) -> bool:
        """Copies the start model into the workspace, unless the workspace has this model or one adapted from this model.

        Returns whether the workspace already had the start model or a model adapted from the start model.
        """
        if is_model(self.model):
            mine, starts = read_manifest(self.model), read_manifest(self.config.start)
            stages = [stage for stage in mine["stages"] if stage["stage"] != "adapt"]
            if (mine["passage_fingerprint"], stages) == (starts["passage_fingerprint"], starts["stages"]):
                return True
            _log.info("%s: the fit starts again with the new start model %s", self.folder, self.config.start)
        copy_model(self.config.start, self.model)
        return False

    def _is_due(self, done: AdaptationJson | None, passages: int) -> bool:
        """Whether to adapt: the first time, if the time limit is longer than before, and if many passages have changed."""
        if self.config.minutes == 0:
            return False
        if done is None or self.config.minutes > done["minutes"]:
            return True
        if done["changed"] > ADAPT_AGAIN * passages:
            _log.info(
                "%s passages were added or removed, so the model is judged again", f"{done['changed']:,}"
            )
            return True
        return False

    def _judged(self, report: FitJson, kb: KnowledgeBase, made: Sequence[MadeQuestion], due: bool) -> FitJson:
        """The report with the recall of BM25, of the start model and, if an adaptation is due, of the adapted model."""
        config, device = self.config, self.config.device
        asked = judging.drawn(made, config.questions)
        write_json_lines(self.folder / QUESTIONS, (question._asdict() for question in asked))
        queries = judging.Queries.draw(kb, asked, self.start.lengths.query, FACTS)
        adapts = due and queries.enough
        if adapts:
            with _timed("adapt", self.seconds):
                self._make_adapted(kb)
        with _timed("judge", self.seconds):
            words = judging.ranks_by_bm25(kb, queries)
            start = judging.ranks_of(config.start, kb, queries, device, "judge the start model")
            adapted = None
            if adapts:
                adapted = judging.ranks_of(str(self.adapted), kb, queries, device, "judge the adapted model")
            tests = judging.tests_of(words, start, adapted)
        return {**report, "tests": tests, "adaptation": self._adaptation(tests, queries, adapts)}

    def _adaptation(
        self, tests: dict[str, TestJson], queries: judging.Queries, adapted: bool
    ) -> AdaptationJson | None:
        if self.config.minutes == 0:
            return None
        kept, why = False, queries.too_few
        if adapted:
            differences = {TESTS[name]: test["difference"] for name, test in tests.items()}
            kept, why = judging.verdict({name: d for name, d in differences.items() if d is not None})
        return {"minutes": self.config.minutes, "kept": kept, "why": why, "changed": 0}

    def _make_adapted(self, kb: KnowledgeBase) -> None:
        config = adapt.AdaptConfig(minutes=self.config.minutes, device=self.config.device)
        if is_model(self.adapted):
            last = read_manifest(self.adapted)["stages"][-1]
            made_of = last.get("kb"), last.get("init"), last.get("minutes")
            if made_of == (kb.fingerprint, self.config.start, config.minutes):
                return  # an earlier fit was interrupted between adapting and judging
            remove(self.adapted)
        _log.info(
            "adapting %s to the documents for at most %g min; after Ctrl-C, the same command continues",
            self.config.start, config.minutes,
        )  # fmt: skip
        try:
            adapt.train(kb, self.adapted, config, self.config.start)
        except OtherSettings:
            _log.info(
                "the interrupted adaptation had other documents or settings: the adaptation starts again"
            )
            remove(self._training)
            adapt.train(kb, self.adapted, config, self.config.start)

    @property
    def _training(self) -> Path:
        return self.adapted.with_name(f"{ADAPTED}.training")

    def _settle(self, adaptation: AdaptationJson | None) -> None:
        """Puts the better model into WORKSPACE/model. If a fit was killed before this step, the next fit repeats the step."""
        if adaptation is None:
            return
        if adaptation["kept"] and is_model(self.adapted):
            replace_folder(self.adapted, self.model)
        elif not adaptation["kept"] and self._is_adapted():
            copy_model(self.config.start, self.model)
        remove(self.adapted)
        remove(self._training)

    def _is_adapted(self) -> bool:
        """Whether the model of the workspace is an adapted model."""
        return any(stage["stage"] == "adapt" for stage in read_manifest(self.model)["stages"])

    def _report(
        self, read: SourceDocuments, kb: KnowledgeBase, changes: Changes, same_start: bool
    ) -> FitJson:
        """The report after step 3, with the tests and the adaptation of the last fit if the start model is still the same."""
        before = self.before if same_start else None
        adaptation = before["adaptation"] if before is not None else None
        if adaptation is not None:
            adaptation = {**adaptation, "changed": adaptation["changed"] + changes.passages}
        return {
            "version": __version__,
            "settings": asdict(self.config),
            "sources": list(self.sources),
            "stamp": "",  # set when the fit is complete
            "documents": kb.document_count,
            "passages": len(kb),
            "left_out": dict(read.left_out.reasons.most_common()),
            "kb_version": 0,
            "seconds": self.seconds,
            "tests": before["tests"] if before is not None and self._has_sources(before) else {},
            "adaptation": adaptation,
        }

    def _has_sources(self, before: FitJson) -> bool:
        """Whether no source was dropped since the report; otherwise its tests may be about documents that are gone."""
        return set(before["sources"]) <= set(self.sources)

    def _write(self, report: FitJson) -> None:
        rounded = {name: round(seconds, 1) for name, seconds in self.seconds.items()}
        report["seconds"] = rounded
        write_json(self.folder / REPORT, report)


def _check_folder(folder: Path) -> None:
    """Raises InputError if the folder exists and is not a workspace."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, but a workspace is a folder")
    parsed = database_files(folder / PARSED)
    names = {path.name for path in folder.iterdir() if path not in parsed} - {LOCK}
    if names and not names & {KB, f"{KB}.building", REPORT}:
        raise InputError(f"{folder} exists and is not a workspace: use another folder")


def _examples(kb: Path, model: Path, made: Sequence[MadeQuestion], device: str) -> list[ExampleJson]:
    """Up to `SHOWN` of the made questions, drawn at random from different documents, each with its best answer.

    Questions that are answered as expected are preferred.
    """
    asked = drawn(made)
    if not asked:
        return []
    answerer = Answerer.load(str(kb), str(model), AnswerConfig(device=device))
    if answerer.model.span_reader is None:
        return [_example(one, answerer.passages(one.question, 1)[0]) for one in asked[:SHOWN]]
    chosen = right_first(answerer, asked)[:SHOWN]
    return [_example(one, answers.answers[0], answers.found) for one, answers in chosen]


def _example(made: MadeQuestion, found: Answer | RankedPassage, is_found: bool | None = None) -> ExampleJson:
    read = isinstance(found, Answer)
    passage = found.passage if isinstance(found, Answer) else found
    return {
        "question": made.question,
        "expected": made.answers[0],
        "answer": found.text if read else None,
        "probability": found.probability if read else None,
        "found": is_found,
        "title": passage.title,
        "evidence": found.evidence()
        if isinstance(found, Answer)
        else shortened(" ".join(found.text.split())),
    }


@contextmanager
def _timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - began
