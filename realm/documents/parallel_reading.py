"""Reads files in several processes, of this machine or of a Ray cluster. The records have the same order as from one process.

A block of the work has several small files, a file of any size, a remote file, or a part of a Wikipedia dump or of a ZIM
archive. A worker refuses a block if a local file does not have the same size and time as on the machine of the command, if a
file cannot be opened or copied, or if a library is missing; another worker, or the process of the command, then reads the whole
block. No worker is asked to read a dump that cannot be split. On this machine, workers are asked to read only what takes longer
to read than to tag: parts of dumps and of ZIM archives, and PDF and Word files.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple, Protocol

from realm.documents.file_records import records_of, records_of_file
from realm.documents.formats.records import Clusters, Limits, Reason, Record, Unreadable
from realm.documents.kept_blocks import KeptBlocks, key_of_file, key_of_part
from realm.documents.kept_records import KeepingReader, reader_of
from realm.documents.remote import MissingError
from realm.documents.sources import RemoteFile, SourceFile, State, keeping, state_of
from realm.documents.wikipedia import multistream, zim
from realm.documents.wikipedia.dumps import (
    add_redirects,
    articles_of_part,
    dump,
    redirects_of_part,
    resolved,
    wiki_of,
)
from realm.documents.wikipedia.multistream import DumpPart
from realm.errors import RealmError
from realm.keys import KeyTable, key_of
from realm.local_processes import map_in_processes
from realm.progress import progress
from realm.ray_actors import READING_CORES, map_on_ray
from realm.refusals import OwnWork, Refused

BLOCK_BYTES, BLOCK_FILES = 4 << 20, 64
"""Size and number of files at which a block is complete."""
RESULT_CHARS, RESULT_RECORDS = 4_000_000, 1000
"""Length of text and number of records at which a worker sends the records."""

REMOTE = State(0, 0)
"""Stands for the state of a remote file, which has the same address on all machines."""
NOT_HERE = (Reason.NOT_OPENED, Reason.NOT_INSTALLED)
"""Reasons why another machine may read a file."""

Redirects = list[tuple[str, str]]
"""Title and target of each redirect in a part of a dump."""


class Map(Protocol):
    """`map_in_processes` or `map_on_ray`."""

    def __call__(
        self,
        prepare: Callable[[], Callable[[Any], Iterable[Any]]],
        items: Iterator[Any],
        *,
        own: OwnWork[Any, Any],
    ) -> Generator[Any, None, None]: ...


class Block(NamedTuple):
    """Files with their states. A worker compares the states with those on its own machine."""

    files: list[tuple[SourceFile | RemoteFile, State | None]]
    """No worker reads a block that has a file without a state."""
    part: DumpPart | None = None
    """The part, if the block is a part of a dump."""
    key: bytes | None = None
    """Key in `KeptBlocks` of a part of a dump, or of a PDF or Word file; None if the records are not kept."""
    known: bool = False
    """Whether the records are kept. No worker reads such a block."""

    @property
    def is_own(self) -> bool:
        """Whether only the process of the command reads the block."""
        return self.known or any(_is_own(file, state) for file, state in self.files)


class Found(NamedTuple):
    """Some of the records of a block, in order; none, if the records are kept."""

    records: list[Record | Unreadable]
    block: Block
    number: int
    """The number of earlier results of the block."""
    last: bool
    """Whether these are the last records of the block."""


def read_on_ray(
    found: Sequence[SourceFile | RemoteFile], limits: Limits, address: str, kept: Path | None = None
) -> Iterator[Record | Unreadable]:
    """The records and problems of files, in order.

    The records of parts of dumps, and of PDF and Word files, are kept in the database `kept`, and are not parsed again.

    Raises:
        InputError: Ray is not installed, or there is no cluster at the address.
        RealmError: the workers died repeatedly during the same work.
    """
    found, dumps = _divided(found), _parts_of_dumps(found)
    mapped = partial(map_on_ray, address=address, cores_each=READING_CORES)
    with nullcontext() if kept is None else KeptBlocks(kept) as known:
        blocks = _with_keys(_blocks(found, dumps, _state), limits, known)
        yield from _read(blocks, dumps, limits, mapped, kept, known)


def read_in_processes(
    found: Sequence[SourceFile | RemoteFile], limits: Limits, processes: int | None, kept: Path | None
) -> Iterator[Record | Unreadable]:
    """The records and problems of files, in order. `processes` processes read the parts of dumps and of ZIM archives, and PDF
    and Word files. With None, this process reads them, and one process per core parses the pages of dumps.

    Parsed pages of dumps, and PDF and Word files, are kept in the database `kept`, and are not parsed again.

    Raises:
        RealmError: the processes were killed repeatedly during the same work.
    """
    dumps = _parts_of_dumps(found)
    if processes is not None and processes > 1:
        found = _divided(found)
    workers = min(processes or 1, sum(map(len, dumps.values())) + sum(map(_is_slow, found)))
    mapped: Map = partial(map_in_processes, processes=workers) if workers > 1 else _map_here
    if workers > 1 or any(dumps.values()):
        blocks = _blocks(found, dumps, _state_if_slow, kept, 1 if workers > 1 else processes)
        yield from _read(blocks, dumps, limits, mapped, kept, worker_kept=kept, processes=processes)
    else:
        with _redirects_of_dumps(dumps, mapped) as redirects:
            files = (keeping(one, kept, redirects, processes) for one in found)
            yield from records_of(files, limits, kept)


def _map_here(
    prepare: Callable[[], Callable[[Any], Iterable[Any]]], items: Iterator[Any], *, own: OwnWork[Any, Any]
) -> Generator[Any, None, None]:
    """A `Map` without workers."""
    for item in items:
        yield from own.function(item)


def _read(
    blocks: Iterator["Block"],
    dumps: Mapping[Path, Sequence[DumpPart]],
    limits: Limits,
    mapped: Map,
    kept: Path | None = None,
    known: KeptBlocks | None = None,
    worker_kept: Path | None = None,
    processes: int | None = None,
) -> Iterator[Record | Unreadable]:
    """The process of the command keeps what it reads in the database `kept`. `known` keeps what other machines have read.
    Workers on this machine use the database `worker_kept`. `processes` processes parse a dump that is read as a whole."""
    with ExitStack() as opened:
        child = opened.enter_context(KeepingReader(kept))
        redirects = opened.enter_context(_redirects_of_dumps(dumps, mapped))

        def read(file: SourceFile | RemoteFile, _: State | None = None) -> Iterator[Record | Unreadable]:
            return records_of_file(keeping(file, kept, redirects, processes), limits, child)

        own = OwnWork(partial(_found, records=read), lambda block: block.is_own)
        results = mapped(partial(prepare_reading, Path.cwd(), limits, worker_kept), blocks, own=own)
        for one, part in _records(opened.enter_context(closing(results)), read, known):
            yield one if part is None else resolved(one, redirects[part.path])


def _records(
    results: Iterable[Found],
    read: Callable[[SourceFile | RemoteFile], Iterator[Record | Unreadable]],
    known: KeptBlocks | None,
) -> Iterator[tuple[Record | Unreadable, DumpPart | None]]:
    """Each record with the part of a dump that it is from, or with None. The records of blocks that have a key are kept."""
    unkept: bytes | None = None  # key of a block that was not read to its end; another reading may succeed
    told: set[str] = set()
    for found in results:
        block, records = found.block, iter(found.records)
        if known is not None and block.key is not None:
            if block.known:
                records = _kept(block, block.key, known, read)
            elif any(_fails(one, block) for one in found.records) or (found.last and _has_changed(block)):
                unkept = block.key
            elif block.key != unkept:
                known.keep(block.key, found.number, found.records, found.last)
        yield from ((one, block.part) for one in records if not _is_told(one, block, told))


def _is_told(one: Record | Unreadable, block: Block, told: set[str]) -> bool:
    """Whether this is a problem with a whole ZIM archive that an earlier part of the archive has, too."""
    file = block.files[0][0]
    if not isinstance(one, Unreadable) or isinstance(file, Unreadable | RemoteFile):
        return False
    reader, path = file
    if not isinstance(reader, Clusters) or one.where != str(path):
        return False
    is_told = str(one) in told
    told.add(str(one))
    return is_told


def _fails(one: Record | Unreadable, block: Block) -> bool:
    """Whether a block was not read completely. A problem of a page of a dump names the page; a problem of the part names the
    dump."""
    return isinstance(one, Unreadable) and (block.part is None or one.where == str(block.part.path))


def _has_changed(block: Block) -> bool:
    """Whether the file of a block that has a key was changed after the key was made."""
    ((file, state),) = block.files
    return state != _state(file)


def _kept(
    block: Block,
    key: bytes,
    known: KeptBlocks,
    read: Callable[[SourceFile | RemoteFile], Iterator[Record | Unreadable]],
) -> Iterator[Record | Unreadable]:
    """The records of a block that are kept; the block is read if a value is damaged."""
    done = 0
    try:
        for values in known.records(key):
            yield from values
            done += len(values)
    except ValueError:
        ((file, _),) = block.files
        yield from islice(read(file), done, None)


def _with_keys(blocks: Iterator[Block], limits: Limits, known: KeptBlocks | None) -> Iterator[Block]:
    """The blocks; a block whose records are kept, now or after it was read, has a key."""
    for block in blocks:
        key = None if known is None else _key(block, limits)
        yield block if known is None or key is None else block._replace(key=key, known=known.has(key))


def _key(block: Block, limits: Limits) -> bytes | None:
    file, state = block.files[0]
    if state is None or isinstance(file, Unreadable | RemoteFile):
        return None
    if block.part is not None:
        return key_of_part(block.part, state, limits)
    return key_of_file(file[1], state, limits) if len(block.files) == 1 else None


def _divided(found: Sequence[SourceFile | RemoteFile]) -> list[SourceFile | RemoteFile]:
    """The files; a local ZIM archive that can be divided is replaced by its parts, or by its damage."""
    divided: list[SourceFile | RemoteFile] = []
    for file in found:
        parts: list[SourceFile | RemoteFile] = []
        if not isinstance(file, Unreadable | RemoteFile) and zim.is_archive(file[1]):
            try:
                parts = [(part, file[1]) for part in zim.parts_of(file[1])]
            except Unreadable as damage:
                parts = [damage]
            except OSError:
                parts = []  # the reader reports the error
        divided += parts or [file]
    return divided


def _parts_of_dumps(found: Sequence[SourceFile | RemoteFile]) -> dict[Path, list[DumpPart]]:
    """The parts of each local dump; an empty list for a dump that cannot be split."""
    return {path: _parts_of(path) for path in map(_path_of_dump, found) if path}


def _path_of_dump(file: SourceFile | RemoteFile) -> Path | None:
    """The path of the file, if the file is a local dump."""
    return None if isinstance(file, Unreadable | RemoteFile) or file[0] is not dump else file[1]


def _parts_of(path: Path) -> list[DumpPart]:
    with suppress(OSError):
        return multistream.parts_of(path)
    return []


def _state(file: SourceFile | RemoteFile) -> State | None:
    """The state of a file. A problem has no state. A file that no worker reads has no state either: a file that cannot be
    opened, and a dump that is read as a whole, because the process of the command keeps its parsed pages."""
    if isinstance(file, Unreadable) or file[0] is dump:
        return None
    if isinstance(file, RemoteFile):
        return REMOTE
    return state_of(file[1]) if os.access(file[1], os.R_OK) else None


def _state_if_slow(file: SourceFile | RemoteFile) -> State | None:
    """The state of a file that a worker on this machine reads; None for all other files."""
    return _state(file) if _is_slow(file) else None


def _is_own(file: SourceFile | RemoteFile, state: State | None) -> bool:
    """Whether only the process of the command reads a file."""
    return state is None and not isinstance(file, Unreadable)


def _is_slow(file: SourceFile | RemoteFile) -> bool:
    """Whether a local file is read alone, because reading it is slow: its records are kept, or it is a part of an archive."""
    return not isinstance(file, Unreadable | RemoteFile) and (
        isinstance(file[0], Clusters) or reader_of(file[1]) is not None
    )


def _blocks(
    found: Sequence[SourceFile | RemoteFile],
    dumps: Mapping[Path, Sequence[DumpPart]],
    state_of_file: Callable[[SourceFile | RemoteFile], State | None],
    kept: Path | None = None,
    parsers: int | None = 1,
) -> Iterator[Block]:
    """All files in blocks. Parsed pages of the parts of dumps are kept in the database `kept`. `parsers` processes parse the
    pages of a part; None: one per core."""
    block, size = Block([]), 0
    for file in found:
        path = _path_of_dump(file)
        parts = dumps[path] if path else ()
        state = state_of_file(file)
        is_full = size >= BLOCK_BYTES or len(block.files) >= BLOCK_FILES
        alone = bool(parts) or (state is not None and (isinstance(file, RemoteFile) or _is_slow(file)))
        if block.files and (alone or is_full or _is_own(file, state) != block.is_own):
            yield block
            block, size = Block([]), 0
        if parts:
            for part in parts:
                source: SourceFile = partial(articles_of_part, part, kept=kept, processes=parsers), part.path
                yield Block([(source, state_of(part.path))], part)
        elif alone:
            yield Block([(file, state)])
        else:
            block.files.append((file, state))
            size += state.size if state else 0
    if block.files:
        yield block


@contextmanager
def _redirects_of_dumps(
    dumps: Mapping[Path, Sequence[DumpPart]], mapped: Map
) -> Iterator[Mapping[Path, KeyTable]]:
    """A context with the redirects of the dump to which a file belongs, for each file that is split, or that has other files of
    the same dump beside it. For all other files, `dump` reads the redirects."""
    files: dict[str, list[Path]] = {}
    for path in dumps:
        files.setdefault(wiki_of(path), []).append(path)
    with ExitStack() as opened:
        redirects: dict[Path, KeyTable] = {}
        for paths in files.values():
            if len(paths) > 1 or dumps[paths[0]]:
                redirects |= dict.fromkeys(paths, opened.enter_context(KeyTable()))
        _read_redirects([part for split in dumps.values() for part in split], redirects, mapped)
        for path, table in redirects.items():
            if not dumps[path]:
                add_redirects(path, table)
        yield redirects


def _read_redirects(parts: Sequence[DumpPart], redirects: Mapping[Path, KeyTable], mapped: Map) -> None:
    """Adds the titles and the targets of all redirects of the dumps."""
    if not parts:
        return
    items = ((part, state_of(part.path)) for part in parts)
    prepare = partial(_prepare_redirects, Path.cwd())
    own: OwnWork[Any, Redirects] = OwnWork(lambda item: [redirects_of_part(item[0])], lambda item: False)
    with closing(mapped(prepare, items, own=own)) as found:
        read = progress(found, total=len(parts), description="read redirects", unit="part", leave=False)
        for part, pairs in zip(parts, read, strict=True):
            for title, target in pairs:
                redirects[part.path].put(key_of(title), target)


# --- in a worker ---------------------------------------------------------------------------------


def prepare_reading(
    folder: Path, limits: Limits, kept: Path | None = None
) -> Callable[[Block], Iterator[Found]]:
    """A function that reads the files of a block. Paths are relative to `folder`, the current folder of the command.

    PDF and Word files are kept in the database `kept`. The function raises Refused if this machine does not see a file of the
    block, or cannot read it.
    """
    is_here = _enter(folder)
    child = KeepingReader(kept, shows=False)
    unreachable: dict[str, RealmError] = {}
    """Server of remote files that this machine cannot reach -> the error. Each attempt can take half a minute."""

    def check(file: SourceFile | RemoteFile, state: State | None) -> None:
        if isinstance(file, RemoteFile):
            if error := unreachable.get(_server(file)):
                raise Refused(f"{gethostname()}: {error}")
        elif not isinstance(file, Unreadable) and not (is_here and state == _state(file)):
            raise Refused(f"{gethostname()} does not see {file[1]}, or cannot open it")

    def records(file: SourceFile | RemoteFile, state: State | None) -> Iterator[Record | Unreadable]:
        ones = records_of_file(file, limits, child)
        try:
            first = next(ones, None)
        except RealmError as error:
            if isinstance(file, RemoteFile):  # there may be no key, library, space, or way to the address
                if not isinstance(error, MissingError):
                    unreachable[_server(file)] = error
                raise Refused(f"{gethostname()}: {error}") from error
            raise
        if isinstance(first, Unreadable) and first.reason in NOT_HERE and first is not file:
            raise Refused(f"{gethostname()}: {first}")
        if first is not None:
            yield first
            yield from ones

    def read(block: Block) -> Iterator[Found]:
        for file, state in block.files:
            check(file, state)
        yield from _found(block, records)

    return read


def _server(file: RemoteFile) -> str:
    """The scheme of an address, and its server or bucket."""
    return "/".join(file.address.split("/", 3)[:3])


def _found(
    block: Block,
    records: Callable[[SourceFile | RemoteFile, State | None], Iterator[Record | Unreadable]],
) -> Iterator[Found]:
    """The records of a block in results. The results are the same in all processes that can read the files."""
    found: list[Record | Unreadable] = []
    number = chars = 0
    for file, state in () if block.known else block.files:
        for one in records(file, state):
            found.append(one)
            chars += len(one.text) if isinstance(one, Record) else 0
            if chars >= RESULT_CHARS or len(found) >= RESULT_RECORDS:
                yield Found(found, block, number, False)
                found, number, chars = [], number + 1, 0
    yield Found(found, block, number, True)


def _prepare_redirects(
    folder: Path,
) -> Callable[[tuple[DumpPart, State | None]], list[Redirects]]:
    """A function that reads the redirects of a part, and raises Refused if the worker does not see the same dump."""
    is_here = _enter(folder)

    def read(item: tuple[DumpPart, State | None]) -> list[Redirects]:
        part, state = item
        if not is_here or state is None or state != state_of(part.path):
            raise Refused(f"{gethostname()} does not see {part.path}")
        return [redirects_of_part(part)]

    return read


def _enter(folder: Path) -> bool:
    """Makes a folder the current folder -> whether the folder is on this machine."""
    with suppress(OSError):
        os.chdir(folder)
        return True
    return False
