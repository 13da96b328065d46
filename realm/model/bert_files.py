"""Reads and writes the files of a BERT, `config.json` and `model.safetensors`, in the format of transformers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from realm.errors import InputError, RealmError, first_line, reason
from realm.files import read_json, write_json
from realm.model.bert import Bert, BertConfig, MaskedBert
from realm.model.tensor_files import WEIGHTS, floats, load_tensors, save_tensors, weight, weight_files
from realm.settings import config_from

TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Tensors that have two names in the network: second name -> first name. A tensor is saved under its first name only."""


def bert_config(values: object, where: str) -> BertConfig:
    """The sizes in the content of a `config.json`; other keys are ignored. Error messages begin with `where`.

    Raises:
        InputError: `values` is not a JSON object, or the sizes are invalid; or the model is not of the BERT family, is a
            decoder, or has other than absolute positions.
    """
    if not isinstance(values, dict):
        raise InputError(f"{where} has no sizes of a BERT: {values!r} is not a JSON object")
    if values.get("is_decoder"):
        raise InputError(f"{where} is a decoder: REALM needs an encoder with bidirectional attention")
    if (family := values.get("model_type", "bert")) != "bert":
        raise InputError(
            f"{where} is a {family!r} model: only the BERT family (model_type 'bert') is supported"
        )
    if (kind := values.get("position_embedding_type", "absolute")) != "absolute":
        raise InputError(f"{where} has position_embedding_type {kind!r}: only 'absolute' is supported")
    own = {field.name for field in fields(BertConfig)}
    return config_from(BertConfig, {name: values[name] for name in own & values.keys()}, where)


def load_bert(folder: Path, name: str) -> MaskedBert:
    """Loads the BERT in a folder -> the network with float32 weights, in evaluation mode.

    If the files have no masked-LM head, the dense layer of the head starts as the identity, so that a state close to the
    embedding of a word predicts this word. Error messages use `name` as the name of the folder.

    Raises:
        InputError: the model is not of the BERT family; or a file is missing or cannot be read, or has tensors of wrong
            sizes or types, or numbers that are not finite.
        DamagedError: as in `read_weights`.
    """
    config = read_bert_config(folder, name)
    states = read_weights(folder, name)
    shapes = required_shapes(name, partial(MaskedBert, config))
    for second, first in TIED.items():
        if second in states:
            states.setdefault(first, states[second])
            if not torch.equal(*(floats(name, key, states[key]) for key in (first, second))):
                raise InputError(f"{name} does not load as a BERT: {second} and {first} must be equal")
    own = {key: value for key, value in shapes.items() if key not in TIED}
    for key, value in own.items():
        if key not in states:
            if key.startswith("bert."):
                raise InputError(f"{name} does not load as a BERT: the tensor {key} is missing")
        elif states[key].shape != value.shape:
            both = f"{tuple(states[key].shape)}, but config.json requires {tuple(value.shape)}"
            raise InputError(f"{name} does not load as a BERT: the shape of {key} is {both}")
    with SkipInit():
        network = MaskedBert(config)
    if "cls.predictions.transform.dense.weight" not in states:
        nn.init.eye_(network.cls.predictions.transform.dense.weight)
    network.load_state_dict(
        {key: weight(name, key, value) for key, value in states.items() if key in own}, strict=False
    )
    return network.eval()


def required_shapes(name: str, make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The tensors of the network that `make` returns, with their shapes and without numbers.

    Shapes are compared with those of a checkpoint before memory for a network of the sizes in its `config.json` is allocated.

    Raises:
        InputError: the sizes are too large for any network.
    """
    try:
        with SkipInit(), torch.device("meta"):
            return make().state_dict()
    except RuntimeError as error:
        raise InputError(f"{name}: no network has the sizes in config.json: {first_line(error)}") from error


def read_bert_config(folder: Path, name: str) -> BertConfig:
    """The sizes of the BERT in a folder. Error messages use `name` as the name of the folder.

    Raises:
        InputError: `config.json` is missing or cannot be read; or see `bert_config`.
    """
    try:
        values = read_json(folder / "config.json")
    except RealmError as error:
        raise InputError(f"{name} has no readable config.json: {reason(error)}") from error
    return bert_config(values, name)


def read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of a BERT, including the pooler and other heads, named as in `MaskedBert`.

    Raises:
        InputError: the weights are missing or cannot be read.
        DamagedError: an index of shards, or the metadata of a file, is damaged.
    """
    states: dict[str, Tensor] = {}
    try:
        for file in weight_files(name, folder):
            states |= load_tensors(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{name} does not load as a BERT: {reason(error)}") from error
    return {own_name(key): value for key, value in states.items()}


def save_bert(network: Bert | MaskedBert, folder: Path, compact: bool = False) -> None:
    """Writes `config.json` and `model.safetensors` in the format of transformers.

    With `compact`, the weights are a compact file (`realm.model.tensor_files`); transformers cannot read such a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = "BertForMaskedLM" if isinstance(network, MaskedBert) else "BertModel"
    settings = {"architectures": [kind], "model_type": "bert", "dtype": "float16" if compact else "float32"}
    states = {k: v for k, v in network.state_dict().items() if k not in TIED}
    save_tensors(states, folder / WEIGHTS, metadata={"format": "pt"}, compact=compact)
    write_json(folder / "config.json", settings | asdict(network.config))


class SkipInit(TorchFunctionMode):
    """A context in which most random initialisation of new networks is skipped.

    Random weights take time to draw, and are useless if the weights are loaded afterwards.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Skips functions such as kaiming_uniform_, but not the tensor methods normal_ and uniform_: trunc_normal_ repeats these
        # methods until all values are within the bounds.
        if isinstance(func, FunctionType) and func.__name__.endswith(("normal_", "uniform_")):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def own_name(name: str) -> str:
    """The name in `MaskedBert` of a tensor of a checkpoint.

    The names in a checkpoint may lack the prefix "bert."; early checkpoints have "gamma" and "beta" for "weight" and "bias".
    """
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return name if name.startswith(("bert.", "cls.", "qa_outputs.")) else f"bert.{name}"
