"""Our networks in transformers' own classes, weight by weight: what ours are compared with."""

from dataclasses import asdict
from typing import TypeVar, cast

from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from realm.model.bert import Bert, MaskedBert

T = TypeVar("T", BertModel, BertForMaskedLM)


def twin(network: Bert) -> BertModel:
    """The same layers there, in the same mode and with the same dropout."""
    theirs = BertModel(BertConfig(**asdict(network.config)), add_pooling_layer=network.pooler is not None)
    return _filled(theirs, network)


def masked_twin(network: MaskedBert) -> BertForMaskedLM:
    """The same layers and head there, in the same mode and with the same dropout."""
    return _filled(BertForMaskedLM(BertConfig(**asdict(network.config))), network)


def _filled(theirs: T, network: Bert | MaskedBert) -> T:
    theirs.to(next(network.parameters()).dtype).load_state_dict(network.state_dict())
    for name, part in network.named_modules():
        if isinstance(part, nn.Dropout):
            cast(nn.Dropout, theirs.get_submodule(name)).p = part.p
    return theirs.train(network.training)
