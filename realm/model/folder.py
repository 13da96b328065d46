"""A model on disk: one folder with everything that a command needs, complete or not there at all.

MODEL/realm.json                  step, lengths, fingerprints, the resolved settings of every stage, a checksum of every file
MODEL/tokenizer.json
MODEL/encoder/                    the masked-LM reader in Hugging Face layout (loads there as BertForMaskedLM), and which
                                  passages its training held out (held_out.json)
MODEL/embedder.safetensors        query tower, and the passage tower where it is another one
MODEL/span_reader.safetensors     after fine-tuning, or taken from a published checkpoint
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from safetensors import SafetensorError
from torch import nn

from realm.checksums import changed, checksum, checksums_of, record_checksums
from realm.errors import DamagedError, InputError, RealmError, reason, writing
from realm.files import read_json, write_json
from realm.folders import replace_folder
from realm.model.bert import Bert, BertConfig
from realm.model.bert_files import SkipInit, bert_config, read_bert_config, weight_files
from realm.model.calibration import Calibration
from realm.model.embedder import Embedder, EmbedderConfig
from realm.model.masked_reader import COPY_HEAD, MaskedReader, load_reader, save_reader
from realm.model.span_reader import SpanConfig, SpanReader
from realm.model.tensor_files import WEIGHTS, load_tensors, look_at_tensors, round_tensors, save_tensors
from realm.settings import config_from
from realm.text.corpus import HeldOut
from realm.tokens.hub import encoder_folder, from_hub
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Tokenizer

FORMAT = 2
MANIFEST = "realm.json"
HELD_OUT = "held_out.json"
"""In the folder of an encoder: `HeldOut` of its training, and where its text came from if that is known."""
KINDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "tokenizer": str,
    "lengths": dict,
    "embedder": dict,
    "trunk": dict,
    "span_reader": bool,
    "stages": (list, dict),
}
"""What is in a manifest, of which kind."""
HUB_FILES = ("*.json", "*.safetensors")
"""What is fetched of a model that is on the hub."""


@dataclass
class Model:
    """The parts of a REALM model; all live on one device."""

    tokenizer: Tokenizer
    lengths: Lengths
    masked_reader: MaskedReader | None
    """None where it was left on disk."""
    embedder: Embedder
    span_reader: SpanReader | None = None
    calibration: Calibration = field(default_factory=Calibration)
    """Of the span reader's answers."""
    step: int = 0
    """Optimizer steps of the stage that made it."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """The resolved settings of each stage that led to this model, oldest first, its name in `stage`."""

    def to(self, device: torch.device) -> "Model":
        """Moves every part."""
        for part in self.parts().values():
            part.to(device)
        return self

    @property
    def reader(self) -> MaskedReader:
        """The masked-LM reader of a model that was loaded with it."""
        assert self.masked_reader is not None, "the model was loaded without its reader"
        return self.masked_reader

    @property
    def held_out(self) -> set[HeldOut]:
        """Which passages its stages held out: one value, or several where older versions let stages differ."""
        return {
            HeldOut(record["held_out"], record.get("passage_tokens", self.lengths.passage))
            for record in self.stages
            if "held_out" in record
        }

    @property
    def device(self) -> torch.device:
        return self.embedder.query.projection.weight.device

    def parts(self) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module | None] = {
            "reader": self.masked_reader,
            "embedder": self.embedder,
            "span_reader": self.span_reader,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def compute_passage_fingerprint(self) -> str:
        """A digest of all that embeds passages: an index of vectors belongs to exactly these weights."""
        digest = hashlib.sha256(
            json.dumps(asdict(replace(self.embedder.config, shared=True)), sort_keys=True).encode()
        )
        digest.update(self.tokenizer.fingerprint.encode())
        for name, value in sorted(_to_disk(self.embedder.passage.state_dict()).items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


class Manifest(TypedDict):
    """What realm.json holds; the settings are those of the dataclasses of their names."""

    format: int
    step: int
    tokenizer: str
    passage_fingerprint: str
    lengths: dict[str, Any]
    embedder: dict[str, Any]
    trunk: dict[str, Any]
    span_reader: bool
    span: dict[str, Any]
    """Empty without a span reader."""
    span_trunk: dict[str, Any]
    """The sizes of its layers, which may be others than the encoder's; empty without one."""
    calibration: dict[str, float | str]
    stages: list[dict[str, Any]]


