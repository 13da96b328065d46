"""BERT (Devlin et al. 2019), with the names of its published checkpoints: those load here, and what is saved loads there.

    Bert          the layers: tokens -> states                            `BertModel` in transformers
    MaskedBert    with the head that predicts words                       `BertForMaskedLM` in transformers

The forward passes in this file take padded rows, as a GPU likes them; `realm.model.trunk` has those for a CPU.

Letters: B rows, T tokens, H hidden, A heads, d hidden of a head, P predicted positions, V vocabulary.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from realm.config import InputError, config_from, reason, write_json
from realm.model.dropout import FastDropout

WEIGHTS = "model.safetensors"
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_python": nn.GELU,
    # One formula; transformers computes it in eight steps, each of which keeps the widest states for the backward pass.
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), partial(nn.GELU, approximate="tanh")),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
}
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Second names of the word embeddings and of the head's bias; not saved."""


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT: names and defaults of `config.json`."""

    vocab_size: int = 30522
    """Wordpieces."""
    hidden_size: int = 768
    """Width of the states."""
    num_hidden_layers: int = 12
    """Layers."""
    num_attention_heads: int = 12
    """Heads; divides `hidden_size`."""
    intermediate_size: int = 3072
    """Width inside the feed-forward part."""
    hidden_act: str = "gelu"
    """Its activation, one of `ACTIVATIONS`."""
    hidden_dropout_prob: float = 0.1
    """Dropout of states."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout of attention."""
    max_position_embeddings: int = 512
    """Longest input."""
    type_vocab_size: int = 2
    """Segments."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    layer_norm_eps: float = 1e-12
    """Of every LayerNorm."""
    pad_token_id: int | None = 0
    """The wordpiece whose embedding is not trained."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and not 1 <= value < 2**31:
                raise ValueError(f"{field.name} is {value}: it must be 1 or more, and fit 32 bits")
            if field.name.endswith("_prob") and not 0 <= value < 1:
                raise ValueError(f"{field.name} is {value}: it must be 0 or more, and below 1")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id is {self.pad_token_id}: there are {self.vocab_size} wordpieces")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads do not divide {self.hidden_size} states"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act is {self.hidden_act!r}: known are {', '.join(ACTIVATIONS)}")


def bert_config(values: object, where: str) -> BertConfig:
    """The sizes in a `config.json`, whatever else is in it; errors begin with `where`.

    Raises:
        InputError: no JSON object, not the BERT family, or one of its kinds that works otherwise.
    """
    if not isinstance(values, dict):
        raise InputError(f"{where} has no sizes: {values!r} is no object")
    if values.get("is_decoder"):
        raise InputError(f"{where} is a decoder: REALM reads in both directions")
    if (family := values.get("model_type", "bert")) != "bert":
        raise InputError(
            f"{where} is a {family!r} model: REALM here runs on the BERT family (model_type 'bert')"
        )
    if (kind := values.get("position_embedding_type", "absolute")) != "absolute":
        raise InputError(f"{where} has positions of the kind {kind!r}: 'absolute' ones are known here")
    own = {field.name for field in fields(BertConfig)}
    return config_from(BertConfig, {name: values[name] for name in own & values.keys()}, where)


class Bert(nn.Module):
    """Embeddings, layers, and where `pooler` is set the dense layer on [CLS] that next-sentence prediction read."""

    def __init__(self, config: BertConfig, pooler: bool = False):
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.pooler = _Pooler(config) if pooler else None
        self.apply(partial(_draw, std=config.initializer_range))

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor) -> Tensor:
        """States of the last layer -> [B, T, H]; 1 in the mask is a token, 0 padding, whose states mean nothing."""
        position_T, real_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device), mask_BT.bool()
        state_BTH = self.embeddings(ids_BT, segments_BT, position_T)
        for layer in self.encoder.layer:
            state_BTH = layer(state_BTH, real_BT)
        return state_BTH


