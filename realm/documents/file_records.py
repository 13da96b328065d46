"""Calls the readers of files, and makes a problem of each error of a reader, so that the other files are read."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from realm.documents.formats.records import (
    Clusters,
    Limits,
    Reader,
    Reason,
    Record,
    Unreadable,
    whole_characters,
)
from realm.documents.kept_records import KeepingReader
from realm.documents.remote import copied, public_address
from realm.documents.sources import RemoteFile, SourceFile
from realm.errors import RealmError, first_line, shortened
from realm.text.fields import time_text


def records_of(
    found: Iterable[SourceFile | RemoteFile], limits: Limits, kept: Path | None = None
) -> Iterator[Record | Unreadable]:
    """The records and problems of files, in order. Files that take long to be read are kept in the database `kept`."""
    with KeepingReader(kept) as child:
        for file in found:
            yield from records_of_file(file, limits, child)


def records_of_file(
    file: SourceFile | RemoteFile, limits: Limits, child: KeepingReader
) -> Iterator[Record | Unreadable]:
    """The records and problems of a file. `child` reads binary formats."""
    if isinstance(file, Unreadable):
        yield file
    elif isinstance(file, RemoteFile):
        yield from _fetched(file, limits, child)
    else:
        reader, path = file
        for one in _opened(reader, path, limits, child):
            if isinstance(one, Record) and _is_of_file(one, path):
                one = _with_file(one, path)
            yield one


def _fetched(found: RemoteFile, limits: Limits, child: KeepingReader) -> Iterator[Record | Unreadable]:
    """The records of a remote file, with the address of the file in the place of the path of the copy."""
    address = public_address(found.address)
    with copied(found.address, found.files) as path:
        for one in _opened(found.reader, path, limits, child):
            where = one.where.replace(str(path), address)
            if isinstance(one, Unreadable):
                yield Unreadable(where, one.reason, str(one).replace(str(path), address))
            elif _is_of_file(one, path):
                own = address + (one.id or "").removeprefix(path.as_posix())
                yield one._replace(where=where, id=own, fields={"path": address, **one.fields})
            else:
                yield one._replace(where=where)


def _opened(
    reader: Reader | Clusters | None, path: Path, limits: Limits, child: KeepingReader
) -> Iterator[Record | Unreadable]:
    """The records of a file. If the reader raises an error, the last item is a problem, whose message contains the path."""
    try:
        found = (
            child.read(path, limits, reader)
            if reader is None or isinstance(reader, Clusters)
            else reader(path, limits)
        )
        for one in found:
            yield whole_characters(one) if isinstance(one, Record) else one
    except Unreadable as problem:
        yield problem
    except RealmError:  # an error of the installation, not of a file
        raise
    except OSError as error:
        yield Unreadable(path, Reason.NOT_OPENED, f"{path}: {error.strerror or first_line(error)}")
    except Exception as error:  # libraries raise errors of many classes
        yield Unreadable(path, Reason.DAMAGED, f"{path} cannot be read ({shortened(first_line(error))})")


def _is_of_file(one: Record, path: Path) -> bool:
    """Whether a record is the whole file, or a part of it, whose id has a colon and the place of the part after the path."""
    return f"{one.id}:".startswith(f"{path.as_posix()}:")


def _with_file(one: Record, path: Path) -> Record:
    """The record of a file or of a part of a file, with the path and, for a whole file, the modification time as fields.

    Parts have no time, because then a change of one part would change all parts of the file.
    """
    fields = {"path": path.as_posix()}
    if one.id != path.as_posix():
        return one._replace(fields={**fields, **one.fields})
    # The file can be gone, or have a time that no calendar has.
    with suppress(OSError, OverflowError, ValueError):
        fields["modified"] = time_text(datetime.fromtimestamp(int(path.stat().st_mtime), UTC))
    return one._replace(fields={**fields, **one.fields})
