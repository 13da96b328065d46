"""Reads the output of WikiExtractor: files such as `wiki_00`, with one JSON line or one element `<doc>` per article.

With its option `--links`, WikiExtractor writes links as `<a href="Ouse%20%28river%29">Ouse</a>`.
"""

import html
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.parse import unquote

from realm.documents.formats.compressed import opened
from realm.documents.formats.encodings import decode
from realm.documents.formats.json_lines import json_lines
from realm.documents.formats.records import Limits, Reason, Record, Unreadable
from realm.documents.formats.titles import without_title
from realm.documents.wikipedia.titles import linked_title, not_an_article
from realm.text.corpus import Link
from realm.text.fields import USUAL_NAMES

NAME = re.compile(r"wiki_\d+")
_DOC = re.compile(r'<doc id="([^"]*)" .*?title="(.*)">')
# The words of a link contain no other link, so that the time grows only with the length of the text.
_LINK = re.compile(r'<a href="([^"\n]*)">((?:(?!<a href=).)*?)</a>')
_ADDRESS = re.compile(r"(\w+:)?//")


def wikiextractor(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    """A record for each article. Lists and disambiguation pages are left out, as in ORQA.

    The records have no id, so the title of an article becomes the id of its document.

    Raises:
        Unreadable: the file is empty, binary or damaged, has text outside the elements `<doc>`, or ends within an article.
    """
    with opened(path) as file:
        elements = file.peek(5)[:5].startswith(b"<doc ")
    usual = limits._replace(names=USUAL_NAMES)  # the keys of WikiExtractor are known
    for found in _elements(path, limits) if elements else json_lines(path, usual):
        if isinstance(found, Unreadable):
            yield found
            continue
        # WikiExtractor escapes entities, and writes the title as the first line of the text.
        title = html.unescape(found.title)
        text = without_title(title, html.unescape(found.text).strip())
        if reason := not_an_article(title):
            yield Unreadable(found.where, reason, f"{found.where}: {title} is not an article")
        elif not text:
            yield Unreadable(found.where, Reason.NO_TEXT, f"{found.where}: {title} has no text")
        else:
            yield _with_links(found._replace(title=title, text=text, id=None))


def _with_links(found: Record) -> Record:
    """The record with the words of the links in its text, and the titles of the linked pages in its links.

    The links of a text without links are unknown, because the file may have been written without `--links`.
    """
    parts = _LINK.split(found.text)
    links, text = [], parts[0]
    for target, words, after in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        page = html.unescape(unquote(target))
        if (title := linked_title(page)) and not _ADDRESS.match(page):
            links.append(Link(len(text), title))
        text += words + after
    return found._replace(text=text, links=tuple(links) if len(parts) > 1 else None)


def _elements(path: Path, limits: Limits) -> Iterator[Record | Unreadable]:
    with opened(path) as file:
        where, length = str(path), 0
        title: str | None = None
        lines: list[str] = []
        for number in count(1):
            raw = file.readline(limits.file_bytes)
            if not raw:
                break
            line, _ = decode(raw, f"{path}:{number}")
            if title is None:
                if start := _DOC.fullmatch(line.strip()):
                    where, title, lines, length = f"{path}:{number}", start[2], [], 0
                elif line.strip():
                    raise Unreadable(
                        path, Reason.DAMAGED, f"{path}:{number}: <doc id=... title=...> was expected"
                    )
            elif line.strip() == "</doc>":
                if length > limits.file_bytes:
                    yield Unreadable(
                        where, Reason.TOO_LONG, f"{where}: the article has over {limits.file_bytes:,} bytes"
                    )
                else:
                    yield Record(where, title, "".join(lines))
                title = None
            else:
                length += len(raw)
                if length <= limits.file_bytes:
                    lines.append(line)
        if title is not None:
            raise Unreadable(path, Reason.DAMAGED, f"{path} ends within an article, so it may be cut off")
