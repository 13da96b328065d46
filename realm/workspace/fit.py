"""From documents to a workspace that answers questions about them, in one call.

1. read     the sources' documents, into memory
2. build    the knowledge base; where there is one, what is new is added, what changed is replaced, what is gone is deleted
3. index    with the start model: from here on the workspace answers
4. adapt    the start model to the documents, for so many minutes (`realm.train.adapt`)
5. judge    the adapted model against the start, on queries made from the documents (`realm.workspace.judging`), and keep it
            where it is better
6. examples three questions made from the documents, with what the workspace says

How far a fit has come follows from what is on disk, so an interrupted one goes on when the call is repeated.

    WORKSPACE/kb/                 after 2 (while it is made: kb.building)
    WORKSPACE/documents.json      ids of the documents that the sources held: what is deleted when they lack one
    WORKSPACE/questions.jsonl     after 3: the made questions that models are judged by in 5
    WORKSPACE/model/              after 3 the start, after 5 the better one
    WORKSPACE/adapted/            after 4, until 5 (while it is made: adapted.training)
    WORKSPACE/report.json         after 3, and after 5 and 6 again
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from realm import __version__
from realm.errors import ConflictError, InputError, shortened
from realm.files import read_json, write_json, write_json_lines
from realm.folders import LOCK, one_writer, remove, replace_folder, restore
from realm.index.versions import IndexConfig, build_index
from realm.model.folder import Model, copy_model, is_model, load_model, read_manifest
from realm.progress import duration, progress
from realm.qa.answers import Answer, RankedPassage
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.questions import MadeQuestion, make_questions
from realm.store.ingest import TABLE, DocumentsChanged, KnowledgeBaseConfig, build
from realm.store.knowledge_base import KnowledgeBase, changed
from realm.store.tables import newest_version
from realm.text.corpus import Document
from realm.text.readers import ReadingReport, read_documents, stamp
from realm.text.salient_spans import Tagger, load_tagger
from realm.train import adapt
from realm.train.loop import OtherSettings
from realm.workspace import judging
from realm.workspace.folder import Workspace
from realm.workspace.report import (
    KB,
    MODEL,
    REPORT,
    TESTS,
    AdaptationJson,
    ExampleJson,
    FitJson,
    TestJson,
    read_report,
    settings_json,
    source_names,
    up_to_date,
)
from realm.workspace.settings import FitConfig

ADAPTED = "adapted"
DOCUMENTS = "documents.json"
QUESTIONS = "questions.jsonl"
ADAPT_AGAIN = 0.25
"""Share of passages that must be new since the last adaptation before another one is made."""
FACTS = 1000
"""Largest number of masked facts of held-out passages that models are judged by."""
EXAMPLES = 3
SHORT = 90
"""Most characters of an example question, where there are such."""
_log = logging.getLogger(__name__)


class DocumentsJson(TypedDict):
    """What documents.json holds."""

    documents: list[str]


class Read(NamedTuple):
    """What the sources hold."""

    documents: list[Document]
    left_out: ReadingReport


class Changes(NamedTuple):
    """What became of the documents in the knowledge base."""

    added: int
    replaced: int
    deleted: int
    passages: int
    """That came or went."""


def fit(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    minutes: float | None = None,
    start: str | os.PathLike[str] | None = None,
    strict: bool = False,
    config: FitConfig | None = None,
) -> Workspace:
    """Makes a workspace of documents, or brings one up to date -> the workspace, open for questions.

        manual = realm.fit(["docs/"], "manual")
        print(manual.answer("how do I reset the device?").text)

    Args:
        sources: files, folders, and `package:` corpora.
        out: the workspace's folder. An interrupted fit goes on; where files came, changed or went, the workspace follows.
        minutes: how long the adaptation may take (10); 0: the start model answers.
        start: the model that it starts from (`package:realm-small`).
        strict: a file that cannot be read is an error, and is not left out.
        config: all settings; `minutes` and `start` take the place of those in it.

    Raises:
        InputError: bad input, in one line.
    """
    config = config or FitConfig()
    config = replace(
        config,
        minutes=config.minutes if minutes is None else minutes,
        start=config.start if start is None else os.fspath(start),
    )
    listed = [sources] if isinstance(sources, str | os.PathLike) else sources
    run(Path(out), [os.fspath(one) for one in listed], config, strict)
    return Workspace(out)


def run(folder: Path, sources: Sequence[str], config: FitConfig, strict: bool = False) -> FitJson:
    """`fit` without opening the workspace -> its report."""
    if report := up_to_date(folder, sources, config):
        return report
    sources = source_names(sources)
    _check_folder(folder)
    stamped = stamp(sources, folder)
    seconds: dict[str, float] = {}
    with _timed("read", seconds):
        read = _read(folder, sources, config, strict)
    start = load_model(config.start, reader=False)
    folder.mkdir(parents=True, exist_ok=True)
    with one_writer(folder, lambda: _log.info("%s: waiting for another fit to end", folder)):
        return _Fit(folder, sources, config, start, seconds).run(read, stamped)


class _Fit:
    """One call's work on a workspace."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[str],
        config: FitConfig,
        start: Model,
        seconds: dict[str, float],
    ):
        self.folder, self.sources, self.config, self.start = folder, sources, config, start
        self.seconds = seconds
        self.kb_folder, self.model, self.adapted = (folder / name for name in (KB, MODEL, ADAPTED))
        for one in (self.kb_folder, self.model, self.adapted):
            restore(one)
        self.before = read_report(folder)

    def run(self, read: Read, stamped: str) -> FitJson:
        with _timed("build", self.seconds):
            changes = self._follow(read) if self._has_kb() else self._build(read)
        kb = KnowledgeBase.open(self.kb_folder)
        with _timed("index", self.seconds):
            same_start = self._put_start()
            build_index(kb, str(self.model), IndexConfig(device=self.config.device))
        report = self._report(read, kb, changes, same_start)
        self._write(report)
        spent = duration(sum(self.seconds.values()))
        _log.info('%s answers now, after %s: realm answer "..." --in %s', self.folder, spent, self.folder)
        made = make_questions(kb)
        if self._is_due(report["adaptation"], len(kb)) or not report["tests"]:
            report = self._judged(report, kb, made)
            self._write(report)
        self._settle(report["adaptation"])
        with _timed("examples", self.seconds):
            examples = _examples(self.kb_folder, self.model, made, self.config.device)
        version = newest_version(self.kb_folder / TABLE)
        assert version is not None
        report = {**report, "stamp": stamped, "kb_version": version, "examples": examples}
        self._write(report)
        return report

    # -- knowledge base -------------------------------------------------------------------------------------------

    def _has_kb(self) -> bool:
        return newest_version(self.kb_folder / TABLE) is not None

    def _build(self, read: Read) -> Changes:
        config, tokenizer = self._kb_config(), self.start.tokenizer
        tokenizer.name = self.config.start
        tagger = load_tagger(config.tagger)
        total = len(read.documents)
        try:
            result = build(self.kb_folder, read.documents, config, tokenizer, tagger, total=total)
        except DocumentsChanged:
            _log.info("the documents have changed since the interruption: their reading starts over")
            remove(self.kb_folder.with_name(f"{KB}.building"))
            result = build(self.kb_folder, read.documents, config, tokenizer, tagger, total=total)
        self._keep(read)
        _log.info(
            "%s: %s documents, %s passages", self.kb_folder, f"{result.documents:,}", f"{result.passages:,}"
        )
        return Changes(result.documents, 0, 0, result.passages)

    def _follow(self, read: Read) -> Changes:
        """Adds, replaces and deletes what has come, changed and gone since the sources were read last."""
        kb = KnowledgeBase.open(self.kb_folder)
        tagger = load_tagger(self.config.tagger)
        self._check_same(kb, tagger)
        known = self.folder / DOCUMENTS
        before = set(read_json(known)["documents"]) if known.is_file() else set()
        now = {document.id for document in read.documents}
        self._write_ids(before | now)
        added = changed(self.kb_folder, lambda kb: kb.add(read.documents, tagger))

        def delete(kb: KnowledgeBase) -> tuple[int, int]:
            there = {document.id for document in kb.documents()} | kb.merged().keys()
            gone = sorted((before - now) & there)
            return len(gone), kb.delete(gone) if gone else 0

        deleted, passages = changed(self.kb_folder, delete)
        self._keep(read)
        _log.info(
            "%s: %d documents added, %d replaced, %d deleted, %s unchanged",
            self.kb_folder, added.added, added.replaced, deleted, f"{added.unchanged:,}",
        )  # fmt: skip
        return Changes(
            added.added,
            added.replaced,
            deleted,
            added.passages_added + added.passages_removed + passages,
        )

    def _keep(self, read: Read) -> None:
        """Keeps what the sources hold beside the knowledge base that now holds it, and the list of what was left out."""
        self._write_ids({document.id for document in read.documents})
        for line in read.left_out.keep(self.kb_folder):
            _log.warning("%s", line)

    def _write_ids(self, ids: set[str]) -> None:
        listed: DocumentsJson = {"documents": sorted(ids)}
        write_json(self.folder / DOCUMENTS, listed)

    def _kb_config(self) -> KnowledgeBaseConfig:
        """How the knowledge base is made, so that it fits the start model."""
        held_out = min(self.start.held_out).held_out if self.start.held_out else self.config.held_out
        return KnowledgeBaseConfig(
            tokenizer=self.config.start,
            passage_tokens=self.start.lengths.passage,
            tagger=self.config.tagger,
            held_out=held_out,
            sources=tuple(self.sources),
            max_document_chars=self.config.max_document_chars,
        )

    def _check_same(self, kb: KnowledgeBase, tagger: Tagger) -> None:
        """Raises InputError unless the knowledge base is one that this call would have made of such documents."""
        kb.check_tokenizer(self.start.tokenizer, self.config.start)
        wanted = replace(self._kb_config(), tagger=tagger.name)
        for name in ("passage_tokens", "held_out", "tagger"):
            if getattr(kb.config, name) != getattr(wanted, name):
                raise ConflictError(
                    f"{self.folder} was made with {name} = {getattr(kb.config, name)}, and this call has "
                    f"{getattr(wanted, name)}: repeat the earlier call, or name another folder"
                )
        sources = self.before["sources"] if self.before is not None else kb.config.sources
        if missing := [one for one in sources if one not in self.sources]:
            raise InputError(
                f"{self.folder} was made from {', '.join(missing)} too: name all its sources, for documents of others would be "
                f"deleted; `realm kb add SOURCE... --in {self.folder}` adds documents beside them"
            )

    # -- models ---------------------------------------------------------------------------------------------------

    def _put_start(self) -> bool:
        """Sees to it that a model answers which is the start, or was adapted from it -> whether one did already."""
        if is_model(self.model):
            mine, starts = read_manifest(self.model), read_manifest(self.config.start)
            stages = [stage for stage in mine["stages"] if stage["stage"] != "adapt"]
            if (mine["passage_fingerprint"], stages) == (starts["passage_fingerprint"], starts["stages"]):
                return True
            _log.info("%s: starting from %s anew", self.folder, self.config.start)
        copy_model(self.config.start, self.model)
        return False

    def _is_due(self, done: AdaptationJson | None, passages: int) -> bool:
        """Whether the start has to be adapted: it never was, for too short a time, or to what is another text by now."""
        if self.config.minutes == 0:
            return False
        if done is None or self.config.minutes > done["minutes"]:
            return True
        if done["changed"] > ADAPT_AGAIN * passages:
            _log.info("%s passages have come or gone since the model was adapted", f"{done['changed']:,}")
            return True
        return False

    def _judged(self, report: FitJson, kb: KnowledgeBase, made: Sequence[MadeQuestion]) -> FitJson:
        """The report with what words, the start and, where it is due, the adapted model find."""
        config, device = self.config, self.config.device
        asked = judging.drawn(made, config.questions)
        write_json_lines(self.folder / QUESTIONS, (question._asdict() for question in asked))
        queries = judging.Queries.draw(kb, asked, self.start.lengths.query, FACTS)
        adapts = self._is_due(report["adaptation"], len(kb)) and queries.enough
        if adapts:
            with _timed("adapt", self.seconds):
                self._make_adapted(kb)
        with _timed("judge", self.seconds):
            words = judging.ranks_by_words(kb, queries)
            start = judging.ranks_of(config.start, kb, queries, device, "judge the start")
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
                return  # a fit was interrupted before it was judged
            remove(self.adapted)
        _log.info(
            "adapting %s to the documents for at most %g min; Ctrl-C ends it, the same command goes on",
            self.config.start, config.minutes,
        )  # fmt: skip
        try:
            adapt.train(kb, self.adapted, config, self.config.start)
        except OtherSettings:
            _log.info(
                "an interrupted adaptation was to other documents, or with other settings: starting over"
            )
            remove(self._training)
            adapt.train(kb, self.adapted, config, self.config.start)

    @property
    def _training(self) -> Path:
        return self.adapted.with_name(f"{ADAPTED}.training")

    def _settle(self, adaptation: AdaptationJson | None) -> None:
        """Puts the model that the report names in its place; killed before, the next fit does it."""
        if adaptation is None:
            return
        if adaptation["kept"] and is_model(self.adapted):
            replace_folder(self.adapted, self.model)
        elif not adaptation["kept"] and self._is_adapted():
            copy_model(self.config.start, self.model)
        remove(self.adapted)
        remove(self._training)

    def _is_adapted(self) -> bool:
        """Whether the model that answers is an adapted one."""
        return any(stage["stage"] == "adapt" for stage in read_manifest(self.model)["stages"])

    # -- report ---------------------------------------------------------------------------------------------------

    def _report(self, read: Read, kb: KnowledgeBase, changes: Changes, same_start: bool) -> FitJson:
        """What is known as soon as the workspace answers: of an earlier adaptation, what came and went since."""
        before = self.before if same_start else None
        adaptation = before["adaptation"] if before is not None else None
        if adaptation is not None:
            adaptation = {**adaptation, "changed": adaptation["changed"] + changes.passages}
        return {
            "version": __version__,
            "settings": settings_json(self.config),
            "sources": list(self.sources),
            "stamp": "",  # until all is done
            "documents": len(read.documents),
            "passages": len(kb),
            "left_out": dict(read.left_out.reasons.most_common()),
            "kb_version": 0,
            "seconds": self.seconds,
            "tests": before["tests"] if before is not None else {},
            "adaptation": adaptation,
        }

    def _write(self, report: FitJson) -> None:
        rounded = {name: round(seconds, 1) for name, seconds in self.seconds.items()}
        report["seconds"] = rounded
        write_json(self.folder / REPORT, report)


