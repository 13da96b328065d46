"""Costs of a training step: FLOP, bytes read from and written to memory, bytes that stay in memory, and time of Python.

A matrix product of [a, b] and [b, c] has 2abc FLOP. A backward pass has twice the FLOP of the forward pass. Padding is not
counted.
"""

from dataclasses import astuple, dataclass

import torch

from realm.model.bert import BertConfig, MaskedBert
from realm.model.embedder import Embedder, EmbedderConfig
from realm.model.masked_reader import MaskedReader

TRAINED, RECOMPUTED = 3, 4
"""Cost of a training step in forward passes: without recomputed activations, and with them (`cached_rows`)."""
UPDATE_BYTES = 44
"""Bytes that an update reads and writes per trained weight. AdamW reads the weight, the gradient and two averages, and writes
the weight and both averages (28 bytes). Before this, the gradient is written, read for its norm, and scaled (16 bytes)."""
WORDS_BACKWARD, TABLE_BYTES = 12, 16
"""Traffic of the backward pass of a bag-of-words tower, in forward passes: the gradients of single words are added one by one.
And traffic per number of the table of embeddings, whose gradient is filled with zeros and added to that of another pass. Both
were measured on a CPU (docs/scaling.md)."""
STATE_BYTES = 12
"""Bytes that stay in memory per trained weight, in addition to the weight: the gradient and two averages."""


SENTENCE_SECONDS, QUERY_SECONDS, ROW_SECONDS = 1e-5, 8e-5, 4e-6
"""Core seconds that Python needs to draw a sentence, to draw a masked query, and to pack a row (docs/scaling.md)."""
CANDIDATES_SECONDS, RETRIEVED_SECONDS = 1e-3, 5e-5
"""Core seconds that Python needs to choose the candidates of a query, and to search a retrieved passage for an answer
(docs/scaling.md)."""
FORWARD_SPEED = 1.2
"""An index build computes no gradient, and makes this many times the FLOP per second of a training step (docs/scaling.md)."""
EMBEDDED_SECONDS = 5e-6
"""Core seconds that Python needs for a passage in an index build, where many passages are packed together
(docs/scaling.md)."""


@dataclass(frozen=True)
class Work:
    """FLOP, bytes, and core seconds that Python needs."""

    flop: float = 0.0
    traffic: float = 0.0
    """Bytes read and written, except by matrix products and for the words of bag-of-words towers."""
    words: float = 0.0
    """Bytes of the words of bag-of-words towers that are read and written: their embeddings, and gradients."""
    host_seconds: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> "Work":
        return Work(*(one * factor for one in astuple(self)))


def layers_flop(encoder: BertConfig, length: float, read: float) -> float:
    """FLOP of a forward pass of all layers on a row of `length` tokens.

    In the last layer, keys and values are counted for every token, and all other operations for `read` tokens.
    """
    hidden, layers = encoder.hidden_size, encoder.num_hidden_layers
    keys_and_values = 4 * hidden**2
    others = 2 * (2 * hidden**2 + 2 * hidden * encoder.intermediate_size) + 4 * hidden * length
    return layers * keys_and_values * length + ((layers - 1) * length + read) * others


def head_work(encoder: BertConfig, masked: float) -> Work:
    """Forward pass of the masked-LM head at `masked` tokens; the softmax reads or writes [masked, V] numbers four times."""
    hidden, words = encoder.hidden_size, encoder.vocab_size
    return Work(2 * masked * hidden * (hidden + words), 4 * 4 * masked * words)


def tower_work(encoder: BertConfig, embedder: EmbedderConfig, rows: float, length: float) -> Work:
    """Forward pass of a tower on `rows` rows of `length` tokens."""
    hidden = encoder.hidden_size
    projection = Work(2 * rows * hidden * embedder.dim)
    if embedder.pooling == "words":  # a sum of word embeddings
        return projection + Work(words=4 * rows * length * hidden)
    return projection + Work(rows * layers_flop(encoder, length, 1 if embedder.pooling == "cls" else length))


def trained_tower_work(
    encoder: BertConfig, embedder: EmbedderConfig, rows: float, length: float, passes: int
) -> Work:
    """Forward and backward pass of a tower on `rows` rows of `length` tokens. `passes` is TRAINED or RECOMPUTED."""
    forward = tower_work(encoder, embedder, rows, length)
    if embedder.pooling != "words":
        return forward.times(passes)
    table = TABLE_BYTES * encoder.vocab_size * encoder.hidden_size
    return Work(forward.flop * passes, table, forward.words * (passes - 2 + WORDS_BACKWARD))


def reading_work(encoder: BertConfig, rows: float, length: float, masked: float) -> Work:
    """Forward pass of the masked reader on `rows` rows of `length` tokens, with `masked` masked tokens each."""
    return Work(rows * layers_flop(encoder, length, masked)) + head_work(encoder, rows * masked)


def activation_bytes(encoder: BertConfig, tokens: float, bits: int) -> float:
    """Bytes of the activations that a backward pass through all layers needs, without the attention probabilities.

    Each layer keeps for each token 9 states and two vectors of the feed-forward width (Korthikanti et al. 2022, section 4.1:
    with 16 bits, 34 bytes times the width).
    """
    numbers = 9 * encoder.hidden_size + 2 * encoder.intermediate_size
    return tokens * encoder.num_hidden_layers * numbers * bits / 8


@dataclass(frozen=True)
class Parameters:
    """Numbers of trainable weights."""

    tower: int
    passage_encoder: int
    """Weights of the passage tower without its projection."""
    towers: int
    """Weights of both towers together; of one tower if the towers are shared."""
    reader: int
    encoder: int
    """Weights of the reader's encoder, from which a span reader starts."""


def count_parameters(encoder: BertConfig, embedder: EmbedderConfig, copy_head: bool) -> Parameters:
    """Numbers of weights of networks with these sizes."""
    with torch.device("meta"):
        made, reader = Embedder(encoder, embedder), MaskedReader(MaskedBert(encoder), copy=copy_head)

    def count(*modules: torch.nn.Module) -> int:
        return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())

    head = [made.passage.projection, made.passage.norm]
    return Parameters(
        tower=count(made.query), passage_encoder=count(made.passage) - count(*head), towers=count(made),
        reader=count(reader), encoder=count(reader.bert.bert),
    )  # fmt: skip
