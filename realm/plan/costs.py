"""Arithmetic of a step: products and sums (FLOP), bytes that pass through memory, bytes that stay in it, and Python's work.

A matrix product of [a, b] and [b, c] has 2abc FLOP; a backward pass costs twice what the forward pass does. Padding is not
counted.
"""

from dataclasses import dataclass

import torch

from realm.model.bert import BertConfig, MaskedBert
from realm.model.embedder import Embedder, EmbedderConfig
from realm.model.masked_reader import MaskedReader

TRAINED, RECOMPUTED = 3, 4
"""Forward passes that a training step costs: forward and backward, and with recomputed activations (`cached_rows`)."""
UPDATE_BYTES = 44
"""Bytes that an update moves per trained number: AdamW reads weight, gradient and two averages, and writes all but the
gradient (28 bytes); the gradient is written, summed for its norm and scaled before (16 bytes)."""
STATE_BYTES = 12
"""Bytes that stay in memory per trained number beside the weight: a gradient and two averages."""


SENTENCE_SECONDS, QUERY_SECONDS, ROW_SECONDS = 6e-5, 1e-4, 2e-5
"""Seconds of a core that Python needs to draw a sentence, to draw a masked query, and to pack a row (docs/scaling.md)."""
CANDIDATES_SECONDS, RETRIEVED_SECONDS = 2e-3, 5e-5
"""Seconds of a core that Python needs to choose a query's candidates, and to look for an answer in a retrieved passage
(docs/scaling.md)."""


@dataclass(frozen=True)
class Work:
    """FLOP, bytes that pass through memory beside those of the matrix products, and seconds of Python's work."""

    flop: float = 0.0
    traffic: float = 0.0
    host_seconds: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flop + other.flop,
            self.traffic + other.traffic,
            self.host_seconds + other.host_seconds,
        )

    def times(self, factor: float) -> "Work":
        return Work(self.flop * factor, self.traffic * factor, self.host_seconds * factor)


def layers_flop(encoder: BertConfig, length: float, read: float) -> float:
    """Forward pass of all layers on a row of so many tokens.

    In the last layer, keys and values are counted for every token, the rest for the tokens whose states are `read`.
    """
    hidden, layers = encoder.hidden_size, encoder.num_hidden_layers
    keys_and_values = 4 * hidden**2
    others = 2 * (2 * hidden**2 + 2 * hidden * encoder.intermediate_size) + 4 * hidden * length
    return layers * keys_and_values * length + ((layers - 1) * length + read) * others


def head_work(encoder: BertConfig, masked: float) -> Work:
    """Forward pass of the head that predicts words, at so many masked tokens; four passes over [masked, V] for the softmax."""
    hidden, words = encoder.hidden_size, encoder.vocab_size
    return Work(2 * masked * hidden * (hidden + words), 4 * 4 * masked * words)


def tower_work(encoder: BertConfig, embedder: EmbedderConfig, rows: float, length: float) -> Work:
    """Forward pass of a tower on so many rows."""
    hidden = encoder.hidden_size
    projection = Work(2 * rows * hidden * embedder.dim)
    if embedder.pooling == "words":  # a sum of word embeddings
        return projection + Work(0, 4 * rows * length * hidden)
    return projection + Work(rows * layers_flop(encoder, length, 1 if embedder.pooling == "cls" else length))


def reading_work(encoder: BertConfig, rows: float, length: float, masked: float) -> Work:
    """Forward pass of the masked reader on so many rows with `masked` masked tokens each."""
    return Work(rows * layers_flop(encoder, length, masked)) + head_work(encoder, rows * masked)


def activation_bytes(encoder: BertConfig, tokens: float, bits: int) -> float:
    """Activations that a backward pass through all layers needs, without those of attention probabilities.

    Per token and layer 9 states and twice the feed-forward width (Korthikanti et al. 2022, section 4.1: 34 bytes times the
    width with 16 bits).
    """
    numbers = 9 * encoder.hidden_size + 2 * encoder.intermediate_size
    return tokens * encoder.num_hidden_layers * numbers * bits / 8


@dataclass(frozen=True)
class Parameters:
    """Numbers of trainable weights."""

    tower: int
    passage_encoder: int
    """Those of a tower without its projection."""
    towers: int
    """One tower, or two if they are not shared."""
    reader: int
    encoder: int
    """The reader's encoder, from which a span reader starts."""


def count_parameters(encoder: BertConfig, embedder: EmbedderConfig, copy_head: bool) -> Parameters:
    """Weights of the networks of these sizes."""
    with torch.device("meta"):
        made, reader = Embedder(encoder, embedder), MaskedReader(MaskedBert(encoder), copy=copy_head)

    def count(*modules: torch.nn.Module) -> int:
        return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())

    head = [made.passage.projection, made.passage.norm]
    return Parameters(
        tower=count(made.query), passage_encoder=count(made.passage) - count(*head), towers=count(made),
        reader=count(reader), encoder=count(reader.bert.bert),
    )  # fmt: skip
