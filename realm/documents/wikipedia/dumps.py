"""MediaWiki's XML dumps become a record per article, in constant memory and in order; several processes parse the pages.

Left out are redirects, disambiguation pages, pages outside the main namespace and, as in ORQA, lists, indexes and outlines.
A page that takes too long, or too much memory, ends the process that parses it: this page is left out.
"""

import io
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from lxml import etree

from realm.documents.child_limits import MOST_MEMORY, limit
from realm.documents.formats.compressed import opened
from realm.documents.formats.records import (
    DAMAGED,
    DISAMBIGUATION,
    NAMESPACE,
    NO_TEXT,
    NOT_INSTALLED,
    REDIRECT,
    TOO_LONG,
    TYPE,
    Limits,
    Record,
    Unreadable,
)
from realm.documents.wikipedia.titles import not_an_article
from realm.errors import first_line
from realm.text.tagger_processes import usable_cores

MOST_SECONDS = 20
"""Seconds of processor time for a page, which takes milliseconds; ten thousand open tags would take hours."""
_PART = 1 << 16


class Page(NamedTuple):
    """A page of a dump, as it stands there; without markup if that is longer than any file that is read whole."""

    title: str
    namespace: str
    redirect: bool
    markup: str | None


def dump(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each article, or why a page gives none.

    Raises:
        Unreadable: the file is no dump, is damaged, or the parser is not installed. What comes before the damage is read.
    """
    if find_spec("mwparserfromhell") is None:
        message = f"{path} needs mwparserfromhell: pip install 'realm-lm[documents]'"
        raise Unreadable(path, NOT_INSTALLED, message)
    ended: Unreadable | None = None
    with opened(path) as file, _Workers() as workers:
        pending: deque[Future[Record | Unreadable]] = deque()
        pages = _pages(path, file, target := _Target(limits))
        while ended is None:
            try:
                page = next(pages, None)
            except Unreadable as problem:
                page, ended = None, problem
            if page is None:
                break
            pending.append(workers.submit(f"{path}: {page.title}", page, target.dropped))
            if len(pending) > 8 * workers.count:
                yield pending.popleft().result()
        for one in pending:
            yield one.result()
    if ended is not None:
        raise ended


def _pages(path: Path, file: io.BufferedReader, target: "_Target") -> Iterator[Page]:
    parser = etree.XMLParser(target=target, huge_tree=True, resolve_entities=False, no_network=True)
    try:
        while part := file.read1(_PART):  # not `read`, which drops what it has when the rest is damaged
            parser.feed(part)
            if target.root != "mediawiki":
                raise Unreadable(
                    path, TYPE, f"{path} is no dump of a MediaWiki: its root element is {target.root!r}"
                )
            yield from target.take()
        parser.close()
    except etree.XMLSyntaxError as error:
        raise Unreadable(path, DAMAGED, f"{path} is damaged ({first_line(error)})") from None


class _Target:
    """What lxml's parser calls for each element; keeps the finished pages until they are taken."""

    def __init__(self, limits: Limits):
        self.root: str | None = None
        self.dropped: list[str] = []
        """Names of the namespaces of files and categories in the wiki's language."""
        self._most = limits.file_bytes
        self._finished: list[Page] = []
        self._values: dict[str, str] = {}
        self._redirect = False
        self._parts: list[str] | None = None
        self._length = 0

    def take(self) -> list[Page]:
        """The pages that were finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def doctype(self, *_: object) -> None:
        """Refuses a document type, in which a few bytes can stand for gigabytes; dumps have none.

        Raises:
            etree.XMLSyntaxError: always.
        """
        raise etree.XMLSyntaxError("a document type definition", 0, 0, 0)

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        name = tag.rpartition("}")[2]
        self.root = self.root or name
        if name == "page":
            self._values, self._redirect = {}, False
        elif name == "redirect":
            self._redirect = True
        self._key = attributes.get("key", "")
        if name in ("title", "ns", "text", "namespace"):
            self._parts, self._length = [], 0

    def data(self, data: str) -> None:
        if self._parts is not None:
            self._length += len(data)
            if self._length <= self._most:
                self._parts.append(data)

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
        """Called by the parser at the end of the file."""


def _why_not(where: str, page: Page) -> Unreadable | None:
    """Why a page gives no record, as far as that is known before its markup is parsed."""
    if page.namespace != "0":
        return Unreadable(where, NAMESPACE, f"{where} is in namespace {page.namespace}")
    if page.redirect:
        return Unreadable(where, REDIRECT, f"{where} is a redirect")
    if reason := not_an_article(page.title):
        return Unreadable(where, reason, f"{where} is no article")
    if page.markup is None:
        return Unreadable(where, TOO_LONG, f"{where}: the markup is too long to be parsed")
    return None


class _Workers(AbstractContextManager["_Workers"]):
    """Processes that parse markup, each with a thread that waits for it."""

    def __init__(self) -> None:
        self.count = usable_cores()
        self._threads = ThreadPoolExecutor(self.count, "wikitext")
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        for _ in range(self.count):
            self._idle.put(None)  # a process starts with its first page

    def submit(self, where: str, page: Page, dropped: list[str]) -> "Future[Record | Unreadable]":
        """The record of a page, once it is parsed."""
        problem = _why_not(where, page)
        if problem is None:
            return self._threads.submit(self._record, where, page, dropped)
        known: Future[Record | Unreadable] = Future()
        known.set_result(problem)
        return known

    def _record(self, where: str, page: Page, dropped: list[str]) -> Record | Unreadable:
        child, answer = self._idle.get(), b""
        try:
            child = child or _start()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([page.markup, dropped, MOST_SECONDS]).encode() + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:  # it has just ended
            pass
        finally:
            if child is not None and not answer.endswith(b"\n"):
                child.kill()
                child.communicate()
                child = None
            self._idle.put(child)
        if child is None:
            return Unreadable(
                where, TOO_LONG, f"{where}: parsing took over {MOST_SECONDS} s or too much memory"
            )
        text, disambiguation = json.loads(answer)
        if disambiguation:
            return Unreadable(where, DISAMBIGUATION, f"{where} is a disambiguation page")
        if text is None:
            return Unreadable(where, DAMAGED, f"{where} cannot be parsed")
        if not text:
            return Unreadable(where, NO_TEXT, f"{where} has no text besides templates")
        return Record(where, page.title, text)

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for _ in range(self.count):
            if child := self._idle.get():
                child.kill()
                child.communicate()


def _start() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "realm.documents.wikipedia.dumps"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


# --- in a child ----------------------------------------------------------------------------------


def main() -> None:
    """Parses the markup that arrives, until the parent closes the stream or dies."""
    from realm.documents.wikipedia.wikitext import read_wikitext

    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, MOST_MEMORY)
    for line in sys.stdin.buffer:
        markup, dropped, seconds = json.loads(line)
        limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
        answer: list[Any] = [None, False]
        try:
            page = read_wikitext(markup, dropped)
            answer = [page.text, page.disambiguation]
        except Exception:  # of whatever class: the page is left out
            pass
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
