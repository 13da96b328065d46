"""Lists the files of a source, each with the reader of its format. A source is a file, a folder or a packaged corpus."""

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from realm.documents import child_process
from realm.documents.demo_corpora import packaged
from realm.documents.formats.compressed import COMPRESSIONS, uncompressed
from realm.documents.formats.json_lines import json_file, json_lines
from realm.documents.formats.records import SURROGATE, Clusters, Reader, Reason, Unreadable, printable
from realm.documents.formats.tables import comma_separated, tsv
from realm.documents.formats.text_files import html, markdown, plain_text
from realm.documents.formats.warc import warc
from realm.documents.lance_datasets import EXTENSION, is_dataset, stat_of, with_datasets
from realm.documents.remote import SCHEMES, addresses_of, is_pattern, is_remote, name_of, public_address
from realm.documents.wikipedia import wikiextractor
from realm.documents.wikipedia.dumps import dump
from realm.errors import InputError
from realm.folders import DOCUMENTS, KB, VERSIONS, what_it_is
from realm.keys import KeyTable


def kind_of(where: str) -> str:
    """The extension of the file at a path or address; without an extension, its name."""
    return _kind(Path(where)) or Path(where).name


def count_kinds(kinds: Counter[str]) -> str:
    """For messages: the most frequent extensions of files, each after the number of files with this extension."""
    return ", ".join(f"{number:,} {printable(kind)}" for kind, number in kinds.most_common(5))


SourceFile = tuple[Reader | Clusters | None, Path] | Unreadable
"""The reader and the path of a file or a Lance dataset, or the reason why it is left out. If the reader is None,
`child_process` reads the file in a child process; if it is a part of a ZIM archive, `child_process` reads this part."""


class RemoteFile(NamedTuple):
    """A file or a Lance dataset that is copied before the reader reads it; if the reader is None, `child_process` reads the
    copy."""

    reader: Reader | None
    address: str
    files: tuple[str, ...] = ()
    """The addresses of the files of a dataset; a file has none."""


class State(NamedTuple):
    """Size and modification time of a file. If they are equal, the file is taken for unchanged."""

    size: int
    time: int


def state_of(path: Path) -> State | None:
    """None if the file cannot be found."""
    try:
        found = stat_of(path)
    except OSError:
        return None
    return State(found.st_size, found.st_mtime_ns)


def keeping(
    file: SourceFile | RemoteFile,
    kept: Path | None,
    redirects: Mapping[Path, KeyTable],
    processes: int | None = None,
) -> SourceFile | RemoteFile:
    """A dump that `processes` processes parse (None: one per core), whose parsed pages are kept in the database `kept`, and
    whose links follow the redirects of this file, if they are given; any other file is unchanged."""
    if isinstance(file, Unreadable):
        return file
    parsed = partial(dump, kept=kept, processes=processes)
    if isinstance(file, RemoteFile):
        return file._replace(reader=parsed) if file.reader is dump else file
    reader, path = file
    return (partial(parsed, redirects=redirects.get(path)), path) if reader is dump else file


def _is_read(path: Path) -> bool:
    """Whether there is a reader for files with this name."""
    plain = uncompressed(path)
    if _DUMP_INDEX.search(plain.name):
        return False
    if _format(path) == EXTENSION:
        return is_dataset(path)
    return bool(wikiextractor.NAME.fullmatch(plain.name)) or _format(plain) in (
        _FORMATS if plain == path else _TEXT_FORMATS
    )


def _why_not_read(path: Path, where: str) -> str:
    """Why there is no reader for a file with this name; `where` is its path or address."""
    if _DUMP_INDEX.search(path.name):
        return f"{where} lists the places of pages in a dump, and contains no text"
    if _format(path) == EXTENSION:
        return f"{where} is not a Lance dataset, which is a folder with a folder {VERSIONS}"
    return f"{where}: {_kind(path) or 'a file without an extension'} cannot be read, only {_READ}"


