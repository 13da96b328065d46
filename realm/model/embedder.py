"""Text -> vector: the knowledge retriever of REALM section 3.2.

Axis letters: B rows, T tokens, H hidden, D embedding, V vocabulary.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.errors import InputError
from realm.hub import encoder_folder
from realm.model.bert import Bert, BertConfig
from realm.model.bert_files import read_weights
from realm.model.cpu.dropout import FastDropout
from realm.model.cpu.packed import hidden_states, states_at
from realm.model.masked_reader import MaskedReader
from realm.model.modes import recomputed
from realm.model.scores import own_scores
from realm.tokens.layouts import Tokens

IMPORTANCE_RATE = 10.0
"""Learning rate of a word's log importance, relative to that of its embedding."""

Pooling = Literal["cls", "mean", "words"]
Norm = Literal["layer", "unit"]


@dataclass(frozen=True)
class EmbedderConfig:
    """How a text becomes a vector."""

    dim: int = 128
    """Width of the vectors (paper: 128)."""
    pooling: Pooling = "mean"
    """"cls": BERT's pooled output, tanh(dense([CLS])) (released code). "mean": mean of the states of all tokens. "words": mean
    of the word embeddings, weighted by the importance of each word, without layers; for an encoder that has read too little
    text to embed sentences, and for training on a CPU in minutes."""
    norm: Norm = "unit"
    """"layer": LayerNorm, raw inner products (released code). "unit": unit vectors, scores are `scale` x cosine."""
    scale: float = 20.0
    """With norm "unit", scores lie between -scale and scale; unused with "layer"."""
    shared: bool = True
    """One tower for queries and passages (released default). False: two towers that start equal (paper)."""

    def __post_init__(self) -> None:
        if not 1 <= self.dim < 2**31:
            raise ValueError(f"dim is {self.dim}: it must be 1 or more, and fit 32 bits")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}: it must be above 0, and finite")


class Tower(nn.Module):
    """One side of the embedder: tokens -> vectors whose inner product is the retrieval score."""

    cached_rows: int = 0
    """Gradient-cache rows, see `realm.model.modes.cache_rows`."""

    def __init__(self, encoder: BertConfig, config: EmbedderConfig):
        super().__init__()
        self.config = config
        self.projection = nn.Linear(encoder.hidden_size, config.dim)
        self.norm = (
            nn.LayerNorm(config.dim, eps=encoder.layer_norm_eps) if config.norm == "layer" else nn.Identity()
        )
        self.dropout = FastDropout(encoder.hidden_dropout_prob)
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def pooled(self, tokens: Tokens) -> Tensor:
        """One state per row -> [B, H]."""
        raise NotImplementedError

    def start_from(self, bert: Bert) -> None:
        """Copies the weights that the tower needs from an encoder."""
        raise NotImplementedError

    def forward(self, tokens: Tokens) -> Tensor:
        """Vectors -> [B, D], float32 also under autocast."""
        if not (self.cached_rows and torch.is_grad_enabled()):
            return self.project(self.pooled(tokens))
        rows = torch.arange(len(tokens.ids_BT), device=tokens.ids_BT.device)
        return torch.cat(
            [
                recomputed(lambda part: self.project(self.pooled(part)), tokens.rows(chunk))
                for chunk in rows.split(self.cached_rows)
            ]
        )

    def project(self, pooled_BH: Tensor) -> Tensor:
        """Vectors of texts with these pooled states -> [B, D] float32."""
        # Small differences of large numbers need float32.
        with torch.autocast(pooled_BH.device.type, enabled=False):
            vector_BD = self.norm(self.projection(pooled_BH.float()))
        if self.config.norm == "unit":
            return F.normalize(vector_BD, dim=-1) * self.config.scale**0.5
        return self.dropout(vector_BD)


class TransformerTower(Tower):
    """A BERT whose states are pooled."""

    def __init__(self, encoder: BertConfig, config: EmbedderConfig):
        super().__init__(encoder, config)
        self.encoder = Bert(encoder, pooler=config.pooling == "cls")

    def pooled(self, tokens: Tokens) -> Tensor:
        if self.encoder.pooler is not None:
            rows_B = torch.arange(len(tokens.ids_BT), device=tokens.ids_BT.device)
            cls_BH = states_at(self.encoder, tokens, rows_B, torch.zeros_like(rows_B))
            return self.encoder.pooler(cls_BH)
        states_BTH = hidden_states(self.encoder, tokens)
        real_BT1 = tokens.mask_BT[:, :, None].float()
        return (states_BTH * real_BT1).sum(dim=1) / real_BT1.sum(dim=1)

    def start_from(self, bert: Bert) -> None:
        states = {k: v for k, v in bert.state_dict().items() if not k.startswith("pooler.")}
        self.encoder.load_state_dict(states, strict=self.config.pooling != "cls")


