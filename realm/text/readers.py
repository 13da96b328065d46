"""File formats: whatever holds documents becomes a stream of `Document`.

A source is a file, a folder that is walked, or the name of a corpus that a package carries (`demo_corpora.py`). `_FORMATS`
names the reader of a file; readers give records (`records.py`), and what all have in common (unique ids, the limit on
length, what becomes of files that cannot be read) is in `read_documents`. Nothing here cuts text into passages.
"""

import hashlib
import io
import json
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realm.errors import InputError, RealmError, first_line, shortened, shown
from realm.files import write_json_lines
from realm.text import apart
from realm.text.columns import arrow, parquet
from realm.text.compressed import COMPRESSIONS, opened, uncompressed
from realm.text.corpus import Document
from realm.text.demo_corpora import packaged
from realm.text.encodings import decode, marked, whole, without_text
from realm.text.pages import Page, PageError, page_record, read_page
from realm.text.records import (
    BINARY,
    DAMAGED,
    FIELDS,
    LINK,
    NAME,
    NOT_JSON,
    NOT_OPENED,
    SAME_ID,
    SURROGATE,
    TOO_LONG,
    TYPE,
    Limits,
    Reader,
    Record,
    Unreadable,
    printable,
    record,
)

logger = logging.getLogger(__name__)
LEFT_OUT = "left_out.jsonl"
"""In a knowledge base: what was left out when its documents were last read, one JSON object per file, line or row."""


class LeftOut(NamedTuple):
    """A file, a line or a row that gave no document."""

    where: str
    reason: str
    problem: str


class ReadingReport:
    """What was read and what was left out, filled in while documents are taken."""

    MOST = 100_000
    """What is left out beyond this is counted, and no longer listed."""

    def __init__(self) -> None:
        self.documents = 0
        self.left_out: list[LeftOut] = []
        self.reasons: Counter[str] = Counter()
        self.assumed: dict[str, str] = {}
        """Files and lines without a declared encoding that are not in UTF-8 -> the encoding they were read in."""
        self._names: dict[str, list[str]] = {}

    def leave_out(self, problem: Unreadable) -> None:
        """Counts and lists a file, a line or a row."""
        where = printable(problem.where)
        self.reasons[problem.reason] += 1
        names = self._names.setdefault(problem.reason, [])
        if len(names) < 3:
            names.append(where)
        if len(self.left_out) < self.MOST:
            self.left_out.append(LeftOut(where, problem.reason, printable(str(problem))))

    def assume(self, where: str, encoding: str) -> None:
        """Notes an encoding that was assumed."""
        if len(self.assumed) < self.MOST:
            self.assumed[printable(where)] = encoding

    def keep(self, folder: Path) -> list[str]:
        """Writes the list of what was left out into a folder, in the place of an earlier one -> lines that say all that.

        Where nothing was left out there is no list.
        """
        listed = folder / LEFT_OUT
        if not self.left_out:
            listed.unlink(missing_ok=True)
            return self.lines()
        write_json_lines(listed, (one._asdict() for one in self.left_out))
        return [*self.lines(), f"all that was left out: {listed} (--strict ends at the first)"]

    def lines(self) -> list[str]:
        """A line per reason, and one about encodings: how many, and the first few names."""
        lines = [
            f"left out: {number:,} {reason}: {_few(self._names[reason], number)}"
            for reason, number in self.reasons.most_common()
        ]
        if self.assumed:
            names = _few(list(self.assumed)[:3], len(self.assumed))
            lines.append(f"read as Windows-1252, being no UTF-8: {len(self.assumed):,}: {names}")
        return lines


def _few(names: Sequence[str], number: int) -> str:
    return ", ".join(shortened(name, 100) for name in names) + (", ..." if number > len(names) else "")


def read_documents(
    sources: Sequence[str],
    max_document_chars: int = 1_000_000,
    report: ReadingReport | None = None,
    but: Path | None = None,
) -> Iterator[Document]:
    """The documents of files, folders and packages, in order; a folder's files sorted, hidden ones left out.

    Ids: records (JSON Lines, Parquet, Arrow) may have a field "id"; without it the title is the id, with a
    number behind it from its second use on. A file that is one document has its path, as given, for an id, so
    that a folder, and later one file of it, name the same document.

    Nothing in the folder `but` is read. Sources are looked up at once, and read while documents are taken.
    What cannot be read is left out and stands in the `report`; without one the first of it is an error.

    Raises:
        InputError: one line with the file, its line or row where it has some, and what is wrong. With a report: a
            source that is not there, or nothing that can be read in any of them.
    """
    found = [one for source in sources for one in _files(source, but)]
    if report is None:
        _refuse(found)
    limits = Limits(max_document_chars)
    return _documents(_read(found, limits), limits, report)


