"""Files that are not on a file system of this machine: `https://`, `s3://`, `gs://`, `hf://`. The library is fsspec.

`addresses_of` and `copied` read a corpus, `uploaded` writes a file, and `RemoteFolder` reads and writes a folder.

To be read, a file is copied to a temporary folder, and the readers of the formats read the copy with the same limits as any
other file. Only bytes are read: no code of a data set is run. If a file cannot be copied, the command ends with an error,
because a corpus must not depend on a failure of the network.
"""

import fcntl
import glob
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from socket import gethostname
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from realm.errors import InputError, RealmError, first_line, shortened, without_passwords, writing

_log = logging.getLogger(__name__)

T = TypeVar("T")
SCHEMES = ("https", "http", "s3", "gs", "hf")
STORES = ("s3", "gs")
"""Schemes of the addresses to which files are written."""
_WEB = ("https", "http")
"""Schemes of single files: a server of web pages has no lists of files."""
WAITS = (1.0, 5.0, 20.0)
"""Seconds before the second, third and fourth attempt to copy a file from or to an address."""
_SILENCE = 300
"""Seconds after which an attempt fails if a web server sends nothing."""
MOST_OF_DISK = 0.9
"""Largest share of the free space of the temporary folder that a copy takes."""
_MISSING = (404, 410)
"""HTTP statuses of files that do not exist."""
_PREFIX, _LOCKED_AFTER = "realm-copy-", 60
"""Beginning of the names of temporary folders, and seconds after which such a folder is locked if its process lives."""
_QUERY = re.compile(r"\?\S+")


class MissingError(InputError):
    """A remote file, folder or bucket does not exist."""


def is_remote(source: str) -> bool:
    """Whether a source is an address.

    >>> is_remote("s3://bucket/articles/"), is_remote("docs/")
    (True, False)
    """
    scheme, colon, _ = source.partition("://")
    return bool(colon) and scheme in SCHEMES


def public_address(source: str) -> str:
    """The source; for a web address without password and query, which can be a secret.

    >>> public_address("https://me:secret@a.b/c.jsonl?signature=secret")
    'https://a.b/c.jsonl'

    Raises:
        InputError: the source is a web address that is not valid.
    """
    if not is_remote(source) or source.partition("://")[0] not in _WEB:
        return source
    parts = _parts(source)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def name_of(address: str) -> str:
    """The name of a file: the last part of its address.

    >>> name_of("https://a.b/files/my%20articles.jsonl?download=true")
    'my articles.jsonl'
    """
    web = address.partition("://")[0] in _WEB
    return PurePosixPath(unquote(_parts(address).path) if web else address).name


def _parts(address: str) -> SplitResult:
    """The parts of a web address."""
    try:
        return urlsplit(address)
    except ValueError:  # its message can contain the password
        scheme = address.partition("://")[0]
        raise InputError(f"a source that begins with {scheme}:// is not a valid address") from None


def is_pattern(source: str) -> bool:
    """Whether a source can match several names."""
    return any(sign in source for sign in "*?[")


def addresses_of(source: str, folders: str) -> list[str]:
    """The addresses of the files of a source, sorted: of a file, of all files in a folder, or of the files that a pattern with
    `*` matches, and all files in the folders that it matches and whose names end with `folders`. Names that begin with a full
    stop are left out.

    Raises:
        InputError: there are no files, or they cannot be listed.
    """
    if source.partition("://")[0] in _WEB:
        return [source]
    with _reaching(source):
        system, path = _opened_system(source)
        if is_pattern(path):
            matches = system.glob(path.rstrip("/"), detail=True)
            found = [name for name, one in matches.items() if one["type"] == "file"]
            for name in matches.keys() - set(found):
                if name.lower().endswith(folders):
                    found += system.find(name)
            path = re.split(r"[*?[]", path, maxsplit=1)[0].rpartition("/")[0]  # the folder that is named
        else:
            found = [path] if system.isfile(path) else system.find(path)
    seen = [one for one in sorted(set(found)) if "/." not in one.removeprefix(path)]
    if not seen:
        raise InputError(f"{source}: no such file or folder")
    return [str(system.unstrip_protocol(one)) for one in seen]


