"""A published-looking open-QA checkpoint of random weights and made-up text, for both sides of `published.py`.

    python benchmarks/published_files.py FOLDER BLOCKS

Hidden 384, 6 layers, 12 heads, 30,522 wordpieces, vectors of 128; blocks of about 224 wordpieces. A million blocks are
2.2 GB and take two minutes.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, BertModel

from realm.model.encoders import Embedder, EmbedderConfig, MaskedReader, SpanReader
from realm.model.folder import Model
from realm.model.published.checkpoint import RECORDS
from realm.model.published.export import Lazy, write_checkpoint
from realm.retrieval.block_records import write_records
from realm.text.inputs import SPECIAL, Lengths, Tokenizer

VOCABULARY, DIM = 30522, 128


def tokenizer() -> Tokenizer:
    """BERT's own settings over made-up words of four letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [f"{a}{b}{c}{d}" for a in "bdfg" for b in letters for c in letters for d in letters]
    marks = [*letters, *"0123456789.,?'-", *(f"##{letter}" for letter in letters)]
    pieces = [*SPECIAL, *marks, *words][:VOCABULARY]
    fast = FastTokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    fast.normalizer, fast.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    fast.add_special_tokens(list(SPECIAL))
    return Tokenizer(fast)


def texts(count: int, words: list[str]) -> Iterator[str]:
    """Sentences of frequent and rare words, as in a language."""
    draw = np.random.default_rng(0)
    chance = 1 / np.arange(10, len(words) + 10)
    ends = np.cumsum(chance / chance.sum())
    for _ in range(count):
        length = int(draw.integers(160, 260))
        chosen = np.searchsorted(ends, draw.random(length))
        said = [words[min(place, len(words) - 1)] for place in chosen]
        yield ". ".join(" ".join(said[at : at + 20]).capitalize() for at in range(0, length, 20)) + "."


def model() -> Model:
    """Random weights, large enough that scores differ."""
    torch.manual_seed(0)
    trunk = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        hidden_act="gelu_new",
        layer_norm_eps=1e-12,
    )
    embedder = Embedder(trunk, EmbedderConfig(DIM, "cls", "layer"))
    reader = MaskedReader(BertForMaskedLM(trunk))
    span_reader = SpanReader(BertModel(trunk, add_pooling_layer=False))
    torch.nn.init.normal_(span_reader.ends.bias, std=0.1)
    return Model(tokenizer(), Lengths(64, 288, 320), reader, embedder, span_reader)


def vectors(count: int) -> Iterator[np.ndarray]:
    """As an embedder gives them."""
    draw = np.random.default_rng(1)
    for start in range(0, count, 8192):
        yield draw.standard_normal((min(8192, count - start), DIM), dtype=np.float32) * 0.08


def make(folder: Path, count: int) -> None:
    """Writes the open-QA folder, and embedder, scorer and encoder beside it."""
    made = model()
    for kind in ("scorer", "encoder"):
        write_checkpoint(made, kind, folder / kind)
    write_checkpoint(made, "openqa", folder / "openqa", Lazy((count, DIM), vectors(count)))
    words = [piece for piece in made.tokenizer.vocabulary() if piece.isalpha() and len(piece) == 4]
    write_records(folder / "openqa" / RECORDS, texts(count, words), count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("blocks", type=int)
    args = parser.parse_args()
    make(args.folder, args.blocks)
