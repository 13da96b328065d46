"""Writes a model as folders that transformers 4.57.6 loads, one folder per REALM class.

Unused tensors (`realm.interop.weight_names`) are written as heads and poolers without effect, so that no tensor is missing. All
other tensors are written unchanged."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.errors import InputError
from realm.files import write_json
from realm.interop.checkpoint import CLASSES, DEFAULTS
from realm.interop.weight_names import MASKED_READER, SPAN_READER, TIED, TOWER, tensors_of
from realm.model.bert import BertConfig
from realm.model.embedder import Tower
from realm.model.folder import Model
from realm.model.manifest import last_record
from realm.model.masked_reader import MaskedReader
from realm.model.span_reader import SpanReader
from realm.model.tensor_files import WEIGHTS
from realm.tokens.tokenizer import SPECIAL, Tokenizer


class Lazy(NamedTuple):
    """A float32 tensor that is written in parts."""

    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]


def check_exportable(model: Model) -> None:
    """Raises InputError if the classes of transformers cannot compute this model."""
    config, reader = model.embedder.config, model.reader
    if config.pooling != "cls" or config.norm != "layer":
        raise InputError(
            f"the embedder has pooling {config.pooling!r} and norm {config.norm!r}: the published classes have only "
            "'cls' and 'layer'"
        )
    if reader.copy_head is not None:
        raise InputError("the reader has a copy head, which the published classes do not have")
    spans = model.span_reader
    if spans is not None and spans.config.head != "pairs":
        raise InputError(
            "the span reader has BERT's question-answering head, which the published classes do not have"
        )
    if spans is not None and (spans.config.objective != "joint" or not spans.config.retrieval_score):
        raise InputError(
            "the published classes add the retrieval score to every span score: train the span reader with "
            "--set objective=joint --set retrieval_score=true"
        )
    if spans is not None and bool(spans.continues_V.any()):
        raise InputError(
            "the span reader answers only in whole words, which the published classes cannot do: train with "
            "--set whole_words=false"
        )


def kinds_of(model: Model) -> list[str]:
    """The kinds of checkpoints for which a model has trained parts, without "openqa"."""
    published = last_record(model.stages, "published") if len(model.stages) == 1 else {}
    trained = published.get("parts", ["embedder", "reader", *(["span_reader"] if model.span_reader else [])])
    kinds = {"embedder": "embedder", "scorer": "embedder", "encoder": "reader", "reader": "span_reader"}
    return [kind for kind, part in kinds.items() if part in trained]


def write_checkpoint(model: Model, kind: str, folder: Path, block_emb: Lazy | None = None) -> None:
    """Writes a checkpoint of one kind with its tokenizer to a new folder; the kind "openqa" needs `block_emb`."""
    folder.mkdir(parents=True)
    write_safetensors(
        folder / WEIGHTS, dict(_tensors(model, kind)), {"block_emb": block_emb} if block_emb else {}
    )
    write_json(folder / "config.json", _config(model, kind, block_emb))
    write_tokenizer(model.tokenizer, folder, model.embedder.encoder_config.max_position_embeddings)


def _tensors(model: Model, kind: str) -> Iterator[tuple[str, Tensor]]:
    embedder = model.embedder
    match kind:
        case "embedder":
            yield from _tower(embedder.passage)
        case "scorer":
            yield from _prefixed("embedder.", _tower(embedder.passage))
            yield from _prefixed("query_embedder.", _tower(embedder.query))
        case "encoder":
            yield from _masked_reader(model.reader)
        case "reader":
            assert model.span_reader is not None
            yield from _span_reader(model.span_reader, model.reader)
        case "openqa":
            assert model.span_reader is not None
            yield from _prefixed("embedder.", _tower(embedder.query))
            yield from _prefixed("reader.", _span_reader(model.span_reader, model.reader))


def _tower(tower: Tower) -> Iterator[tuple[str, Tensor]]:
    tensors = dict(tensors_of(tower, TOWER))
    yield from tensors.items()
    yield from _plain_head(tensors["realm.embeddings.word_embeddings.weight"])


def _masked_reader(reader: MaskedReader) -> Iterator[tuple[str, Tensor]]:
    tensors = dict(tensors_of(reader.bert, MASKED_READER))
    yield from tensors.items()
    yield from _tied(tensors)
    yield from _plain_pooler(reader.config)


def _span_reader(reader: SpanReader, masked: MaskedReader) -> Iterator[tuple[str, Tensor]]:
    tensors = dict(tensors_of(reader, SPAN_READER))
    # As in the released checkpoints, the head is that of the encoder from which the reader was fine-tuned.
    tensors |= {k: v for k, v in tensors_of(masked.bert, MASKED_READER) if k.startswith("cls.")}
    yield from tensors.items()
    yield from _tied(tensors)
    yield from _plain_pooler(masked.config)


def _tied(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for left, right in TIED.items():
        yield left, tensors[right]


def _plain_head(words_VH: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A masked-LM head that predicts the word whose embedding is nearest to the output of the encoder."""
    vocabulary, hidden = words_VH.shape
    yield "cls.predictions.transform.dense.weight", torch.eye(hidden)
    yield "cls.predictions.transform.dense.bias", torch.zeros(hidden)
    yield "cls.predictions.transform.LayerNorm.weight", torch.ones(hidden)
    yield "cls.predictions.transform.LayerNorm.bias", torch.zeros(hidden)
    yield "cls.predictions.decoder.weight", words_VH
    yield "cls.predictions.decoder.bias", torch.zeros(vocabulary)
    yield "cls.predictions.bias", torch.zeros(vocabulary)


