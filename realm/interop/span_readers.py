"""A BERT that answers questions about a text, as `BertForQuestionAnswering` of transformers has it, as a span reader.

Such checkpoints were fine-tuned on SQuAD or the like, with what our span reader reads: [CLS] question [SEP] text [SEP]. Their
head gives each token the logits of being an answer's start and its end; those of [CLS] stand for "no answer".
"""

from pathlib import Path
from typing import NamedTuple

import torch

from realm.errors import InputError
from realm.interop.checkpoint import FILES, read_tensors
from realm.model.bert import Bert
from realm.model.bert_files import SkipInit, own_name, read_bert_config
from realm.model.calibration import Calibration
from realm.model.folder import Model, load_model
from realm.model.manifest import is_model
from realm.model.span_reader import SpanConfig, SpanReader
from realm.tokens.hub import encoder_folder
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Tokenizer

LONGEST_ANSWER = 30
"""Wordpieces of an answer, at most, as the published scores of such checkpoints were taken."""
HEAD = {"ends.weight": "qa_outputs.weight", "ends.bias": "qa_outputs.bias"}
"""Our names of the head's tensors -> theirs; the layers' are BERT's."""


class LoadedReader(NamedTuple):
    """A checkpoint's reader, in evaluation mode, and what there is to know about it."""

    reader: SpanReader
    tokenizer: Tokenizer
    dead: list[str]
    """Tensors that nothing uses, and that were left out."""


def take_reader(model: Model, name: str) -> list[str]:
    """Gives a model the span reader of another one: a published checkpoint, by folder or hub name, or a model of ours.

    The model's calibration, which was that of its own reader, goes; its method, which finds the passages, stays. Returns the
    tensors of the checkpoint that nothing uses.

    Raises:
        InputError: there is no such reader, or it reads other wordpieces or shorter inputs than the model.
    """
    if is_model(name):
        other = load_model(name, reader=False)
        if other.span_reader is None:
            raise InputError(f"{name} has no span reader: `realm finetune` gives it one")
        reader, tokenizer, dead = LoadedReader(other.span_reader, other.tokenizer, [])
    else:
        reader, tokenizer, dead = load_huggingface_reader(name)
    if tokenizer.behaviour != model.tokenizer.behaviour:
        raise InputError(
            f"{name} has tokenizer {tokenizer.behaviour}, the model and its knowledge base have {model.tokenizer.behaviour}: "
            "name a reader of the same vocabulary, or build both with this one's"
        )
    _check_length(reader, name, model.lengths)
    model.span_reader = reader.to(model.device)
    model.calibration = Calibration(method=model.calibration.method)
    return dead


def load_huggingface_reader(name: str) -> LoadedReader:
    """A checkpoint with BERT's question-answering head as a span reader.

    Raises:
        InputError: not there, not of the BERT family, without that head, damaged, or a file that holds more than tensors.
    """
    folder = Path(encoder_folder(name.removeprefix("hf:"), FILES))
    config = read_bert_config(folder, name)
    tensors = {own_name(key): value for key, value in read_tensors(name, folder).items()}
    if HEAD["ends.weight"] not in tensors:
        raise InputError(
            f"{name} has no question-answering head (qa_outputs): `realm finetune` trains one on a model's own encoder"
        )
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{name}: its tokenizer has {tokenizer.vocab_size} wordpieces, its embeddings are for {config.vocab_size}"
        )
    continues_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    continues_V[tokenizer.continuing_ids()] = True
    spans = SpanConfig("ends", LONGEST_ANSWER, finds_none=True)
    with SkipInit():
        reader = SpanReader(Bert(config), continues_V, spans)
    states, used = {}, set()
    for ours, value in reader.state_dict().items():
        if ours == "continues_V":
            continue
        theirs = HEAD.get(ours, ours.replace("encoder.", "bert.", 1))
        if theirs not in tensors:
            raise InputError(
                f"{name} does not hold the weights of a BERT that answers questions: {theirs} is missing"
            )
        if tensors[theirs].shape != value.shape:
            raise InputError(
                f"{name}: {theirs} is {tuple(tensors[theirs].shape)}, of its config.json and two logits a token follows "
                f"{tuple(value.shape)}"
            )
        states[ours] = tensors[theirs].float()
        used.add(theirs)
    reader.load_state_dict(states, strict=False)
    return LoadedReader(reader.eval(), tokenizer, sorted(tensors.keys() - used))


def _check_length(reader: SpanReader, name: str, lengths: Lengths) -> None:
    """Raises InputError where a question and a passage may be longer than what a reader was made for."""
    config, longest = reader.encoder.config, lengths.reading or lengths.joint
    if config.max_position_embeddings < longest or config.type_vocab_size < 2:
        raise InputError(
            f"{name} reads {config.max_position_embeddings} wordpieces in {config.type_vocab_size} segments; the model's "
            f"questions and passages take up to {longest} in 2"
        )
