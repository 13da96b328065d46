"""Towns whose words have several wordpieces, and the answers of their passages in plain loops."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from realm.model.bert import Bert
from realm.model.masked_reader import EncoderConfig, new_reader
from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig
from realm.tokens.layouts import Lengths
from tests.conftest import tiny_documents
from tests.store.tiny import TOKENIZER, make

LENGTHS = Lengths(query=48, passage=120)
WIDEST = 10
"""Wordpieces of the longest answer."""


def lettered_kb(folder: Path) -> KnowledgeBase:
    """The towns, in wordpieces of one letter; each document has two paragraphs."""
    documents = []
    for one in tiny_documents()[:8]:
        sentences = one.text.split(". ")
        text = ". ".join(sentences[:1]) + ".\n\n" + ". ".join(sentences[1:])
        documents.append(one._replace(text=text))
    return make(folder, documents, KnowledgeBaseConfig(passage_tokens=LENGTHS.passage))


def random_encoder(seed: int) -> Bert:
    """An encoder whose weights are so large that the states of different texts differ."""
    torch.manual_seed(seed)
    sizes = EncoderConfig(layers=1, hidden=16, heads=2, positions=LENGTHS.query + 2 * LENGTHS.passage)
    encoder = new_reader(sizes, TOKENIZER).bert.bert.eval()
    sharpened([encoder.encoder], 20)
    return encoder


class Span(NamedTuple):
    """Log-probability and characters of a span of a text."""

    logp: float
    start: int
    end: int


class Row(NamedTuple):
    """A question and a text as the reader's input."""

    state_TH: Tensor
    pieces: list[str]
    body: range
    starts: list[int]
    ends: list[int]


def row_of(encoder: Bert, question: str, text: str) -> Row:
    """The states of [CLS], question, [SEP], text and [SEP]."""
    (asked,), (body,) = TOKENIZER.encode([question]), TOKENIZER.encode_with_offsets([text])
    ids = [TOKENIZER.cls_id, *asked, TOKENIZER.sep_id, *body.ids, TOKENIZER.sep_id]
    first = len(asked) + 2
    assert first <= LENGTHS.query and len(ids) <= encoder.config.max_position_embeddings  # nothing is cut
    segments = [0] * first + [1] * (len(ids) - first)
    with torch.no_grad():
        state_BTH = encoder(torch.tensor([ids]), torch.ones(1, len(ids)), torch.tensor([segments]))
    vocabulary = TOKENIZER.vocabulary()
    pieces = [vocabulary[one] for one in ids]
    return Row(state_BTH[0], pieces, range(first, len(ids) - 1), body.starts, body.ends)


def logp_of_ends(row: Row, layer: nn.Linear) -> tuple[dict[int, float], dict[int, float]]:
    """Log-probability that the answer begins, and that it ends, at each position where a word begins or ends."""
    firsts = [place for place in row.body if not row.pieces[place].startswith("##")]
    lasts = [place for place in row.body if not row.pieces[place + 1].startswith("##")]
    found = []
    for output, places in ((0, firsts), (1, lasts)):
        weight, bias = layer.weight[output].detach(), float(layer.bias[output].detach())
        logits = {place: float(weight @ row.state_TH[place]) + bias for place in places}
        total = math.log(sum(map(math.exp, logits.values())))
        found.append({place: logit - total for place, logit in logits.items()})
    return found[0], found[1]


def spans_of(row: Row, layer: nn.Linear, text: str) -> Iterator[Span]:
    """Every span of whole words in one paragraph of a text."""
    first_logp, last_logp = logp_of_ends(row, layer)
    for first, one in first_logp.items():
        for last, other in last_logp.items():
            if 0 <= last - first < WIDEST:
                start, end = row.starts[first - row.body.start], row.ends[last - row.body.start]
                if "\n\n" not in text[start:end]:
                    yield Span(one + other, start, end)


def log_probability(row: Row, layer: nn.Linear, text: str, answer: str) -> float:
    """Logarithm of the sum of p(span) over the spans of a text that are an answer in lower case; -inf if there are none."""
    found = [one for one in spans_of(row, layer, text) if text[one.start : one.end].lower() == answer.lower()]
    return math.log(sum(math.exp(one.logp) for one in found)) if found else -math.inf


def sharpened(layers: Sequence[nn.Module], factor: float) -> None:
    """Multiplies weights, so that the scores of random networks differ."""
    with torch.no_grad():
        for layer in layers:
            for part in layer.modules():
                if isinstance(part, nn.Linear | nn.Embedding):
                    part.weight.mul_(factor)
