"""Measures how fast a corpus is embedded: passages per second of an index build, and of forward passes over the same batches.

    python benchmarks/embed.py                                    # two towers with random weights, artificial passages
    python benchmarks/embed.py --layers 12 --hidden 768 --passage 288 --sizes 10000 --towers layers    # BERT-base
    python benchmarks/embed.py --kb demo-from-text/kb --model demo-from-text/models/ict

The tower `layers` is a BERT whose states are pooled. The tower `words` is a bag of words, as in the demo. Artificial passages
are random wordpieces, with lengths as in passages of `kb build`. The batches of the forward passes are prepared beforehand,
and all threads of torch work on one batch after the other. In a build on a CPU each thread packs and embeds its own batches,
so a build can be faster than the forward passes. In a large corpus, the forward passes use only a sample of the batches. A
size for which one round would take longer than `--most` seconds is left out. `padding` is the share of padding among the
tokens. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args

sys.path.insert(
    0, str(Path(__file__).parent.parent)
)  # a file that is run by its path does not find the package `realm`
from realm.environment import set_torch_environment

set_torch_environment()  # as in the command line

import numpy as np
import shared
import torch

from realm.index.embedding import batch_tokens, batches_by_length, embed_passages
from realm.model.bert import BertConfig
from realm.model.device import Precision, autocast, choose_device, chosen
from realm.model.embedder import Embedder, EmbedderConfig
from realm.model.folder import Model, load_model
from realm.store.knowledge_base import KnowledgeBase
from realm.store.schema import PassageTokens
from realm.tokens.layouts import Lengths, Ragged, Tokens, passage_rows
from realm.tokens.tokenizer import Tokenizer

FORWARD_SECONDS = 3.0
"""Approximate maximum time of one round of forward passes."""
ENOUGH = 10.0
"""Seconds after which a measurement is not repeated."""


class Corpus(NamedTuple):
    """Passages to embed, with the tokenizer and the lengths of their inputs."""

    tokens: PassageTokens
    tokenizer: Tokenizer
    lengths: Lengths


def main() -> None:
    """Measures the parts that the flags select, and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--towers", nargs="+", choices=list(TOWERS), default=list(TOWERS))
    parser.add_argument("--layers", type=int, default=4, help="number of layers of the BERT (default: 4)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the towers (default: 256)")
    parser.add_argument(
        "--passage", type=int, default=112, help="longest passage in wordpieces (default: 112)"
    )
    parser.add_argument(
        "--kb", help="embed all passages of this knowledge base instead of artificial passages"
    )
    parser.add_argument("--model", help="with --kb: the model that has the passage tower")
    parser.add_argument("--precision", choices=get_args(Precision), default="auto")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of a short measurement; the fastest round counts"
    )
    parser.add_argument("--most", type=float, default=60.0, help="longest round in seconds (default: 60)")
    args = parser.parse_args()
    if (args.kb is None) != (args.model is None):
        parser.error("--kb and --model go together")
    device = choose_device("auto")
    rows = []
    with autocast(device, args.precision):
        for what, embedder, corpus in asked(args):
            embedder.to(device).eval()
            row = measured(embedder, corpus, device, args.rounds, args.most)
            rows.append({"tower": what, "passages": len(corpus.tokens.body.lengths), **row})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shared.print_table(rows)
    result = {"benchmark": "embed", "device": str(device), "torch_threads": torch.get_num_threads()}
    result |= {"precision": chosen(device, args.precision), "layers": args.layers, "hidden": args.hidden}
    print(json.dumps(result | {"rows": rows} | shared.machine()))


def asked(args: argparse.Namespace) -> Iterator[tuple[str, Embedder, Corpus]]:
    """All pairs of an embedder and a corpus, each with the name of the embedder."""
    if args.kb is not None:
        kb, model = KnowledgeBase.open(args.kb), load_model(args.model)
        yield args.model, model.embedder, Corpus(kb.tokens, model.tokenizer, model.lengths)
        return
    tokenizer, lengths = Tokenizer.load("package:realm-mini"), Lengths(passage=args.passage)
    for name in args.towers:
        embedder = TOWERS[name](args, tokenizer)
        for size in args.sizes:
            yield name, embedder, Corpus(made_up(size, tokenizer, lengths), tokenizer, lengths)


