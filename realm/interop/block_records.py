"""The published block records: a pickle of 13 million texts, read without unpickling, a thousand at a time.

`block_records.npy` is a NumPy header and then the pickle of a one-dimensional object array of UTF-8 bytes. Unpickling it
would run whatever it says and hold all of it. Here a small machine follows its opcodes instead: it knows those that such an
array needs, three names of NumPy's that it never calls, and refuses everything else. Rows come out as they are met.

In memory: a thousand rows, and 8 bytes per row, with which a row that the pickle refers to again is found in the file.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from realm.errors import InputError

LONGEST = 1 << 24
"""Bytes of a record; the published ones have about 1,500."""

_RECONSTRUCT = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_ARRAY, _DTYPE = ("numpy", "ndarray"), ("numpy", "dtype")
_NAMES = {*_RECONSTRUCT, _ARRAY, _DTYPE}
"""The globals of such a pickle, under NumPy 1 and 2."""


class BlockRecords:
    """The texts of a `block_records.npy`, in order; can be read again and again."""

    def __init__(self, path: Path):
        """Raises InputError when the file is not there or holds something else."""
        self.path = path
        with self._opened() as file:
            self._count, self._start = self._header(file)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """Raises InputError where the pickle is damaged, or holds anything but the bytes of UTF-8 texts."""
        with self._opened() as file:
            file.seek(self._start)
            for number, record in enumerate(_Machine(file, self.path, self._count).rows()):
                try:
                    yield record.decode()
                except UnicodeDecodeError as error:
                    raise InputError(f"{self.path}: record {number} is not UTF-8: {error}") from error

    def _opened(self) -> BinaryIO:
        try:
            return self.path.open("rb", buffering=1 << 20)
        except FileNotFoundError:
            raise InputError(f"{self.path} is not there: the checkpoint came without its texts") from None

    def _header(self, file: BinaryIO) -> tuple[int, int]:
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read[version](file)
        except (ValueError, KeyError) as error:
            raise InputError(f"{self.path} is no NumPy file that is known here: {error}") from error
        if dtype != np.dtype(object) or len(shape) != 1:
            raise InputError(f"{self.path} is an array {shape} of {dtype}: a list of texts was expected")
        return int(shape[0]), file.tell()


def _batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    stream = iter(texts)
    while part := list(islice(stream, size)):
        yield part


def write_records(path: Path, texts: Iterable[str], count: int) -> None:
    """Writes a `block_records.npy` that `numpy.load(allow_pickle=True)` reads, as the texts come."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (count,)})
        empty_array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        shape = b"J" + struct.pack("<i", count) + b"\x85"
        dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R"
        dtype += b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb"
        file.write(b"\x80\x03" + empty_array + b"(K\x01" + shape + dtype + b"\x89]")
        for part in _batched(texts, 1000):
            file.write(b"(")
            for record in (text.encode() for text in part):
                file.write(b"B" + struct.pack("<I", len(record)) + record)
            file.write(b"e")
        file.write(b"tb.")


class _Mark:
    """Where a tuple or a run of rows begins on the stack."""


class _Rows:
    """The list of all rows, which is never made."""


class _Built:
    """What a call of NumPy's would have given: the array or its dtype."""

    def __init__(self, name: tuple[str, str]):
        self.name = name


