"""The manifest of a model folder, `realm.json`: the settings of the model, and checksums of the files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from realm.checksums import changed, checksum, checksums_of
from realm.errors import DamagedError, InputError, RealmError, first_line, writing
from realm.files import read_json, write_json
from realm.folders import MANIFEST as MANIFEST
from realm.folders import what_it_is
from realm.hub import encoder_folder, from_hub
from realm.model.calibration import Calibration
from realm.text.corpus import HeldOut

FORMAT = 2
HELD_OUT = "held_out.json"
"""File in the folder of an encoder: which passages the training held out, and, if known, the sources of the training text."""
KINDS: dict[str, type] = {
    "step": int,
    "tokenizer": str,
    "passage_fingerprint": str,
    "lengths": dict,
    "embedder": dict,
    "trunk": dict,
    "span_reader": bool,
    "span": dict,
    "span_trunk": dict,
    "calibration": dict,
    "stages": list,
}
"""Types of the values in a manifest."""
HUB_FILES = ("*.json", "*.safetensors")
"""Patterns of the names of files that are downloaded for a model on the hub."""


class Manifest(TypedDict):
    """Content of realm.json.

    `lengths`, `embedder`, `span` and `calibration` have the fields of `Lengths`, `EmbedderConfig`, `SpanConfig` and
    `Calibration`; `trunk` and `span_trunk` have the fields of `BertConfig`.
    """

    format: int
    step: int
    tokenizer: str
    passage_fingerprint: str
    lengths: dict[str, Any]
    embedder: dict[str, Any]
    trunk: dict[str, Any]
    span_reader: bool
    span: dict[str, Any]
    """Settings of the span reader; empty if the model has no span reader."""
    span_trunk: dict[str, Any]
    """Sizes of the span reader's encoder, which may differ from the sizes in `trunk`; empty if the model has no span reader."""
    calibration: dict[str, float | str]
    stages: list[dict[str, Any]]


class SummedManifest(Manifest):
    """Content of realm.json with checksums of all other files of the model, and of realm.json without the checksums."""

    checksums: dict[str, str]


class HeldOutFile(TypedDict):
    """Content of held_out.json."""

    held_out: float
    passage_tokens: int
    sources: NotRequired[list[str]]
    """Sources of the text that the encoder was trained on; written by hand for an encoder that is distributed alone."""


def set_calibration(folder: Path, calibration: Calibration) -> None:
    """Replaces the calibration in the manifest of a model.

    Raises:
        InputError: see `read_manifest`.
        WriteFailed: the manifest cannot be written; the old manifest stays.
    """
    manifest = {**read_manifest(folder), "calibration": asdict(calibration)}
    if "checksums" in manifest:
        manifest["checksums"] = {**manifest["checksums"], MANIFEST: manifest_checksum(manifest)}
    with writing(folder / MANIFEST):
        write_json(folder / MANIFEST, manifest)


def manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """Checksum of a manifest without the key "checksums"; the formatting of the file has no effect."""
    rest = {name: value for name, value in manifest.items() if name != "checksums"}
    as_read = json.loads(json.dumps(rest))  # JSON turns keys into strings
    return checksum(json.dumps(as_read, sort_keys=True).encode())


def model_path(name: str | Path) -> Path:
    """The folder of a model; `name` is a path, `package:NAME` or `hf:OWNER/NAME`, which is downloaded into a cache.

    If a repository on the hub is a workspace, its model is used.

    Raises:
        InputError: there is no packaged model with this name, or the model cannot be downloaded.
    """
    match str(name).partition(":"):
        case "hf", ":", rest:
            folder = Path(from_hub(rest, HUB_FILES))
            inside = folder / "model"
            return folder if (folder / MANIFEST).is_file() or not inside.is_dir() else inside
        case "package", ":", _:
            return Path(encoder_folder(str(name)))
    return Path(name)


def is_model(folder: str | Path) -> bool:
    """Whether the folder of a model, given as in `model_path`, has a manifest."""
    return (model_path(folder) / MANIFEST).is_file()


