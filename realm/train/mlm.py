"""Masked language modelling: trains an encoder as BERT is trained, and also to predict masked words from a passage.

Every batch has two kinds of rows: plain rows, and reading rows with a sentence and a passage (`realm.masking.masked_rows`).
The reading rows are needed for pre-training on a small machine. As long as the reader does not copy from passages, no passage
raises the likelihood of a masked span, and the retriever is trained on noise. After masked-LM training, the embedder gets a
copy of the encoder, or only of the word embeddings, and a projection onto the principal components of the corpus.

Axis letters: P predicted wordpieces, H hidden, N passages, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realm import distributed
from realm.errors import InputError, at_least, check_shares
from realm.index.embedding import pooled_states
from realm.masking.held_out import held_out, held_out_queries
from realm.masking.masked_queries import MaskedQuery
from realm.masking.masked_rows import RowMaker, Rows
from realm.model.copying import CopyHead
from realm.model.embedder import BagOfWordsTower, EmbedderConfig, embedder_from, fit_projection, load_pooler
from realm.model.folder import Model, load_model
from realm.model.manifest import encoder_held_out, is_model
from realm.model.masked_reader import ROWS_AT_ONCE, EncoderConfig, MaskedReader, load_reader, new_reader
from realm.model.modes import evaluating
from realm.model.span_reader import SpanReader
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.text.corpus import HeldOut
from realm.tokens.layouts import Lengths, joint_inputs
from realm.tokens.tokenizer import Tokenizer
from realm.train.loop import StartedFrom, TrainRun
from realm.train.run_config import RunConfig, generator
from realm.train.sharding import whole_model

COUNTED = 1 << 16
"""Number of passages whose wordpieces are counted at once."""
CHECK_EVERY = 200
"""Steps between two checks of the reader on held-out sentences."""


@dataclass(frozen=True)
class MlmConfig(RunConfig):
    """Settings of `realm mlm`."""

    init: str | None = None
    """Folder or name of the model or BERT-like encoder to start from. None: random weights."""
    batch_size: int = 64
    """Rows per step."""
    learning_rate: float = 5e-4
    """Peak learning rate; 1e-3 suits a small encoder with random weights."""
    input_embeddings: Literal["trained", "frozen"] = "trained"
    """Word, position and segment embeddings of the reader. "frozen": these embeddings are not trained. Use "frozen" if
    `init` was trained on much text."""
    reading: float = 0.5
    """Share of the rows of a batch that are reading rows: a sentence with masked words, and a passage."""
    query_tokens: int = 64
    """Longest query of the model in wordpieces, including special tokens."""
    principal: bool = True
    """The projection of the embedder starts from the principal components of the corpus. False: from random weights (paper)."""
    whiten: bool = True
    """Scales the principal components to unit variance."""
    sample: int = 20_000
    """Number of passages from whose pooled states the principal components are computed."""
    copy_head: bool = False
    """Adds a copy head to the reader if the reader has no copy head (paper: no copy head). With a copy head, the reader learns
    to copy in minutes."""
    embedder_start: Literal["trained", "given"] = "trained"
    """Weights of the embedder. "trained": the weights of the encoder after masked-LM training. "given": the weights of `init`,
    for an `init` that can already retrieve; if `init` is a model folder, its whole embedder is kept, and becomes two equal
    towers if `embedder.shared` is false."""
    embedder: EmbedderConfig = field(default_factory=EmbedderConfig)
    """Settings of the embedder."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """Size of an encoder with random weights; not used if `init` is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, query_tokens=3, sample=1)
        check_shares(self, "reading")