def _reader_of(path: Path) -> Reader | None:
    plain = uncompressed(path)
    if wikiextractor.NAME.fullmatch(plain.name):
        return wikiextractor.wikiextractor
    return (_FORMATS if plain == path else _TEXT_FORMATS)[_format(plain)]


def _format(plain: Path) -> str:
    """The key of a file in `_FORMATS`: its extension; ".xml" for a part of a dump, such as `articles1.xml-p1p41242`."""
    extension = plain.suffix.lower()
    return ".xml" if _DUMP_PART.fullmatch(extension) else extension


def _kind(path: Path) -> str:
    """The extension of a file. For a compressed file, these are the last two extensions, such as ".txt.gz"."""
    plain = uncompressed(path)
    return path.suffix if plain == path else plain.suffix + path.suffix


def files_of(source: str, but: Collection[Path] = ()) -> list[SourceFile]:
    """The files of one source, each with its reader or with the reason why it is left out.

    Files in the folders `but` are not listed.

    Raises:
        InputError: the source does not exist, is a file for which there is no reader, or is a folder without any file for
            which there is a reader.
    """
    # `os.path.normpath` makes one slash of the two slashes of an address.
    address = re.sub("^([a-z0-9]+):/+", r"\1://", source)
    if is_remote(address):
        raise InputError(
            f"{public_address(address)}: only `realm kb build`, `kb add` and `kb preview` read remote files"
        )
    if source.startswith("package:"):
        return [packaged(source)]
    path = Path(os.path.normpath(source))
    if path.is_dir() and not is_dataset(path):
        return _walk(path, but)
    if not path.exists():
        scheme, colon, _ = address.partition("://")
        if colon and scheme.isalnum():
            known = ", ".join(f"{one}://" for one in SCHEMES)
            raise InputError(f"{source}: {scheme}:// is no kind of address that is read: use {known}")
        raise InputError(f"{source}: no such file or folder")
    if _DUMP_INDEX.search(path.name) or (path.suffix.lower() == EXTENSION and not is_dataset(path)):
        raise InputError(_why_not_read(path, source))
    if not _is_read(path):
        kind = f"{_kind(path)} files" if path.suffix else "files without an extension"
        raise InputError(f"{source}: cannot read {kind}, only {_READ}")
    return [_file(path)]


def remote_files_of(source: str) -> list[RemoteFile | Unreadable]:
    """The files of a source that is an address, each with its reader or with the reason why it is left out.

    Raises:
        InputError: the files cannot be listed, or there is no reader for any of them.
    """
    found: list[RemoteFile | Unreadable] = []
    listed = with_datasets(addresses_of(source, EXTENSION))
    if source.lower().endswith(EXTENSION) and not is_pattern(source) and not any(listed.values()):
        raise InputError(_why_not_read(Path(name_of(source)), public_address(source)))
    for address, files in listed.items():
        path, where = Path(name_of(address)), public_address(address)
        if files:
            found.append(RemoteFile(None, address, files))
        elif _format(path) != EXTENSION and _is_read(path):
            found.append(RemoteFile(_reader_of(path), address))
        else:
            found.append(Unreadable(where, Reason.TYPE, _why_not_read(path, where)))
    if not any(isinstance(one, RemoteFile) for one in found):
        raise InputError(str(found[0]))
    return found


