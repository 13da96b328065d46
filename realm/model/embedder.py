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
from realm.model.masked_reader import MaskedReader
from realm.model.modes import chunks, recomputed
from realm.model.scores import own_scores
from realm.model.states import hidden_states, states_at
from realm.model.tensor_files import weight
from realm.tokens.layouts import Tokens

IMPORTANCE_RATE = 10.0
"""Learning rate of the logarithm of a word's weight, relative to the learning rate of the word's embedding."""

Pooling = Literal["cls", "mean", "words"]
Norm = Literal["layer", "unit"]


@dataclass(frozen=True)
class EmbedderConfig:
    """Settings of the network that computes a vector for a text."""

    dim: int = 128
    """Width of the vectors (paper: 128)."""
    pooling: Pooling = "mean"
    """"cls": BERT's pooled output, tanh(dense([CLS])) (released code). "mean": mean of the states of all tokens. "words": mean
    of the word embeddings, weighted by the importance of each word, without layers. Use "words" for an encoder that was trained
    on too little text to embed sentences, and for training on a CPU in minutes."""
    norm: Norm = "unit"
    """"layer": LayerNorm; a score is an inner product (released code). "unit": vectors of equal length; a score is `scale` x
    cosine."""
    scale: float = 20.0
    """With norm "unit", scores lie between -scale and scale; unused with "layer"."""
    shared: bool = True
    """True: one tower for queries and passages (default of the released code). False: two towers with equal initial weights
    (paper)."""

    def __post_init__(self) -> None:
        if not 1 <= self.dim < 2**31:
            raise ValueError(f"dim is {self.dim}: it must be 1 or more, and fit 32 bits")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}: it must be above 0, and finite")


class Tower(nn.Module):
    """The network for queries or for passages: tokens -> vectors. The inner product of two vectors is the retrieval score."""

    cached_rows: int = 0
    """Number of rows whose activations are kept at a time (`realm.model.modes.cache_rows`); 0: all rows."""
    sharded: bool = False
    """Whether the weights are sharded (`realm.train.sharding`)."""

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
        return torch.cat(
            [
                recomputed(lambda part: self.project(self.pooled(part)), tokens.rows(computed))[: len(used)]
                for computed, used in chunks(torch.arange(len(tokens.ids_BT)), self.cached_rows, self.sharded)
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
        # The words of the null passage have small weights. If the divisor had no lower limit, the gradient of the null passage
        # would be much larger than the gradients of other passages.
        total_B1 = weight_BT.sum(dim=1, keepdim=True).clamp_min(1.0)
        # embedding_bag reads each embedding once, and is faster than separate gathering, weighting and summing.
        sum_BH = F.embedding_bag(tokens.ids_BT, self.words.weight, mode="sum", per_sample_weights=weight_BT)
        return sum_BH / total_B1

    def start_from(self, bert: Bert) -> None:
        self.words.load_state_dict(bert.embeddings.word_embeddings.state_dict())

    def importance(self, ids: Tensor) -> Tensor:
        """The weight of each word -> shape of `ids`.

        The learning rate of the logarithm of a weight is `IMPORTANCE_RATE` times the learning rate of an embedding; with equal
        rates the recall is lower.
        """
        return (IMPORTANCE_RATE * self.slow_log_importance(ids).squeeze(-1)).exp()

    def fit_importance(self, weight_V: Tensor) -> None:
        """Sets the weight of each word; all weights must be above 0. Inverse document frequencies are good initial weights."""
        with torch.no_grad():
            self.slow_log_importance.weight.copy_(weight_V.log()[:, None] / IMPORTANCE_RATE)


def new_tower(encoder: BertConfig, config: EmbedderConfig) -> Tower:
    """A tower with random weights."""
    return (BagOfWordsTower if config.pooling == "words" else TransformerTower)(encoder, config)


class Embedder(nn.Module):
    """The query tower and the passage tower; both are the same object if `config.shared`."""

    def __init__(self, encoder: BertConfig, config: EmbedderConfig):
        super().__init__()
        self.encoder_config, self.config = encoder, config
        self.query = self.passage = new_tower(encoder, config)
        if not config.shared:
            self.untie()

    def score(self, queries: Tokens, passages: Tokens | Tensor, place_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of the queries [B, D], and inner products of each query with its passages [B, K].

        `passages` are U distinct passages, as texts or as vectors [U, D]. `place_BK` has, for each query, the numbers of its
        passages in `passages`.
        """
        query_BD = self.query(queries)
        passage_UD = passages if isinstance(passages, Tensor) else self.passage(passages)
        return query_BD, own_scores(query_BD, passage_UD[place_BK])

    def untie(self) -> None:
        """If both towers are the same object, makes the passage tower a separate copy of the query tower."""
        if self.passage is self.query:
            self.passage = new_tower(self.encoder_config, self.config).to(self.query.projection.weight.device)
            self.passage.load_state_dict(self.query.state_dict())


def embedder_from(reader: MaskedReader, config: EmbedderConfig) -> Embedder:
    """An embedder whose towers are copies of the reader's encoder, or of its word embeddings, with a random projection.

    `fit_projection` computes a better initial projection.
    """
    embedder = Embedder(reader.config, config)
    for tower in {embedder.query, embedder.passage}:
        tower.start_from(reader.bert.bert)
    return embedder


def load_pooler(embedder: Embedder, name: str) -> None:
    """Loads the pooler of a BERT checkpoint into towers that pool [CLS]; if the checkpoint has no pooler, nothing changes."""
    weights = read_weights(Path(encoder_folder(name)), name)
    states = {k.split("pooler.dense.")[1]: v for k, v in weights.items() if "pooler.dense." in k}
    if states:
        for tower in {embedder.query, embedder.passage}:
            if isinstance(tower, TransformerTower) and tower.encoder.pooler is not None:
                tower.encoder.pooler.dense.load_state_dict(
                    {k: weight(name, f"pooler.dense.{k}", v) for k, v in states.items()}
                )


def fit_projection(tower: Tower, pooled_NH: Tensor, whiten: bool) -> None:
    """Sets the projection to the principal components of the pooled states of a corpus, with the mean removed.

    With `whiten`, every component is scaled to unit variance. Whitening helps if a few directions dominate the states.
    """
    mean_H = pooled_NH.mean(dim=0)
    _, singular, components = torch.linalg.svd(pooled_NH - mean_H, full_matrices=False)
    # n passages determine at most n - 1 directions. All other directions are rounding errors, which whitening would amplify.
    known = int((singular > 1e-4 * singular[0]).sum())
    kept_DH = components[: min(known, tower.config.dim)]
    if whiten:
        kept_DH = kept_DH / (singular[: len(kept_DH), None] / len(pooled_NH) ** 0.5)
    bias_D = -(kept_DH * mean_H).sum(dim=1)  # autocast would round a matrix product
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
