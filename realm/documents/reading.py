"""Reads files, folders and packaged corpora as a stream of `Document`.

A source is a file, a folder with all its subfolders, an address (`remote.py`), or the name of a packaged corpus
(`demo_corpora.py`). `sources.py` finds the files and the reader of each file, and the readers yield records
(`formats/records.py`). `file_records.py` and `parallel_reading.py` call the readers. `read_documents` does what all formats
have in common: unique ids, the limit on length, and the report on files that cannot be read.
This file does not split documents into passages.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realm.documents.formats.records import (
    EXPECTED,
    Limits,
    Reason,
    Record,
    Unreadable,
    printable,
    record,
)
from realm.documents.parallel_reading import read_in_processes, read_on_ray
from realm.documents.remote import is_remote
from realm.documents.sources import count_kinds, files_of, kind_of, remote_files_of
from realm.errors import InputError, shortened, shown
from realm.files import write_json_lines
from realm.keys import KeyTable, key_of
from realm.ray_actors import EngineConfig
from realm.text.corpus import Document, PassagesConfig, over_limit
from realm.text.fields import LONGEST_VALUE, USUAL_NAMES, FieldNames, Fields, clean_fields

logger = logging.getLogger(__name__)
LEFT_OUT = "left_out.jsonl"
"""File in a knowledge base that lists what the last reading of documents left out, as one JSON object per line."""
_NAMED = 5
"""Number of files that a line about files names."""
_EXPLAINED = frozenset((Reason.TOO_LONG, Reason.FIELDS, Reason.COLUMNS))
"""Reasons whose lines also have the first problem, because it says which limit or setting can be changed."""


class LeftOut(NamedTuple):
    """A file, a line or a row from which no document was made."""

    where: str
    reason: str
    problem: str


class ReadingReport:
    """Counts of what was read and what was left out, which are updated while the documents are read."""

    MOST = 20_000
    """Most files, lines and rows that are listed for each reason; further files, lines and rows are only counted."""
    MOST_ASSUMED = 100_000
    """Most files and lines whose assumed encoding is stored and counted."""

    def __init__(self) -> None:
        self.documents = 0
        self.left_out: list[LeftOut] = []
        self.reasons: Counter[str] = Counter()
        self.assumed: dict[str, str] = {}
        """Files and lines that are not UTF-8 and declare no encoding -> the encoding with which they were decoded."""
        self.fields_left_out: Counter[str] = Counter()
        """Name of a field -> number of documents that were read without this field."""
        self._names: dict[str, list[str]] = {}
        self._kinds: Counter[str] = Counter()
        """Extension -> number of files that are of a type that is not read."""

    def leave_out(self, problem: Unreadable) -> None:
        """Counts and lists a file, a line or a row."""
        where = printable(problem.where)
        self.reasons[problem.reason] += 1
        if problem.reason == Reason.TYPE:
            self._kinds[kind_of(problem.where)] += 1
        names = self._names.setdefault(problem.reason, [])
        if len(names) < _NAMED and where not in names:  # a dump can be damaged in several places
            names.append(where)
        if self.reasons[problem.reason] <= self.MOST:
            self.left_out.append(LeftOut(where, problem.reason, printable(str(problem))))

    def assume(self, where: str, encoding: str) -> None:
        """Stores the encoding that was assumed for a file or a line."""
        if len(self.assumed) < self.MOST_ASSUMED:
            self.assumed[printable(where)] = encoding

    def keep(self, folder: Path) -> list[str]:
        """Writes the list of what was left out to a folder, unless the list is empty -> lines for the terminal.

        The file with the list of an earlier call is replaced or deleted.
        """
        listed = folder / LEFT_OUT
        if not self.left_out:
            listed.unlink(missing_ok=True)
            return self.lines()
        write_json_lines(listed, (one._asdict() for one in self.left_out))
        is_complete = max(self.reasons.values()) <= self.MOST
        what = "all that was left out" if is_complete else f"the first {self.MOST:,} of each reason"
        return [*self.lines(), f"{listed} lists {what} (with --strict, the first problem is an error)"]

    def lines(self, explained: bool = True) -> list[str]:
        """A line for each reason, and lines about assumed encodings and fields, each with counts and the first names.

        With `explained`, lines about some reasons also have the first problem.
        """
        lines = [
            f"left out: {number:,} {reason}: {self._named(reason, number)}"
            + (self._explained(reason) if explained else "")
            for reason, number in self.reasons.most_common()
        ]
        if self.assumed:
            names = _few(list(self.assumed)[:_NAMED], len(self.assumed))
            lines.append(f"not UTF-8, so read as Windows-1252: {len(self.assumed):,}: {names}")
        if self.fields_left_out:
            names = ", ".join(f"{name} ({count:,})" for name, count in self.fields_left_out.most_common(5))
            lines.append(
                f"fields left out, because they are longer than {LONGEST_VALUE:,} characters or not JSON: {names}"
            )
        return lines

    def _named(self, reason: str, number: int) -> str:
        """The first files, lines and rows that were left out for a reason; of many files of other types, their extensions."""
        if reason == Reason.TYPE and number > _NAMED:
            return count_kinds(self._kinds) + (", ..." if len(self._kinds) > 5 else "")
        return _few(self._names[reason], number)

    def _explained(self, reason: str) -> str:
        """The first problem with a reason, in parentheses, if the reason is one of `_EXPLAINED`."""
        if reason not in _EXPLAINED:
            return ""
        first = next(one for one in self.left_out if one.reason == reason)
        return f" ({shortened(first.problem.removeprefix(f'{first.where}: '))})"


class _StrictReport(ReadingReport):
    """Raises the first problem, unless its reason is one of `EXPECTED`; such problems are counted, and logged at the end."""

    def leave_out(self, problem: Unreadable) -> None:
        _refuse(problem)
        super().leave_out(problem)


def _few(names: Sequence[str], number: int) -> str:
    return ", ".join(shortened(name, 100) for name in names) + (
        ", ..." if number > len(names) == _NAMED else ""
    )


def read_documents(
    sources: Sequence[str],
    max_document_chars: int = PassagesConfig.max_document_chars,
    report: ReadingReport | None = None,
    but: Collection[Path] = (),
    headings: bool = False,
    taken: Collection[str] = (),
    engine: EngineConfig | None = None,
    kept: Path | None = None,
    processes: int | None = None,
    names: FieldNames = USUAL_NAMES,
) -> Iterator[Document]:
    """The documents of files, folders and packages, in order. Files of a folder are sorted; hidden files are skipped.

    The id of a record (JSON Lines, Parquet, Arrow, ...) is its field "id". If a record has no such field, its title is the id;
    without a title, its field "url"; without this, its place. If an earlier document has this id, a number is added. `names`
    are the fields that have other names than "id", "title" and "text". If a file is one document, its path as given is the
    id, so that the id is the same whether the source is the folder or the file itself.

    Files in the folders `but` are not read. With `headings`, documents of formats with headings have sections. The sources are
    checked at once; their files are read while the documents are iterated over. Files, lines and rows that cannot be read are
    left out and listed in `report`; without a report, the first problem is raised. With the engine "ray", the machines of a
    cluster read the files; the documents and the report are the same. Otherwise, `processes` processes read PDF and Word files,
    and the parts of dumps and ZIM archives that can be divided. With None, this process reads them, and one process per core
    parses the pages of dumps.
    The database `kept`, which is made if it does not exist, keeps the parsed pages of dumps and the text of PDF and Word files,
    which are not parsed again.

    Raises:
        InputError: a source does not exist, or no document could be read; without a report, also for any other problem. The
            message is one line with the file, the line or row (if there is one) and the problem.
    """
    found = [
        one
        for source in sources
        for one in (remote_files_of(source) if is_remote(source) else files_of(source, but))
    ]
    if report is None:
        report = _StrictReport()
        for one in found:
            if isinstance(one, Unreadable):
                _refuse(one)
    limits = Limits(max_document_chars, headings, names)
    if engine is not None and engine.engine == "ray":
        return _documents(read_on_ray(found, limits, engine.ray_address, kept), limits, report, taken)
    return _documents(read_in_processes(found, limits, processes, kept), limits, report, taken)


def documents_of(
    records: Iterable[Mapping[str, Any]], max_document_chars: int = PassagesConfig.max_document_chars
) -> Iterator[Document]:
    """The documents of records in memory, `{"title"?, "text", "id"?}`, with the same ids as from a JSON Lines file.

    All other keys of a record are fields of the document.

    Raises:
        InputError: a record has no text, has neither id nor title nor url, has values of other types, or is longer than
            `max_document_chars`; the message has the number of the record. Or a field cannot be stored.
    """
    report = _StrictReport()
    read = (_in_memory(f"record {number}", one) for number, one in enumerate(records, start=1))
    for document in _documents(read, Limits(max_document_chars), report):
        for name in report.fields_left_out:
            raise InputError(
                f"the field {shortened(name, 100)!r} of the document {shortened(document.id, 100)!r} cannot be stored, because "
                f"its value is longer than {LONGEST_VALUE:,} characters or not JSON"
            )
        yield document


def _in_memory(where: str, one: object) -> Record | Unreadable:
    if not isinstance(one, Mapping):
        return Unreadable(where, Reason.FIELDS, f"{where} is {shown(one)}, not a mapping")
    found = record(where, one)
    # The place would be the id, and records of the next call have the same places.
    if isinstance(found, Record) and found.id is None and _name(found, found.fields) == where:
        return Unreadable(where, Reason.FIELDS, f"{where} has neither an id nor a title: add one of these")
    return found


def stamp(sources: Sequence[str], but: Collection[Path] = ()) -> str:
    """Sixteen hex digits that change if a file of the sources is added, removed or written.

    The digits are a hash of the names, sizes and times of the files; no file is opened. Links to folders are not followed.

    Raises:
        InputError: a source does not exist.
    """
    digest = hashlib.sha256()
    for one in (one for source in sources for one in files_of(source, but)):
        left_out = isinstance(one, Unreadable)
        path = Path(one.where) if isinstance(one, Unreadable) else one[1]
        for file in sorted(path.rglob("*")) if path.is_dir() and not left_out else [path]:
            try:
                found = file.stat(follow_symlinks=not left_out)
                state = f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
            except OSError as error:
                state = str(error.errno)
            digest.update(os.fsencode(file) + b"\0" + state.encode() + b"\0")
    return digest.hexdigest()[:16]


def _refuse(problem: Unreadable) -> None:
    """Raises a problem, unless its reason is one of `EXPECTED`."""
    if problem.reason not in EXPECTED:
        raise problem


def _documents(
    read: Iterable[Record | Unreadable],
    limits: Limits,
    report: ReadingReport,
    taken: Collection[str] = (),
) -> Iterator[Document]:
    repeats: Counter[str] = Counter()
    with KeyTable() as used:
        for name in taken:
            used.put(key_of(name))
        for one in read:
            problem = one if isinstance(one, Unreadable) else _problem(one, used, limits)
            if problem is not None:
                report.leave_out(problem)
                continue
            assert isinstance(one, Record)
            fields = clean_fields(one.fields, report.fields_left_out)
            name = _name(one, fields)
            document_id = name if one.id is None else one.id
            while used.put(key_of(document_id)) is not None:
                repeats[name] += 1
                document_id = f"{name} ({repeats[name] + 1})"
            report.documents += 1
            if one.assumed:
                report.assume(one.where, one.assumed)
            yield Document(one.title, one.text, document_id, one.links, fields, one.sections)
    if not report.documents and report.reasons:
        if len(report.left_out) == 1:
            raise InputError(report.left_out[0].problem)
        problems = [one.problem for one in report.left_out if one.reason not in EXPECTED]
        first = shortened((problems or [report.left_out[0].problem])[0])
        raise InputError(
            f"nothing could be read; {'; '.join(report.lines(explained=False))}; the first problem: {first}"
        )
    if isinstance(report, _StrictReport):
        for line in report.lines():
            logger.warning(line)


def _name(one: Record, fields: Fields) -> str:
    """The name from which the id of a record without an id is made: its title, its address, or its place."""
    if one.title.strip():
        return one.title
    url = fields.get("url")
    return url if isinstance(url, str) and url.strip() else one.where


def _problem(one: Record, used: KeyTable, limits: Limits) -> Unreadable | None:
    if len(one.text) > limits.document_chars:
        message = over_limit(len(one.text), limits.document_chars)
        return Unreadable(one.where, Reason.TOO_LONG, f"{one.where}: {message}")
    if one.id is not None and used.get(key_of(one.id)) is not None:
        message = f"a second document with the id {shown(one.id)}: ids must differ"
        return Unreadable(one.where, Reason.SAME_ID, f"{one.where}: {message}")
    return None