def documents_of(
    records: Iterable[Mapping[str, Any]], max_document_chars: int = 1_000_000
) -> Iterator[Document]:
    """The documents of records in memory, `{"title", "text", "id"?}`, with the ids that a JSON Lines file of them has.

    Raises:
        InputError: a record is none, with its number.
    """
    read = (
        record(f"record {number}", one)
        if isinstance(one, Mapping)
        else Unreadable(f"record {number}", FIELDS, f"record {number} is {shown(one)}, not a mapping")
        for number, one in enumerate(records, start=1)
    )
    return _documents(read, Limits(max_document_chars), None)


def stamp(sources: Sequence[str], but: Path | None = None) -> str:
    """Sixteen hex digits that stay the same as long as no file of the sources comes, goes or is written.

    They follow from names, sizes and times. Nothing is read.

    Raises:
        InputError: as in `read_documents`, of a source that is not there.
    """
    digest = hashlib.sha256()
    for one in (one for source in sources for one in _files(source, but)):
        path = Path(one.where) if isinstance(one, Unreadable) else one[1]
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            try:
                found = file.stat()
                state = f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
            except OSError as error:
                state = str(error.errno)
            digest.update(os.fsencode(file) + b"\0" + state.encode() + b"\0")
    return digest.hexdigest()[:16]


def _refuse(found: Sequence["_Found"]) -> None:
    """Raises the first problem of the folders; what is of another type is told, and no error."""
    passed = [one for one in found if isinstance(one, Unreadable)]
    for one in passed:
        if one.reason not in (TYPE, LINK):
            raise one
    if passed:
        logger.warning("%d files of other kinds left out (%s)", len(passed), _kinds(passed))


def _kinds(files: Iterable[Unreadable]) -> str:
    """How many files there are of the commonest extensions."""
    kinds = Counter(_kind(Path(one.where)) or Path(one.where).name for one in files)
    return ", ".join(f"{number} {printable(kind)}" for kind, number in kinds.most_common(5))


def _documents(
    read: Iterable[Record | Unreadable], limits: Limits, report: ReadingReport | None
) -> Iterator[Document]:
    used: set[str] = set()
    repeats: Counter[str] = Counter()
    for one in read:
        problem = one if isinstance(one, Unreadable) else _problem(one, used, limits)
        if problem is not None:
            if report is not None:
                report.leave_out(problem)
            elif problem.reason not in (TYPE, LINK):
                raise problem
            continue
        assert isinstance(one, Record)
        name = one.title if one.title.strip() else one.where
        document_id = name if one.id is None else one.id
        while document_id in used:
            repeats[name] += 1
            document_id = f"{name} ({repeats[name] + 1})"
        used.add(document_id)
        if report is not None:
            report.documents += 1
            if one.assumed:
                report.assume(one.where, one.assumed)
        yield Document(one.title, one.text, document_id)
    if report is not None and not report.documents and report.reasons:
        if len(report.left_out) == 1:
            raise InputError(report.left_out[0].problem)
        raise InputError(f"nothing could be read; {'; '.join(report.lines())}")


def _problem(one: Record, used: set[str], limits: Limits) -> Unreadable | None:
    if len(one.text) > limits.document_chars:
        over = f"{len(one.text):,} characters, over the limit of {limits.document_chars:,}"
        message = f"{over}: split it, or raise max_document_chars"
        return Unreadable(one.where, TOO_LONG, f"{one.where}: {message}")
    if one.id in used:
        message = f"a second document with the id {shown(one.id)}: ids must differ"
        return Unreadable(one.where, SAME_ID, f"{one.where}: {message}")
    return None


def _read(found: Iterable["_Found"], limits: Limits) -> Iterator[Record | Unreadable]:
    """What all files give, in order."""
    with apart.Apart() as child:
        for one in found:
            yield from _opened(one, limits, child)