def train(kb: KnowledgeBase, out: Path, config: MlmConfig, init: str | None = None) -> Path:
    """Trains an encoder on the text of a knowledge base, and makes the embedder from this encoder -> the model folder `out`.

    `init` replaces the setting `init`. If `init` has a span reader, the new model has the same span reader.
    """
    init = init or config.init
    model = start_model(kb, config, init)
    reader, tokens = model.reader, kb.tokens
    train_passages = np.flatnonzero(~held_out(kb.ids, kb.config.held_out))
    probe = held_out_queries(kb, config.query_tokens - 2, count=256)
    maker = RowMaker(tokens, kb.tokenizer, model.lengths)
    names: StartedFrom = {"init": init, **kb.training_record}
    if config.input_embeddings == "frozen":
        if init is None:
            raise InputError(
                'input_embeddings = "frozen" needs an init, because random embeddings have to be trained'
            )
        reader.bert.bert.embeddings.requires_grad_(False)
    with TrainRun("mlm", out, config, model, {reader: config.learning_rate}, names, shares=True) as run:
        for step in run.steps():
            rng = generator(config.seed, step)
            batch = maker.batch(train_passages, config.batch_size, config.reading, rng)
            batch = [rows.to(run.device) for rows in own_rows(batch, run.sharded)]
            with run.autocast():
                logp_P = torch.cat([reader.target_logp(*rows) for rows in batch])
            weight = distributed.loss_weight(torch.tensor(float(len(logp_P)), device=run.device))
            loss, seen = (
                weight * part.sum() / max(1, len(logp_P)) for part in (-logp_P, logp_P.detach().exp())
            )
            run.update(loss, {"target_probability": seen})
            if probe and (run.step % CHECK_EVERY == 0 or run.step == config.steps):
                run.log(reading_check(model, tokens, probe, run))
        run.model = trained = whole_model(model)
        if not keeps_embedder(config, init):
            with run.autocast():
                fit_embedder(trained, kb, config)
        return run.finish()


def own_rows(parts: Sequence[Rows], sharded: bool = False) -> list[Rows]:
    """The rows of this rank, from each part of a batch; all ranks have the same number of rows.

    If weights are `sharded`, all ranks must read equally many parts: if a rank has no row of a part, the rank reads the first
    row of this part without targets.
    """
    size = distributed.world_size()
    if size == 1:
        return list(parts)
    found, before = [], 0
    for rows in parts:
        count = len(rows.tokens.ids_BT)
        index = torch.arange(count)[(distributed.rank() - before) % size :: size].contiguous()
        before += count
        if len(index):
            found.append(rows.rows(index))
        elif sharded:
            found.append(
                Rows(rows.tokens.rows(torch.zeros(1, dtype=torch.int64)), *(part[:0] for part in rows[1:]))
            )
    return found


def fit_embedder(model: Model, kb: KnowledgeBase, config: MlmConfig) -> None:
    """Sets the first weights of the embedder: the weights of the encoder, the importances of words, and the projection."""
    sample = generator(config.seed, 1).permutation(len(kb))[: config.sample]
    for tower in {model.embedder.query, model.embedder.passage}:
        if config.embedder_start == "trained":
            tower.start_from(model.reader.bert.bert)
        if isinstance(tower, BagOfWordsTower):
            # The null passage has only special tokens. With importance 0 its vector would be 0, which has no direction.
            tower.fit_importance(inverse_frequency(kb.tokens, kb.tokenizer).clamp_min(0.01))
        if config.principal:
            pooled_NH = pooled_states(tower, kb.tokens, sample, kb.tokenizer, model.lengths)
            fit_projection(tower, pooled_NH, config.whiten)


def keeps_embedder(config: MlmConfig, init: str | None) -> bool:
    """Whether the new model has the embedder of the model folder `init`."""
    return config.embedder_start == "given" and init is not None and is_model(init)


def inverse_frequency(tokens: PassageTokens, tokenizer: Tokenizer) -> Tensor:
    """Inverse document frequency, log((N + 1) / (passages with the wordpiece + 1)), and 0 for special tokens -> [V]."""
    count, vocabulary = len(tokens.body.lengths), tokenizer.vocab_size
    passages_V = np.zeros(vocabulary, dtype=np.int64)
    for first in range(0, count, COUNTED):
        end = min(first + COUNTED, count)
        pairs = [
            np.repeat(np.arange(end - first), part.lengths[first:end]) * vocabulary
            + part.values[part.offsets[first] : part.offsets[end]]
            for part in (tokens.title, tokens.body)
        ]
        passages_V += np.bincount(np.unique(np.concatenate(pairs)) % vocabulary, minlength=vocabulary)
    weight_V = np.log((count + 1) / (passages_V + 1))
    weight_V[[tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id]] = 0
    return torch.from_numpy(weight_V).float()


