"""Tensors on disk: safetensors files, in full or compact.

A compact file has float16 numbers, and leaves out tensors that are equal to tensors of a packaged encoder. The metadata of the
file lists these tensors, and has a checksum of the encoder's weights; `load_tensors` reads these tensors from the encoder.

float16 rounds eight times as finely as bfloat16, and the largest weights are far below the limit of float16, 65,504.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from realm.checksums import checksums_of
from realm.errors import DamagedError, InputError, RealmError, reason
from realm.files import read_json
from realm.hub import encoder_folder, package_of

WEIGHTS = "model.safetensors"
BASES = ("package:all-minilm-l6-v2", "package:realm-mini")
"""Packaged encoders whose tensors compact files may leave out."""
TAKEN = "realm_taken"
"""Key in the metadata of a compact file. The value is a JSON object: name of a packaged encoder -> `Taken`."""


class Taken(TypedDict):
    """Tensors of a packaged encoder that a compact file leaves out."""

    checksum: str
    """Checksum of the encoder's weights (`realm.checksums`)."""
    tensors: dict[str, str]
    """Name in the compact file -> name in the encoder's file."""


def weight_files(name: str, folder: Path, wholes: Sequence[str] = (WEIGHTS,)) -> list[Path]:
    """The files of the weights in a folder: the first file of `wholes` that exists, or the shards of this file.

    Shards are listed in an index, FILE.index.json. Error messages use `name` as the name of the folder.

    Raises:
        InputError: the folder has no file of `wholes`, neither in full nor as shards; or a shard is missing.
        DamagedError: an index is damaged.
    """
    for whole in wholes:
        index = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            return [folder / whole]
        if index.is_file():
            try:
                shards = sorted({str(file) for file in read_json(index)["weight_map"].values()})
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise DamagedError(f"{index} is damaged: {error!r}") from error
            for shard in shards:
                if Path(shard).name != shard or not (folder / shard).is_file():
                    raise InputError(f"{index} lists {shard}, but the folder has no such file")
            return [folder / shard for shard in shards]
    raise InputError(f"{name} has no weights: there is no {' or '.join(wholes)} in {folder}")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file in their stored precision, including the tensors that the file leaves out.

    Raises:
        SafetensorError, OSError: the file is damaged or missing.
        RealmError: the metadata is damaged, or a packaged encoder is not installed or has other weights.
    """
    left_out = _taken(path)
    tensors = load_file(path)
    for base, taken in left_out.items():
        with safe_open(_base_file(path, base, taken["checksum"]), "pt") as file:
            there = set(file.keys())
            for name, source in taken["tensors"].items():
                if name in tensors or source not in there:
                    raise _damaged(path, f"the tensor {name} occurs twice, or {base} has no tensor {source}")
                tensors[name] = file.get_tensor(source)
    return tensors


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types of the numbers of a weight. Weights of other types, such as int8 and float8, need scales that `realm` does not know."""


def floats(name: str, key: str, value: Tensor) -> Tensor:
    """The numbers of the tensor `key` in float32. Error messages use `name` as the name of the model.

    Raises:
        InputError: the numbers are of another type than `FLOATS`, or not stored one by one.
    """
    if value.dtype not in FLOATS or value.layout is not torch.strided or value.is_meta:
        kind = "/".join(str(one).removeprefix("torch.") for one in (value.dtype, value.layout, value.device))
        raise InputError(
            f"{name}: {key} is {kind}, not float16, bfloat16 or float32 (use unquantized weights)"
        )
    return value.float()


def weight(name: str, key: str, value: Tensor) -> Tensor:
    """The numbers of a weight in float32, as `floats`.

    Raises:
        InputError: see `floats`; or a number is not finite.
    """
    numbers = floats(name, key, value)
    if not numbers.isfinite().all():
        raise InputError(
            f"{name}: {key} has a NaN or an infinity: the weights are damaged, or of a failed training"
        )
    return numbers


def look_at_tensors(path: Path) -> None:
    """Checks, without reading the tensors, that a file is complete and the packaged encoders are installed.

    Raises:
        SafetensorError, OSError, RealmError: see `load_tensors`.
    """
    for base, taken in _taken(path).items():
        _base_file(path, base, taken["checksum"])


def is_compact(folder: Path) -> bool:
    """Whether any file in a folder leaves out tensors of a packaged encoder.

    Raises:
        DamagedError: a file is damaged.
    """
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            if _taken(path):
                return True
        except (SafetensorError, OSError) as error:
            raise _damaged(path, reason(error)) from error
    return False


