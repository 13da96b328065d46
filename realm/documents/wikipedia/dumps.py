"""MediaWiki's XML dumps become records, one per article, in the order of the dump. Several processes parse the pages.

Redirects, disambiguation pages, pages outside the main namespace and, as in ORQA, lists, indexes and outlines are left out. All
files of a dump are read twice: the first time only for the redirects, so that a link to a redirect becomes a link to the page
behind it.
A page that takes too much time or memory ends the process that parses the page, and is left out. If the process was killed for
another reason, another process parses the page. The memory for reading a dump does not depend on its length.

Parsed pages can be kept on disk until the end of a build, because parsing takes much longer than reading.
"""

import hashlib
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from lxml import etree

from realm.documents.child_limits import MOST_MEMORY, limit
from realm.documents.formats.compressed import opened
from realm.documents.formats.records import Limits, Reason, Record, Unreadable, need
from realm.documents.wikipedia.multistream import DumpPart, read_part
from realm.documents.wikipedia.titles import MOST_REDIRECTS, linked_title, not_an_article
from realm.errors import first_line
from realm.kept_values import KeptValues
from realm.keys import KeyTable, key_of
from realm.local_processes import default_processes
from realm.orphans import end_when_orphaned
from realm.progress import progress
from realm.text.corpus import Link
from realm.worker_threads import WorkerThreads

MOST_SECONDS = 20
"""Most seconds of processor time for a page. A usual page takes milliseconds; ten thousand open tags would take hours."""
MOST_WAITING = 32 << 20
"""Length of the markup of pages that wait for a process, above which no further page is read."""
_PART = 1 << 16
_OF_WIKIMEDIA = re.compile(r"(\w+-(?:\d{8}|latest))-pages-")
"""The beginning of the names of all files of a dump of Wikimedia: the wiki and the date."""


class Page(NamedTuple):
    """A page of a dump. `markup` is None if the dump has none for this page, or if the markup exceeds `Limits.file_bytes`."""

    title: str
    namespace: str
    redirect: str | None
    """Title of the page to which a redirect leads; None for all other pages."""
    markup: str | None


def dump(
    path: Path,
    limits: Limits,
    kept: Path | None = None,
    redirects: KeyTable | None = None,
    processes: int | None = None,
) -> Iterator[Record | Unreadable]:
    """A record for each article, and a problem for each page from which no record is made.

    Parsed pages are kept in the database `kept`, and known pages are not parsed again. `redirects` has the redirects of all
    files of the dump; None: this is the only file, and is first read for its redirects. `processes` processes parse the pages;
    None: one per core.

    Raises:
        Unreadable: the file is not a dump, is damaged, or the parser is not installed. Pages before the damage are read.
    """
    need("mwparserfromhell", path)
    with KeyTable() as own, opened(path) as file, _Workers(processes or default_processes(), kept) as workers:
        if redirects is None:
            redirects = own
            add_redirects(path, own)
        for one in _articles(path, file, limits, workers):
            yield resolved(one, redirects)


def add_redirects(path: Path, redirects: KeyTable) -> None:
    """Adds the redirects of a file of a dump. Redirects that follow damage are not added."""
    # Damage is reported when the articles are read.
    with suppress(Unreadable, OSError, EOFError), opened(path) as file:
        found = _redirects(path, file)
        for title, target in progress(
            found, total=None, description="read redirects", unit="redirect", leave=False
        ):
            redirects.put(key_of(title), target)


def wiki_of(path: Path) -> str:
    """A name that all files of one dump of Wikimedia have in common, such as "enwiki-20260101".

    For a file that is not from Wikimedia, the name is its path.
    """
    found = _OF_WIKIMEDIA.match(path.name)
    return found[1] if found else str(path)


def redirects_of_part(part: DumpPart) -> list[tuple[str, str]]:
    """Title and target of each redirect in a part of a dump. Damage is reported when the articles are read."""
    found: list[tuple[str, str]] = []
    with suppress(Unreadable, OSError, EOFError):
        for one in read_part(part, partial(_redirects, part.path)):
            found += [] if isinstance(one, Unreadable) else [one]
    return found


def articles_of_part(
    part: DumpPart, path: Path, limits: Limits, kept: Path | None = None, processes: int | None = None
) -> Iterator[Record | Unreadable]:
    """The same records and problems as from `dump`, for the pages in a part of the dump `path`, with links to redirects.

    After a damaged place, the pages of the following streams are read.
    """
    need("mwparserfromhell", path)
    with _Workers(processes or default_processes(), kept) as workers:
        yield from read_part(part, partial(_articles, path, limits=limits, workers=workers))


def _redirects(path: Path, file: io.BufferedReader) -> Iterator[tuple[str, str]]:
    for page in _pages(path, file, _Target(Limits(), markup=False)):
        if page.redirect is not None:
            yield page.title, page.redirect