def _opened(found: "_Found", limits: Limits, child: apart.Apart) -> Iterator[Record | Unreadable]:
    """What a file gives, and at the end what was wrong with it: whatever its reader raises names the file."""
    if isinstance(found, Unreadable):
        yield found
        return
    reader, path = found
    try:
        yield from child.read(path, limits) if reader is None else reader(path, limits)
    except Unreadable as problem:
        yield problem
    except RealmError:  # about the installation, not about a file
        raise
    except OSError as error:
        yield Unreadable(path, NOT_OPENED, f"{path}: {error.strerror or first_line(error)}")
    except Exception as error:  # of many classes: whatever a library could not read
        yield Unreadable(path, DAMAGED, f"{path} cannot be read ({shortened(first_line(error))})")


# --- which files ---------------------------------------------------------------------------------

_Found = tuple[Reader | None, Path] | Unreadable
"""No reader: the file is read in a process of its own."""


def _is_read(path: Path) -> bool:
    """Whether files of this name are of a type that is read."""
    plain = uncompressed(path)
    return plain.suffix.lower() in (_FORMATS if plain == path else _COMPRESSED)


def _reader_of(path: Path) -> Reader | None:
    plain = uncompressed(path)
    return (_FORMATS if plain == path else _COMPRESSED)[plain.suffix.lower()]


def _kind(path: Path) -> str:
    """A file's extension, with the one before it where it is compressed."""
    plain = uncompressed(path)
    return path.suffix if plain == path else plain.suffix + path.suffix


def _files(source: str, but: Path | None) -> list[_Found]:
    if source.startswith("package:"):
        return [packaged(source)]
    path = Path(os.path.normpath(source))
    if path.is_dir():
        return _walk(path, but)
    if not path.exists():
        raise InputError(f"{source}: no such file or folder")
    if not _is_read(path):
        kind = f"{_kind(path)} files" if path.suffix else "files without an extension"
        raise InputError(f"{source}: cannot read {kind}, only {_READ}")
    return [_file(path)]


def _walk(folder: Path, but: Path | None) -> list[_Found]:
    found: list[_Found] = []
    left = but.resolve() if but is not None else None

    def not_opened(error: OSError) -> None:
        found.append(Unreadable(error.filename, NOT_OPENED, f"{error.filename}: {error.strerror}"))

    for parent, folders, names in os.walk(folder, onerror=not_opened):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and Path(parent, name).resolve() != left
        )
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink():  # it may lead back here
                found.append(Unreadable(path, LINK, f"{path}: links to folders are not followed"))
        found += [_file(Path(parent, name)) for name in sorted(names) if not name.startswith(".")]
    passed = [one for one in found if isinstance(one, Unreadable) and one.reason in (TYPE, LINK)]
    if len(passed) == len(found):
        others = _kinds(passed)
        has = f"has {others}, and no" if others else "is empty: it needs"
        raise InputError(f"{folder}: this folder {has} {_READ}")
    return found


def _file(path: Path) -> _Found:
    if path.name.startswith("~$"):
        return Unreadable(
            path, TYPE, f"{path} marks a document as open in an office program, and holds no text"
        )
    if not _is_read(path):
        kind = _kind(path) or "no extension"
        return Unreadable(path, TYPE, f"{path}: {kind} is not read, only {_READ}")
    if SURROGATE.search(str(path)):  # names become ids and titles, which are kept in UTF-8
        return Unreadable(path, NAME, f"{str(path)!r}: the name of this file is not UTF-8: rename it")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would never end
            return Unreadable(path, NOT_OPENED, f"{path} is no regular file")
    except OSError as error:
        return Unreadable(path, NOT_OPENED, f"{path}: {error.strerror}")
    return _reader_of(path), path


# --- JSON Lines ----------------------------------------------------------------------------------


