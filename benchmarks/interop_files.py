"""Makes an open-QA checkpoint in the published format, with random weights and artificial texts, for `interop.py`.

    python benchmarks/interop_files.py FOLDER BLOCKS

The encoders have 6 layers with 384 hidden units and 12 heads, the vocabulary has 30,522 wordpieces, vectors have 128
dimensions, and blocks have about 224 wordpieces. NumPy writes the texts as a pickle, as in the published checkpoints; therefore
all texts are in memory at once.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from interop_inputs import FIRST_WORD, VOCABULARY, vocabulary

from realm.interop.checkpoint import RECORDS
from realm.interop.export import Lazy, write_checkpoint
from realm.model.bert import Bert, BertConfig, MaskedBert
from realm.model.embedder import Embedder, EmbedderConfig
from realm.model.folder import Model
from realm.model.masked_reader import MaskedReader
from realm.model.span_reader import SpanReader
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Tokenizer

DIM = 128


def texts(count: int, words: list[str]) -> Iterator[str]:
    """Texts of sentences in which the frequency of a word falls with its rank, as in a language."""
    draw = np.random.default_rng(0)
    chance = 1 / np.arange(10, len(words) + 10)
    ends = np.cumsum(chance / chance.sum())
    for _ in range(count):
        length = int(draw.integers(160, 260))
        chosen = np.searchsorted(ends, draw.random(length))
        drawn = [words[min(place, len(words) - 1)] for place in chosen]
        yield ". ".join(" ".join(drawn[at : at + 20]).capitalize() for at in range(0, length, 20)) + "."


def model(tokenizer: Tokenizer, hidden: int = 384, layers: int = 6) -> Model:
    """A model with random weights that are large enough for different scores."""
    torch.manual_seed(0)
    encoder = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=4 * hidden,
        hidden_act="gelu_new",
        layer_norm_eps=1e-12,
    )
    embedder = Embedder(encoder, EmbedderConfig(DIM, "cls", "layer"))
    reader = MaskedReader(MaskedBert(encoder))
    span_reader = SpanReader(Bert(encoder))
    torch.nn.init.normal_(span_reader.ends.bias, std=0.1)
    return Model(tokenizer, Lengths(64, 288, 320), reader, embedder, span_reader)


def vectors(count: int) -> Iterator[np.ndarray]:
    """Random vectors of the size of an embedder's vectors, in parts."""
    draw = np.random.default_rng(1)
    for start in range(0, count, 8192):
        yield draw.standard_normal((min(8192, count - start), DIM), dtype=np.float32) * 0.08


def make_step(folder: Path, hidden: int = 384, layers: int = 6) -> Model:
    """Writes the scorer and the encoder, which a pre-training step needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    made = model(Tokenizer.from_vocabulary(folder), hidden, layers)
    for kind in ("scorer", "encoder"):
        write_checkpoint(made, kind, folder / kind)
    return made


def make(folder: Path, count: int) -> None:
    """Writes the open-QA checkpoint, the scorer and the encoder."""
    made = make_step(folder)
    write_checkpoint(made, "openqa", folder / "openqa", Lazy((count, DIM), vectors(count)))
    records_N = np.empty(count, dtype=object)
    for number, text in enumerate(texts(count, vocabulary()[FIRST_WORD:])):
        records_N[number] = text.encode()
    np.save(folder / "openqa" / RECORDS, records_N)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("blocks", type=int)
    args = parser.parse_args()
    make(args.folder, args.blocks)