class SummedManifest(Manifest):
    """What realm.json holds, with the checksums of the model's files and of the rest of itself."""

    checksums: dict[str, str]


class HeldOutFile(TypedDict):
    """What held_out.json holds: `HeldOut`."""

    held_out: float
    passage_tokens: int
    sources: NotRequired[list[str]]
    """Where the encoder's text came from; written by hand where an encoder is published alone."""


def save_model(model: Model, folder: Path, extra: Sequence[Path] = (), compact: bool = False) -> None:
    """Writes the model, with copies of the `extra` files and folders, aside and renames it in, over what was there.

    With `compact` the files are those of `realm.model.tensor_files`, and the model is rounded as they are.

    Raises:
        WriteFailed: it could not be written, a full disk perhaps; what was there stays.
        InputError: `compact`, and a weight is too large for 16 bits.
    """
    with _in_place_of(folder, RuntimeError, SafetensorError) as aside:
        _write(model, aside, extra, compact)


def copy_model(name: str | Path, folder: Path) -> None:
    """Copies the files of a model, as `save_model` writes them.

    Raises:
        InputError: see `read_manifest`.
        WriteFailed: it could not be written; what was there stays.
    """
    read_manifest(name)
    with _in_place_of(folder, shutil.Error) as aside:
        shutil.copytree(model_path(name), aside)


