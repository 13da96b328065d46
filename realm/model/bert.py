"""BERT (Devlin et al. 2019), with the tensor names of transformers; `realm.model.bert_files` reads and writes checkpoints.

    Bert          the layers: tokens -> states                            `BertModel` in transformers
    MaskedBert    Bert with the head that predicts words                  `BertForMaskedLM` in transformers

The forward passes in this file also compute padding. `realm.model.states` computes the same states without padding.

Axis letters: B rows, T tokens, H hidden, A heads, d hidden of a head, P predicted positions, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.model.cpu.dropout import FastDropout

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_python": nn.GELU,
    # transformers computes these activations with eight operations, each of which keeps a tensor for the backward pass.
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), partial(nn.GELU, approximate="tanh")),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
}

MOST_LAYERS = 1000
"""Most layers of an encoder, far more than any published encoder has."""


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT, with the names and defaults of `config.json`."""

    vocab_size: int = 30522
    """Number of wordpieces in the vocabulary."""
    hidden_size: int = 768
    """Width of the states."""
    num_hidden_layers: int = 12
    """Number of layers."""
    num_attention_heads: int = 12
    """Number of attention heads; must divide `hidden_size`."""
    intermediate_size: int = 3072
    """Width of the hidden layer of the feed-forward part."""
    hidden_act: str = "gelu"
    """Activation of the feed-forward part, one of `ACTIVATIONS`."""
    hidden_dropout_prob: float = 0.1
    """Dropout probability of states."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout probability of attention weights."""
    max_position_embeddings: int = 512
    """Length of the longest input in wordpieces."""
    type_vocab_size: int = 2
    """Number of segments."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    layer_norm_eps: float = 1e-12
    """Epsilon of every LayerNorm."""
    pad_token_id: int | None = 0
    """Number of the padding wordpiece, whose embedding is not trained; None if there is no padding wordpiece."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and not 1 <= value < 2**31:
                raise ValueError(f"{field.name} is {value}: it must be 1 or more, and fit 32 bits")
            if field.name == "num_hidden_layers" and value > MOST_LAYERS:
                raise ValueError(f"{field.name} is {value}: it must be {MOST_LAYERS} or less")
            if field.name in ("initializer_range", "layer_norm_eps") and not 0 <= value < math.inf:
                raise ValueError(f"{field.name} is {value}: it must be 0 or more, and finite")
            if field.name.endswith("_prob") and not 0 <= value < 1:
                raise ValueError(f"{field.name} is {value}: it must be 0 or more, and below 1")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id}: it must be 0 or more, and below vocab_size, {self.vocab_size}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}: it must be a multiple of num_attention_heads, {self.num_attention_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act is {self.hidden_act!r}: it must be one of {', '.join(ACTIVATIONS)}")


class Bert(nn.Module):
    """The embeddings and layers of BERT; with `pooler` also the dense layer over [CLS], trained by next-sentence prediction."""

    sharded: bool = False
    """Whether the weights are sharded (`realm.train.sharding`). Then only `forward` computes the layers, on every device."""

    def __init__(self, config: BertConfig, pooler: bool = False):
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.pooler = _Pooler(config) if pooler else None
        self.apply(partial(_draw, std=config.initializer_range))

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor) -> Tensor:
        """States of the last layer -> [B, T, H]. The mask is 1 at tokens and 0 at padding; states of padding are undefined."""
        position_T, real_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device), mask_BT.bool()
        state_BTH = self.embeddings(ids_BT, segments_BT, position_T)
        for layer in self.encoder.layer:
            state_BTH = layer(state_BTH, real_BT)
        return state_BTH


class MaskedBert(nn.Module):
    """A BERT with a masked-LM head. The output layer of the head and the word embeddings share one weight matrix."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.bert = Bert(config)
        self.cls = _Head(config)
        self.cls.apply(partial(_draw, std=config.initializer_range))
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight


def _draw(module: nn.Module, std: float) -> None:
    """Draws random weights in the same order and from the same distributions as transformers."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = FastDropout(config.hidden_dropout_prob)

    def forward(self, ids: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        state = (
            self.word_embeddings(ids)
            + self.token_type_embeddings(segments)
            + self.position_embeddings(positions)
        )
        return self.dropout(self.LayerNorm(state))


class _Encoder(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.layer = cast("Sequence[BertLayer]", layers)  # ModuleList has no element type


class BertLayer(nn.Module):
    """One layer: attention between the tokens of a row, then a feed-forward part for each token."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = _Attention(config)
        self.intermediate = _Intermediate(config)
        self.output = AddedLayer(config.intermediate_size, config)

    def forward(self, state_BTH: Tensor, mask_BT: Tensor) -> Tensor:
        return self.after_attention(self.attention.self(state_BTH, mask_BT), state_BTH)

    def after_attention(self, mixed: Tensor, state: Tensor) -> Tensor:
        """States after the layer -> shape of `state`, from the states before it, and what attention mixed from them."""
        state = self.attention.output(mixed, state)
        return self.output(self.intermediate(state), state)


class _Attention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = AddedLayer(config.hidden_size, config)


class _SelfAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = FastDropout(config.attention_probs_dropout_prob)

    def forward(self, state_BTH: Tensor, mask_BT: Tensor) -> Tensor:
        query_BATd, key_BATd, value_BATd = (
            layer(state_BTH).unflatten(2, (self.num_attention_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout.p if self.training else 0.0
        mixed_BATd = F.scaled_dot_product_attention(
            query_BATd, key_BATd, value_BATd, attn_mask=mask_BT[:, None, None], dropout_p=dropout
        )
        return mixed_BATd.transpose(1, 2).flatten(2)


class _Intermediate(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]()

    def forward(self, state: Tensor) -> Tensor:
        return self.activation(self.dense(state))


class AddedLayer(nn.Module):
    """A linear layer with a residual connection: LayerNorm(dropout(dense(found)) + given)."""

    def __init__(self, width: int, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = FastDropout(config.hidden_dropout_prob)

    def forward(self, found: Tensor, given: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(found)) + given)


class _Pooler(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, cls_BH: Tensor) -> Tensor:
        return self.dense(cls_BH).tanh()


class _Head(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.predictions = _Predictions(config)

    def forward(self, state_PH: Tensor) -> Tensor:
        """Logits of words -> [P, V]."""
        return self.predictions.decoder(self.predictions.transform(state_PH))


class _Predictions(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.transform = _Transform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.decoder.bias = self.bias


class _Transform(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, state: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(state)))