class _Machine:
    """The stack and the memo of a pickle, and one method per opcode."""

    def __init__(self, file: BinaryIO, path: Path, count: int):
        self._file, self._path, self._count = file, path, count
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._memoized = 0
        self._first, self._offsets = -1, array("Q")  # of rows: their numbers in the memo are consecutive
        self._record_at = self._given = 0
        self._whole = False

    def rows(self) -> Iterator[bytes]:
        take = self._file.read
        operations = self._operations()
        while True:
            code = take(1)
            if code == b".":
                break
            if code in (b"e", b"a"):
                yield from self._appended(code == b"e")
                continue
            if code not in operations:
                raise self._refusal(f"opcode {code!r}" if code else "its end is missing")
            operations[code]()
        top = self._stack.pop() if self._stack else None
        if not (isinstance(top, _Built) and top.name == _ARRAY and self._whole) or self._stack:
            raise self._refusal("it is not one array of texts")

    def _operations(self) -> dict[bytes, Callable[[], None]]:
        push, number = self._stack.append, self._number
        return {
            b"\x80": lambda: self._check(number("<B") <= 5, "its protocol"),
            b"\x95": lambda: self._check(number("<Q") >= 0, "a frame"),
            b"(": lambda: push(_Mark),
            b")": lambda: push(()),
            b"N": lambda: push(None),
            b"\x88": lambda: push(True),
            b"\x89": lambda: push(False),
            b"]": lambda: push(_Rows),
            b"K": lambda: push(number("<B")),
            b"M": lambda: push(number("<H")),
            b"J": lambda: push(number("<i")),
            b"\x8a": lambda: push(int.from_bytes(self._bytes(number("<B")), "little", signed=True)),
            b"C": lambda: push(self._record("<B")),
            b"B": lambda: push(self._record("<I")),
            b"\x8e": lambda: push(self._record("<Q")),
            b"\x8c": lambda: push(self._bytes(number("<B")).decode(errors="replace")),
            b"X": lambda: push(self._bytes(number("<I")).decode(errors="replace")),
            b"\x85": lambda: self._tuple(1),
            b"\x86": lambda: self._tuple(2),
            b"\x87": lambda: self._tuple(3),
            b"t": lambda: push(tuple(self._since_mark())),
            b"q": lambda: self._put(number("<B")),
            b"r": lambda: self._put(number("<I")),
            b"\x94": lambda: self._put(self._memoized),
            b"h": lambda: self._get(number("<B")),
            b"j": lambda: self._get(number("<I")),
            b"c": lambda: self._name(self._line(), self._line()),
            b"\x93": lambda: self._name(*reversed((self._pop(), self._pop()))),
            b"R": self._call,
            b"b": self._build,
        }

    def _appended(self, many: bool) -> Iterator[bytes]:
        rows = self._since_mark() if many else [self._pop()]
        self._check(bool(self._stack) and self._stack[-1] is _Rows, "a list inside the list")
        for row in rows:
            if type(row) is not bytes:
                raise self._refusal(f"record {self._given} is not bytes but {type(row).__name__}")
            self._given += 1
            yield row

    def _put(self, number: int) -> None:
        self._memoized += 1
        self._check(bool(self._stack), "an empty stack")
        top = self._stack[-1]
        # Bytes come before the rows too: the b'b' that NumPy calls its constructor with.
        if type(top) is not bytes or _Rows not in self._stack:
            self._memo[number] = top
            return
        if not self._offsets:
            self._first = number
        if number == self._first + len(self._offsets):
            self._offsets.append(self._record_at)
        else:
            self._memo[number] = top

    def _get(self, number: int) -> None:
        if number in self._memo:
            self._stack.append(self._memo[number])
            return
        self._check(0 <= number - self._first < len(self._offsets), f"memo {number}")
        here = self._file.tell()
        self._file.seek(self._offsets[number - self._first])
        self._stack.append(self._record({b"C": "<B", b"B": "<I", b"\x8e": "<Q"}[self._file.read(1)]))
        self._file.seek(here)

    def _name(self, module: Any, name: Any) -> None:
        if (module, name) not in _NAMES:
            raise self._refusal(f"it asks for {module}.{name}")
        self._stack.append((module, name))

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        self._check(isinstance(arguments, tuple), "a call without arguments")
        if function in _RECONSTRUCT and arguments == (_ARRAY, (0,), b"b"):
            self._stack.append(_Built(_ARRAY))
        elif function == _DTYPE and arguments[:1] in (("O8",), ("O",)):
            self._stack.append(_Built(_DTYPE))
        else:
            raise self._refusal(f"a call of {function} with {str(arguments)[:60]}")

    def _build(self) -> None:
        state, built = self._pop(), self._stack[-1] if self._stack else None
        self._check(isinstance(built, _Built) and isinstance(state, tuple), "the state of something else")
        assert isinstance(built, _Built)
        if built.name == _ARRAY:
            self._check(len(state) == 5 and state[4] is _Rows, "an array of something else")
            if state[1] != (self._count,) or self._given != self._count:
                raise self._refusal(f"{self._given} records, {self._count} were announced")
            self._whole = True

    def _tuple(self, length: int) -> None:
        self._check(len(self._stack) >= length, "an empty stack")
        self._stack[-length:] = [tuple(self._stack[-length:])]

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _Mark:
                found = self._stack[place + 1 :]
                del self._stack[place:]
                return found
        raise self._refusal("a mark is missing")

    def _pop(self) -> Any:
        self._check(bool(self._stack), "an empty stack")
        return self._stack.pop()

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        return int(struct.unpack(form, self._exactly(size))[0])

    def _record(self, form: str) -> bytes:
        self._record_at = self._file.tell() - 1  # its opcode
        return self._bytes(self._number(form))

    def _bytes(self, length: int) -> bytes:
        self._check(length <= LONGEST, f"a record of {length} bytes")
        return self._exactly(length)

    def _line(self) -> str:
        return self._file.readline(100).removesuffix(b"\n").decode("ascii", "replace")

    def _exactly(self, length: int) -> bytes:
        found = self._file.read(length)
        if len(found) < length:
            raise self._refusal("its end is missing")
        return found

    def _check(self, right: bool, what: str) -> None:
        if not right:
            raise self._refusal(what)

    def _refusal(self, what: str) -> InputError:
        return InputError(
            f"{self._path} is no pickle of texts that is safe to read: {what}, at byte {self._file.tell()}"
        )