def _articles(
    path: Path, file: io.BufferedReader, limits: Limits, workers: "_Workers"
) -> Iterator[Record | Unreadable]:
    ended: Unreadable | None = None
    pending: deque[tuple[int, Callable[[], Record | Unreadable]]] = deque()
    waiting = 0  # length of the markup of the pending pages
    pages = _pages(path, file, target := _Target(limits))
    while ended is None:
        try:
            page = next(pages, None)
        except Unreadable as problem:
            page, ended = None, problem
        if page is None:
            break
        length = len(page.markup or "")
        pending.append((length, workers.submit(f"{path}: {page.title}", page, target.dropped)))
        waiting += length
        while len(pending) > 8 * workers.count or (waiting > MOST_WAITING and len(pending) > 1):
            length, result = pending.popleft()
            waiting -= length
            yield result()
    for _, result in pending:
        yield result()
    if ended is not None:
        raise ended


def resolved(found: Record | Unreadable, redirects: KeyTable) -> Record | Unreadable:
    """The record with links to the pages to which redirects lead."""
    if isinstance(found, Unreadable) or not found.links:
        return found
    return found._replace(
        links=tuple(Link(start, _page_behind(title, redirects)) for start, title in found.links)
    )


def _page_behind(title: str, redirects: KeyTable) -> str:
    """The title of the page to which a title leads, after at most `MOST_REDIRECTS` redirects."""
    for _ in range(MOST_REDIRECTS):
        target = redirects.get(key_of(title))
        if not target:
            break
        title = target
    return title


def _pages(path: Path, file: io.BufferedReader, target: "_Target") -> Iterator[Page]:
    parser = etree.XMLParser(target=target, huge_tree=True, resolve_entities=False, no_network=True)
    try:
        while part := file.read1(_PART):  # `read` would lose the bytes before the damage
            parser.feed(part)
            if target.root != "mediawiki":
                raise Unreadable(
                    path,
                    Reason.TYPE,
                    f"{path} is not a dump of a MediaWiki: its root element is {target.root!r}",
                )
            yield from target.take()
        parser.close()
    except etree.XMLSyntaxError as error:
        raise Unreadable(path, Reason.DAMAGED, f"{path} is damaged ({first_line(error)})") from None


