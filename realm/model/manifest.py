"""The manifest of a model folder, `realm.json`: what the model is, and checksums of its files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from realm.checksums import checksum
from realm.errors import DamagedError, InputError, RealmError, writing
from realm.files import read_json, write_json
from realm.hub import encoder_folder, from_hub
from realm.model.calibration import Calibration
from realm.text.corpus import HeldOut

FORMAT = 2
MANIFEST = "realm.json"
HELD_OUT = "held_out.json"
"""File in the folder of an encoder: the held-out passages of its training, and the sources of its text if known."""
KINDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "tokenizer": str,
    "lengths": dict,
    "embedder": dict,
    "trunk": dict,
    "span_reader": bool,
    "stages": (list, dict),
}
"""Types of the values in a manifest."""
HUB_FILES = ("*.json", "*.safetensors")
"""Patterns of the files that are downloaded for a model on the hub."""


class Manifest(TypedDict):
    """Content of realm.json; settings are fields of the dataclasses with these names."""

    format: int
    step: int
    tokenizer: str
    passage_fingerprint: str
    lengths: dict[str, Any]
    embedder: dict[str, Any]
    trunk: dict[str, Any]
    span_reader: bool
    span: dict[str, Any]
    """Settings of the span reader; empty without one."""
    span_trunk: dict[str, Any]
    """Sizes of the span reader's encoder, which may differ from those of `trunk`; empty without a span reader."""
    calibration: dict[str, float | str]
    stages: list[dict[str, Any]]


class SummedManifest(Manifest):
    """Content of realm.json with checksums of all files of the model and of the rest of realm.json."""

    checksums: dict[str, str]


class HeldOutFile(TypedDict):
    """Content of held_out.json."""

    held_out: float
    passage_tokens: int
    sources: NotRequired[list[str]]
    """Sources of the encoder's text; written by hand for an encoder that is distributed without its model."""


def set_calibration(folder: Path, calibration: Calibration) -> None:
    """Replaces the calibration in the manifest of a model.

    Raises:
        InputError: see `read_manifest`.
        WriteFailed: the file system refused; the old manifest stays.
    """
    manifest = {**read_manifest(folder), "calibration": asdict(calibration)}
    if "checksums" in manifest:
        manifest["checksums"] = {**manifest["checksums"], MANIFEST: manifest_checksum(manifest)}
    with writing(folder / MANIFEST):
        write_json(folder / MANIFEST, manifest)


def manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """Checksum of a manifest without its checksums, independent of its formatting."""
    rest = {name: value for name, value in manifest.items() if name != "checksums"}
    as_read = json.loads(json.dumps(rest))  # JSON turns keys into strings
    return checksum(json.dumps(as_read, sort_keys=True).encode())


def model_path(name: str | Path) -> Path:
    """The folder of a model: a path, `package:NAME`, or the cached copy of `hf:OWNER/NAME`.

    Raises:
        InputError: no package has the name, or the hub's copy cannot be downloaded.
    """
    match str(name).partition(":"):
        case "hf", ":", rest:
            return Path(from_hub(rest, HUB_FILES))
        case "package", ":", _:
            return Path(encoder_folder(str(name)))
    return Path(name)


def is_model(folder: str | Path) -> bool:
    """Whether a folder or name, as in `model_path`, has a manifest."""
    return (model_path(folder) / MANIFEST).is_file()


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a model.

    Raises:
        InputError: there is no such folder, it is no model, or the format is unknown.
        DamagedError: the manifest is damaged or was changed.
    """
    path = model_path(folder)
    if not path.is_dir():
        raise InputError(f"no model at {folder}: the folder does not exist")
    if not is_model(path):
        raise InputError(
            f"{folder} is not a realm model (it has no {MANIFEST}): `realm mlm --init {folder} --out ...` makes one"
        )
    manifest = read_json(path / MANIFEST)
    try:
        if manifest["format"] != FORMAT:
            raise InputError(f"{folder} has format {manifest['format']!r}, this version reads {FORMAT}")
        recorded = manifest.get("checksums", {}).get(MANIFEST)
        if recorded not in (None, manifest_checksum(manifest)):
            raise damaged_model(folder, f"{MANIFEST} differs from its checksum")
        _check_kinds(manifest)
        return {**manifest, "stages": _records(manifest["stages"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, RealmError):
            raise
        raise DamagedError(f"{path / MANIFEST} is damaged: {problem_of(error)}") from error


def _check_kinds(manifest: Mapping[str, Any]) -> None:
    """Raises KeyError or TypeError unless all values have the types of a manifest."""
    for name, kind in KINDS.items():
        if type(manifest[name]) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise TypeError(f"{name} is {str(manifest[name])[:60]!r}")
    for name, value in manifest.get("checksums", {}).items():
        if not isinstance(value, str):
            raise TypeError(f"the checksum of {name} is {str(value)[:60]!r}")


def damaged_model(folder: str | Path, problem: str) -> DamagedError:
    """The error for a model folder with a damaged file."""
    return DamagedError(
        f"{folder} is damaged, or was changed: {problem}. Copy the model anew; after a change on purpose, remove "
        f'"checksums" from its {MANIFEST}'
    )


def problem_of(error: BaseException) -> str:
    """The message of an exception in one line; a missing key is named as such."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return (str(error).splitlines() or [type(error).__name__])[0]


def last_record(stages: Sequence[dict[str, Any]], stage: str) -> dict[str, Any]:
    """The settings of the newest stage of this name; empty without one."""
    return next((record for record in reversed(stages) if record["stage"] == stage), {})


def _records(saved: Any) -> list[dict[str, Any]]:
    """The stages of a manifest as a list; earlier versions wrote an object by stage names."""
    if isinstance(saved, Mapping):
        saved = [{**settings, "stage": stage} for stage, settings in saved.items()]
    for record in saved:
        held_out = record.get("held_out", 0.0), record.get("passage_tokens", 0)
        if type(record["stage"]) is not str or not all(type(value) in (int, float) for value in held_out):
            raise TypeError(f"a stage is {str(record)[:60]!r}")
    return list(saved)


def encoder_held_out(name: str, sources: Sequence[str] = ()) -> set[HeldOut]:
    """The held-out passages in the training of an encoder, by folder or name; empty if its folder has no such file.

    If the file names the sources of the encoder's text, and none of them is among `sources`, the result is empty, because the
    encoder has not read any of this text.

    Raises:
        InputError: no such encoder, or a damaged file.
    """
    file = Path(encoder_folder(name)) / HELD_OUT
    if not file.is_file():
        return set()
    try:
        saved = read_json(file)
        seen = saved.pop("sources", sources)
        found = HeldOut(**saved)
        if not all(type(value) in (int, float) for value in found):
            raise TypeError(f"it holds {str(tuple(found))[:60]}")
        return {found} if seen is sources or set(seen) & set(sources) else set()
    except (TypeError, AttributeError) as error:
        raise DamagedError(f"{file} is damaged: {error}") from error
