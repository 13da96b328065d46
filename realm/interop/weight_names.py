"""Converts tensors of Hugging Face REALM checkpoints to networks and back. Some tensors of each kind of checkpoint are unused:

    kind       becomes                              tensors that the forward pass does not use
    embedder   Tower                                the masked-LM head, cls.predictions
    scorer     two Towers, or one if they are equal both masked-LM heads
    encoder    MaskedReader                         the pooler
    reader     SpanReader, MaskedReader             the pooler, the masked-LM head
    openqa     Tower, SpanReader, MaskedReader      the unused tensors of embedder and reader

The masked-LM head of a reader, whose decoder is the word embeddings, is that of the encoder from which the reader was
fine-tuned. Therefore this head becomes a masked-LM reader. The head of an embedder becomes the start of a masked-LM reader if
the checkpoints have no other head. The other tensors are left out: poolers, heads of embedders if there is a reader, and the
separate decoders of both kinds of heads, which were never trained."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from realm.errors import InputError
from realm.interop.checkpoint import ENCODER_SETTINGS, Checkpoint
from realm.model import bert_files
from realm.model.bert import Bert, BertConfig, MaskedBert
from realm.model.bert_files import bert_config, required_shapes
from realm.model.embedder import Embedder, EmbedderConfig, Tower, new_tower
from realm.model.folder import Model
from realm.model.masked_reader import MaskedReader
from realm.model.span_reader import SpanConfig, SpanReader
from realm.model.tensor_files import floats, weight
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Tokenizer

TOWER = {"encoder.": "realm.", "projection.": "cls.dense.", "norm.": "cls.LayerNorm."}
MASKED_READER = {"bert.": "realm.", "cls.": "cls."}
SPAN_READER = {
    "encoder.": "realm.",
    "ends.": "qa_outputs.dense_intermediate.",
    "norm.": "qa_outputs.layer_normalization.",
    "score.": "qa_outputs.dense_output.",
}
"""Prefixes of the names of tensors in `realm` -> prefixes of Hugging Face names."""

TIED = {second: first.replace("bert.", MASKED_READER["bert."]) for second, first in bert_files.TIED.items()}
"""Second name of a shared tensor -> its first name, which is in every file."""

Network = TypeVar("Network", bound=nn.Module)
OURS = {"continues_V"}
"""Tensors of the networks of `realm` that no Hugging Face checkpoint has."""


class Parts(NamedTuple):
    """The networks of a checkpoint; `query` and `passage` are the same object if they are equal."""

    query: Tower | None = None
    passage: Tower | None = None
    reader: MaskedReader | None = None
    span_reader: SpanReader | None = None


class Conversion(NamedTuple):
    """A model made from checkpoints, with notes on the conversion."""

    model: Model
    dead: list[str]
    """Names of unused tensors, which were left out."""
    notes: list[str]


def huggingface_names(ours: Iterable[str], table: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Names of the tensors of a network -> their Hugging Face names."""
    names = {}
    for name in ours:
        if name not in OURS:
            start = next(start for start in table if name.startswith(start))
            published = table[start] + name.removeprefix(start)
            names[name] = prefix + (TIED.get(published, published) if table is MASKED_READER else published)
    return names