class _Target:
    """Target of lxml's parser, with a method for each event of parsing. Finished pages are kept until `take` returns them.

    Without `markup`, the markup of the pages is not read.
    """

    def __init__(self, limits: Limits, markup: bool = True):
        self.root: str | None = None
        self.dropped: list[str] = []
        """Names of the namespaces of files and categories in the wiki's language."""
        self._most = limits.file_bytes
        self._finished: list[Page] = []
        self._values: dict[str, str] = {}
        self._redirect: str | None = None
        self._read = frozenset(("title", "ns", "namespace", *(("text",) if markup else ())))
        self._parts: list[str] | None = None
        self._length = 0

    def take(self) -> list[Page]:
        """The pages that were finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def doctype(self, *_: object) -> None:
        """Refuses a document type definition, in which a few bytes can expand to gigabytes. Dumps have no such definition.

        Raises:
            etree.XMLSyntaxError: always.
        """
        raise etree.XMLSyntaxError("a document type definition", 0, 0, 0)

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        name = tag.rpartition("}")[2]
        self.root = self.root or name
        if name == "page":
            self._values, self._redirect = {}, None
        elif name == "redirect":
            self._redirect = linked_title(attributes.get("title", ""))
        self._key = attributes.get("key", "")
        if name in self._read:
            self._parts, self._length = [], 0

    def data(self, data: str) -> None:
        if self._parts is not None:
            self._length += len(data)
            if self._length <= self._most:
                self._parts.append(data)
            else:
                self._parts.clear()

    def end(self, tag: str) -> None:
        name = tag.rpartition("}")[2]
        if self._parts is not None:
            value = "".join(self._parts)
            if name == "namespace" and self._key in ("-2", "6", "14"):
                self.dropped.append(value)
            elif self._length <= self._most:
                self._values[name] = value
            self._parts = None
        if name == "page":
            of = self._values.get
            self._finished.append(Page(of("title", ""), of("ns", "0"), self._redirect, of("text")))

    def close(self) -> None:
        """The parser calls this at the end of the file."""


def _why_not(where: str, page: Page) -> Unreadable | None:
    """The reason why no record is made from a page, if this is known before the markup is parsed; else None."""
    if page.namespace != "0":
        return Unreadable(where, Reason.NAMESPACE, f"{where} is in namespace {page.namespace}")
    if page.redirect is not None:
        return Unreadable(where, Reason.REDIRECT, f"{where} is a redirect")
    if reason := not_an_article(page.title):
        return Unreadable(where, reason, f"{where} is not an article")
    if page.markup is None:
        return Unreadable(where, Reason.TOO_LONG, f"{where}: the markup is too long to be parsed")
    return None


class _Workers(AbstractContextManager["_Workers"]):
    """Processes that parse markup, and for each process a thread that waits for its results.

    Results are kept in the database `kept`, if one is given, and a page whose result is known is not parsed.
    """

    def __init__(self, count: int, kept: Path | None = None):
        self.count = count
        self._kept = None if kept is None else KeptValues(kept, "pages", "all pages are parsed")
        self._threads = WorkerThreads(self.count, "wikitext")
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        for _ in range(self.count):
            self._idle.put(None)  # a process starts with its first page

    def submit(self, where: str, page: Page, dropped: list[str]) -> Callable[[], Record | Unreadable]:
        """A function that waits until a page has been parsed, and returns its record."""
        problem = _why_not(where, page)
        if problem is not None:
            return lambda: problem
        if self._kept is None:
            waiting = self._threads.submit(partial(self._parsed, page, dropped))
            return lambda: _record(where, page.title, waiting.result())
        return self._kept_result(self._kept, where, page, dropped)

    def _kept_result(
        self, kept: KeptValues, where: str, page: Page, dropped: list[str]
    ) -> Callable[[], Record | Unreadable]:
        key = _key(page, dropped)
        known = kept.find(key)
        if known is not None and (parsed := _uncompressed(known)) is not None:
            return lambda: _record(where, page.title, parsed)
        waiting = self._threads.submit(partial(self._parsed, page, dropped))

        def result() -> Record | Unreadable:
            parsed = waiting.result()
            kept.keep(key, zlib.compress(parsed, level=1))
            return _record(where, page.title, parsed)

        return result

    def _parsed(self, page: Page, dropped: list[str]) -> bytes:
        """The answer of a process; b"" if parsing the page takes too much time or memory."""
        answer, code = self._answer(page, dropped)
        if not answer and code != -signal.SIGXCPU:
            # perhaps something else killed the process, for want of memory
            answer, _ = self._answer(page, dropped)
        return answer

    def _answer(self, page: Page, dropped: list[str]) -> tuple[bytes, int | None]:
        """The answer of a process, or b"" and the exit code of the process if it ended."""
        child, answer, code = self._idle.get(), b"", None
        try:
            child = child or _start()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([page.markup, dropped, MOST_SECONDS]).encode() + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:  # the child has ended
            pass
        finally:
            if child is not None and not answer.endswith(b"\n"):
                child.kill()
                child.communicate()
                code, child, answer = child.returncode, None, b""
            self._idle.put(child)
        return answer, code

    def __exit__(self, *exception: object) -> None:
        self._threads.close()
        for _ in range(self.count):
            if child := self._idle.get():
                child.kill()
                child.communicate()
        if self._kept is not None:
            self._kept.close()


def _record(where: str, title: str, answer: bytes) -> Record | Unreadable:
    """The record of a page from the answer of a process, which is b"" or null for a page that exceeds the limits of parsing."""
    parsed = json.loads(answer or "null")
    if parsed is None:
        return Unreadable(
            where, Reason.TOO_LONG, f"{where}: parsing took over {MOST_SECONDS} s or too much memory"
        )
    text, disambiguation, links = parsed
    if disambiguation:
        return Unreadable(where, Reason.DISAMBIGUATION, f"{where} is a disambiguation page")
    if text is None:
        return Unreadable(where, Reason.DAMAGED, f"{where} cannot be parsed")
    if not text:
        return Unreadable(where, Reason.NO_TEXT, f"{where} has no text besides templates")
    return Record(where, title, text, links=tuple(Link(*link) for link in links))


def _key(page: Page, dropped: list[str]) -> bytes:
    """Hash of all on which the result of parsing a page depends."""
    content = "\0".join((parser_version(), str(MOST_SECONDS), str(MOST_MEMORY), *dropped, page.markup or ""))
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


@cache
def parser_version() -> str:
    """The version of the parser's library, and a digest of the code that makes text from the parser's output."""
    here = Path(__file__).parent
    files = [here / name for name in ("titles.py", "wikitext.py")]
    files += [here.parent / "formats" / name for name in ("grid.py", "mediawiki.py", "rows.py")]
    code = b"".join(file.read_bytes() for file in files)
    return f"{version('mwparserfromhell')} {hashlib.sha256(code).hexdigest()}"


def _uncompressed(value: bytes) -> bytes | None:
    """None if the value is damaged."""
    try:
        return zlib.decompress(value)
    except zlib.error:
        return None


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "realm.documents.wikipedia.dumps", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # A second arena, for a thread, would count towards the limit of memory.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )


# --- in a child ----------------------------------------------------------------------------------


def main() -> None:
    """Parses the pages on standard input until the parent process closes standard input or ends.

    The only argument of the command is the id of the parent process.
    """
    from realm.documents.wikipedia.wikitext import read_wikitext

    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, MOST_MEMORY)
    end_when_orphaned(int(sys.argv[1]))
    for line in sys.stdin.buffer:
        markup, dropped, seconds = json.loads(line)
        limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
        answer: list[Any] | None = [None, False, []]
        try:
            page = read_wikitext(markup, dropped)
            answer = [page.text, page.disambiguation, page.links]
        except MemoryError:
            answer = None
        except Exception:  # the parser raises errors of many classes; the page is left out
            pass
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer is None:  # not all memory may be free again
            break


if __name__ == "__main__":
    main()
