"""Sharded weights: each rank holds a shard of every weight, of its gradient and of Adam's averages (FSDP2).

`shard_weights` divides the parts of a model with `torch.distributed.fsdp.fully_shard`. Before a layer is computed, its weights
are gathered from all ranks; afterwards the gathered weights are freed. So all ranks must compute the same layers in the same
order, also in an evaluation. Saving a model and building an index use a copy with whole weights (`whole_model`).

Weights outside of this file are DTensors, whose `full_tensor` is a whole weight. Checkpoints contain whole weights
(`gathered`), so they do not depend on the number of ranks. docs/cluster.md says why torch.distributed.checkpoint is not used.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from realm import distributed
from realm.errors import InputError
from realm.model.bert import Bert
from realm.model.embedder import Embedder, TransformerTower
from realm.model.folder import Model
from realm.model.masked_reader import MaskedReader
from realm.model.modes import set_sharded
from realm.model.span_reader import SpanReader

if TYPE_CHECKING:  # importing these modules takes a second, and only sharded weights need them
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

M = TypeVar("M", bound=nn.Module)

OLDEST_TORCH = "2.13"
"""Earlier versions of FSDP2 do not gather the weights that the gradient cache needs in the backward pass."""

_EMPTY: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""For each sharded part, a copy whose parameters have shapes, but no values. The reason for this copy is that a module cannot
be copied any more after `fully_shard`."""


def shard_weights(model: Model, device: torch.device) -> None:
    """Shards the weights of all parts of a model that is on `device`.

    Raises:
        InputError: this version of torch is too old, or the embedder has no layers.
    """
    if torch.__version__ < OLDEST_TORCH:
        raise InputError(
            f"shard_weights needs torch {OLDEST_TORCH} or newer: this is torch {torch.__version__}"
        )
    towers = dict.fromkeys((model.embedder.query, model.embedder.passage))
    if not all(isinstance(tower, TransformerTower) for tower in towers):
        raise InputError(
            "shard_weights shards encoders with layers, but the towers of this model embed words alone: set shard_weights to "
            "false"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    for part in model.parts().values():
        _EMPTY[part] = _with_parameters(
            part,
            {p: nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in part.parameters()},
        )
        match part:
            case MaskedReader():
                _shard_layers(part.bert.bert, mesh)
                # The word embeddings are also the output layer, so one group has both.
                _shard(part, mesh)
                register_fsdp_forward_method(part, "target_logp")
            case SpanReader():
                _shard_encoder(part.encoder, mesh)
                _shard(part, mesh)
            case Embedder():
                # A tower is also used without its `forward`, so each of its layers is a group.
                for tower in towers:
                    _shard_encoder(cast(TransformerTower, tower).encoder, mesh)
                    _shard(tower.projection, mesh)
                    if not isinstance(tower.norm, nn.Identity):
                        _shard(tower.norm, mesh)
        set_sharded(part)


def _shard_encoder(bert: Bert, mesh: "DeviceMesh") -> None:
    _shard_layers(bert, mesh)
    _shard(bert, mesh)


def _shard_layers(bert: Bert, mesh: "DeviceMesh") -> None:
    for layer in (*bert.encoder.layer, bert.pooler):
        if layer is not None:
            _shard(layer, mesh)


def _shard(module: nn.Module, mesh: "DeviceMesh") -> None:
    from torch.distributed.fsdp import fully_shard

    # Without `reshard_after_forward`, the outermost module would stay whole after an evaluation.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


def is_sharded(module: nn.Module) -> bool:
    """Whether the weights of this part of a model are sharded."""
    return module in _EMPTY


def whole_model(model: Model) -> Model:
    """The model with whole weights; if weights are sharded, a copy. All ranks must call this function."""
    return replace(
        model,
        masked_reader=None if model.masked_reader is None else whole(model.masked_reader),
        embedder=whole(model.embedder),
        span_reader=None if model.span_reader is None else whole(model.span_reader),
    )


def whole(part: M) -> M:
    """This part of a model with whole weights: a copy if the weights are sharded, else `part` itself. All ranks must call this
    function."""
    if not is_sharded(part):
        return part
    empty = _EMPTY[part]
    weights = {name: whole_tensor(value.detach()) for name, value in part.named_parameters()}
    found = _with_parameters(
        empty, {p: nn.Parameter(weights[name], p.requires_grad) for name, p in empty.named_parameters()}
    )
    return cast(M, found.train(part.training))


def _with_parameters(module: M, parameters: Mapping[nn.Parameter, nn.Parameter]) -> M:
    """A copy of a module with other parameters. A parameter that is used in several places stays one parameter."""
    return copy.deepcopy(module, {id(old): new for old, new in parameters.items()})


def gathered(values: Any) -> Any:
    """`values`, a tree of dictionaries and lists, with whole tensors in place of sharded tensors, for a checkpoint.

    All ranks must call this function; only the result of rank 0 has the whole tensors, which are on the CPU.
    """
    if isinstance(values, dict):
        return {key: gathered(value) for key, value in values.items()}
    if isinstance(values, list):
        return [gathered(value) for value in values]
    if not _is_sharded_tensor(values):
        return values
    tensor = values.full_tensor()
    return tensor.cpu() if distributed.is_main_process() else None


def shard_as(values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors as tensors that are sharded as the tensors `like` of the same name and shape; each rank takes its shards.

    Tensors that are sharded already stay unchanged, and so do tensors whose counterpart is not sharded or has another shape.
    """
    return {name: _shard_as(value, like.get(name)) for name, value in values.items()}


def load_weights(module: nn.Module, states: Mapping[str, Tensor], strict: bool = True) -> None:
    """`module.load_state_dict` of whole or sharded weights."""
    module.load_state_dict(shard_as(states, module.state_dict()), strict=strict)


def whole_tensor(value: Tensor) -> Tensor:
    """The whole tensor of a tensor that may be sharded. All ranks must call this function."""
    return value.full_tensor() if _is_sharded_tensor(value) else value


def _is_sharded_tensor(value: Any) -> "TypeGuard[DTensor]":
    return hasattr(value, "full_tensor")


def _shard_as(value: Tensor, like: Tensor | None) -> Tensor:
    if not _is_sharded_tensor(like) or _is_sharded_tensor(value) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # With `src_data_rank=None`, each rank takes its shard from its own tensor, without communication.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