def _walk(folder: Path, but: Collection[Path]) -> list[SourceFile]:
    found: list[SourceFile] = []
    left = {one.resolve() for one in but}
    with_packages = _has_packages(folder)

    def not_opened(error: OSError) -> None:
        found.append(Unreadable(error.filename, Reason.NOT_OPENED, f"{error.filename}: {error.strerror}"))

    for parent, folders, names in os.walk(folder, onerror=not_opened):
        datasets = [name for name in folders if is_dataset(Path(parent, name))]
        folders[:] = sorted(
            name
            for name in folders
            if not (name.startswith(".") or name in datasets) and Path(parent, name).resolve() not in left
        )
        for name in list(folders):
            path = Path(parent, name)
            if what := _made_by_realm(path):
                folders.remove(name)
                found.append(Unreadable(path, Reason.OWN, f"{path} is {what}"))
            elif not with_packages and _has_packages(path):
                folders.remove(name)
                message = (
                    f"{path} has installed packages: if they are to be read, name this folder as a source"
                )
                found.append(Unreadable(path, Reason.PACKAGES, message))
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink():  # the link may lead to a folder that contains the link
                found.append(Unreadable(path, Reason.LINK, f"{path}: links to folders are not followed"))
        found += [
            _file(Path(parent, name)) for name in sorted([*names, *datasets]) if not name.startswith(".")
        ]
    passed = [
        one
        for one in found
        if isinstance(one, Unreadable)
        and one.reason in (Reason.TYPE, Reason.LINK, Reason.OWN, Reason.PACKAGES)
    ]
    if len(passed) == len(found):
        others = count_kinds(Counter(kind_of(one.where) for one in passed))
        has = f"has {others}, and no" if others else "is empty, and needs one or more files of these types:"
        raise InputError(f"{folder}: this folder {has} {_READ}")
    return found


def _made_by_realm(folder: Path) -> str:
    """ "a workspace", "a knowledge base" or "a model"; "" for a folder of the user."""
    with suppress(OSError):  # a folder that cannot be opened is reported when it is walked
        if (folder / DOCUMENTS).is_file() and what_it_is(folder / KB):
            return "a workspace"
        return what_it_is(folder)
    return ""


_PACKAGES = frozenset(("__pycache__", "node_modules", "site-packages"))


def _has_packages(folder: Path) -> bool:
    """Whether a folder has programs of others, or what was made of programs: their documents would outnumber the user's."""
    return folder.name in _PACKAGES or os.path.isfile(folder / "pyvenv.cfg")


def _file(path: Path) -> SourceFile:
    if path.name.startswith("~$"):
        return Unreadable(
            path, Reason.TYPE, f"{path} is a lock file of an office program, and contains no text"
        )
    if not _is_read(path):
        return Unreadable(path, Reason.TYPE, _why_not_read(path, str(path)))
    if SURROGATE.search(str(path)):  # the name becomes the id and the title, which are stored in UTF-8
        return Unreadable(
            path, Reason.NAME, f"{str(path)!r}: the name of this file is not UTF-8: rename the file"
        )
    try:
        if not (stat.S_ISREG(path.stat().st_mode) or is_dataset(path)):  # reading a pipe may never end
            return Unreadable(path, Reason.NOT_OPENED, f"{path} is not a regular file")
    except OSError as error:
        return Unreadable(path, Reason.NOT_OPENED, f"{path}: {error.strerror}")
    return _reader_of(path), path


_DUMP_PART = re.compile(r"\.xml-p\d+p\d+")
"""The extension of a part of a dump of Wikimedia, with the first and the last number of a page."""
_DUMP_INDEX = re.compile(r"-multistream-index\d*\.txt")
_TEXT_FORMATS: dict[str, Reader | None] = {
    ".jsonl": json_lines,
    ".json": json_file,
    ".txt": plain_text,
    ".text": plain_text,
    ".log": plain_text,
    ".md": markdown,
    ".markdown": markdown,
    ".mdx": markdown,
    ".html": html,
    ".htm": html,
    ".xhtml": html,
    ".csv": comma_separated,
    ".tsv": tsv,
    ".xml": dump,
    ".warc": warc,
}
"""Extension -> reader. Files of these formats may be compressed."""
_FORMATS = {**_TEXT_FORMATS, **dict.fromkeys(child_process.MODULES)}
"""Extension -> reader of files that are not compressed; None: `child_process` reads the file."""
_READ = (
    f"{', '.join(_FORMATS)}, WikiExtractor's wiki_00, "
    f"and {', '.join(COMPRESSIONS)} of {', '.join(_TEXT_FORMATS)} and wiki_00"
)
