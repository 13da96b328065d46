"""Reads the published block records (a pickle of 13 million texts) a thousand texts at a time, without unpickling the file.

`block_records.npy` is a NumPy header and the pickle of a one-dimensional object array of UTF-8 bytes. Unpickling
the file would call any function whose name is in the pickle, and would need memory for all texts. Instead, this module
interprets the opcodes. The interpreter accepts only the opcodes that an array of texts needs, and the names of three NumPy
functions, which it does not call.

Memory is needed for a thousand rows, and for the position of each row in the file (8 bytes), because a pickle can refer to
earlier rows.
"""

import pickletools
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from realm.errors import InputError, first_line

LONGEST = 1 << 24
"""Most bytes of a record; the published records have about 1,500."""

_RECONSTRUCT = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_ARRAY, _DTYPE = ("numpy", "ndarray"), ("numpy", "dtype")
_NAMES = {*_RECONSTRUCT, _ARRAY, _DTYPE}
"""The globals in the pickle of an object array, as written by NumPy 1 and NumPy 2."""


class BlockRecords:
    """The texts of a `block_records.npy`, in order. The texts can be read more than once."""

    def __init__(self, path: Path):
        """Raises InputError if the file does not exist or does not contain a list of texts."""
        self.path = path
        with self._opened() as file:
            self._count, self._start = self._header(file)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """Raises InputError if the pickle is damaged, or contains anything other than texts in UTF-8."""
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
            raise InputError(f"{self.path} does not exist: the checkpoint has no texts") from None

    def _header(self, file: BinaryIO) -> tuple[int, int]:
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read[version](file)
        except OSError:
            raise
        except Exception as error:  # NumPy parses the header as Python, and raises errors of many classes
            raise InputError(
                f"{self.path} is not a NumPy file of a supported version: {first_line(error)}"
            ) from error
        if dtype != np.dtype(object) or len(shape) != 1 or not 0 <= shape[0] < 2**63:
            raise InputError(
                f"{self.path} is an array of {dtype} with shape {shape}: a list of texts was expected"
            )
        return int(shape[0]), file.tell()


def _batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    stream = iter(texts)
    while part := list(islice(stream, size)):
        yield part


def write_records(path: Path, texts: Iterable[str], count: int) -> None:
    """Writes a `block_records.npy` for `numpy.load(allow_pickle=True)`, one text after the other."""
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
    """Marks the start of a tuple or of a series of rows on the stack."""


class _Rows:
    """Stands on the stack for the list of all rows, which is not built."""


class _Built:
    """Stands on the stack for the result of a NumPy function: the array or its dtype."""

    def __init__(self, name: tuple[str, str]):
        self.name = name


class _Bounded:
    """The file for `pickletools`, in which the length of a read is checked before memory is allocated."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.tell, self.seek = file.tell, file.seek

    def read(self, length: int) -> bytes:
        if length > LONGEST:
            raise ValueError(f"a record has {length} bytes")
        return self._file.read(length)

    def readline(self) -> bytes:
        return self._file.readline(100)


class _Machine:
    """Interprets a pickle, whose opcodes `pickletools` decodes, with a stack and a memo."""

    def __init__(self, file: BinaryIO, path: Path, count: int):
        self._file, self._path, self._count = _Bounded(file), path, count
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._memoized = 0
        # The memo number of the first row, and the position of each row in the file; memo numbers of rows are consecutive.
        self._first, self._offsets = -1, array("Q")
        self._record_at = self._given = 0
        self._whole = False

    def rows(self) -> Iterator[bytes]:
        run = self._operations()
        try:
            for opcode, argument, position in pickletools.genops(cast(IO[bytes], self._file)):
                if opcode.name in ("APPENDS", "APPEND"):
                    yield from self._appended(opcode.name == "APPENDS")
                elif opcode.name in ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"):
                    self._record_at = position or 0
                    self._stack.append(argument)
                elif opcode.name in run:
                    run[opcode.name](argument)
                elif opcode.name != "STOP":
                    raise self._refusal(f"opcode {opcode.name}")
        except ValueError as error:
            raise self._refusal(str(error)) from error
        top = self._stack.pop() if self._stack else None
        if not (isinstance(top, _Built) and top.name == _ARRAY and self._whole) or self._stack:
            raise self._refusal("the pickle is not one array of texts")

    def _operations(self) -> dict[str, Callable[[Any], None]]:
        push = self._stack.append
        return {
            "PROTO": lambda version: self._check(version <= 5, f"protocol {version}"),
            "FRAME": lambda _: None,
            "MARK": lambda _: push(_Mark),
            "EMPTY_TUPLE": lambda _: push(()),
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "EMPTY_LIST": lambda _: push(_Rows),
            **dict.fromkeys(("BININT1", "BININT2", "BININT", "LONG1"), push),
            **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), push),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "TUPLE": lambda _: push(tuple(self._since_mark())),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            "MEMOIZE": lambda _: self._put(self._memoized),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self._get),
            "GLOBAL": lambda name: self._name(*name.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*reversed((self._pop(), self._pop()))),
            "REDUCE": lambda _: self._call(),
            "BUILD": lambda _: self._build(),
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
        # Bytes also occur before the rows: b'b' is an argument of NumPy's constructor.
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
        _, record, position = next(pickletools.genops(cast(IO[bytes], self._file)))
        self._record_at = position or 0
        self._stack.append(record)
        self._file.seek(here)

    def _name(self, module: Any, name: Any) -> None:
        if (module, name) not in _NAMES:
            raise self._refusal(f"the pickle refers to {module}.{name}")
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
        self._check(
            isinstance(built, _Built) and isinstance(state, tuple),
            "a state of an object that is not an array or a dtype",
        )
        assert isinstance(built, _Built)
        if built.name == _ARRAY:
            self._check(len(state) == 5 and state[4] is _Rows, "an array of other objects than the texts")
            if state[1] != (self._count,) or self._given != self._count:
                raise self._refusal(f"{self._given} records were found, but the header has {self._count}")
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

    def _check(self, right: bool, what: str) -> None:
        if not right:
            raise self._refusal(what)

    def _refusal(self, what: str) -> InputError:
        return InputError(
            f"{self._path} is not a pickle of texts that is safe to read: {what}, at byte {self._file.tell()}"
        )
