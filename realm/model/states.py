"""States of the last layer of a BERT, computed without padding where this is possible.

    on a CPU                                            `realm.model.cpu.packed`
    on an NVIDIA GPU since Ampere, in bf16              `realm.model.flash`, if it can compute heads of this size
    all else, and sharded weights on any device         `Bert.forward`, which also computes padding

Axis letters: B rows, T tokens of the longest row, P requested tokens, H hidden.
"""

from typing import Literal

from torch import Tensor

from realm.model import flash
from realm.model.bert import Bert
from realm.model.cpu import packed
from realm.tokens.layouts import Tokens


def hidden_states(bert: Bert, tokens: Tokens) -> Tensor:
    """States of the last layer -> [B, T, H]; states of padding are undefined."""
    way = _way(bert, tokens)
    if way == "packed":
        return packed.hidden_states(bert, tokens)
    if way == "flash":
        return flash.hidden_states(bert, tokens)
    return _padded_states(bert, tokens)


def states_at(bert: Bert, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
    """States of the last layer at the given (row, position) pairs, each a token and not padding -> [P, H]."""
    way = _way(bert, tokens)
    if way == "packed":
        return packed.states_at(bert, tokens, row_P, position_P)
    if way == "flash":
        return flash.states_at(bert, tokens, row_P, position_P)
    return _padded_states(bert, tokens)[row_P, position_P]


def _padded_states(bert: Bert, tokens: Tokens) -> Tensor:
    states_BTH: Tensor = bert(tokens.ids_BT, tokens.mask_BT, tokens.segments_BT)
    return states_BTH


def _way(bert: Bert, tokens: Tokens) -> Literal["packed", "flash", "padded"]:
    device = tokens.ids_BT.device
    if bert.sharded:
        return "padded"
    if device.type == "cpu":
        return "packed"
    return "flash" if flash.is_possible(bert, device) else "padded"
