"""Updates the knowledge base of a workspace, so that it contains the documents of the workspace's sources.

The first fit builds the knowledge base. A later fit adds new documents, replaces changed documents, and deletes documents that
the sources no longer contain.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from multiprocessing import current_process
from pathlib import Path
from typing import NamedTuple

from realm.documents.reading import ReadingReport, read_documents
from realm.errors import ConflictError, InputError
from realm.files import write_json
from realm.folders import DOCUMENTS, KB, remove
from realm.kept_values import PARSED
from realm.local_processes import FRESH, default_processes
from realm.model.folder import Model
from realm.progress import counted, progress
from realm.store.ingest import TABLE, DocumentsChanged, NoText, build, unfinished_folder
from realm.store.knowledge_base import KnowledgeBase, changed
from realm.store.settings import KnowledgeBaseConfig
from realm.store.tables.table import newest_version
from realm.text.corpus import Document, PassagesConfig
from realm.text.salient_spans import Tagger, load_tagger
from realm.workspace.report import read_report
from realm.workspace.settings import FitConfig
from realm.workspace.sources import (
    DocumentsJson,
    check_sources,
    forget_watched,
    listed_documents,
    watched_documents,
)

_log = logging.getLogger(__name__)


class SourceDocuments(NamedTuple):
    """The documents of the sources, and a report of the files that could not be read."""

    documents: list[Document]
    left_out: ReadingReport


class Changes(NamedTuple):
    """Numbers of documents that a fit added, replaced and deleted."""

    added: int
    replaced: int
    deleted: int
    passages: int
    """Passages that were added or removed."""


def read_sources(folder: Path, sources: Sequence[str], config: FitConfig, strict: bool) -> SourceDocuments:
    """The documents of the sources; files inside the workspace `folder` are not read.

    What takes long to read (`read_documents`) is kept in the workspace until the fit is complete.

    Raises:
        InputError: the sources contain no text, or `strict` is set and a file cannot be read.
    """
    if not sources:
        raise InputError("no source is given: name at least one file or folder")
    left_out = ReadingReport()
    report = None if strict else left_out
    found = read_documents(
        sources,
        config.max_document_chars,
        report,
        (folder,),
        config.reads_headings,
        kept=folder / PARSED,
        processes=_processes(),
        names=config.names,
    )
    documents = list(progress(found, total=None, description="read", unit="document"))
    if not documents:
        raise InputError(f"{', '.join(sources)} contains no text from which {folder} could be made")
    return SourceDocuments(documents, left_out)


def _processes() -> int | None:
    """Number of processes that read and tag documents. None: `multiprocessing` cannot be used, so this process reads and tags.

    Spawned processes need `if __name__ == "__main__":` in the program that calls `realm.fit`, and a daemonic process may not
    start any.
    """
    return None if FRESH or current_process().daemon else default_processes()


class Sync:
    """Writes the documents of the sources into the knowledge base of one workspace."""

    def __init__(
        self, folder: Path, sources: Sequence[str], dropped: Sequence[str], config: FitConfig, start: Model
    ):
        """`dropped` are earlier sources, whose documents are deleted."""
        self.folder, self.sources, self.dropped = folder, sources, dropped
        self.config, self.start = config, start
        self.kb_folder = folder / KB

    def run(self, read: SourceDocuments) -> Changes:
        """Builds the knowledge base, or updates an existing knowledge base.

        Raises:
            ConflictError: the knowledge base was built with other settings.
            InputError: `sources` lacks a source from which the workspace was made.
        """
        exists = newest_version(self.kb_folder / TABLE) is not None
        return self._update(read) if exists else self._build(read)

    def _build(self, read: SourceDocuments) -> Changes:
        config, tokenizer = self._kb_config(), self.start.tokenizer
        tokenizer.name = self.config.start
        tagger = load_tagger(config.tagger, _processes() or 1)
        total = len(read.documents)
        try:
            result = build(self.kb_folder, read.documents, config, tokenizer, tagger, total=total)
        except NoText:
            for line in read.left_out.lines():
                _log.warning("%s", line)
            raise
        except DocumentsChanged:
            _log.info("the documents have changed since the interruption: the build starts over")
            remove(unfinished_folder(self.kb_folder))
            result = build(self.kb_folder, read.documents, config, tokenizer, tagger, total=total)
        self._keep(read)
        stored = KnowledgeBase.open(self.kb_folder).document_count
        others = result.documents - stored
        _log.info(
            "%s: %s, %s%s",
            self.kb_folder,
            counted(stored, "document"),
            counted(result.passages, "passage"),
            f" ({counted(others, 'other document')} without text, or with the text of another)"
            if others
            else "",
        )
        return Changes(result.documents, 0, 0, result.passages)

    def _update(self, read: SourceDocuments) -> Changes:
        """Adds new documents, replaces changed documents, and deletes documents that the sources no longer contain."""
        kb = KnowledgeBase.open(self.kb_folder)
        tagger = load_tagger(self.config.tagger, _processes() or 1)
        self._check_same(kb, tagger)
        before = listed_documents(self.folder) | watched_documents(
            self.folder, (*self.sources, *self.dropped)
        )
        now = {document.id for document in read.documents}
        self._write_ids(before | now)
        added = changed(self.kb_folder, lambda kb: kb.add(read.documents, tagger, before - now))
        if self.dropped:
            forget_watched(self.folder, self.dropped)
        self._keep(read)
        _log.info(
            "%s: documents: %d added, %d replaced, %d deleted, %s unchanged",
            self.kb_folder, added.added, added.replaced, added.deleted, f"{added.unchanged:,}",
        )  # fmt: skip
        passages = added.passages_added + added.passages_removed
        return Changes(added.added, added.replaced, added.deleted, passages)

    def _keep(self, read: SourceDocuments) -> None:
        """Writes documents.json, and the list of files that were left out."""
        self._write_ids({document.id for document in read.documents})
        for line in read.left_out.keep(self.kb_folder):
            _log.warning("%s", line)

    def _write_ids(self, ids: set[str]) -> None:
        listed: DocumentsJson = {"documents": sorted(ids)}
        write_json(self.folder / DOCUMENTS, listed)

    def _kb_config(self) -> KnowledgeBaseConfig:
        """Settings of the knowledge base that fit the start model."""
        rule = self.start.held_out
        return KnowledgeBaseConfig(
            tokenizer=self.config.start,
            passage_tokens=self.start.lengths.passage,
            held_out=self.config.held_out if rule is None else rule.held_out,
            sources=tuple(self.sources),
            **{one.name: getattr(self.config, one.name) for one in fields(PassagesConfig)},
        )

    def _check_same(self, kb: KnowledgeBase, tagger: Tagger) -> None:
        """Raises a RealmError if this call has other settings than the knowledge base, or lacks a source of the workspace."""
        report = read_report(self.folder)
        earlier = report["sources"] if report is not None else kb.config.sources
        check_sources(self.folder, self.sources, self.dropped, earlier)
        kb.check_tokenizer(self.start.tokenizer, self.config.start)
        wanted = replace(self._kb_config(), tagger=tagger.name)
        for name in (
            *("passage_tokens", "cut", "passage_overlap", "held_out", "tagger"),
            *("title_field", "text_field", "id_field"),
        ):
            if getattr(kb.config, name) != getattr(wanted, name):
                raise ConflictError(
                    f"{self.folder} was made with {name} = {getattr(kb.config, name)!r}, but this call has "
                    f"{getattr(wanted, name)!r}: use the earlier value, or another folder"
                )
