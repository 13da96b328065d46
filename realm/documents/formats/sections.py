"""The headings of a document, the sections of passages that they make, and the record of a file that is one document.

What reads HTML, slides or sheets finds the headings. The sections of Markdown in plain text are in `realm.text`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realm.documents.formats.records import Reason, Record, Unreadable
from realm.documents.formats.titles import file_title, without_title
from realm.text.corpus import Section
from realm.text.fields import NO_FIELDS


class Heading(NamedTuple):
    """A heading in a text: position of its first character, level from 1 to 6, and words."""

    start: int
    level: int
    words: str


def sections_of(title: str, text: str, headings: Sequence[Heading]) -> tuple[Section, ...]:
    """A section for each heading that text follows. The title is the title of the page and the headings above, joined by " > ".

    A heading that another heading follows is part of the section of the next heading. Of two names of which one begins with the
    other, such as "git-add(1)" and "git-add(1) Manual Page", only the longer one is in the title of a section.
    """
    found: list[Section] = []
    path: list[Heading] = []
    open_since: int | None = None  # start of a heading without text of its own
    ends = [*(one.start for one in headings[1:]), len(text)]
    for one, end in zip(headings, ends, strict=False):
        path = [*(above for above in path if above.level < one.level), one]
        start = one.start if open_since is None else open_since
        if " ".join(text[one.start : end].split()) == one.words:
            open_since = start
            continue
        open_since = None
        path_words = _without_repeats([title, *(above.words for above in path)])
        found.append(Section(start, " > ".join(path_words), heading=True))
    return tuple(found)


def _without_repeats(names: Sequence[str]) -> list[str]:
    """The names without each one that is the beginning of the name before or after it, up to the end of a word."""
    kept: list[str] = []
    for name in names:
        if kept and _begins(name, kept[-1]):
            kept[-1] = name
        elif not kept or not _begins(kept[-1], name):
            kept.append(name)
    return kept


def _begins(name: str, beginning: str) -> bool:
    return name.startswith(beginning) and not name[len(beginning) : len(beginning) + 1].isalnum()


def page_record(
    path: Path,
    title: str,
    text: str,
    assumed: str | None = None,
    fields: Mapping[Any, Any] = NO_FIELDS,
    headings: Sequence[Heading] = (),
) -> Record:
    """The record of a page in a file. If `title` is empty, the file name is the title.

    Raises:
        Unreadable: the page has no text.
    """
    title = title or file_title(path)
    sections = sections_of(title, text, headings)
    before = len(text)
    text = without_title(title, text)
    gone = before - len(text)
    sections = tuple(one._replace(start=max(0, one.start - gone)) for one in sections)
    if not text:
        raise Unreadable(path, Reason.NO_TEXT, f"{path} has no text, only a title or markup")
    return Record(str(path), title, text, path.as_posix(), assumed, fields=fields, sections=sections)
