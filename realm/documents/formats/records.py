"""Output of the file format readers: records, and problems with a file, a line or a row."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from realm.errors import InputError, shortened, shown
from realm.text.corpus import Link, PassagesConfig, Section
from realm.text.fields import NO_FIELDS, USUAL_NAMES, FieldNames, with_nested


class Reason(StrEnum):
    """Reasons for leaving out files, lines and rows, as printed after a number: "3 empty"."""

    EMPTY = "empty"
    NO_TEXT = "without text"
    BINARY = "binary"
    ENCODING = "in an unknown encoding"
    NOT_JSON = "not JSON"
    FIELDS = "without a usable title, text or id"
    COLUMNS = "rows with more or fewer columns than their table"
    SAME_ID = "with an id that an earlier document has"
    TOO_LONG = "too long"
    DAMAGED = "damaged"
    ENCRYPTED = "encrypted"
    NOT_INSTALLED = "because a library is not installed (pip install 'realm-lm[documents]')"
    NOT_OPENED = "that cannot be opened"
    NAME = "with a name that is not UTF-8"
    TYPE = "of a type that is not read"
    KEY = "JSON files without a text (the setting text_field names its key)"
    LINK = "links to folders"
    OWN = "folders that realm made"
    PACKAGES = "folders of installed packages"
    REDIRECT = "redirects"
    DISAMBIGUATION = "disambiguation pages"
    LISTS = "lists, indexes and outlines"
    NAMESPACE = "pages that are not articles"
    NEAR_DUPLICATE = "nearly equal to an earlier document"


EXPECTED = frozenset(
    (
        Reason.TYPE,
        Reason.KEY,
        Reason.LINK,
        Reason.OWN,
        Reason.PACKAGES,
        Reason.REDIRECT,
        Reason.DISAMBIGUATION,
        Reason.LISTS,
        Reason.NAMESPACE,
        Reason.NEAR_DUPLICATE,
    )
)
"""Reasons that are not problems: with `--strict`, the first problem is an error, but these reasons are not."""


class Record(NamedTuple):
    """A document in a file. `where` is the place in the file, for error messages. If `id` is None, the title is the id."""

    where: str
    title: str
    text: str
    id: str | None = None
    assumed: str | None = None
    """The assumed encoding, if the file declares no encoding and is not UTF-8; else None."""
    links: tuple[Link, ...] | None = None
    """Links in the order of the text; None if the format of the file has no links, or if the reader does not keep them."""
    fields: Mapping[Any, Any] = NO_FIELDS
    """Metadata of the document as it is in the file; `realm.text.fields.clean_fields` makes fields of it."""
    sections: tuple[Section, ...] = ()
    """Sections of the text: those of the headings, if `Limits.headings` is set, or the passages of a record."""


class Unreadable(InputError):
    """A file, a line or a row from which no document can be made.

    Readers raise `Unreadable` if the rest of the file cannot be read, and yield `Unreadable` if they can continue.
    """

    def __init__(self, where: str | Path, reason: str, message: str):
        super().__init__(message)
        self.where = str(where)
        self.reason = reason

    def __reduce__(self) -> tuple[type["Unreadable"], tuple[str, str, str]]:
        """For pickle, which would call the class with the message only."""
        return Unreadable, (self.where, self.reason, str(self))


def need(package: str, path: Path) -> None:
    """Raises Unreadable if `package`, with which the file at `path` would be read, is not installed."""
    if find_spec(package) is None:
        message = f"{path} needs {package}: pip install 'realm-lm[documents]'"
        raise Unreadable(path, Reason.NOT_INSTALLED, message)


class Limits(NamedTuple):
    """What readers read: limits of length, which also limit the memory of a reader, whether headings make sections, and the
    names of the keys and columns."""

    document_chars: int = PassagesConfig.max_document_chars
    """Most characters of a document."""
    headings: bool = False
    """Whether readers of formats with headings make a section of each heading."""
    names: FieldNames = USUAL_NAMES
    """The keys of JSON and the columns of tables that have the parts of a document."""

    @property
    def file_bytes(self) -> int:
        """Most bytes of a file, or of a line of JSON Lines, that are read into memory at once.

        The limit is higher than `document_chars`, because files also contain markup, and a character can need several bytes.
        """
        # JSON can write a character in 12 bytes: "\ud83d\ude00".
        return max(64 << 20, 12 * self.document_chars)


class Pages(NamedTuple):
    """Progress of reading a long file: pages read, and pages in total."""

    done: int
    total: int


class Clusters(NamedTuple):
    """A part of a ZIM archive that can be read alone: the clusters `first` to `last`, both included. The archive had this size
    in bytes and this time (`st_mtime_ns`) when it was divided."""

    first: int
    last: int
    size: int
    time: int


Reader = Callable[[Path, Limits], Iterator[Record | Unreadable]]


def printable(text: str) -> str:
    """`text` for a terminal: line breaks, control characters and bytes that are not UTF-8 are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


FIELD_NAMES = {"id": ("id", "_id"), "title": ("title",), "text": ("text", "maintext")}
"""Part of a document -> the names of this part in data sets; `_id` is the name in BEIR, `maintext` the name in news-please."""


def present_names(columns: Collection[str], names: FieldNames) -> dict[str, str]:
    """Part of a document ("id", "title" or "text") -> the one of `columns` that has this part. Missing parts are left out.

    A part whose name is given in `names` is only in the column of this name.
    """
    known = {part: (own,) if (own := getattr(names, part)) else usual for part, usual in FIELD_NAMES.items()}
    found = {part: next((name for name in several if name in columns), "") for part, several in known.items()}
    return {part: name for part, name in found.items() if name}


