"""Sources become a list of files, each with its reader: a file, a folder that is walked, or a packaged corpus."""

import os
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from realm.documents import child_process
from realm.documents.demo_corpora import packaged
from realm.documents.formats.columns import arrow, parquet
from realm.documents.formats.compressed import COMPRESSIONS, uncompressed
from realm.documents.formats.json_lines import json_lines
from realm.documents.formats.records import (
    LINK,
    NAME,
    NOT_OPENED,
    SURROGATE,
    TYPE,
    Reader,
    Unreadable,
    printable,
)
from realm.documents.formats.tables import tsv
from realm.documents.formats.text_files import html, markdown, plain_text
from realm.documents.formats.warc import warc
from realm.documents.wikipedia import wikiextractor
from realm.documents.wikipedia.dumps import dump
from realm.errors import InputError


def count_kinds(files: Iterable[Unreadable]) -> str:
    """The commonest extensions among some files, with their counts, for messages."""
    kinds = Counter(_kind(Path(one.where)) or Path(one.where).name for one in files)
    return ", ".join(f"{number} {printable(kind)}" for kind, number in kinds.most_common(5))


SourceFile = tuple[Reader | None, Path] | Unreadable
"""The reader and the path of a file, or why the file is left out. Without a reader, `child_process` reads the file in a child
process."""


def _is_read(path: Path) -> bool:
    """Whether files of this name are of a type that is read."""
    plain = uncompressed(path)
    return bool(wikiextractor.NAME.fullmatch(plain.name)) or plain.suffix.lower() in (
        _FORMATS if plain == path else _COMPRESSED
    )


def _reader_of(path: Path) -> Reader | None:
    plain = uncompressed(path)
    if wikiextractor.NAME.fullmatch(plain.name):
        return wikiextractor.wikiextractor
    return (_FORMATS if plain == path else _COMPRESSED)[plain.suffix.lower()]


def _kind(path: Path) -> str:
    """The extension of a file; of a compressed file also the extension before it."""
    plain = uncompressed(path)
    return path.suffix if plain == path else plain.suffix + path.suffix


def files_of(source: str, but: Path | None) -> list[SourceFile]:
    """The files of one source, each with its reader or with the reason why it is left out.

    Nothing in the folder `but` is listed.

    Raises:
        InputError: the source does not exist, is not of a type that is read, or is a folder without any such file.
    """
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


def _walk(folder: Path, but: Path | None) -> list[SourceFile]:
    found: list[SourceFile] = []
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
        others = count_kinds(passed)
        has = f"has {others}, and no" if others else "is empty: it needs"
        raise InputError(f"{folder}: this folder {has} {_READ}")
    return found


def _file(path: Path) -> SourceFile:
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


_FORMATS: dict[str, Reader | None] = {
    ".jsonl": json_lines,
    ".txt": plain_text,
    ".md": markdown,
    ".html": html,
    ".htm": html,
    ".parquet": parquet,
    ".arrow": arrow,
    ".tsv": tsv,
    ".xml": dump,
    ".warc": warc,
    **dict.fromkeys(child_process.MODULES),
}
_COMPRESSED: dict[str, Reader | None] = {
    **{name: _FORMATS[name] for name in (".jsonl", ".txt", ".md", ".html", ".htm", ".tsv", ".xml", ".warc")},
    ".json": json_lines,  # what data sets call JSON Lines when they compress them: `c4-train.00000.json.gz`
}
_READ = f"{', '.join(_FORMATS)}, WikiExtractor's wiki_00, and {', '.join(COMPRESSIONS)} of the text formats"
