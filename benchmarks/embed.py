"""What embedding a corpus costs: passages per second of an index build's work against bare forward passes of the same batches.

    python benchmarks/embed.py                                    # two towers from random weights on lengths made up here
    python benchmarks/embed.py --layers 12 --hidden 768 --passage 288 --sizes 10000 --towers layers    # BERT-base's size
    python benchmarks/embed.py --kb demo-from-text/kb --model demo-from-text/models/ict

`layers` is a BERT whose states are pooled, `words` an embedder without layers, as the demo's. Passages are random wordpieces of
lengths as `kb build` makes them. The forward passes get their batches ready made, one after the other with all of torch's
threads; a build on a CPU, whose threads each pack and embed batches of their own, can be faster. Of a large corpus the forward
passes take every so many-th batch. A size that would take a tower longer than `--most` seconds is left out. `padding` is the
share of a batch's tokens that are none. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file: the repository is the package's home
from realm.environment import set_torch_environment

set_torch_environment()  # as the command line does

import numpy as np
import shared
import torch

from realm.index.embedding import batches_by_length, embed_passages
from realm.model.bert import BertConfig
from realm.model.device import Precision, autocast, choose_device, chosen
from realm.model.embedder import Embedder, EmbedderConfig
from realm.model.folder import Model, load_model
from realm.store.knowledge_base import KnowledgeBase
from realm.store.schema import PassageTokens
from realm.tokens.layouts import Lengths, Ragged, Tokens, passage_rows
from realm.tokens.tokenizer import Tokenizer

FORWARD_SECONDS = 3.0
"""About as long a round of bare forward passes takes, at most."""
ENOUGH = 10.0
"""Seconds after which a measurement is not repeated."""


class Corpus(NamedTuple):
    """Passages to embed, and what they are embedded with."""

    tokens: PassageTokens
    tokenizer: Tokenizer
    lengths: Lengths


def main() -> None:
    """Measures what the flags ask for and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--towers", nargs="+", choices=list(TOWERS), default=list(TOWERS))
    parser.add_argument("--layers", type=int, default=4, help="of the BERT (default: 4)")
    parser.add_argument("--hidden", type=int, default=256, help="width of its states (default: 256)")
    parser.add_argument(
        "--passage", type=int, default=112, help="longest passage in wordpieces (default: 112)"
    )
    parser.add_argument("--kb", help="a knowledge base, whole, in place of passages made here")
    parser.add_argument("--model", help="with --kb: whose passage tower")
    parser.add_argument("--precision", choices=get_args(Precision), default="auto")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of each measurement that is short, the best counts"
    )
    parser.add_argument("--most", type=float, default=60.0, help="seconds of one round (default: 60)")
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
    """Each embedder with each corpus."""
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
    """A BERT whose states are pooled."""
    return Embedder(_encoder_config(args, tokenizer), EmbedderConfig())


def words(args: argparse.Namespace, tokenizer: Tokenizer) -> Embedder:
    """Word embeddings alone."""
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
    """Random wordpieces in passages that are filled with sentences: most nearly full, an article's last one of any length."""
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
    """The two rates, measured in turns."""
    tower = embedder.passage
    tokens, numbers = corpus.tokens, np.arange(len(corpus.tokens.body.lengths))
    length_N = np.minimum(tokens.title.lengths + tokens.body.lengths + 3, corpus.lengths.passage)
    batches = batches_by_length(length_N)

    def packed(batch: np.ndarray) -> Tokens:
        return passage_rows(tokens.title, tokens.body, batch, corpus.tokenizer, corpus.lengths).to(device)

    with torch.no_grad():
        middle = packed(batches[len(batches) // 2])
        tower(middle)  # warm
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