def missing_names(columns: Collection[str], names: FieldNames) -> list[str]:
    """The names that a record must have and that are not in `columns`: that of the text, and those given in `names`."""
    present = present_names(columns, names)
    needed = [part for part in FIELD_NAMES if part == "text" or getattr(names, part)]
    return [getattr(names, part) or part for part in needed if part not in present]


def check_columns(where: str | Path, columns: Sequence[str], names: FieldNames) -> None:
    """Raises Unreadable if several columns of a table have the name of the title, the text or the id."""
    for name in present_names(columns, names).values():
        if (number := columns.count(name)) > 1:
            raise Unreadable(where, Reason.FIELDS, f"{where}: {number} columns are named {name}")


def without_columns(where: str | Path, missing: Sequence[str], columns: Sequence[str]) -> Unreadable:
    """The problem with a table that lacks the columns `missing`."""
    listed = shortened(", ".join(columns))
    problem = f"no column {' and '.join(missing)} (columns: {listed})"
    way_out = ": name the column of the text with text_field" if missing == ["text"] else ""
    return Unreadable(where, Reason.FIELDS, f"{where}: {problem}{way_out}")


def record(
    where: str, fields: Mapping[str, Any], names: FieldNames = USUAL_NAMES, way_out: str = ""
) -> Record | Unreadable:
    """The record that has the keys of a JSON object or the columns of a row, or the problem with these. `way_out` ends the
    message that a key is missing.

    All keys besides id, title and text are fields of the document, and so are the keys of an object `metadata` or `fields`. If
    the record has `passages`, as `realm kb export` writes them, these are the text, and each is a section. A record without a
    title has an empty title, and an empty id is no id.
    """
    passages = _passages(fields.get("passages"))
    if passages:
        fields = {**fields, names.text or "text": "\n\n".join(text for _, text in passages)}
        del fields["passages"]
    if missing := missing_names(fields, names):
        listed = ", ".join(map(shown, fields))
        message = f'{where}: no "{missing[0]}" (fields: {shortened(listed)}){way_out}'
        return Unreadable(where, Reason.FIELDS, message)
    present = present_names(fields, names)
    title = fields[present["title"]] if "title" in present else None
    title, text = "" if title is None else title, fields[present["text"]]
    for part, value in (("title", title), ("text", text)):
        if not isinstance(value, str):
            return Unreadable(
                where, Reason.FIELDS, f'{where}: "{present[part]}" is {shown(value)}, and must be a string'
            )
    own_id = fields[present["id"]] if "id" in present else None
    if own_id == "":  # a cell of CSV cannot be null
        own_id = None
    if own_id is not None:
        if isinstance(own_id, bool) or not isinstance(own_id, str | int):
            problem = f'"{present["id"]}" is {shown(own_id)}, and must be a string or a whole number'
            return Unreadable(where, Reason.FIELDS, f"{where}: {problem}")
        own_id = str(own_id)
    titles = "".join(own or "" for own, _ in passages)
    for name, value in (("title", title), ("text", text), ("id", own_id or ""), ("passages", titles)):
        if SURROGATE.search(value):
            return Unreadable(
                where, Reason.FIELDS, f'{where}: "{name}" holds half of a character (a lone UTF-16 surrogate)'
            )
    others = with_nested({name: value for name, value in fields.items() if name not in present.values()})
    return Record(where, title, text, own_id, fields=others, sections=_sections(title, passages))


def _passages(value: Any) -> list[tuple[str | None, str]]:
    """Title and text of the passages of a record, `[{"title"?, "text"}, ...]`; an empty list if the value is anything else."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return []
    found = [(one.get("title"), one.get("text")) for one in value]
    usable = all(
        isinstance(text, str) and text.strip() and isinstance(title, str | None) for title, text in found
    )
    return found if usable else []


def _sections(title: str, passages: Sequence[tuple[str | None, str]]) -> tuple[Section, ...]:
    """A section for each passage; in the text of the document, a blank line follows each passage."""
    starts = accumulate((len(text) + 2 for _, text in passages), initial=0)
    return tuple(
        Section(start, title if own is None else own)
        for start, (own, _) in zip(starts, passages, strict=False)
    )


SURROGATE = re.compile(r"[\ud800-\udfff]")


def whole_characters(record: Record) -> Record:
    """The record with U+FFFD in place of each half of a character. Escapes in texts can name such halves; UTF-8 has none."""
    parts: tuple[Link | Section, ...] = (*(record.links or ()), *record.sections)
    texts = (record.title, record.text, record.id or "", *(one.title for one in parts))
    if not any(map(SURROGATE.search, texts)):
        return record
    whole = partial(SURROGATE.sub, "\ufffd")
    return record._replace(
        title=whole(record.title),
        text=whole(record.text),
        id=None if record.id is None else whole(record.id),
        links=None
        if record.links is None
        else tuple(Link(start, whole(title)) for start, title in record.links),
        sections=tuple(one._replace(title=whole(one.title)) for one in record.sections),
    )


def checked(record: Record) -> Record:
    """The record, if a reader can have made it; for a record from a database.

    Raises:
        ValueError: no reader makes such a record.
        TypeError: a value is not of the type of its field.
    """
    parts: tuple[Link | Section, ...] = (*(record.links or ()), *record.sections)
    optional = [one for one in (record.id, record.assumed) if one is not None]
    texts = (record.where, record.title, record.text, *optional, *(one.title for one in parts))
    good = (
        not SURROGATE.search("".join(texts))
        and bool(record.text)
        and isinstance(record.fields, dict)
        and all(type(one.start) is int and 0 <= one.start <= len(record.text) for one in parts)
        and all(type(one.heading) is bool for one in record.sections)
    )
    if not good:
        raise ValueError(record)
    return record