def encoder_config(checkpoint: Checkpoint, tokenizer: Tokenizer) -> BertConfig:
    """The sizes of the encoder. The padding id of the checkpoint, 1, is wrong for the vocabulary and is ignored."""
    same = (*ENCODER_SETTINGS, "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
    sizes = {name: checkpoint.config[name] for name in same}
    return bert_config(sizes | {"pad_token_id": tokenizer.pad_id}, checkpoint.name)


def lengths_of(config: Mapping[str, Any]) -> Lengths:
    """Longest inputs: the defaults, and for the span reader the length in the checkpoint; all limited by the encoder."""
    positions = config["max_position_embeddings"]
    query = min(Lengths.query, positions // 4)
    passage = min(Lengths.passage, positions - query)
    return Lengths(query, passage, reading=min(config["reader_seq_len"], positions))


def convert(
    checkpoint: Checkpoint, encoder: Checkpoint | None = None, embedder: Checkpoint | None = None
) -> Conversion:
    """Converts a checkpoint to a model.

    `encoder` provides the masked-LM reader; `embedder` provides the passage tower, and the query tower if the checkpoint has
    no query tower. A part that no checkpoint provides starts from another part, and a note of the conversion lists this part.

    Raises:
        InputError: a tensor is missing or has an unexpected shape, or the checkpoints do not fit together.
    """
    tokenizer = checkpoint.tokenizer()
    for other, wanted in ((encoder, {"encoder", "openqa"}), (embedder, {"embedder", "scorer", "openqa"})):
        if other is not None:
            _check_fits(checkpoint, other, wanted, tokenizer)
    sizes = encoder_config(checkpoint, tokenizer)
    used: set[str] = set()
    parts = _read(checkpoint, tokenizer, used)
    notes: list[str] = []
    trained = {"embedder", "reader", "span_reader"}
    reader = _read(encoder, tokenizer).reader if encoder else parts.reader
    towers = _read(embedder, tokenizer) if embedder else Parts()
    query = parts.query or towers.query
    passage = towers.passage or parts.passage
    if reader is None:
        prefix = "embedder." if checkpoint.kind == "scorer" else ""
        reader = _masked_reader(checkpoint, prefix, sizes, used)
        trained.discard("reader")
        notes.append(
            "the masked-LM reader is the encoder of the embedder: give an --encoder, or train one with `realm mlm`"
        )
    shared = query is passage
    dim = (embedder or checkpoint).config["retriever_proj_size"]
    config = EmbedderConfig(dim, "cls", "layer", shared=shared)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # for untrained parts, so that equal checkpoints give equal models
        model_embedder = Embedder(sizes, config)
    if query is None or passage is None:
        trained.discard("embedder")
        model_embedder.query.start_from(reader.bert.bert)
        notes.append("the embedder is untrained: give an --embedder, or train one with `realm ict`")
    else:
        model_embedder.query, model_embedder.passage = query, passage
    span_reader = parts.span_reader
    if span_reader is not None and _untrained(span_reader):
        span_reader = None
        notes.append(
            "the head of the span reader was never trained and is left out: `realm finetune` trains a new span reader"
        )
    if checkpoint.kind == "openqa" and "block_emb" not in checkpoint.tensors:
        notes.append(
            "the checkpoint has no vectors and no texts: make them from a corpus with `realm kb build` and `realm index`"
        )
    if checkpoint.kind == "openqa" and embedder is None:
        notes.append(
            "questions and passages have the same tower: to add passages later, convert with the --embedder that computed "
            "the vectors"
        )
    if span_reader is None:
        trained.discard("span_reader")
    elif checkpoint.kind == "reader" and encoder is None:
        trained.discard("reader")  # the encoder of the checkpoint was fine-tuned for spans
    stage = {
        "stage": "published",
        "parts": sorted(trained),
        "kind": checkpoint.kind,
        "name": checkpoint.name,
        "encoder": encoder.name if encoder else None,
        "embedder": embedder.name if embedder else None,
        "config": {name: checkpoint.config[name] for name in KEPT},
    }
    model = Model(
        tokenizer, lengths_of(checkpoint.config), reader, model_embedder, span_reader, stages=[stage]
    )
    for part in model.parts().values():
        part.eval()
    dead = sorted(checkpoint.tensors.keys() - used - {"block_emb"})
    return Conversion(model, dead, notes)


KEPT = ("num_candidates", "reader_beam_size", "reader_seq_len", "searcher_beam_size")
"""Settings of a checkpoint that belong to no network; they are kept for `export`."""


def _read(checkpoint: Checkpoint, tokenizer: Tokenizer, used: set[str] | None = None) -> Parts:
    """The networks of a checkpoint. The names of the tensors that the networks use are added to `used`."""
    used = set() if used is None else used
    sizes = encoder_config(checkpoint, tokenizer)
    match checkpoint.kind:
        case "embedder":
            tower = _tower(checkpoint, "", sizes, used)
            return Parts(tower, tower)
        case "scorer":
            passage = _tower(checkpoint, "embedder.", sizes, used)
            query = _tower(checkpoint, "query_embedder.", sizes, used)
            passage_weights = passage.state_dict()
            same = all(
                torch.equal(value, passage_weights[name]) for name, value in query.state_dict().items()
            )
            return Parts(passage if same else query, passage)
        case "encoder":
            return Parts(reader=_masked_reader(checkpoint, "", sizes, used))
        case "reader":
            return Parts(
                reader=_masked_reader(checkpoint, "", sizes, used),
                span_reader=_span_reader(checkpoint, "", sizes, used),
            )
        case _:
            tower = _tower(checkpoint, "embedder.", sizes, used)
            reader = _masked_reader(checkpoint, "reader.", sizes, used)
            return Parts(tower, tower, reader, _span_reader(checkpoint, "reader.", sizes, used))


def _tower(checkpoint: Checkpoint, prefix: str, encoder: BertConfig, used: set[str]) -> Tower:
    config = EmbedderConfig(checkpoint.config["retriever_proj_size"], "cls", "layer")
    return _filled(partial(new_tower, encoder, config), TOWER, checkpoint, prefix, used)


def _masked_reader(checkpoint: Checkpoint, prefix: str, encoder: BertConfig, used: set[str]) -> MaskedReader:
    return MaskedReader(_filled(partial(MaskedBert, encoder), MASKED_READER, checkpoint, prefix, used))


def _span_reader(checkpoint: Checkpoint, prefix: str, encoder: BertConfig, used: set[str]) -> SpanReader:
    config = checkpoint.config
    spans = SpanConfig(
        max_width=config["max_span_width"],
        hidden=config["span_hidden_size"],
        norm_eps=config["reader_layer_norm_eps"],
    )
    return _filled(lambda: SpanReader(Bert(encoder), config=spans), SPAN_READER, checkpoint, prefix, used)


def _filled(
    make: Callable[[], Network],
    table: Mapping[str, str],
    checkpoint: Checkpoint,
    prefix: str,
    used: set[str],
) -> Network:
    """The network that `make` returns, with the tensors of the checkpoint in float32."""
    shapes = required_shapes(checkpoint.name, make)
    names = huggingface_names(shapes, table, prefix)
    missing = sorted(set(names.values()) - checkpoint.tensors.keys())
    if missing:
        raise InputError(
            f"{checkpoint.name} lacks {missing[0]} and {len(missing) - 1} more tensors of a {checkpoint.kind}"
        )
    for ours, published in names.items():
        found, wanted = tuple(checkpoint.tensors[published].shape), tuple(shapes[ours].shape)
        if found != wanted:
            raise InputError(
                f"{checkpoint.name}: {published} has the shape {found}, but {wanted} by config.json"
            )
    network = make()
    network.load_state_dict(
        {
            ours: weight(checkpoint.name, published, checkpoint.tensors[published])
            for ours, published in names.items()
        },
        strict=False,
    )
    used.update(names.values())
    for names_of_one in TIED.items() if table is MASKED_READER else ():
        second, first = (prefix + key for key in names_of_one)
        # A tensor with equal values under the second name counts as used.
        if second in checkpoint.tensors and torch.equal(
            *(floats(checkpoint.name, key, checkpoint.tensors[key]) for key in (first, second))
        ):
            used.add(second)
    return network


def _check_fits(
    checkpoint: Checkpoint, other: Checkpoint, kinds: Sequence[str] | set[str], tokenizer: Tokenizer
) -> None:
    if other.kind not in kinds:
        raise InputError(f"{other.name} is a {other.kind}: {' or '.join(sorted(kinds))} was expected")
    names = [*ENCODER_SETTINGS]
    if not {checkpoint.kind, other.kind} & {"encoder", "reader"}:
        names.append("retriever_proj_size")
    for name in names:
        if other.config[name] != checkpoint.config[name]:
            raise InputError(
                f"{name} is {other.config[name]} in {other.name}, but {checkpoint.config[name]} in {checkpoint.name}"
            )
    if other.tokenizer().vocabulary() != tokenizer.vocabulary():
        raise InputError(f"{other.name} and {checkpoint.name} have different vocabularies")


def _untrained(reader: SpanReader) -> bool:
    """Whether the head is untrained. Only before training, all gains are exactly one and all biases exactly zero."""
    states = reader.state_dict()
    zeros = (states[name] for name in ("norm.bias", "ends.bias", "score.bias"))
    return bool((states["norm.weight"] == 1).all()) and not any(bool(zero.any()) for zero in zeros)


def tensors_of(network: nn.Module, table: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face names and tensors of a network; no name occurs twice."""
    states = network.state_dict()
    names = {published: ours for ours, published in huggingface_names(states, table).items()}
    for published, ours in names.items():
        yield published, states[ours].detach().cpu()