def start_model(kb: KnowledgeBase, config: MlmConfig, init: str | None) -> Model:
    """The model before the first step: made from a model folder, from a BERT-like encoder, or with random weights."""
    lengths = Lengths(query=config.query_tokens, passage=kb.config.passage_tokens)
    stages: list[dict[str, Any]] = []
    held_out_by_init: HeldOut | None = None
    span_reader: SpanReader | None = None
    torch.manual_seed(config.seed)
    if init is None:
        tokenizer, reader = kb.tokenizer, new_reader(config.encoder, kb.tokenizer)
    elif is_model(init):
        saved = load_model(init)
        tokenizer, reader, span_reader = saved.tokenizer, saved.reader, saved.span_reader
        stages, held_out_by_init = saved.stages, saved.held_out
    else:
        tokenizer, reader = Tokenizer.load(init), load_reader(init)
        held_out_by_init = encoder_held_out(init, kb.config.sources)
    kb.check_tokenizer(tokenizer, init or "the encoder")
    kb.agree_on_held_out(held_out_by_init, init or "the encoder")
    if lengths.joint > reader.config.max_position_embeddings:
        raise InputError(
            f"a query of {lengths.query} wordpieces and a passage of {lengths.passage} wordpieces are together longer than "
            f"{reader.config.max_position_embeddings} wordpieces, the longest input of the encoder: lower query_tokens, or "
            f"build {kb.folder} with a smaller passage_tokens"
        )
    if config.copy_head and reader.copy_head is None:
        reader = MaskedReader(reader.bert, copy=True)
        weight_V = inverse_frequency(kb.tokens, tokenizer)
        cast(CopyHead, reader.copy_head).fit_importance(weight_V / weight_V.max().clamp_min(1e-6))
    if keeps_embedder(config, init):
        if not config.embedder.shared:
            saved.embedder.untie()
        return Model(
            tokenizer, lengths, reader, saved.embedder, span_reader, saved.calibration, stages=stages
        )
    embedder = embedder_from(reader, config.embedder)
    if init is not None and not is_model(init) and config.embedder.pooling == "cls":
        load_pooler(embedder, init)
    return Model(tokenizer, lengths, reader, embedder, span_reader, stages=stages)


@torch.no_grad()
def reading_check(
    model: Model, tokens: PassageTokens, queries: list[MaskedQuery], run: TrainRun
) -> dict[str, float]:
    """Loss in nats per wordpiece, and accuracy, on held-out masked sentences: with the passage that contains the sentence, and
    without a passage."""
    nats, right, total = np.zeros(2), np.zeros(2), sum(len(q.positions) for q in queries)
    for start in range(0, len(queries), ROWS_AT_ONCE):
        part = queries[start : start + ROWS_AT_ONCE]
        row_P = torch.from_numpy(np.repeat(np.arange(len(part)), [len(q.positions) for q in part])).to(
            run.device
        )
        position_P = torch.from_numpy(np.concatenate([q.positions for q in part]) + 1).to(run.device)
        target_P = torch.from_numpy(np.concatenate([q.targets for q in part]).astype(np.int64)).to(run.device)
        own = [tokens.body.row(q.passage) for q in part]
        for column, bodies in enumerate((own, [body[:0] for body in own])):
            inputs = joint_inputs([q.ids for q in part], bodies, model.tokenizer, model.lengths).to(
                run.device
            )
            with evaluating(model.reader), run.autocast():
                logp_PV = model.reader(inputs, row_P, position_P)
            nats[column] += F.nll_loss(logp_PV, target_P, reduction="sum").item()
            right[column] += (logp_PV.argmax(dim=1) == target_P).sum().item()
    values = (*nats / total, *right / total)
    names = ("own_passage_nats", "none_passage_nats", "own_passage_accuracy", "none_passage_accuracy")
    return {name: round(float(value), 4) for name, value in zip(names, values, strict=True)}