class MaskedBert(nn.Module):
    """A BERT and its masked-LM head, whose last layer is the word embeddings."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.bert = Bert(config)
        self.cls = _Head(config)
        self.cls.apply(partial(_draw, std=config.initializer_range))
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight


def load_bert(folder: Path, name: str) -> MaskedBert:
    """The BERT in a folder, in evaluation mode, float32.

    A missing head starts as the identity, so that a state close to a word's embedding predicts that word. Messages call
    the folder `name`.

    Raises:
        InputError: not of the BERT family, or files that are missing, damaged or of other sizes.
    """
    config = read_bert_config(folder, name)
    states = read_weights(folder, name)
    with Undrawn():
        network = MaskedBert(config)
    if "cls.predictions.transform.dense.weight" not in states:
        nn.init.eye_(network.cls.predictions.transform.dense.weight)
    own = {key: value for key, value in network.state_dict().items() if key not in TIED}
    for key, value in own.items():
        if key not in states:
            if key.startswith("bert."):
                raise InputError(f"{name} does not hold a BERT's weights: {key} is missing")
        elif states[key].shape != value.shape:
            shapes = f"{tuple(states[key].shape)}, its config.json says {tuple(value.shape)}"
            raise InputError(f"{name} does not load as a BERT: {key} is {shapes}")
    for second, first in TIED.items():
        if second in states and not torch.equal(states.setdefault(first, states[second]), states[second]):
            raise InputError(f"{name} has {second} beside another {first}: here they are one")
    network.load_state_dict({key: value for key, value in states.items() if key in own}, strict=False)
    return network.eval()


def read_bert_config(folder: Path, name: str) -> BertConfig:
    """The sizes of the BERT in a folder, which messages call `name`; raises as `bert_config` does."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{name} has no readable config.json: {reason(error)}") from error
    return bert_config(values, name)


def read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of a BERT by the names that `MaskedBert` has for them, its pooler and other heads too.

    Raises:
        InputError: no weights, or damaged ones.
    """
    states: dict[str, Tensor] = {}
    try:
        for file in weight_files(folder, name):
            states |= load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{name} does not load as a BERT: {reason(error)}") from error
    return {_own_name(key): value for key, value in states.items()}


def weight_files(folder: Path, name: str) -> list[Path]:
    """The files that hold a BERT's weights: one, or those that an index lists.

    Raises:
        InputError: neither, or the index is damaged.
    """
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not index.is_file():
        raise InputError(f"{name} does not load as a BERT: no {WEIGHTS} in {folder}")
    try:
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / Path(part).name for part in parts]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{name} does not load as a BERT: {index} is damaged") from error


def save_bert(network: Bert | MaskedBert, folder: Path) -> None:
    """Writes a network as transformers does: `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "BertForMaskedLM" if isinstance(network, MaskedBert) else "BertModel"
    settings = {"architectures": [kind], "model_type": "bert", "dtype": "float32"}
    states = {k: v.detach().cpu().contiguous() for k, v in network.state_dict().items() if k not in TIED}
    save_file(states, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / "config.json", settings | asdict(network.config))


class Undrawn(TorchFunctionMode):
    """Networks made inside draw few weights or none: those are read next, and drawing takes longer than reading."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # kaiming_uniform_ and its like; not the method of tensors of that name, which others draw with until they like
        # what they got
        if isinstance(func, FunctionType) and func.__name__.endswith(("normal_", "uniform_")):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _own_name(name: str) -> str:
    """`MaskedBert`'s name for a tensor of a checkpoint with or without a head, of today or of BERT's first years."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return name if name.startswith(("bert.", "cls.")) else f"bert.{name}"


def _draw(module: nn.Module, std: float) -> None:
    """Random weights, in the order and of the kind that transformers draws."""
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
        layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.layer = cast("Sequence[_Layer]", layers)  # ModuleList does not say of what


class _Layer(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = _Attention(config)
        self.intermediate = _Intermediate(config)
        self.output = _Added(config.intermediate_size, config)

    def forward(self, state_BTH: Tensor, mask_BT: Tensor) -> Tensor:
        attention = self.attention
        state_BTH = attention.output(attention.self(state_BTH, mask_BT), state_BTH)
        return self.output(self.intermediate(state_BTH), state_BTH)


class _Attention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _Added(config.hidden_size, config)


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


class _Added(nn.Module):
    """What a part computed, added to what it was given."""

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
