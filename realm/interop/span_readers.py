"""Imports checkpoints of `BertForQuestionAnswering` as span readers.

Such checkpoints were fine-tuned on SQuAD or similar data with the same inputs as `SpanReader`: [CLS] question [SEP] text [SEP].
The head computes a start logit and an end logit for each token; the logits of [CLS] stand for "no answer"."""

from pathlib import Path
from typing import NamedTuple

import torch

from realm.errors import InputError
from realm.hub import encoder_folder
from realm.interop.checkpoint import FILES, read_tensors
from realm.model.bert import Bert
from realm.model.bert_files import SkipInit, own_name, read_bert_config, required_shapes
from realm.model.calibration import Calibration
from realm.model.folder import Model, load_model
from realm.model.manifest import is_model
from realm.model.span_reader import SpanConfig, SpanReader
from realm.model.tensor_files import weight
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Tokenizer

LONGEST_ANSWER = 30
"""Longest answer in wordpieces, as is usual in evaluations on SQuAD."""
HEAD = {"ends.weight": "qa_outputs.weight", "ends.bias": "qa_outputs.bias"}
"""Names of the head's tensors in `SpanReader` -> their names in the checkpoint."""


class LoadedReader(NamedTuple):
    """The span reader of a checkpoint in evaluation mode, with its tokenizer."""

    reader: SpanReader
    tokenizer: Tokenizer
    dead: list[str]
    """Names of unused tensors, which were left out."""


def take_reader(model: Model, name: str) -> list[str]:
    """Replaces the span reader of a model by that of a checkpoint (a folder or hub name) or of another model folder.

    The calibration of the old reader is removed; the search method stays. Returns the names of unused tensors.

    Raises:
        InputError: there is no such reader, or the reader has another vocabulary or shorter inputs than the model.
    """
    if is_model(name):
        other = load_model(name, reader=False)
        if other.span_reader is None:
            raise InputError(f"{name} has no span reader: train one with `realm finetune`")
        reader, tokenizer, dead = LoadedReader(other.span_reader, other.tokenizer, [])
    else:
        reader, tokenizer, dead = load_huggingface_reader(name)
    if tokenizer.fingerprint != model.tokenizer.fingerprint:
        raise InputError(
            f"{name} has tokenizer {tokenizer.fingerprint}, but model and knowledge base have {model.tokenizer.fingerprint}: "
            "use a reader with the same vocabulary, or build model and knowledge base with the tokenizer of the reader"
        )
    _check_length(reader, name, model.lengths)
    model.span_reader = reader.to(model.device)
    model.calibration = Calibration(method=model.calibration.method)
    return dead


def load_huggingface_reader(name: str) -> LoadedReader:
    """Loads a checkpoint with BERT's question-answering head as a span reader.

    Raises:
        InputError: the checkpoint is missing, not of the BERT family, lacks this head, or contains more than tensors.
        DamagedError: a file of the checkpoint is damaged.
    """
    folder = Path(encoder_folder(name, FILES))
    config = read_bert_config(folder, name)
    tensors = {own_name(key): value for key, value in read_tensors(name, folder).items()}
    if HEAD["ends.weight"] not in tensors:
        raise InputError(
            f"{name} has no question-answering head (qa_outputs): `realm finetune` trains one on the encoder of a model"
        )
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} wordpieces, but there are embeddings for {config.vocab_size}"
        )
    spans = SpanConfig("ends", LONGEST_ANSWER, finds_none=True)
    shapes = required_shapes(name, lambda: SpanReader(Bert(config), config=spans))
    states, used = {}, set()
    for ours, value in shapes.items():
        if ours == "continues_V":
            continue
        theirs = HEAD.get(ours, ours.replace("encoder.", "bert.", 1))
        if theirs not in tensors:
            raise InputError(f"{name} has not all weights of a question-answering BERT: {theirs} is missing")
        if tensors[theirs].shape != value.shape:
            raise InputError(
                f"{name}: {theirs} has the shape {tuple(tensors[theirs].shape)}, but {tuple(value.shape)} is required by "
                "config.json and two logits per token"
            )
        states[ours] = weight(name, theirs, tensors[theirs])
        used.add(theirs)
    continues_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    continues_V[list(tokenizer.continuing_ids)] = True
    with SkipInit():
        reader = SpanReader(Bert(config), continues_V, spans)
    reader.load_state_dict(states, strict=False)
    return LoadedReader(reader.eval(), tokenizer, sorted(tensors.keys() - used))


def _check_length(reader: SpanReader, name: str, lengths: Lengths) -> None:
    """Raises InputError if a question and a passage together can be longer than the longest input of a reader."""
    config, longest = reader.encoder.config, lengths.reading or lengths.joint
    if config.max_position_embeddings < longest or config.type_vocab_size < 2:
        raise InputError(
            f"{name} reads {config.max_position_embeddings} wordpieces in {config.type_vocab_size} segments, but a question "
            f"and a passage of the model have up to {longest} in 2"
        )