def layers(args: argparse.Namespace, tokenizer: Tokenizer) -> Embedder:
    """An embedder whose towers are BERTs with pooled states."""
    return Embedder(_encoder_config(args, tokenizer), EmbedderConfig())


def words(args: argparse.Namespace, tokenizer: Tokenizer) -> Embedder:
    """An embedder whose towers are bags of words."""
    return Embedder(_encoder_config(args, tokenizer), EmbedderConfig(pooling="words"))


TOWERS: dict[str, Callable[[argparse.Namespace, Tokenizer], Embedder]] = {"layers": layers, "words": words}


def _encoder_config(args: argparse.Namespace, tokenizer: Tokenizer) -> BertConfig:
    return BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        intermediate_size=4 * args.hidden,
        max_position_embeddings=max(512, args.passage),
    )


def made_up(size: int, tokenizer: Tokenizer, lengths: Lengths) -> PassageTokens:
    """Passages of random wordpieces: 60 % are nearly full, the others have any length, like the last passage of an article."""
    rng = np.random.default_rng(0)
    title_N = rng.integers(1, 6, size)
    room = lengths.passage - 3 - title_N
    full = rng.random(size) < 0.6
    body_N = np.where(full, room - rng.integers(0, 25, size), rng.integers(8, room + 1)).clip(8, room)

    def ragged(length_N: np.ndarray) -> Ragged:
        offsets = np.concatenate([[0], np.cumsum(length_N, dtype=np.int64)])
        return Ragged(rng.integers(100, tokenizer.vocab_size, offsets[-1], dtype=np.int32), offsets)

    none = Ragged(np.zeros(0, dtype=np.int32), np.zeros(size + 1, dtype=np.int64))
    return PassageTokens(ragged(title_N), ragged(body_N), none, none, none)


def measured(
    embedder: Embedder, corpus: Corpus, device: torch.device, rounds: int, most: float
) -> shared.Row:
    """Measures a build and forward passes alternately -> a row of the table."""
    tower = embedder.passage
    tokens, numbers = corpus.tokens, np.arange(len(corpus.tokens.body.lengths))
    length_N = np.minimum(tokens.title.lengths + tokens.body.lengths + 3, corpus.lengths.passage)
    batches = batches_by_length(length_N, batch_tokens(device, tower))

    def packed(batch: np.ndarray) -> Tokens:
        return passage_rows(tokens.title, tokens.body, batch, corpus.tokenizer, corpus.lengths).to(device)

    with torch.no_grad():
        middle = packed(batches[len(batches) // 2])
        tower(middle)  # warm-up
        each = _seconds(lambda: tower(middle).float().cpu())
    most_batches = max(5, int(FORWARD_SECONDS / each))
    inputs = [packed(batch) for batch in batches[:: -(-len(batches) // most_batches)]]
    in_sample = sum(len(one.ids_BT) for one in inputs)
    padded = sum(one.mask_BT.numel() for one in inputs)
    padding = 1 - int(sum(one.mask_BT.sum() for one in inputs)) / padded

    @torch.no_grad()
    def forward() -> None:
        for one in inputs:
            tower(one).float().cpu()

    def whole() -> None:
        embed_passages(Model(corpus.tokenizer, corpus.lengths, None, embedder), tokens, numbers)

    bare, all_of_it = [_seconds(forward)], []
    if len(numbers) * bare[0] / in_sample < most:
        while len(all_of_it) < rounds and sum(all_of_it) < ENOUGH:
            all_of_it.append(_seconds(whole))
            bare.append(_seconds(forward))
    rate, ceiling = (len(numbers) / min(all_of_it) if all_of_it else None), in_sample / min(bare)
    return {
        "tokens/passage": float(length_N.mean()),
        "padding": round(padding, 3),
        "forward, passages/s": ceiling,
        "build, passages/s": rate,
        "share": rate and round(rate / ceiling, 3),
        "build, s": min(all_of_it, default=None),
    }


def _seconds(do: Callable[[], None]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