def _json_lines(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    empty = True
    with opened(path) as file:
        start = file.peek(5)[:5]
        for number, (raw, complete) in enumerate(_raw_lines(path, file, limits), start=1):
            where = f"{path}:{number}"
            if raw is None:
                empty = False
                yield Unreadable(where, TOO_LONG, f"{where}: a line of over {limits.file_bytes:,} bytes")
                continue
            try:
                line, assumed = decode(raw, where)
            except Unreadable as problem:
                empty = False
                yield problem
                continue
            if line.strip():
                empty = False
                found = _json_line(where, line.strip(), complete)
                yield found if isinstance(found, Unreadable) else found._replace(assumed=assumed)
    if empty:
        raise without_text(path, start)


def _raw_lines(path: Path, file: io.BufferedReader, limits: Limits) -> Iterator[tuple[bytes | None, bool]]:
    """Each line in UTF-8, or as it is; whether it has an end; None for one that is too long to be looked at."""
    start = file.peek(1024)[:1024]
    encoding = marked(start)
    if encoding in ("utf-16", "utf-32"):
        try:
            for text in io.TextIOWrapper(file, encoding, newline="\n"):
                yield text.encode(), text.endswith("\n")
        except UnicodeDecodeError as error:
            raise Unreadable(
                path, DAMAGED, f"{path}: {encoding.upper()} with damage ({error.reason})"
            ) from None
        return
    if b"\0" in start:
        raise Unreadable(path, BINARY, f"{path}: binary data, or UTF-16 without a byte-order mark")
    while line := file.readline(limits.file_bytes):
        if complete := line.endswith(b"\n") or len(line) < limits.file_bytes:
            yield line, line.endswith(b"\n")
        while not complete:
            rest = file.readline(1 << 20)
            complete = rest.endswith(b"\n") or not rest
            if complete:
                yield None, True


def _json_line(where: str, line: str, complete: bool) -> Record | Unreadable:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        message = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
        cut = "" if complete else ": the file ends here, cut off?"
        return Unreadable(where, NOT_JSON, f"{where}: not JSON ({message}){cut}")
    if not isinstance(fields, dict):
        expected = f'{shown(fields)} where an object {{"title": ..., "text": ...}} should be'
        return Unreadable(where, FIELDS, f"{where}: {expected}")
    return record(where, fields)


# --- one file, one document: text, Markdown, HTML ------------------------------------------------


def _plain_text(path: Path, limits: Limits) -> Iterator[Record]:
    """The first line is the title if it is short and a blank line follows, else the file's name."""
    text, assumed = whole(path, limits)
    text = text.strip()
    first, _, rest = text.partition("\n")
    if len(first) <= 100 and rest.strip() and not rest.partition("\n")[0].strip():
        yield Record(str(path), first.strip(), rest.strip(), path.as_posix(), assumed)
    else:
        yield Record(str(path), uncompressed(path).stem, text, path.as_posix(), assumed)


def _markdown(path: Path, limits: Limits) -> Iterator[Record]:
    """The first heading is the title, or the title that a front matter gives."""
    from markdown_it import MarkdownIt

    source, assumed = whole(path, limits)
    title = ""
    if front := _FRONT_MATTER.match(source):
        source = source[front.end() :]
        if named := re.search(r"^title:[ \t]*(.+)$", front[1] or "", re.MULTILINE):
            title = named[1].strip().strip("\"'")
    # Through HTML: that is what Markdown means, and it may contain some.
    page = _page(path, MarkdownIt("commonmark").enable("table").render(source))
    yield page_record(path, title or page.heading, page.text, assumed)


_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)?---[ \t]*(?:\n|\Z)", re.DOTALL)


def _html(path: Path, limits: Limits) -> Iterator[Record]:
    """The title element is the title, else the first heading."""
    source, assumed = whole(path, limits, html=True)
    page = _page(path, source)
    yield page_record(path, page.title or page.heading, page.text, assumed)


def _page(path: Path, source: str) -> Page:
    try:
        return read_page(source)
    except PageError as error:
        raise Unreadable(path, DAMAGED, f"{path}: {error}") from None


_FORMATS: dict[str, Reader | None] = {
    ".jsonl": _json_lines,
    ".txt": _plain_text,
    ".md": _markdown,
    ".html": _html,
    ".htm": _html,
    ".parquet": parquet,
    ".arrow": arrow,
    **dict.fromkeys(apart.MODULES),
}
_COMPRESSED: dict[str, Reader | None] = {
    **{name: _FORMATS[name] for name in (".jsonl", ".txt", ".md", ".html", ".htm")},
    ".json": _json_lines,  # what data sets call JSON Lines when they compress them: `c4-train.00000.json.gz`
}
_READ = f"{', '.join(_FORMATS)}, and {', '.join(COMPRESSIONS)} of the text formats"
