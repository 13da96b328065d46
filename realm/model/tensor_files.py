"""Tensors on disk: safetensors files, whole or compact.

A compact file holds float16 numbers, and leaves out the tensors that are equal to one of a packaged encoder. Its metadata names
these, with a checksum of that encoder's weights, and `load_tensors` takes them from there: each file is complete by itself.

float16, not bfloat16: the largest weights are far below its limit of 65,504, and it rounds eight times as finely.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from realm.checksums import checksums_of
from realm.errors import DamagedError, InputError, RealmError, reason
from realm.tokens.hub import encoder_folder, package_of

WEIGHTS = "model.safetensors"
BASES = ("package:all-minilm-l6-v2", "package:realm-mini")
"""The packaged encoders that compact files take tensors from."""
TAKEN = "realm_taken"
"""In the metadata of a compact file: `Taken` of each encoder that it takes tensors from, as JSON."""


class Taken(TypedDict):
    """Which tensors a compact file takes from one encoder."""

    checksum: str
    """Of the encoder's weights, as `realm.checksums` computes it."""
    tensors: dict[str, str]
    """Name in the compact file -> name in the encoder's."""


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in the precision in which they are stored, with those that it takes from packaged encoders.

    Raises:
        SafetensorError, OSError: the file is damaged or missing.
        InputError: so is what it says about an encoder's tensors, or that encoder is not installed or has other weights.
    """
    tensors = load_file(path)
    for base, taken in _taken(path).items():
        with safe_open(_base_file(path, base, taken["checksum"]), "pt") as file:
            there = set(file.keys())
            for name, source in taken["tensors"].items():
                if name in tensors or source not in there:
                    raise _damaged(path, f"{name} is there twice, or {base} has no {source}")
                tensors[name] = file.get_tensor(source)
    return tensors


def look_at_tensors(path: Path) -> None:
    """Raises as `load_tensors` where a file is cut short or an encoder that it needs is missing; leaves the tensors on disk."""
    for base, taken in _taken(path).items():
        _base_file(path, base, taken["checksum"])


def is_compact(folder: Path) -> bool:
    """Whether a file in a folder takes tensors from a packaged encoder.

    Raises:
        InputError: a file is damaged.
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
    """Writes a safetensors file with the rights that the umask gives; `save_file` alone leaves it to its owner."""
    path.touch()
    rights = path.stat().st_mode
    values = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    if compact:
        taken = _equal_ones(values)
        named = {name for part in taken.values() for name in part["tensors"]}
        values = {name: _as_stored(value) for name, value in values.items() if name not in named}
        if taken:
            metadata = {**(metadata or {}), TAKEN: json.dumps(taken, sort_keys=True)}
    save_file(values, path, metadata=dict(metadata) if metadata else None)
    path.chmod(rights)


def round_tensors(tensors: Iterable[Tensor]) -> None:
    """Changes tensors to what a compact file of them gives back.

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
            f"a weight is {value.abs().max():g}, and 16 bits end at 65504: the model stays in 32 bits"
        )
    return short


def _equal_ones(values: Mapping[str, Tensor]) -> dict[str, Taken]:
    """Which of the tensors packaged encoders have, by encoder."""
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
    """Encoder, name and value of each floating-point tensor of the installed encoders, by shape."""
    by_shape: _Bases = {}
    for base in BASES:
        try:
            tensors = load_file(Path(encoder_folder(base)) / WEIGHTS)
        except RealmError:
            continue  # it is not installed: nothing is taken from it
        for name, value in tensors.items():
            if value.is_floating_point():
                by_shape.setdefault(value.shape, []).append((base, name, value))
    return by_shape


def _equal_one(value: Tensor, bases: _Bases) -> tuple[str, str] | None:
    """Encoder and name of a tensor that has these values."""
    if value.is_floating_point():
        for base, name, other in bases.get(value.shape, ()):
            if torch.equal(other.to(value), value):
                return base, name
    return None


def _taken(path: Path) -> dict[str, Taken]:
    """What a file's metadata says of the tensors that it takes from packaged encoders."""
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
                    path, f"it takes tensors from {base[:60]!r}; those of {', '.join(BASES)} can be had"
                )
    except RealmError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its metadata has no readable {TAKEN}") from error
    return dict(found)


def _base_file(path: Path, base: str, wanted: str) -> Path:
    """The weights of a packaged encoder, when they are those that `path` was made with."""
    try:
        file = Path(encoder_folder(base)) / WEIGHTS
    except RealmError as error:
        raise InputError(f"{path} takes tensors from a packaged encoder: {error}") from error
    if (found := _checksum_of(file)) != wanted:
        raise InputError(
            f"{path} takes tensors from {base}, and the installed one has other weights (checksum {found}, not {wanted}): "
            f"install the {package_of(base)} that it was made with"
        )
    return file


@cache
def _checksum_of(file: Path) -> str:
    """Once in a process: nobody changes an installed package while it runs."""
    return checksums_of(file.parent, [file.name])[file.name]


def _damaged(path: Path, problem: str) -> DamagedError:
    return DamagedError(f"{path} is damaged: {problem}; copy it anew")