def save_tensors(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    compact: bool = False,
) -> None:
    """Writes a safetensors file with the permissions of the umask; the files of `save_file` can be read only by their owner."""
    path.touch()
    rights = path.stat().st_mode
    values = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    if compact:
        taken = _equal_ones(values)
        named = {name for part in taken.values() for name in part["tensors"]}
        values = {name: _as_stored(value) for name, value in values.items() if name not in named}
        if taken:
            # A second entry would stand before or after this one by chance, and the checksum would not be the same again. No
            # other library can use a file without these tensors, so it needs no entry "format".
            metadata = {TAKEN: json.dumps(taken, sort_keys=True)}
    save_file(values, path, metadata=dict(metadata) if metadata else None)
    path.chmod(rights)


def round_tensors(tensors: Iterable[Tensor]) -> None:
    """Rounds tensors in place to the values that a compact file of them would hold.

    Raises:
        InputError: a number is too large for float16.
    """
    bases = _tensors_of_bases()
    for value in tensors:
        if _equal_one(value, bases) is None:
            value.copy_(_as_stored(value))


def _as_stored(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    short = value.half()
    if not torch.equal(short.isfinite(), value.isfinite()):
        raise InputError(
            f"a weight is {value.abs().max():g}, but float16 holds at most 65504: the model cannot be stored in 16 bits"
        )
    return short


def _equal_ones(values: Mapping[str, Tensor]) -> dict[str, Taken]:
    """The tensors of `values` that are equal to a tensor of a packaged encoder, grouped by encoder."""
    bases = _tensors_of_bases()
    found: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        if equal := _equal_one(value, bases):
            found.setdefault(equal[0], {})[name] = equal[1]
    return {
        base: {"checksum": _checksum_of(Path(encoder_folder(base)) / WEIGHTS), "tensors": names}
        for base, names in found.items()
    }


_Bases = dict[torch.Size, list[tuple[str, str, Tensor]]]


def _tensors_of_bases() -> _Bases:
    """Encoder, name and value of each floating-point tensor of the installed packaged encoders, grouped by shape."""
    by_shape: _Bases = {}
    for base in BASES:
        try:
            tensors = load_file(Path(encoder_folder(base)) / WEIGHTS)
        except RealmError:
            continue  # not installed
        for name, value in tensors.items():
            if value.is_floating_point():
                by_shape.setdefault(value.shape, []).append((base, name, value))
    return by_shape


def _equal_one(value: Tensor, bases: _Bases) -> tuple[str, str] | None:
    """Encoder and name of a tensor in `bases` that is equal to `value`; None if there is no such tensor."""
    if value.is_floating_point():
        for base, name, other in bases.get(value.shape, ()):
            if torch.equal(other.to(value), value):
                return base, name
    return None


def _taken(path: Path) -> dict[str, Taken]:
    """The tensors that a file leaves out, grouped by encoder, from the metadata of the file."""
    path.open("rb").close()  # safetensors would report any refusal of the system as a missing file
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(TAKEN)
    if text is None:
        return {}
    try:
        found = json.loads(text)
        for base, taken in found.items():
            words = (taken["checksum"], *taken["tensors"].keys(), *taken["tensors"].values())
            if base not in BASES or not all(isinstance(word, str) for word in words):
                raise _damaged(
                    path,
                    f"it needs tensors of {base[:60]!r}, but only tensors of {' and '.join(BASES)} are supported",
                )
    except RealmError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its metadata has no readable {TAKEN}") from error
    return dict(found)


def _base_file(path: Path, base: str, wanted: str) -> Path:
    """The weights file of a packaged encoder.

    Raises:
        InputError: the encoder is not installed, or has other weights than when `path` was written.
    """
    try:
        file = Path(encoder_folder(base)) / WEIGHTS
    except RealmError as error:
        raise InputError(f"{path} needs tensors of a packaged encoder: {error}") from error
    if (found := _checksum_of(file)) != wanted:
        raise InputError(
            f"{path} needs tensors of {base}, but the installed {base} has other weights (checksum {found}, not {wanted}): "
            f"install the version of {package_of(base)} with which the file was made"
        )
    return file


@cache
def _checksum_of(file: Path) -> str:
    """The checksum of a file, computed once per process, because installed packages do not change while a process runs."""
    return checksums_of(file.parent, [file.name])[file.name]


def _damaged(path: Path, problem: str) -> DamagedError:
    return DamagedError(f"{path} is damaged: {problem}; copy the file again")
