"""Masked language modelling: trains an encoder as BERT is trained, and also to predict masked words from a passage.

Every batch has two kinds of rows:

    plain      [CLS] title [SEP] body [SEP]      wordpieces and whole salient spans of the body are masked
    reading    [CLS] sentence [SEP] body [SEP]   half of the salient spans and some wordpieces of the sentence are masked; the
                                                 body is the passage that contains the sentence, a neighbouring passage,
                                                 another passage with a masked span, or empty

The reading rows are needed for pre-training on a small machine. As long as the reader does not copy from passages, no passage
raises the likelihood of a masked span, and the retriever is trained on noise. After masked-LM training, the embedder gets a
copy of the encoder, or only of the word embeddings, and a projection onto the principal components of the corpus.

Axis letters: B rows, P predicted wordpieces, T tokens, H hidden, N passages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realm import distributed
from realm.errors import InputError
from realm.index.embedding import pooled_states
from realm.masking.held_out import held_out, held_out_queries
from realm.masking.masked_queries import MaskedQuery, SpanIndex
from realm.model.copying import CopyHead
from realm.model.embedder import BagOfWordsTower, EmbedderConfig, embedder_from, fit_projection, load_pooler
from realm.model.folder import Model, load_model
from realm.model.manifest import encoder_held_out, is_model
from realm.model.masked_reader import ROWS_AT_ONCE, EncoderConfig, MaskedReader, load_reader, new_reader
from realm.model.modes import evaluating
from realm.model.span_reader import SpanReader
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.text.corpus import HeldOut
from realm.tokens.layouts import Lengths, Tokens, joint_inputs, passage_inputs
from realm.tokens.tokenizer import Tokenizer
from realm.train.loop import StartedFrom, TrainRun
from realm.train.run_config import RunConfig, generator

MASKED_TOKENS = 0.12
"""Share of single wordpieces that are masked, in both kinds of rows."""
MASKED_SPANS = 0.3
"""Share of salient spans that are masked in plain rows. In reading rows, half of the salient spans are masked, at least one."""
VISIBLE = 0.1
"""Share of the targets of plain rows that are not replaced by [MASK], so that the states of visible words are trained too."""
OWN_PASSAGE = 0.3
"""Share of reading rows with the passage that contains the sentence."""
NEAR_PASSAGE = 0.2
"""Share of reading rows with a neighbouring passage, at most two passages before or after the passage of the sentence. From
these rows the reader learns when not to copy."""
NO_PASSAGE = 0.1
"""Share of reading rows without a passage. All remaining reading rows have another passage that contains a masked span; if no
other passage contains the span, these rows have the passage of the sentence."""
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


class Rows(NamedTuple):
    """Masked rows of one kind, and the targets at their masked positions."""

    tokens: Tokens
    row_P: Tensor
    position_P: Tensor
    target_P: Tensor

    def to(self, device: torch.device) -> "Rows":
        return Rows._make(part.to(device) for part in self)

    def rows(self, index: Tensor) -> "Rows":
        """The rows with the numbers `index`, which must be ascending, and the targets of these rows."""
        own_P = torch.isin(self.row_P, index)
        row_P = torch.searchsorted(index, self.row_P[own_P])
        return Rows(self.tokens.rows(index), row_P, self.position_P[own_P], self.target_P[own_P])


def train(kb: KnowledgeBase, out: Path, config: MlmConfig, init: str | None = None) -> Path:
    """Trains an encoder on the text of a knowledge base, and makes the embedder from this encoder -> the model folder `out`.

    `init` replaces the setting `init`. If `init` has a span reader, the new model has the same span reader.
    """
    init = init or config.init
    model = start_model(kb, config, init)
    reader, tokens = model.reader, kb.tokens
    train_passages = np.flatnonzero(~held_out(kb.ids, kb.config.held_out))
    probe = held_out_queries(kb, config.query_tokens - 2, count=256)
    spans = SpanIndex(tokens)
    names: StartedFrom = {"init": init, **kb.training_record}
    if config.input_embeddings == "frozen":
        if init is None:
            raise InputError(
                'input_embeddings = "frozen" needs an init, because random embeddings have to be trained'
            )
        reader.bert.bert.embeddings.requires_grad_(False)
    with TrainRun("mlm", out, config, model, {reader: config.learning_rate}, names, True) as run:
        for step in run.steps():
            rng = generator(config.seed, step)
            batch = masked_rows(tokens, spans, train_passages, rng, kb.tokenizer, model.lengths, config)
            batch = [rows.to(run.device) for rows in own_rows(batch)]
            with run.autocast():
                logp_P = torch.cat([reader.target_logp(*rows) for rows in batch])
            weight = distributed.loss_weight(torch.tensor(float(len(logp_P)), device=run.device))
            loss, seen = (
                weight * part.sum() / max(1, len(logp_P)) for part in (-logp_P, logp_P.detach().exp())
            )
            run.update(loss, {"target_probability": seen.item()})
            if probe and (run.step % CHECK_EVERY == 0 or run.step == config.steps):
                run.log(reading_check(model, tokens, probe, run))
        if not keeps_embedder(config, init):
            with run.autocast():
                fit_embedder(model, kb, config)
        return run.finish()


def own_rows(parts: Sequence[Rows]) -> list[Rows]:
    """The rows of this rank, from each part of a batch; all ranks have the same number of rows."""
    size = distributed.world_size()
    if size == 1:
        return list(parts)
    found, before = [], 0
    for rows in parts:
        count = len(rows.tokens.ids_BT)
        index = torch.arange(count)[(distributed.rank() - before) % size :: size]
        before += count
        if len(index):
            found.append(rows.rows(index))
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
    count = len(tokens.body.lengths)
    pairs = [
        np.repeat(np.arange(count), part.lengths) * tokenizer.vocab_size + part.values
        for part in (tokens.title, tokens.body)
    ]
    passages_V = np.bincount(
        np.unique(np.concatenate(pairs)) % tokenizer.vocab_size, minlength=tokenizer.vocab_size
    )
    weight_V = np.log((count + 1) / (passages_V + 1))
    weight_V[[tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id]] = 0
    return torch.from_numpy(weight_V).float()


def start_model(kb: KnowledgeBase, config: MlmConfig, init: str | None) -> Model:
    """The model before the first step: made from a model folder, from a BERT-like encoder, or with random weights."""
    lengths = Lengths(query=config.query_tokens, passage=kb.config.passage_tokens)
    stages: list[dict[str, Any]] = []
    held_out_by_init: set[HeldOut] = set()
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


def masked_rows(
    tokens: PassageTokens,
    spans: SpanIndex,
    passages: np.ndarray,
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    lengths: Lengths,
    config: MlmConfig,
) -> list[Rows]:
    """The plain rows and the reading rows of a batch. Their passages have similar lengths, to limit padding.

    The probability of a passage is proportional to the square of its length. Otherwise most batches of a corpus such as a
    dictionary would consist of very short passages, from which the reader does not learn to use passages.
    """
    weight = tokens.body.lengths[passages].astype(np.float64) ** 2
    drawn = rng.choice(passages, config.batch_size * 4, p=weight / weight.sum())
    drawn = drawn[np.argsort(tokens.body.lengths[drawn], kind="stable")]
    first = int(rng.integers(len(drawn) - config.batch_size + 1))
    batch = drawn[first : first + config.batch_size]
    reading = round(config.reading * config.batch_size)
    chosen = rng.permutation(batch)
    parts = [
        _reading_rows(tokens, spans, chosen[:reading], rng, tokenizer, lengths),
        _plain_rows(tokens, chosen[reading:], rng, tokenizer, lengths),
    ]
    return [rows for rows in parts if rows is not None]


def _plain_rows(
    tokens: PassageTokens,
    passages: np.ndarray,
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    lengths: Lengths,
) -> Rows | None:
    titles, bodies, hidden_rows, offsets = [], [], [], []
    for passage in passages:
        title, body = tokens.title.row(passage), tokens.body.row(passage)
        title = title if rng.random() < 0.5 else title[:0]
        hidden = rng.random(len(body)) < MASKED_TOKENS
        for start, end in zip(tokens.span_starts.row(passage), tokens.span_ends.row(passage), strict=True):
            hidden[start:end] |= rng.random() < MASKED_SPANS
        shown = body.copy()
        shown[hidden & (rng.random(len(body)) >= VISIBLE)] = tokenizer.mask_id
        titles.append(title)
        bodies.append(shown)
        hidden_rows.append((body, np.flatnonzero(hidden)))
        offsets.append(2 + len(title))
    if not titles:
        return None
    return _rows(passage_inputs(titles, bodies, tokenizer, lengths), hidden_rows, offsets)


def _reading_rows(
    tokens: PassageTokens,
    spans: SpanIndex,
    passages: np.ndarray,
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    lengths: Lengths,
) -> Rows | None:
    sentences, bodies, hidden_rows = [], [], []
    for passage in passages:
        body = tokens.body.row(passage)
        bounds = np.append(tokens.sentences.row(passage), len(body))
        # A sentence of control characters has no wordpieces.
        number = int(rng.choice(np.flatnonzero(np.diff(bounds))))
        first = int(bounds[number])
        sentence = body[first : min(int(bounds[number + 1]), first + lengths.query - 2)]
        starts, ends = tokens.span_starts.row(passage) - first, tokens.span_ends.row(passage) - first
        inside = np.flatnonzero((starts >= 0) & (ends <= len(sentence)))
        hidden = rng.random(len(sentence)) < MASKED_TOKENS
        hidden[rng.integers(len(sentence))] = True
        beside = body
        if len(inside):
            picked = rng.permutation(inside)[: max(1, (len(inside) + 1) // 2)]
            for pick in picked:
                hidden[starts[pick] : ends[pick]] = True
            beside = _beside(tokens, spans, int(passage), sentence[starts[picked[0]] : ends[picked[0]]], rng)
        shown = sentence.copy()
        shown[hidden] = tokenizer.mask_id
        sentences.append(shown)
        bodies.append(beside)
        hidden_rows.append((sentence, np.flatnonzero(hidden)))
    if not sentences:
        return None
    return _rows(joint_inputs(sentences, bodies, tokenizer, lengths), hidden_rows, [1] * len(sentences))


def _beside(
    tokens: PassageTokens, spans: SpanIndex, own: int, span: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Wordpieces of the passage in a reading row: the passage `own` of the sentence, a neighbouring passage, another passage
    with the masked span, or no passage."""
    draw = rng.random()
    if draw < NO_PASSAGE:
        return tokens.body.row(own)[:0]
    if draw < NO_PASSAGE + NEAR_PASSAGE:
        near = [n for n in (own - 2, own - 1, own + 1, own + 2) if 0 <= n < len(tokens.body.lengths)]
        return tokens.body.row(int(rng.choice(near)) if near else own)
    if draw < NO_PASSAGE + NEAR_PASSAGE + OWN_PASSAGE:
        return tokens.body.row(own)
    others = spans.passages(span)
    others = others[others != own]
    return tokens.body.row(int(rng.choice(others)) if len(others) else own)


def _rows(inputs: Tokens, hidden_rows: list[tuple[np.ndarray, np.ndarray]], offsets: list[int]) -> Rows:
    """Rows with their targets. For each row, `offsets` has the position in the input at which the masked text starts. Tokens
    that were cut off are not targets."""
    longest = inputs.mask_BT.sum(dim=1).tolist()
    row, position, target = [], [], []
    for number, ((original, hidden), offset) in enumerate(zip(hidden_rows, offsets, strict=True)):
        kept = hidden[hidden + offset < longest[number] - 1]
        row += [number] * len(kept)
        position += (kept + offset).tolist()
        target += original[kept].tolist()
    return Rows(inputs, *(torch.tensor(values, dtype=torch.int64) for values in (row, position, target)))


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