def _plain_pooler(config: BertConfig) -> Iterator[tuple[str, Tensor]]:
    yield "realm.pooler.dense.weight", torch.eye(config.hidden_size)
    yield "realm.pooler.dense.bias", torch.zeros(config.hidden_size)


def _prefixed(prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in tensors:
        yield prefix + name, value


def _config(model: Model, kind: str, block_emb: Lazy | None) -> dict[str, Any]:
    sizes, spans = asdict(model.embedder.encoder_config), model.span_reader and model.span_reader.config
    config = {name: sizes.get(name, default) for name, default in DEFAULTS.items()}
    config |= last_record(model.stages, "published").get("config", {})  # settings recorded by a conversion
    config["retriever_proj_size"] = model.embedder.config.dim
    if spans:
        config |= {
            "span_hidden_size": spans.hidden,
            "max_span_width": spans.max_width,
            "reader_layer_norm_eps": spans.norm_eps,
            "reader_seq_len": model.lengths.reading or model.lengths.joint,
        }
    if block_emb:
        config["num_block_records"] = block_emb.shape[0]
    # The released checkpoints also have these ids, which are wrong.
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    return {"architectures": [CLASSES[kind]], "model_type": "realm", "dtype": "float32", **ids, **config}


def write_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int, kind: str = "RealmTokenizer") -> None:
    """Writes the files of the slow and the fast tokenizer of transformers for the class `kind`."""
    pieces = tokenizer.vocabulary()
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    published = tokenizer.as_huggingface()
    (folder / "tokenizer.json").write_text(published.to_str(), encoding="utf-8")
    normalizer = json.loads(published.to_str())["normalizer"] or {}
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    write_json(folder / "special_tokens_map.json", names)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": kind,
            "do_lower_case": normalizer.get("lowercase", True),
            "strip_accents": normalizer.get("strip_accents"),
            "tokenize_chinese_chars": normalizer.get("handle_chinese_chars", True),
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
            **names,
        },
    )


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], lazy: Mapping[str, Lazy]) -> None:
    """Writes tensors in float32 to a safetensors file, which is a JSON header with offsets, and the bytes of the tensors."""
    places: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    for name, shape in (shapes | {name: value.shape for name, value in lazy.items()}).items():
        size = 4 * int(np.prod(shape))
        places[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for value in tensors.values():
            file.write(value.float().contiguous().numpy().astype("<f4", copy=False).tobytes())
        for name, one in lazy.items():
            _write_parts(file, name, one)


def _write_parts(file: BinaryIO, name: str, lazy: Lazy) -> None:
    rows = 0
    for part in lazy.parts:
        file.write(np.ascontiguousarray(part, dtype="<f4").tobytes())
        rows += len(part)
    if rows != lazy.shape[0]:
        raise ValueError(f"{name} has {rows} rows, but its shape has {lazy.shape[0]}")
