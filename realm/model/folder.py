"""A model and its folder, which is written completely or not at all.

MODEL/realm.json                  step, lengths, fingerprints, the resolved settings of every stage, a checksum of every file
MODEL/tokenizer.json
MODEL/encoder/                    the masked-LM reader in the layout of transformers (BertForMaskedLM), and the rule by which
                                  its training held out passages (held_out.json)
MODEL/embedder.safetensors        query tower, and the passage tower if it is not the same
MODEL/span_reader.safetensors     only if the model was fine-tuned, or converted from a checkpoint with a span reader
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from realm.checksums import changed, checksums_of, record_checksums
from realm.errors import DamagedError, InputError, RealmError, reason, writing
from realm.files import write_json
from realm.folders import copy_into, is_new, replace_folder
from realm.model.bert import Bert
from realm.model.bert_files import SkipInit, bert_config, read_bert_config, required_shapes
from realm.model.calibration import Calibration
from realm.model.embedder import Embedder, EmbedderConfig
from realm.model.manifest import (
    FORMAT,
    HELD_OUT,
    MANIFEST,
    HeldOutFile,
    Manifest,
    SummedManifest,
    damaged_model,
    is_model,
    manifest_checksum,
    model_path,
    problem_of,
    read_manifest,
)
from realm.model.masked_reader import COPY_HEAD, MaskedReader, load_reader, save_reader
from realm.model.modes import evaluating
from realm.model.span_reader import SpanConfig, SpanReader
from realm.model.tensor_files import (
    WEIGHTS,
    load_tensors,
    look_at_tensors,
    round_tensors,
    save_tensors,
    weight_files,
)
from realm.settings import config_from
from realm.text.corpus import HeldOut
from realm.tokens.layouts import Lengths, passage_inputs
from realm.tokens.tokenizer import Tokenizer

M = TypeVar("M", bound=nn.Module)


@dataclass
class Model:
    """The parts of a REALM model, all on one device."""

    tokenizer: Tokenizer
    lengths: Lengths
    masked_reader: MaskedReader | None
    """None if the model was loaded without its masked reader."""
    embedder: Embedder
    span_reader: SpanReader | None = None
    calibration: Calibration = field(default_factory=Calibration)
    """Calibration of the answers of the span reader."""
    step: int = 0
    """Number of optimizer steps of the last stage."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """Resolved settings of each stage that made this model, oldest first; the key `stage` has the name of the stage."""

    def to(self, device: torch.device) -> "Model":
        """Moves all parts to a device -> the model itself."""
        for part in self.parts().values():
            part.to(device)
        return self

    @property
    def reader(self) -> MaskedReader:
        """The masked-LM reader; the model must be loaded with it."""
        assert self.masked_reader is not None, "the model was loaded without its reader"
        return self.masked_reader

    @property
    def held_out(self) -> HeldOut | None:
        """The rule by which the stages held out passages, which is the same for all of them; None if none held out passages."""
        rules = (
            HeldOut(record["held_out"], record["passage_tokens"])
            for record in self.stages
            if "held_out" in record
        )
        return next(rules, None)

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

    def save(self, folder: Path, extra: Sequence[Path] = ()) -> None:
        """Writes the model; see `save_model`."""
        save_model(self, folder, extra)

    @staticmethod
    def saved_stages(folder: Path) -> list[dict[str, Any]]:
        """The stages of the model in a folder; empty if the folder is not a model."""
        return list(read_manifest(folder)["stages"]) if is_model(folder) else []

    @torch.no_grad()
    def null_vector(self) -> torch.Tensor:
        """The vector of the null passage, which has no title and no text -> [1, D]."""
        nothing = passage_inputs([[]], [[]], self.tokenizer, self.lengths).to(self.device)
        with evaluating(self.embedder):
            vector_1D: torch.Tensor = self.embedder.passage(nothing)
        return vector_1D

    def compute_passage_fingerprint(self) -> str:
        """Digest of the weights and settings with which passages are embedded; an index belongs to exactly one digest."""
        digest = hashlib.sha256(
            json.dumps(asdict(replace(self.embedder.config, shared=True)), sort_keys=True).encode()
        )
        digest.update(self.tokenizer.fingerprint.encode())
        add_weights(digest, _to_disk(self.embedder.passage.state_dict()))
        return digest.hexdigest()[:16]


def save_model(model: Model, folder: Path, extra: Sequence[Path] = (), compact: bool = False) -> None:
    """Writes a model and copies of the `extra` files and folders; replaces an existing model folder in one step.

    With `compact`, weights are written as compact files (`realm.model.tensor_files`), and the weights in memory are rounded to
    the same values.

    Raises:
        WriteFailed: the files cannot be written; an existing folder stays unchanged.
        InputError: `compact` is set, and a weight is too large for float16.
    """
    with replacing(folder, RuntimeError, SafetensorError) as aside:
        _write(model, aside, extra, compact)


def copy_model(name: str | Path, folder: Path) -> None:
    """Copies the folder of a model.

    Raises:
        InputError: see `read_manifest`.
        WriteFailed: the files cannot be written; an existing folder stays unchanged.
    """
    read_manifest(name)
    with replacing(folder) as aside:
        shutil.copytree(model_path(name), aside)


@contextmanager
def replacing(folder: Path, *kinds: type[Exception]) -> Iterator[Path]:
    """A temporary folder that replaces `folder` if the block succeeds, and is removed otherwise.

    Raises:
        WriteFailed: the files cannot be written, or the block raises one of `kinds`; an existing folder stays unchanged.
    """
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
    if (rule := model.held_out) is not None:
        held_out: HeldOutFile = {"held_out": rule.held_out, "passage_tokens": rule.passage_tokens}
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
    checksums = {MANIFEST: manifest_checksum(manifest), **checksums_of(aside, files)}
    with_sums: SummedManifest = {**manifest, "checksums": checksums}
    write_json(aside / MANIFEST, with_sums)
    copy_into(aside, extra)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` if the block succeeds, and is removed otherwise.

    Raises:
        InputError: `out` exists and is not an empty folder.
        WriteFailed: the files cannot be written.
    """
    if not is_new(out):
        raise InputError(f"{out} exists already and is not an empty folder: choose another folder")
    with replacing(out, SafetensorError) as aside:
        aside.mkdir(parents=True)
        yield aside


