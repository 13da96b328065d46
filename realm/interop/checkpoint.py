"""Opens a REALM checkpoint: its kind, its settings, and its tensors by their Hugging Face names.

Only tensors are unpickled (`torch.load(weights_only=True)`), and tensors are read from disk when they are used.
"""

import math
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from realm.errors import DamagedError, InputError, RealmError, first_line, out_of_memory, reason, shown
from realm.files import read_json
from realm.folders import what_it_is
from realm.hub import encoder_folder
from realm.interop import google
from realm.model.tensor_files import WEIGHTS, load_tensors, weight_files
from realm.tokens.tokenizer import Tokenizer

RECORDS = "block_records.npy"
FILES = ("*.json", "vocab.txt", "*.safetensors", "pytorch_model*.bin", RECORDS)
"""Patterns of the files that are downloaded from a repository."""

CLASSES = {
    "embedder": "RealmEmbedder",
    "scorer": "RealmScorer",
    "encoder": "RealmKnowledgeAugEncoder",
    "reader": "RealmReader",
    "openqa": "RealmForOpenQA",
}
"""Kind -> class of transformers 4.57.6."""

ENCODER_SETTINGS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
"""Settings of the encoder that all parts of a model must share, with their defaults."""

DEFAULTS: dict[str, Any] = ENCODER_SETTINGS | {
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "retriever_proj_size": 128,
    "num_candidates": 8,
    "span_hidden_size": 256,
    "max_span_width": 10,
    "reader_layer_norm_eps": 1e-3,
    "reader_beam_size": 5,
    "reader_seq_len": 320,
    "searcher_beam_size": 5000,
    "num_block_records": 13353718,
}
"""Defaults of the configuration class in transformers, for settings that are missing in config.json."""

MOST = {"retriever_proj_size": 2**16}
"""Limits of settings by which a network is made even if the checkpoint has no tensor of this size."""


class Checkpoint(NamedTuple):
    """A checkpoint; its tensors are views of the files."""

    name: str
    folder: Path
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    vocabulary: Path
    """Folder of the tokenizer."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint; raises InputError if the tokenizer is missing or does not fit the embeddings."""
        if not any((self.vocabulary / file).is_file() for file in ("tokenizer.json", "vocab.txt")):
            raise InputError(
                f"{self.vocabulary} has no tokenizer, neither tokenizer.json nor vocab.txt: give one with --tokenizer"
            )
        tokenizer = Tokenizer.load(self.vocabulary)
        if tokenizer.vocab_size > self.config["vocab_size"]:
            raise InputError(
                f"{self.name}: the tokenizer has {tokenizer.vocab_size} wordpieces, but there are embeddings for "
                f"{self.config['vocab_size']}"
            )
        return tokenizer


def open_checkpoint(name: str, tokenizer: str | None = None) -> Checkpoint:
    """Opens a Hugging Face checkpoint (a folder or hub name), or Google's checkpoint (the prefix of its files, or a folder).

    `tokenizer` is the name of another tokenizer, for example for a checkpoint that has no tokenizer.

    Raises:
        InputError: the checkpoint is missing or not a REALM checkpoint, a file contains more than tensors, or a file of
            TensorFlow is damaged.
        DamagedError: a file of a Hugging Face checkpoint is damaged.
    """
    if prefix := google.prefix_of(name):
        return _googles(name, prefix, tokenizer)
    folder = Path(encoder_folder(name, FILES))
    if what := what_it_is(folder):
        raise InputError(
            f"{name} is {what} of realm, not a published checkpoint: give --to to convert a model"
        )
    config = _config(name, folder)
    tensors = read_tensors(name, folder)
    vocabulary = Path(encoder_folder(tokenizer)) if tokenizer else folder
    return Checkpoint(name, folder, _kind(name, tensors), config, tensors, vocabulary)


def _googles(name: str, prefix: Path, tokenizer: str | None) -> Checkpoint:
    folder = Path(encoder_folder(tokenizer)) if tokenizer else Path(name) / "assets"
    if not tokenizer and not (folder / "vocab.txt").is_file():
        raise InputError(f"{name} has no vocabulary, {folder / 'vocab.txt'}: give one with --tokenizer")
    tensors = google.read_variables(prefix)
    config = DEFAULTS | google.settings(tensors, folder)
    return Checkpoint(name, folder, _kind(name, tensors), _checked(config, folder), tensors, folder)


def _config(name: str, folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / "config.json")
        model_type = config.get("model_type")
    except (RealmError, AttributeError) as error:
        raise InputError(f"{name} has no readable config.json: {error}") from error
    if model_type != "realm":
        raise InputError(
            f"{name} is a {model_type!r} model, not a published REALM checkpoint (model_type 'realm'); "
            f"`realm mlm --init {name}` starts from a BERT, `realm convert --retriever MODEL` uses a question-answering "
            "BERT as a reader"
        )
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise InputError(f"{name} has relative positions or is a decoder, unlike all published REALM models")
    return _checked(
        DEFAULTS | {key: value for key, value in config.items() if value is not None}, folder / "config.json"
    )


def _checked(config: dict[str, Any], file: Path) -> dict[str, Any]:
    for key, default in DEFAULTS.items():
        value = config[key]
        match default:
            case int():
                most = MOST.get(key, 2**31 - 1)
                right = type(value) is int and 1 <= value <= most
                wanted = f"a whole number of 1 or more, and at most {most}"
            case float():
                right, wanted = type(value) in (int, float) and 0 <= value < math.inf, "a number of 0 or more"
            case _:
                right, wanted = isinstance(value, str), "a text"
        if not right:
            raise InputError(f"{file}: {key} is {shown(value)}: it must be {wanted}")
    return config


def read_tensors(name: str, folder: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder by their names.

    Raises:
        InputError: a file is missing or cannot be read, or contains more than tensors.
        DamagedError: a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(name, folder, (WEIGHTS, "pytorch_model.bin")):
        try:
            tensors |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
        except OSError as error:
            raise InputError(f"{file} cannot be read: {reason(error)}") from error
    return tensors


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(file)  # the file is mapped, so tensors are read when they are used
    except SafetensorError as error:
        raise DamagedError(f"{file} is damaged: {error}") from error


def _pickled(file: Path) -> dict[str, Tensor]:
    try:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # The file is from before PyTorch 1.6.
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"{file} contains more than tensors and is not read: {first_line(error)}") from error
    except Exception as error:  # the unpickler raises errors of many classes
        if out_of_memory(error) or isinstance(error, OSError):
            raise
        raise DamagedError(f"{file} is damaged: {first_line(error)}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()
    ):
        raise InputError(f"{file} is not a state dict with names and tensors")
    return tensors


def _kind(name: str, tensors: dict[str, Tensor]) -> str:
    """The kind of a checkpoint by the names of its tensors, which are more reliable than config.json."""
    roots = {re.sub(r"^((?:query_)?embedder\.|reader\.)?(\w+)\..*$", r"\1\2", key) for key in tensors}
    if "block_emb" in tensors or "reader.qa_outputs" in roots:
        return "openqa"
    if "query_embedder.realm" in roots or "embedder.realm" in roots:
        return "scorer"
    if "qa_outputs" in roots:
        return "reader"
    if "cls.dense.weight" in tensors:
        return "embedder"
    if "realm" in roots and "cls" in roots:
        return "encoder"
    some = ", ".join(sorted(tensors)[:2])
    raise InputError(
        f"{name} is not a published REALM checkpoint ({', '.join(CLASSES.values())}): its tensors are {some or 'none'} ..."
    )