@contextmanager
def _in_place_of(folder: Path, *kinds: type[Exception]) -> Iterator[Path]:
    """A name beside the folder; what is written there takes the folder's place when the block ends well, else it goes."""
    aside = folder.with_name(folder.name + ".writing")
    shutil.rmtree(aside, ignore_errors=True)
    with writing(folder, *kinds):
        try:
            yield aside
            replace_folder(aside, folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def _write(model: Model, aside: Path, extra: Sequence[Path], compact: bool) -> None:
    if compact:
        round_tensors(value for part in model.parts().values() for value in part.state_dict().values())
    aside.mkdir(parents=True)
    model.tokenizer.save(aside)
    save_reader(model.reader, aside / "encoder", compact)
    if len(model.held_out) == 1:
        share, longest = min(model.held_out)
        held_out: HeldOutFile = {"held_out": share, "passage_tokens": longest}
        write_json(aside / "encoder" / HELD_OUT, held_out)
    model.tokenizer.save(aside / "encoder")
    record_checksums(aside / "encoder")
    shared = model.embedder.passage is model.embedder.query
    towers = _to_disk(model.embedder.query.state_dict(), "query.")
    if not shared:
        towers |= _to_disk(model.embedder.passage.state_dict(), "passage.")
    save_tensors(towers, aside / "embedder.safetensors", compact=compact)
    if model.span_reader is not None:
        span_reader = _to_disk(model.span_reader.state_dict())
        save_tensors(span_reader, aside / "span_reader.safetensors", compact=compact)
    manifest: Manifest = {
        "format": FORMAT,
        "step": model.step,
        "tokenizer": model.tokenizer.fingerprint,
        "passage_fingerprint": model.compute_passage_fingerprint(),
        "lengths": asdict(model.lengths),
        "embedder": asdict(model.embedder.config) | {"shared": shared},
        "trunk": asdict(model.embedder.encoder_config),
        "span_reader": model.span_reader is not None,
        "span": asdict(model.span_reader.config) if model.span_reader else {},
        "span_trunk": asdict(model.span_reader.encoder.config) if model.span_reader else {},
        "calibration": asdict(model.calibration),
        "stages": model.stages,
    }
    files = sorted(path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file())
    checksums = {MANIFEST: _manifest_checksum(manifest), **checksums_of(aside, files)}
    with_sums: SummedManifest = {**manifest, "checksums": checksums}
    write_json(aside / MANIFEST, with_sums)
    for one in extra:
        (shutil.copytree if one.is_dir() else shutil.copy)(one, aside / one.name)


def set_calibration(folder: Path, calibration: Calibration) -> None:
    """Writes a model's calibration into its manifest, in place of the one that is there.

    Raises:
        InputError: see `read_manifest`.
        WriteFailed: it could not be written; what was there stays.
    """
    manifest = {**read_manifest(folder), "calibration": asdict(calibration)}
    if "checksums" in manifest:
        manifest["checksums"] = {**manifest["checksums"], MANIFEST: _manifest_checksum(manifest)}
    with writing(folder / MANIFEST):
        write_json(folder / MANIFEST, manifest)


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """Of everything in a manifest but the checksums, however it is indented."""
    rest = {name: value for name, value in manifest.items() if name != "checksums"}
    as_read = json.loads(json.dumps(rest))  # the keys of JSON are text
    return checksum(json.dumps(as_read, sort_keys=True).encode())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in that becomes `out` when the block ends well, and is gone otherwise.

    Raises:
        InputError: something is at `out`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is there already, and not empty: give another folder")
    aside = out.with_name(out.name + ".writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        replace_folder(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def model_path(name: str | Path) -> Path:
    """The folder of a model: as it is, that of `package:NAME`, or the hub's copy of `hf:OWNER/NAME`.

    Raises:
        InputError: no package has it, or it is not to be had from the hub.
    """
    match str(name).partition(":"):
        case "hf", ":", rest:
            return Path(from_hub(rest, HUB_FILES))
        case "package", ":", _:
            return Path(encoder_folder(str(name)))
    return Path(name)


def is_model(folder: str | Path) -> bool:
    """Whether a folder, or what a name as in `model_path` stands for, says that it is one of ours."""
    return (model_path(folder) / MANIFEST).is_file()


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The model's description without its weights.

    Raises:
        InputError: no such folder, not one of ours, unreadable, changed since it was written, or of a newer format.
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
        if recorded not in (None, _manifest_checksum(manifest)):
            raise _has_changed(folder, f"{MANIFEST} is not what its checksum says")
        _check_kinds(manifest)
        return {**manifest, "stages": _records(manifest["stages"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, RealmError):
            raise
        raise DamagedError(f"{path / MANIFEST} is damaged: {_what(error)}") from error


def _check_kinds(manifest: Mapping[str, Any]) -> None:
    """Raises KeyError or TypeError unless each value is of the kind that it was written as."""
    for name, kind in KINDS.items():
        if type(manifest[name]) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise TypeError(f"{name} is {str(manifest[name])[:60]!r}")
    for name, value in manifest.get("checksums", {}).items():
        if not isinstance(value, str):
            raise TypeError(f"the checksum of {name} is {str(value)[:60]!r}")


def _has_changed(folder: str | Path, problem: str) -> DamagedError:
    return DamagedError(
        f"{folder} is damaged, or was changed: {problem}. Copy the model anew; after a change on purpose, remove "
        f'"checksums" from its {MANIFEST}'
    )


def _what(error: BaseException) -> str:
    """The problem in one line; a missing key is named as such."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return (str(error).splitlines() or [type(error).__name__])[0]


def last_record(stages: Sequence[dict[str, Any]], stage: str) -> dict[str, Any]:
    """The settings of the newest stage of this name; empty where there is none."""
    return next((record for record in reversed(stages) if record["stage"] == stage), {})


def _records(saved: Any) -> list[dict[str, Any]]:
    """The stages of a manifest; earlier versions wrote an object, by the stages' names."""
    if isinstance(saved, Mapping):
        saved = [{**settings, "stage": stage} for stage, settings in saved.items()]
    for record in saved:
        held_out = record.get("held_out", 0.0), record.get("passage_tokens", 0)
        if type(record["stage"]) is not str or not all(type(value) in (int, float) for value in held_out):
            raise TypeError(f"a stage is {str(record)[:60]!r}")
    return list(saved)


def encoder_held_out(name: str, sources: Sequence[str] = ()) -> set[HeldOut]:
    """Which passages the training of an encoder held out, by folder or name; empty where its folder does not say it.

    An encoder whose folder names the `sources` of its text held out nothing of text from other ones, which it never saw.

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


def load_model(folder: str | Path, reader: bool = True) -> Model:
    """The model in a folder, in evaluation mode, on the CPU.

    Without `reader` the masked-LM reader, which neither embeds passages nor answers questions, is looked at and left on disk.

    Raises:
        InputError: see `read_manifest`; or weights that are missing, damaged, or of another shape.
    """
    manifest, path = read_manifest(folder), model_path(folder)
    tokenizer = Tokenizer.load(path)
    masked_reader = load_reader(str(path / "encoder"), alone=False) if reader else None
    encoder = masked_reader.config if masked_reader else _look_at_reader(path / "encoder")
    try:
        if not tokenizer.goes_by(manifest["tokenizer"]):
            raise InputError(f"{folder}: tokenizer.json is not the one that the model was trained with")
        config = config_from(EmbedderConfig, manifest["embedder"], f"{path / MANIFEST} embedder")
        lengths = config_from(Lengths, manifest["lengths"], f"{path / MANIFEST} lengths")
        with SkipInit():
            embedder = Embedder(bert_config(manifest["trunk"], f"{path / MANIFEST} trunk"), config)
        states = load_tensors(path / "embedder.safetensors")
        embedder.query.load_state_dict(_from_disk(states, "query."))
        if not config.shared:
            embedder.passage.load_state_dict(_from_disk(states, "passage."))
        span_reader = None
        if manifest["span_reader"]:
            spans = config_from(SpanConfig, manifest.get("span", {}), f"{path / MANIFEST} span")
            sizes = manifest.get("span_trunk")  # earlier versions had the encoder's
            bert = encoder if sizes is None else bert_config(sizes, f"{path / MANIFEST} span_trunk")
            with SkipInit():
                span_reader = SpanReader(Bert(bert), config=spans)
            span_reader.load_state_dict(_from_disk(load_tensors(path / "span_reader.safetensors")))
        calibration = config_from(
            Calibration, manifest.get("calibration", {}), f"{path / MANIFEST} calibration"
        )
    except RealmError:
        raise
    except (
        SafetensorError,
        RuntimeError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        ArithmeticError,
    ) as error:
        raise DamagedError(f"{folder} is damaged: {_what(error)}") from error
    unread = () if reader else (f"encoder/{WEIGHTS}", f"encoder/{COPY_HEAD}")
    if problem := changed(path, manifest.get("checksums", {}), (MANIFEST, *unread)):
        raise _has_changed(folder, problem)
    step, stages = manifest["step"], manifest["stages"]
    model = Model(tokenizer, lengths, masked_reader, embedder, span_reader, calibration, step, stages)
    for part in model.parts().values():
        part.eval()
    return model


def _look_at_reader(encoder: Path) -> BertConfig:
    """The sizes of a reader that stays on disk; raises InputError where its files are missing or cut short."""
    try:
        for file in weight_files(encoder, str(encoder)):
            look_at_tensors(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{encoder} does not load as a BERT: {reason(error)}") from error
    return read_bert_config(encoder, str(encoder))


def _to_disk(states: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors under their names in files and fingerprints, where format 2 calls the encoder of a part `trunk`."""
    return {prefix + re.sub(r"^encoder\.", "trunk.", name): value for name, value in states.items()}


def _from_disk(states: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of the part that begins with `prefix`, under their names in the network."""
    return {
        re.sub(r"^trunk\.", "encoder.", name.removeprefix(prefix)): value
        for name, value in states.items()
        if name.startswith(prefix)
    }