class BagOfWordsTower(Tower):
    """Word embeddings, weighted by the importance of each word, without layers."""

    def __init__(self, encoder: BertConfig, config: EmbedderConfig):
        super().__init__(encoder, config)
        self.words = nn.Embedding(encoder.vocab_size, encoder.hidden_size)
        self.slow_log_importance = nn.Embedding(encoder.vocab_size, 1)
        nn.init.zeros_(self.slow_log_importance.weight)

    def pooled(self, tokens: Tokens) -> Tensor:
        weight_BT = tokens.mask_BT * self.importance(tokens.ids_BT)
        # The null passage has no important word: without the floor its gradient would dominate.
        total_B1 = weight_BT.sum(dim=1, keepdim=True).clamp_min(1.0)
        # One pass over the rows of the embedding, faster than gathering, weighting and summing them.
        sum_BH = F.embedding_bag(tokens.ids_BT, self.words.weight, mode="sum", per_sample_weights=weight_BT)
        return sum_BH / total_B1

    def start_from(self, bert: Bert) -> None:
        self.words.load_state_dict(bert.embeddings.word_embeddings.state_dict())

    def importance(self, ids: Tensor) -> Tensor:
        """The weight of each word -> shape of `ids`.

        The logarithm of a weight learns `IMPORTANCE_RATE` times as fast as an embedding; at the same rate recall is lower.
        """
        return (IMPORTANCE_RATE * self.slow_log_importance(ids).squeeze(-1)).exp()

    def fit_importance(self, weight_V: Tensor) -> None:
        """Sets the weight of each word, all above 0 (inverse document frequency is a good start)."""
        with torch.no_grad():
            self.slow_log_importance.weight.copy_(weight_V.log()[:, None] / IMPORTANCE_RATE)


def new_tower(encoder: BertConfig, config: EmbedderConfig) -> Tower:
    """A tower with random weights."""
    return (BagOfWordsTower if config.pooling == "words" else TransformerTower)(encoder, config)


class Embedder(nn.Module):
    """Query tower and passage tower; the same object if shared."""

    def __init__(self, encoder: BertConfig, config: EmbedderConfig):
        super().__init__()
        self.encoder_config, self.config = encoder, config
        self.query = self.passage = new_tower(encoder, config)
        if not config.shared:
            self.untie()

    def score(self, queries: Tokens, passages: Tokens | Tensor, place_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of the queries [B, D], and inner products of each query with its passages [B, K].

        `passages` are U distinct passages, as texts or as vectors [U, D]; `place_BK` has the row of each query's passages.
        """
        query_BD = self.query(queries)
        passage_UD = passages if isinstance(passages, Tensor) else self.passage(passages)
        return query_BD, own_scores(query_BD, passage_UD[place_BK])

    def untie(self) -> None:
        """Gives the embedder a separate passage tower, a copy of the query tower."""
        if self.passage is self.query:
            self.passage = new_tower(self.encoder_config, self.config).to(self.query.projection.weight.device)
            self.passage.load_state_dict(self.query.state_dict())


def embedder_from(reader: MaskedReader, config: EmbedderConfig) -> Embedder:
    """An embedder that starts with a copy of the reader's encoder or words; its projection is random until `fit_projection`."""
    embedder = Embedder(reader.config, config)
    for tower in {embedder.query, embedder.passage}:
        tower.start_from(reader.bert.bert)
    return embedder


def load_pooler(embedder: Embedder, name: str) -> None:
    """Loads the pooler of a BERT checkpoint into towers that pool [CLS]; without one in the checkpoint it stays random."""
    weights = read_weights(Path(encoder_folder(name)), name)
    states = {k.split("pooler.dense.")[1]: v for k, v in weights.items() if "pooler.dense." in k}
    if states:
        for tower in {embedder.query, embedder.passage}:
            if isinstance(tower, TransformerTower) and tower.encoder.pooler is not None:
                tower.encoder.pooler.dense.load_state_dict({k: v.float() for k, v in states.items()})


def fit_projection(tower: Tower, pooled_NH: Tensor, whiten: bool) -> None:
    """Sets the projection to the principal components of the pooled states of a corpus, with the mean removed.

    `whiten` scales every component to unit variance, which helps encoders whose states share a few dominant directions.
    """
    mean_H = pooled_NH.mean(dim=0)
    _, singular, components = torch.linalg.svd(pooled_NH - mean_H, full_matrices=False)
    # n passages determine at most n - 1 directions. The rest is rounding error, which whitening would amplify.
    known = int((singular > 1e-4 * singular[0]).sum())
    kept_DH = components[: min(known, tower.config.dim)]
    if whiten:
        kept_DH = kept_DH / (singular[: len(kept_DH), None] / len(pooled_NH) ** 0.5)
    bias_D = -(kept_DH * mean_H).sum(dim=1)  # not a matrix product, which autocast would round
    with torch.no_grad():
        for parameter, start in ((tower.projection.weight, kept_DH), (tower.projection.bias, bias_D)):
            parameter.zero_()
            parameter[: len(start)].copy_(start)


def freeze_passage_encoder(embedder: Embedder) -> None:
    """Gives the embedder a separate passage tower whose projection trains and whose encoder is frozen.

    Raises:
        InputError: a bag-of-words tower has no encoder to freeze.
    """
    embedder.untie()
    _with_layers(embedder.passage, "passage_encoder").encoder.requires_grad_(False)


def freeze_input_embeddings(embedder: Embedder) -> None:
    """Freezes the word, position and segment embeddings of both towers.

    Raises:
        InputError: a bag-of-words tower has nothing else to train.
    """
    for tower in (embedder.query, embedder.passage):
        _with_layers(tower, "input_embeddings").encoder.embeddings.requires_grad_(False)


def _with_layers(tower: Tower, option: str) -> TransformerTower:
    if not isinstance(tower, TransformerTower):
        raise InputError(
            f'{option} = "frozen" needs towers with layers, this model\'s embed words alone: leave it "trained"'
        )
    return tower
