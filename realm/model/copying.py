"""A copy term for the masked reader: the hidden word may be one that stands in the passage (pointer networks, Vinyals 2015).

    p(y) = (1 - g) p_mlm(y) + g * (attention of the [MASK]'s state to the passage's wordpieces that are y)

Not in the paper, and off for its checkpoints. A BERT learns to copy with its attention layers and needs much text for it;
this term copies almost from the first step, because the states of a [MASK] and of the word that fits are alike.

Letters: B rows, T tokens, H hidden, P predicted positions, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.text.inputs import Tokens


class CopyHead(nn.Module):
    """Where a [MASK] would copy from, and how much it trusts that; starts as plain similarity of states, g = 1/2."""

    def __init__(self, hidden: int):
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, 1)
        for layer in (self.query, self.key):
            nn.init.eye_(layer.weight)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(
        self, states_BTH: Tensor, tokens: Tokens, row_P: Tensor, position_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability to copy from each token [P, T], and of not copying at all [P]; together they are 1.

        Only a row's passage is copied from, its closing [SEP] excluded; beside an empty passage nothing is.
        """
        mask_PH = states_BTH[row_P, position_P]
        scale = states_BTH.shape[-1] ** -0.5
        slot_P, position_BM = _by_row(row_P, position_P, len(states_BTH))
        query_BMH = self.query(
            states_BTH.gather(1, position_BM[:, :, None].expand(-1, -1, states_BTH.shape[-1]))
        )
        score_PT = (query_BMH @ self.key(states_BTH).mT)[row_P, slot_P].float() * scale
        passage_PT = passage_mask(tokens)[row_P]
        attention_PT = score_PT.masked_fill(~passage_PT, torch.finfo(torch.float32).min).log_softmax(dim=-1)
        gate_P = self.gate(mask_PH).squeeze(-1).float()
        empty_P = ~passage_PT.any(dim=1)
        copy_P = F.logsigmoid(gate_P).masked_fill(empty_P, -torch.inf)
        keep_P = F.logsigmoid(-gate_P).masked_fill(empty_P, 0.0)
        return (copy_P[:, None] + attention_PT).masked_fill(~passage_PT, -torch.inf), keep_P


def passage_mask(tokens: Tokens) -> Tensor:
    """True at a row's second sequence without the [SEP] that closes it -> [B, T] bool."""
    followed_BT = F.pad(tokens.mask_BT[:, 1:], (0, 1))
    return (tokens.segments_BT == 1) & (followed_BT == 1)


def mixed_target_logp(
    word_logp_P: Tensor, copy_logp_PT: Tensor, keep_P: Tensor, ids_PT: Tensor, target_P: Tensor
) -> Tensor:
    """log p of each target under the mixture -> [P]; `word_logp_P` is its log-probability under the MLM head."""
    lowest = torch.finfo(torch.float32).min  # a finite floor: a logsumexp of nothing but -inf has no gradient
    copied_PT = copy_logp_PT.masked_fill(ids_PT != target_P[:, None], -torch.inf).clamp_min(lowest)
    return torch.logaddexp(keep_P + word_logp_P, copied_PT.logsumexp(dim=1))


def mixed_vocabulary_logp(
    word_logp_PV: Tensor, copy_logp_PT: Tensor, keep_P: Tensor, ids_PT: Tensor
) -> Tensor:
    """log p of every word under the mixture -> [P, V]; for looking at predictions."""
    probability_PV = (keep_P[:, None] + word_logp_PV).exp().scatter_add(1, ids_PT, copy_logp_PT.exp())
    return probability_PV.clamp_min(1e-30).log()


def _by_row(row_P: Tensor, position_P: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Each position's slot within its row [P], and the positions by row and slot, padded with 0 [B, M].

    >>> _by_row(torch.tensor([1, 0, 1]), torch.tensor([5, 6, 7]), rows=2)
    (tensor([0, 0, 1]), tensor([[6, 0],
            [5, 7]]))
    """
    order_P = row_P.argsort(stable=True)
    count_B = row_P.bincount(minlength=rows)
    slot_P = torch.empty_like(row_P)
    slot_P[order_P] = (
        torch.arange(len(row_P), device=row_P.device) - (count_B.cumsum(0) - count_B)[row_P[order_P]]
    )
    position_BM = position_P.new_zeros(rows, int(count_B.max()))
    position_BM[row_P, slot_P] = position_P
    return slot_P, position_BM
