"""Files of a BERT: `config.json` and `model.safetensors`, in the format of transformers."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from realm.errors import InputError, RealmError, reason
from realm.files import read_json, write_json
from realm.model.bert import Bert, BertConfig, MaskedBert
from realm.model.tensor_files import WEIGHTS, load_tensors, save_tensors, weight_files
from realm.settings import config_from

TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Second names of shared tensors -> their first names; second names are not saved."""


def bert_config(values: object, where: str) -> BertConfig:
    """The sizes in the values of a `config.json`, whose other keys are ignored; errors begin with `where`.

    Raises:
        InputError: no JSON object, not the BERT family, or an unsupported kind of BERT.
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


def load_bert(folder: Path, name: str) -> MaskedBert:
    """The BERT in a folder, in evaluation mode, float32.

    A missing head starts as the identity, so that a state close to a word's embedding predicts that word. Error messages name
    the folder `name`.

    Raises:
        InputError: not of the BERT family, or files that are missing, damaged or of other sizes.
    """
    config = read_bert_config(folder, name)
    states = read_weights(folder, name)
    with SkipInit():
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
    """The sizes of the BERT in a folder, which error messages call `name`; raises as `bert_config` does."""
    try:
        values = read_json(folder / "config.json")
    except RealmError as error:
        raise InputError(f"{name} has no readable config.json: {reason(error)}") from error
    return bert_config(values, name)


def read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of a BERT, including its pooler and other heads, under the names in `MaskedBert`.

    Raises:
        InputError: no weights, or damaged ones.
    """
    states: dict[str, Tensor] = {}
    try:
        for file in weight_files(name, folder):
            states |= load_tensors(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{name} does not load as a BERT: {reason(error)}") from error
    return {own_name(key): value for key, value in states.items()}


def save_bert(network: Bert | MaskedBert, folder: Path, compact: bool = False) -> None:
    """Writes `config.json` and `model.safetensors` as transformers does; only `load_bert` reads `compact` files."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "BertForMaskedLM" if isinstance(network, MaskedBert) else "BertModel"
    settings = {"architectures": [kind], "model_type": "bert", "dtype": "float16" if compact else "float32"}
    states = {k: v for k, v in network.state_dict().items() if k not in TIED}
    save_tensors(states, folder / WEIGHTS, metadata={"format": "pt"}, compact=compact)
    write_json(folder / "config.json", settings | asdict(network.config))


class SkipInit(TorchFunctionMode):
    """Skips most random initialisation of networks made inside: their weights are loaded next, which is faster than drawing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Functions such as kaiming_uniform_, but not the tensor methods of the same names, which truncated draws repeat until
        # the values lie in the bounds.
        if isinstance(func, FunctionType) and func.__name__.endswith(("normal_", "uniform_")):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def own_name(name: str) -> str:
    """The name in `MaskedBert` of a checkpoint's tensor: with or without a head, in current or early BERT names."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return name if name.startswith(("bert.", "cls.", "qa_outputs.")) else f"bert.{name}"