def _check_folder(folder: Path) -> None:
    """Raises InputError where something else than a workspace is there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder for the workspace")
    names = {path.name for path in folder.iterdir()} - {LOCK}
    if names and not names & {KB, f"{KB}.building", REPORT}:
        raise InputError(f"{folder} is there already, and no workspace: name another folder")


def _read(folder: Path, sources: Sequence[str], config: FitConfig, strict: bool) -> Read:
    """The documents of the sources, but for what is in the workspace itself."""
    left_out = ReadingReport()
    found = read_documents(sources, config.max_document_chars, None if strict else left_out, folder)
    documents = list(progress(found, total=None, description="read", unit="document"))
    if not documents:
        raise InputError(f"no text in {', '.join(sources)}: nothing to make {folder} from")
    return Read(documents, left_out)


def _examples(kb: Path, model: Path, made: Sequence[MadeQuestion], device: str) -> list[ExampleJson]:
    """A few of the made questions, of different documents, drawn by chance, with what the workspace says."""
    short = [one for one in made if len(one.question) <= SHORT] or list(made)
    drawn = [short[n] for n in np.random.default_rng(0).permutation(len(short))]
    asked = list({one.document_id: one for one in reversed(drawn)}.values())[::-1][:EXAMPLES]
    if not asked:
        return []
    answerer = Answerer.load(str(kb), str(model), AnswerConfig(device=device))
    if answerer.model.span_reader is None:
        return [_example(one, answerer.passages(one.question, 1)[0]) for one in asked]
    said = answerer.answer_batch([one.question for one in asked])
    return [
        _example(one, answers.answers[0], answers.found) for one, answers in zip(asked, said, strict=True)
    ]


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
        seconds[stage] = time.monotonic() - began