def weights_checksum(name: str) -> str:
    """Checksum of the weights of a model, given as in `model_path`, or of an encoder, given as in `encoder_folder`."""
    folder = model_path(name) if is_model(name) else Path(encoder_folder(name))
    files = (path for path in folder.rglob("*") if path.suffix in (".safetensors", ".bin"))
    names = sorted(file.relative_to(folder).as_posix() for file in files)
    return checksum(json.dumps(checksums_of(folder, names)).encode())


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a model.

    Raises:
        InputError: the folder does not exist, is not a model, or has an unknown format.
        DamagedError: the manifest is damaged or was changed.
    """
    path = model_path(folder)
    if not path.is_dir():
        raise InputError(f"no model at {folder}: the folder does not exist")
    if not is_model(path):
        if known := what_it_is(path):
            raise InputError(f"{folder} is {known}, not a model")
        raise InputError(
            f"{folder} is not a realm model (it has no {MANIFEST}): to make a model from an encoder, run "
            f"`realm mlm --init {folder} --out ...`"
        )
    manifest = read_json(path / MANIFEST)
    try:
        if manifest["format"] != FORMAT:
            raise InputError(
                f"{folder} has format {manifest['format']!r}, but this version of realm reads only format {FORMAT}"
            )
        recorded = manifest.get("checksums", {}).get(MANIFEST)
        if recorded not in (None, manifest_checksum(manifest)):
            raise damaged_model(folder, f"{MANIFEST} differs from its checksum")
        _check_kinds(manifest)
        return dict(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, RealmError):
            raise
        raise DamagedError(f"{path / MANIFEST} is damaged: {problem_of(error)}") from error


def checked_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a model, after all files of the model were compared with their checksums.

    Raises:
        InputError: see `read_manifest`.
        DamagedError: see `read_manifest`; or a file was changed.
    """
    manifest = read_manifest(folder)
    if problem := changed(model_path(folder), manifest.get("checksums", {}), (MANIFEST,)):
        raise damaged_model(folder, problem)
    return manifest


def _check_kinds(manifest: Mapping[str, Any]) -> None:
    """Raises KeyError if a value of the manifest is missing, and TypeError if a value has a wrong type."""
    for name, kind in KINDS.items():
        if type(manifest[name]) is not kind:
            raise TypeError(f"{name} is {str(manifest[name])[:60]!r}")
    for record in manifest["stages"]:
        rule = [record[name] for name in HeldOut._fields] if "held_out" in record else []
        if type(record["stage"]) is not str or not all(type(value) in (int, float) for value in rule):
            raise TypeError(f"a stage is {str(record)[:60]!r}")
    for name, value in manifest.get("checksums", {}).items():
        if not isinstance(value, str):
            raise TypeError(f"the checksum of {name} is {str(value)[:60]!r}")


def damaged_model(folder: str | Path, problem: str) -> DamagedError:
    """The error for a model folder with a damaged file."""
    return DamagedError(
        f"{folder} is damaged, or was changed: {problem}. Copy the model again; if the change was intended, remove "
        f'"checksums" from its {MANIFEST}'
    )


def problem_of(error: BaseException) -> str:
    """The message of an exception in one line; for a KeyError, a sentence with the missing key."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return first_line(error)


def last_record(stages: Sequence[dict[str, Any]], stage: str) -> dict[str, Any]:
    """The settings of the last stage with this name; empty if no stage has this name."""
    return next((record for record in reversed(stages) if record["stage"] == stage), {})


def encoder_held_out(name: str, sources: Sequence[str] = ()) -> HeldOut | None:
    """The rule by which the training of an encoder held out passages; None if the encoder has no file `held_out.json`.

    `name` is a folder, or a name as in `encoder_folder`. If the file lists the sources of the training text, and `sources` has
    none of these, the result is None, because the encoder was trained on no text of `sources`.

    Raises:
        InputError: there is no such encoder.
        DamagedError: the file is damaged.
    """
    file = Path(encoder_folder(name)) / HELD_OUT
    if not file.is_file():
        return None
    try:
        saved = read_json(file)
        seen = saved.pop("sources", sources)
        found = HeldOut(**saved)
        if not all(type(value) in (int, float) for value in found):
            raise TypeError(f"its values are {str(tuple(found))[:60]}")
        return found if seen is sources or set(seen) & set(sources) else None
    except (TypeError, AttributeError) as error:
        raise DamagedError(f"{file} is damaged: {error}") from error