@contextmanager
def copied(address: str, files: Sequence[str] = ()) -> Iterator[Path]:
    """A context with a copy of a file, or of the files of a folder, in a temporary folder, under the same name.

    Args:
        files: the addresses of the files of the folder; empty: `address` is a file.

    Raises:
        InputError: a file cannot be read, or is too large for the temporary folder.
        WriteFailed: the copy cannot be written.
    """
    with temporary_folder() as folder:
        path = folder / name_of(address)
        room = _room(folder)
        for one in files or [address]:
            file = path / one.removeprefix(f"{address}/") if files else path
            # Object storage allows ".." and a leading slash in names.
            if not Path(os.path.abspath(file)).is_relative_to(path):
                raise InputError(f"{one}: a file of this name cannot be copied")
            with writing(file.parent):
                file.parent.mkdir(parents=True, exist_ok=True)
            way_out = f"in {folder.parent}: set TMPDIR to a folder with more room"
            _attempts(one, "read", partial(_copy, one, file, room, way_out))
            room -= file.stat().st_size
        yield path


@contextmanager
def uploaded(address: str) -> Iterator[Path]:
    """A context with the path of a temporary file, which is copied to the address when the block ends without an error.

    Raises:
        InputError: the address is not of an object store, or the file cannot be written there.
    """
    if not _is_in_bucket(address):
        known = " or ".join(f"{one}://" for one in STORES)
        shown = without_passwords(public_address(address))
        raise InputError(f"{shown} cannot be written: give the address of a file at {known}")
    with _reaching(address, "written"):
        system, inside = _opened_system(address)
    with temporary_folder() as folder:
        path = folder / name_of(address)
        yield path
        _attempts(address, "written", partial(system.put_file, str(path), inside))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A context with a temporary folder, which is locked. Unlocked folders, which killed processes have left, are removed.

    The names of the folders contain the name of the machine, because a lock of a folder is not seen by other machines.
    """
    prefix = f"{_PREFIX}{gethostname()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError), _opened_folder(left) as folder:
            found = os.fstat(folder)
            # A process locks its folder shortly after it has made it.
            if found.st_uid == os.getuid() and found.st_mtime < time.time() - _LOCKED_AFTER:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as made, _opened_folder(Path(made)) as folder:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield Path(made)


@contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class RemoteFolder:
    """A folder of an object store: the files whose addresses begin with the address of the folder and a slash.

    All methods raise InputError if the store cannot be reached, or refuses.
    """

    def __init__(self, address: str):
        """Raises InputError if the address is not that of a folder in a bucket."""
        self.address = address.rstrip("/")
        if not _is_in_bucket(self.address):
            raise InputError(
                f"{without_passwords(public_address(address))} is not a folder on object storage: give an address such as "
                f"{STORES[0]}://bucket/name"
            )
        with _reaching(address):
            self._system, self._path = _opened_system(self.address)

    def sizes(self) -> dict[str, int]:
        """Name of each file, relative to the folder -> size in bytes. An empty dict if the folder does not exist."""

        def find() -> dict[str, dict[str, Any]]:
            self._system.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._system.find(self._path, detail=True)
            return found

        found = _attempts(self.address, "written", find)  # only what writes needs the names
        inside = {name.removeprefix(f"{self._path}/"): int(one["size"]) for name, one in found.items()}
        return {name: size for name, size in inside.items() if name and not name.endswith("/")}

    def read(self, name: str, most: int) -> bytes | None:
        """The content of a file; None if the file does not exist.

        Raises:
            InputError: the file has more than `most` bytes.
        """

        def content() -> bytes:
            self._system.invalidate_cache()
            size = self._system.size(f"{self._path}/{name}")
            if size > most:
                raise InputError(f"{self.address}/{name} has {size:,} bytes, more than {most:,}")
            return bytes(self._system.cat_file(f"{self._path}/{name}"))

        try:
            return _attempts(self.address, "read", content)
        except MissingError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file in one step: other processes read the old or the new content."""
        _attempts(self.address, "written", partial(self._system.pipe_file, f"{self._path}/{name}", content))

    def put(self, file: Path, name: str, report: Callable[[int], object]) -> None:
        """Copies a local file to the folder. `report` is called with the bytes that were copied since the last call."""
        from fsspec.callbacks import Callback

        class Reporting(Callback):
            def relative_update(self, inc: int = 1) -> None:
                report(inc)

        path = f"{self._path}/{name}"
        _attempts(
            self.address, "written", lambda: self._system.put_file(str(file), path, callback=Reporting())
        )

    def get(self, name: str, file: Path, report: Callable[[int], object]) -> None:
        """Copies a file of the folder to a local file. `report` as in `put`.

        Raises:
            InputError: the file does not exist, or is too large for the disk.
            WriteFailed: the local file cannot be written.
        """
        address = f"{self.address}/{name}"
        _attempts(
            address,
            "read",
            partial(
                _copy, address, file, _room(file.parent), f"in {file.parent.parent}: remove files", report
            ),
        )

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, if they exist."""
        for name in names:
            with suppress(MissingError):
                _attempts(self.address, "written", partial(self._system.rm_file, f"{self._path}/{name}"))


def _is_in_bucket(address: str) -> bool:
    """Whether an address is that of a file or folder in a bucket of an object store."""
    scheme, _, inside = address.partition("://")
    return scheme in STORES and "/" in inside and not inside.endswith("/")


def _attempts(address: str, done: str, copy: Callable[[], T]) -> T:
    """The result of `copy`, which is tried again when it fails. `done` as in `_reaching`."""
    with _reaching(address, done):
        for wait in WAITS:
            try:
                return copy()
            except (ImportError, RealmError):
                raise
            except Exception as error:  # the libraries raise errors of many classes
                if _is_final(error):
                    raise
                failure = f"{public_address(address)} cannot be {done}: {_explained(error)}"
                _log.warning("%s. The next attempt is in %g s.", failure, wait)
            time.sleep(wait)
        return copy()


def _room(folder: Path) -> int:
    """Number of bytes that copies in a folder may have."""
    return int(MOST_OF_DISK * shutil.disk_usage(folder).free)


def _copy(
    address: str, path: Path, most: int, way_out: str, report: Callable[[int], object] = lambda _: None
) -> None:
    """Copies a file of at most `most` bytes. `way_out` ends the message that there is too little free space."""
    system, inside = _opened_system(address)

    def check(size: int) -> None:
        if size > most:
            raise InputError(
                f"{public_address(address)} has over {most:,} bytes, too many for the free space {way_out}"
            )

    with system.open(inside, "rb") as remote:
        check(remote.size or 0)  # some servers do not send the size
        with writing(path):
            file = path.open("wb")
        with file:
            size = 0
            while data := remote.read(1 << 20):
                check(size := size + len(data))
                with writing(path):
                    file.write(data)
                    file.flush()
                report(len(data))


def _opened_system(address: str) -> tuple[Any, str]:
    import fsspec

    scheme, options = address.partition("://")[0], {}
    if scheme in _WEB:
        import aiohttp

        # By default, aiohttp ends each transfer after five minutes, and ignores HTTPS_PROXY and HTTP_PROXY.
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE)
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True}
    # `url_to_fs` of fsspec would take "::" in an address for a chain of file systems.
    system = fsspec.filesystem(scheme, **options)
    return system, system._strip_protocol(address)


def _reason(error: BaseException) -> BaseException:
    """The error that explains an error: fsspec raises FileNotFoundError for every failure of a web server."""
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _explained(error: Exception) -> str:
    """The reason of an error in one line without secrets."""
    status = getattr(_reason(error), "status", None)
    if status:
        return f"HTTP status {status}"
    return shortened(_QUERY.sub("", without_passwords(first_line(_reason(error)))))


def _is_missing(error: Exception) -> bool:
    if not isinstance(error, FileNotFoundError):
        return False
    status = getattr(_reason(error), "status", None)
    is_of_web = type(_reason(error)).__module__.startswith("aiohttp")
    return status in _MISSING or not is_of_web


def _is_final(error: Exception) -> bool:
    """Whether the next attempt would fail too."""
    status = getattr(_reason(error), "status", None)
    is_refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    return _is_missing(error) or is_refused


@contextmanager
def _reaching(address: str, done: str = "read") -> Iterator[None]:
    """Turns the exceptions of fsspec and its libraries into InputError. `done` is "read" or "written"."""
    shown = public_address(address)
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"{shown} needs {error.name or 'a library'}: pip install 'realm-lm[remote]'"
        ) from None
    except RealmError:
        raise
    except Exception as error:
        if _is_missing(error):
            missing = "file or folder" if done == "read" else "bucket"
            raise MissingError(f"{shown}: no such {missing}") from None
        raise InputError(f"{shown} cannot be {done}: {_explained(error)}") from error
