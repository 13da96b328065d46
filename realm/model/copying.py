"""A copy term for the masked reader: the hidden word may be one that stands in the passage.

    p(y) = g p_mlm(y) + sum of a_t over the passage's wordpieces t that are y,      (a_1, ..., a_T, g) = softmax(scores)

a pointer with a sentinel (Merity et al. 2016). A wordpiece scores by two things: how alike its state and the [MASK]'s state
are, and how well its surroundings match the [MASK]'s, word by word: a convolution over the matrix of the words'
similarities that starts by favouring the same words at the same distances.

Not in the paper, and off for its checkpoints. A BERT learns to copy with its attention layers and needs much text for it;
this term copies from the first steps, and has little to give where the passage says nothing like the sentence.

Letters: B rows, T tokens, H hidden, P predicted positions, V vocabulary, W = 2 REACH + 1 distances.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.tokens.layouts import Tokens

REACH = 8
"""Words to either side that count as surroundings."""


class CopyHead(nn.Module):
    """Where a [MASK] would copy from, and how little it trusts that."""

    def __init__(self, hidden: int, vocabulary: int):
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.sentinel = nn.Linear(hidden, 1)
        self.importance = nn.Embedding(vocabulary, 1)
        self.kernel = nn.Parameter(_first_kernel())
        for layer in (self.query, self.key):
            nn.init.eye_(layer.weight)
        nn.init.zeros_(self.sentinel.weight)
        nn.init.constant_(self.sentinel.bias, 5.0)  # beside 100 wordpieces of score 0 about even
        nn.init.ones_(self.importance.weight)

    def forward(
        self, states_BTH: Tensor, words_BTH: Tensor, tokens: Tokens, row_P: Tensor, position_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability to copy from each token [P, T], and of not copying at all [P]; together they are 1.

        `words_BTH` are the word embeddings. Only a row's passage is copied from, its closing [SEP] excluded, and only by
        its sentence; beside an empty passage nothing is.
        """
        mask_PH = states_BTH[row_P, position_P]
        asked_P = (
            tokens.segments_BT[row_P, position_P] == 0
        )  # a word hidden in the passage itself is not to be copied
        passage_PT = passage_mask(tokens)[row_P] & asked_P[:, None]
        slot_P, position_BM = _by_row(row_P, position_P, len(states_BTH))
        query_BMH = self.query(
            states_BTH.gather(1, position_BM[:, :, None].expand(-1, -1, states_BTH.shape[-1]))
        )
        alike_PT = (query_BMH @ self.key(states_BTH).mT)[row_P, slot_P].float() * mask_PH.shape[1] ** -0.5
        score_PT = alike_PT + self._surroundings(words_BTH, tokens, row_P, position_P)
        logp_PS = torch.cat(
            [
                score_PT.masked_fill(~passage_PT, torch.finfo(torch.float32).min),
                self.sentinel(mask_PH).float(),
            ],
            dim=1,
        ).log_softmax(dim=1)
        return logp_PS[:, :-1].masked_fill(~passage_PT, -torch.inf), logp_PS[:, -1]

    def fit_importance(self, weight_V: Tensor) -> None:
        """Sets how much each word counts in comparing surroundings."""
        with torch.no_grad():
            self.importance.weight.copy_(weight_V[:, None])

    def _surroundings(self, words_BTH: Tensor, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
        """sum over distances d, e of kernel[d, e] times the similarity of query word p + d and passage word t + e -> [P, T]."""
        length, span = words_BTH.shape[1], 2 * REACH + 1
        with torch.autocast(words_BTH.device.type, enabled=False):  # sums of many products: not in bf16
            weighed_BTH = F.normalize(words_BTH.float(), dim=-1) * self.importance(tokens.ids_BT)
            real_BT1 = tokens.mask_BT[:, :, None]
            asked_BTH = weighed_BTH * (real_BT1 * (1 - tokens.segments_BT[:, :, None]))
            read_BTH = weighed_BTH * (real_BT1 * tokens.segments_BT[:, :, None])
            similar_BTT = F.pad(asked_BTH @ read_BTH.mT, (REACH, REACH, REACH, REACH))
            near_PW = position_P[:, None] + torch.arange(span, device=position_P.device)
            part_PWT = self.kernel.T @ similar_BTT[row_P[:, None], near_PW]
            return torch.stack([part_PWT[:, e, e : e + length] for e in range(span)]).sum(dim=0)


def _first_kernel() -> Tensor:
    """Weights of (query distance, passage distance) -> [W, W]: equal ones most, the same side some, the far ones less.

    The words in the middle, hidden here and to be copied there, do not count.
    """
    distance_W = torch.arange(-REACH, REACH + 1).float()
    near_WW = (-0.1 * (distance_W.abs()[:, None] + distance_W.abs()[None])).exp()
    side_WW = distance_W.sign()[:, None] * distance_W.sign()[None]
    kernel_WW = torch.where(side_WW > 0, 0.75, 0.15) * near_WW
    kernel_WW += torch.diag(4.25 * near_WW.diagonal())
    return kernel_WW * side_WW.abs()


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
