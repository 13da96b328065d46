"""Reads a TensorFlow checkpoint without TensorFlow: its float32 tensors by name, mapped from disk.

    PREFIX.index                  a sorted table of names and of the positions of the tensors (LevelDB's table format)
    PREFIX.data-00000-of-00001    the bytes of the tensors

Each block of the table and each tensor has a CRC-32C. The checksum of a block or tensor is checked before its content is used,
and every length is compared with the size of the file.
"""

import math
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from realm.errors import InputError, reason

_FOOTER, _MAGIC = 48, struct.pack("<Q", 0xDB4775248B80FB57)
"""Number of bytes in the footer of a table, and the last eight of these bytes."""
_BEHIND_BLOCK = 5
"""Number of bytes after a block: the compression of the block, and its checksum."""
_FLOAT32 = 1
_AT_ONCE = 1 << 24


class _Damaged(ValueError):
    """The file is damaged; the message is the reason."""


def is_bundle(prefix: Path) -> bool:
    """Whether a TensorFlow checkpoint has this prefix."""
    return _index(prefix).is_file()


def read_bundle(prefix: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The wanted tensors by name, as views of the files.

    Raises:
        InputError: the checkpoint is damaged, or a wanted tensor is not float32 or is stored in slices.
    """
    index = _index(prefix)
    try:
        entries = {key.decode(errors="replace"): _fields(value) for key, value in _table(index.read_bytes())}
        header = entries.pop("", {})
        if _first(header, 2):
            raise _Damaged("it was written on a big-endian machine")
    except _Damaged as error:
        raise InputError(f"{index} is not a TensorFlow checkpoint, or is damaged: {error}") from None
    shards = _first(header, 1)

    @cache
    def shard(number: int) -> np.ndarray:
        file = prefix.with_name(f"{prefix.name}.data-{number:05d}-of-{shards:05d}")
        try:
            return np.memmap(file, mode="c")  # "c" is copy on write, because torch needs a writable array
        except (OSError, ValueError) as error:
            raise _Damaged(f"{file.name}: {reason(error)}") from error

    tensors = {}
    for name, entry in entries.items():
        if wanted(name):
            try:
                tensors[name] = _tensor(entry, shard)
            except _Damaged as error:
                raise InputError(f"{prefix}: {name} cannot be read: {error}") from None
    return tensors


def _index(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")


def _tensor(entry: "_Message", shard: Callable[[int], np.ndarray]) -> Tensor:
    if 7 in entry:
        raise _Damaged("the tensor is stored in slices")
    if _first(entry, 1) != _FLOAT32:
        raise _Damaged(f"the type is {_first(entry, 1)} and not float32 ({_FLOAT32})")
    shape = [
        _first(_fields(one), 1) for one in _fields(_bytes(entry, 2)).get(2, []) if isinstance(one, bytes)
    ]
    data, start, size = shard(_first(entry, 3)), _first(entry, 4), _first(entry, 5)
    if size != 4 * math.prod(shape):
        raise _Damaged(f"{size} bytes do not fit the shape {shape}")
    if start + size > len(data):
        raise _Damaged(f"the tensor ends at byte {start + size}, the file at {len(data)}")
    found = data[start : start + size]
    sum_ = 0
    for at in range(0, size, _AT_ONCE):
        sum_ = google_crc32c.extend(sum_, found[at : at + _AT_ONCE].tobytes())
    _check_sum(sum_, _first(entry, 6))
    if start % 4:
        found = found.copy()
    try:
        return torch.from_numpy(found.view("<f4").reshape(shape))
    except (ValueError, OverflowError) as error:
        # The tensor has no elements, and more or longer dimensions than NumPy supports.
        raise _Damaged(f"the shape {shape} is not supported") from error


# -- the table: blocks of entries, an index of the blocks, and a footer with the position of the index


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < _FOOTER or data[-8:] != _MAGIC:
        raise _Damaged("the end is not that of a table")
    footer = _Bytes(data[-_FOOTER:-8])
    _handle(footer)  # the position of the metadata of the table, which is empty
    for _, place in _entries(_block(data, *_handle(footer))):
        yield from _entries(_block(data, *_handle(_Bytes(place))))


def _handle(at: "_Bytes") -> tuple[int, int]:
    return at.varint(), at.varint()


def _block(data: bytes, start: int, size: int) -> bytes:
    end = start + size
    if end + _BEHIND_BLOCK > len(data):
        raise _Damaged(f"a block ends at byte {end}, the file at {len(data)}")
    compression, sum_ = struct.unpack_from("<BI", data, end)
    _check_sum(google_crc32c.value(data[start : end + 1]), sum_)
    if compression:
        raise _Damaged("a block is compressed, unlike those of TensorFlow's checkpoints")
    return data[start:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values. A key is stored without the prefix that it shares with the previous key."""
    restarts = struct.unpack("<I", _Bytes(block[-4:]).take(4))[0]
    if 4 * restarts + 4 > len(block):
        raise _Damaged("a block is cut off")
    left, key = _Bytes(block[: len(block) - 4 * restarts - 4]), b""
    while left:
        shared, fresh, length = left.varint(), left.varint(), left.varint()
        if shared > len(key):
            raise _Damaged("a key has a longer shared prefix than the previous key")
        key = key[:shared] + left.take(fresh)
        yield key, left.take(length)


def _check_sum(found: int, masked: int) -> None:
    rotated = (found >> 15 | found << 17) & 0xFFFFFFFF
    if (rotated + 0xA282EAD8) & 0xFFFFFFFF != masked:
        raise _Damaged("the checksum (CRC-32C) differs")


# -- protocol buffers: messages with numbered fields


_Message = dict[int, list[int | bytes]]


def _fields(data: bytes) -> _Message:
    """Number of a field -> the values of this field."""
    fields: _Message = {}
    left = _Bytes(data)
    while left:
        number, kind = divmod(left.varint(), 8)
        value: int | bytes
        match kind:
            case 0:
                value = left.varint()
            case 1:
                value = struct.unpack("<Q", left.take(8))[0]
            case 2:
                value = left.take(left.varint())
            case 5:
                value = struct.unpack("<I", left.take(4))[0]
            case _:
                raise _Damaged(f"a field of kind {kind}")
        fields.setdefault(number, []).append(value)
    return fields


def _first(message: _Message, number: int) -> int:
    """The first value of a numeric field; 0 if the field is missing, because fields with 0 are not stored."""
    value = message.get(number, [0])[0]
    if not isinstance(value, int):
        raise _Damaged(f"field {number} is not a number")
    return value


def _bytes(message: _Message, number: int) -> bytes:
    value = message.get(number, [b""])[0]
    if not isinstance(value, bytes):
        raise _Damaged(f"field {number} is a number")
    return value


class _Bytes:
    """Reads bytes from the start to the end."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise _Damaged("the end is missing")
        self._at += count
        return found

    def varint(self) -> int:
        """A number with seven bits in each byte, the lowest bits first; the eighth bit is set if more bytes follow."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise _Damaged("a number of more than 64 bits")
