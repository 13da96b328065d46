"""Updates the knowledge base of a workspace when files change: adds, replaces and deletes the documents of these files.

A watcher looks at the names, sizes and times of all files of its sources again and again. A change is applied when the file has
stayed the same for some seconds (`settle`), so that a file is not read while another program writes it. A file that changes
during the reading is read again later. WORKSPACE/watched.json has the files that were read, with the ids of their documents.
The ids are written before the documents are added, so that after a kill the next watcher can delete the documents of files that
are gone. Only one process at a time watches for a workspace.

If a source is missing or empty, for example because a disk is not mounted, its documents stay.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from realm.documents.formats.records import Unreadable
from realm.documents.lance_datasets import stat_of
from realm.documents.reading import ReadingReport, read_documents
from realm.documents.sources import files_of
from realm.errors import InputError, RealmError
from realm.files import read_json, write_json
from realm.folders import KB, one_writer, only_holder
from realm.qa.pipeline import AnswerConfig
from realm.text.corpus import Document
from realm.workspace.living import LivingKnowledge
from realm.workspace.report import MODEL, read_report
from realm.workspace.settings import EVERY, SETTLE
from realm.workspace.sources import (
    WATCH_LOCK,
    WATCHED,
    WatchedFileJson,
    WatchedJson,
    listed_documents,
    source_names,
)

_log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """The version of a file, which is empty if the file does not exist, and the time since which the file has this version."""

    version: list[int]
    since: float


def watch(
    folder: Path,
    sources: Sequence[str],
    stop: threading.Event,
    every: float = EVERY,
    settle: float = SETTLE,
    device: str = "auto",
) -> None:
    """Watches files and folders until `stop` is set; without sources, those of the last fit.

    Raises:
        InputError: the workspace or a source cannot be used.
        ConflictError: another process watches the files of this workspace.
    """
    if str(folder).startswith("hf:"):
        raise InputError(f"{folder} is on the hub: name a workspace on this computer, made by `realm fit`")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a workspace: make one with `realm fit SOURCE... --out {folder}`")
    with only_holder(folder / WATCH_LOCK, f"another `realm watch` already runs for {folder}: end it first"):
        _watch(Watcher(folder, sources, settle, device), stop, every)


def _watch(watcher: "Watcher", stop: threading.Event, every: float) -> None:
    _log.info("watching %s; Ctrl-C ends the command", ", ".join(watcher.sources))
    problem = ""
    while True:
        try:
            watcher.look(time.monotonic())
            problem = ""
        except RealmError as error:  # the next look tries again
            if str(error) != problem:
                _log.warning("%s", error)
            problem = str(error)
        if stop.wait(every):
            return


class Watcher:
    """Applies the changes of files to one workspace."""

    def __init__(self, folder: Path, sources: Sequence[str], settle: float = SETTLE, device: str = "auto"):
        self.folder, self._settle = folder, settle
        self._knowledge = LivingKnowledge(str(folder / KB), str(folder / MODEL), AnswerConfig(device=device))
        self._knowledge.get_ready_to_write()
        report = read_report(folder)
        of_fit = report["sources"] if report is not None else []
        self.sources = source_names(sources or [one for one in of_fit if not one.startswith("package:")])
        if not self.sources:
            raise InputError(f"{folder} was made from no file or folder: name the files and folders to watch")
        for source in self.sources:
            if source.startswith("package:"):
                raise InputError(f"{source} does not change: name files and folders")
            try:
                files_of(source, (folder,))
            except InputError as error:
                if sources:
                    raise
                raise InputError(
                    f"{error}; {folder} was made from {source}: run the command in the folder in which `realm fit` ran, or "
                    "name the files and folders to watch"
                ) from error
        self._seen: dict[str, _Seen] = {}
        self._lost: set[str] = set()
        if (folder / WATCHED).is_file():
            self._watched: WatchedJson = read_json(folder / WATCHED)
        else:
            everything = set(of_fit) <= set(self.sources)
            unclaimed = sorted(listed_documents(folder)) if everything else []
            self._watched = {"files": {}, "unclaimed": unclaimed}

    def look(self, now: float) -> None:
        """Looks at all files, and applies the change of a file when the file has stayed the same for `settle` seconds after the
        change.

        `now` is a time in seconds, of any clock that only goes forward.
        """
        self._knowledge.refresh()
        files = self._files()
        there = {path: (source, version) for source, path, version in files}
        known = self._watched["files"]
        for path in self._seen.keys() - known.keys() - there.keys():  # a file that was there for a moment
            del self._seen[path]
        ready = {}
        for path in {**known, **there}:
            if path not in there and (
                known[path]["source"] in self._lost or known[path]["source"] not in self.sources
            ):
                continue
            source, version = there.get(path, ("", []))
            if path in known and known[path]["version"] == version != []:
                self._seen.pop(path, None)
                continue
            seen = self._seen.get(path)
            if seen is None or seen.version != version:
                seen = self._seen[path] = _Seen(version, now)
            if now - seen.since >= self._settle:
                ready[path] = source
        if ready:
            self._take_over(ready)
        if not self._seen and self._watched["unclaimed"] and not self._lost:
            self._delete_unclaimed()

    def _files(self) -> list[tuple[str, str, list[int]]]:
        """Source, path and version of each file. A source that cannot be listed is added to `_lost`."""
        found = []
        for source in self.sources:
            try:
                listed = files_of(source, (self.folder,))
                self._lost.discard(source)
            except InputError as error:
                if source not in self._lost:
                    _log.warning("%s; its documents stay as they are", error)
                self._lost.add(source)
                continue
            for one in listed:
                if not isinstance(one, Unreadable) and (version := _version(one[1])):
                    found.append((source, str(one[1]), version))
        return found

    def _take_over(self, ready: Mapping[str, str]) -> None:
        """Adds, replaces and deletes the documents of these files; `ready` is path -> source."""
        files, report = self._watched["files"], ReadingReport()
        others = {id for path, file in files.items() if path not in ready for id in file["documents"]}
        read: dict[str, list[Document]] = {}
        for path in sorted(ready):
            version = self._seen[path].version
            documents = list(self._read(path, others, report)) if version else []
            if _version(Path(path)) != version:  # the file changed while it was read
                del self._seen[path]
                continue
            read[path] = documents
            others |= {document.id for document in documents}
        before = {path: set(files[path]["documents"]) if path in files else set() for path in read}
        now = {path: {document.id for document in documents} for path, documents in read.items()}
        with one_writer(self.folder, lambda: _log.info("%s: waiting for a fit to end", self.folder)):
            for path in read:
                files[path] = _file(ready[path] or files[path]["source"], [], before[path] | now[path])
            self._write()
            gone = {id for ids in before.values() for id in ids} - others
            documents = [document for part in read.values() for document in part]
            if any(before.values()):
                documents += self._incomplete(others - set().union(*now.values()))
            added = self._knowledge.add(documents, gone) if documents or gone else None
            for path in read:
                if version := self._seen.pop(path).version:
                    files[path] = _file(files[path]["source"], version, now[path])
                else:
                    del files[path]
            self._write()
        for line in report.lines():
            _log.warning("%s", line)
        counts = (added.added, added.replaced, added.deleted) if added else (0, 0, 0)
        same = f", {len(added.merged)} with the text of another document" if added and added.merged else ""
        _log.info(
            "%s changed files: %d; documents: %d added, %d replaced, %d deleted%s",
            f"{datetime.now():%H:%M:%S}", len(read), *counts, same,
        )  # fmt: skip

    def _read(self, path: str, taken: set[str], report: ReadingReport) -> Iterator[Document]:
        config = self._knowledge.current.kb.config
        limit, headings = config.max_document_chars, config.reads_headings
        try:
            yield from read_documents(
                [path], limit, report, (self.folder,), headings, taken, names=config.names
            )
        except InputError:  # the file has no document; the report has the reason
            return

    def _incomplete(self, ids: set[str]) -> list[Document]:
        """Those of the documents with these ids, read again from their files, that share passages with other documents: these
        passages could be deleted with the other documents. A file that has changed, is missing or has other documents now is
        read when a later look finds it."""
        needed = self._knowledge.current.kb.incomplete(ids)
        files = self._watched["files"]
        taken = {id for file in files.values() for id in file["documents"]}
        found = []
        for path, file in files.items():
            own = set(file["documents"])
            if needed.isdisjoint(own):
                continue
            if _version(Path(path)) == file["version"]:
                read = [one for one in self._read(path, taken - own, ReadingReport()) if one.id in needed]
                found += read
                if {one.id for one in read} == needed & own:
                    continue
            file["version"] = []
        return found

    def _delete_unclaimed(self) -> None:
        """Deletes the documents of the last fit whose files were gone when the first watcher started."""
        ids = {id for file in self._watched["files"].values() for id in file["documents"]}
        with one_writer(self.folder):
            gone = set(self._watched["unclaimed"]) - ids
            deleted = self._knowledge.add(self._incomplete(ids), gone).deleted if gone else 0
            self._watched["unclaimed"] = []
            self._write()
        if deleted:
            _log.info("%d documents deleted, because their files are gone", deleted)

    def _write(self) -> None:
        write_json(self.folder / WATCHED, self._watched)


def _file(source: str, version: list[int], documents: set[str]) -> WatchedFileJson:
    return {"source": source, "version": version, "documents": sorted(documents)}


def _version(path: Path) -> list[int]:
    """Size and times of a file; an empty list if the file does not exist."""
    try:
        found = stat_of(path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