def load_model(folder: str | Path, reader: bool = True) -> Model:
    """Loads the model in a folder -> the model on the CPU, in evaluation mode.

    Without `reader`, the masked-LM reader is not loaded, and only its files are checked. The masked-LM reader is needed neither
    to embed passages nor to answer questions.

    Raises:
        InputError: as in `read_manifest`; or the masked-LM reader does not load, or tokenizer.json belongs to another model.
        DamagedError: as in `read_manifest`; or weights or other files are missing or damaged, or weights have a wrong shape.
    """
    manifest, path = read_manifest(folder), model_path(folder)
    tokenizer = Tokenizer.load(path)
    masked_reader = load_reader(str(path / "encoder"), alone=False) if reader else None
    if not reader:
        _check_reader(path / "encoder")
    try:
        if tokenizer.fingerprint != manifest["tokenizer"]:
            raise InputError(f"{folder}: tokenizer.json is not the tokenizer that the model was trained with")
        config = config_from(EmbedderConfig, manifest["embedder"], f"{path / MANIFEST} embedder")
        lengths = config_from(Lengths, manifest["lengths"], f"{path / MANIFEST} lengths")
        trunk = bert_config(manifest["trunk"], f"{path / MANIFEST} trunk")
        states = load_tensors(path / "embedder.safetensors")
        embedder = _made(folder, lambda: Embedder(trunk, config), states, "query.")
        embedder.query.load_state_dict(_from_disk(states, "query."))
        if not config.shared:
            embedder.passage.load_state_dict(_from_disk(states, "passage."))
        span_reader = None
        if manifest["span_reader"]:
            spans = config_from(SpanConfig, manifest["span"], f"{path / MANIFEST} span")
            sizes = bert_config(manifest["span_trunk"], f"{path / MANIFEST} span_trunk")
            states = load_tensors(path / "span_reader.safetensors")
            span_reader = _made(folder, lambda: SpanReader(Bert(sizes), config=spans), states)
            span_reader.load_state_dict(_from_disk(states))
        calibration = config_from(Calibration, manifest["calibration"], f"{path / MANIFEST} calibration")
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
        raise DamagedError(f"{folder} is damaged: {problem_of(error)}") from error
    unread = () if reader else (f"encoder/{WEIGHTS}", f"encoder/{COPY_HEAD}")
    if problem := changed(path, manifest.get("checksums", {}), (MANIFEST, *unread)):
        raise damaged_model(folder, problem)
    step, stages = manifest["step"], manifest["stages"]
    model = Model(tokenizer, lengths, masked_reader, embedder, span_reader, calibration, step, stages)
    for part in model.parts().values():
        part.eval()
    return model


def _check_reader(encoder: Path) -> None:
    """Checks the files of a masked-LM reader without loading them.

    Raises:
        InputError: a file is missing or cut short.
        DamagedError: an index of shards, or the metadata of a file, is damaged.
    """
    try:
        for file in weight_files(str(encoder), encoder):
            look_at_tensors(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{encoder} does not load as a BERT: {reason(error)}") from error
    read_bert_config(encoder, str(encoder))


def add_weights(digest: "hashlib._Hash", states: Mapping[str, torch.Tensor]) -> None:
    """Adds the names and values of weights to a digest."""
    for name, value in sorted(states.items()):
        digest.update(name.encode())
        bytes_N = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
        digest.update(bytes_N.numpy().data)


def _to_disk(states: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors with their names on disk: format 2 has `trunk.` where the name in the network begins with `encoder.`."""
    return {prefix + re.sub(r"^encoder\.", "trunk.", name): value for name, value in states.items()}


def _made(
    folder: str | Path, make: Callable[[], M], states: Mapping[str, torch.Tensor], prefix: str = ""
) -> M:
    """The network that `make` returns, without random weights.

    Before memory is allocated, its shapes are compared with those of the tensors on disk: the manifest can have any sizes.

    Raises:
        ValueError: a tensor is missing, or has another shape.
        InputError: as in `required_shapes`.
    """
    stored = _from_disk(states, prefix)
    for name, wanted in required_shapes(str(folder), make).items():
        if name.startswith(prefix):
            own = name.removeprefix(prefix)
            if own not in stored or stored[own].shape != wanted.shape:
                raise ValueError(f"{own} is missing, or does not have the shape {tuple(wanted.shape)}")
    with SkipInit():
        return make()


def _from_disk(states: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors whose names on disk begin with `prefix`, with their names in the network."""
    return {
        re.sub(r"^trunk\.", "encoder.", name.removeprefix(prefix)): value
        for name, value in states.items()
        if name.startswith(prefix)
    }
