"""The copy head of the masked reader, which can copy the masked word from the passage.

    p(y) = g p_mlm(y) + sum of a_t over the passage's wordpieces t that are y,      (a_1, ..., a_T, g) = softmax(scores)

The copy head is a pointer network with a sentinel (Merity et al. 2016). The score of a wordpiece t of the passage is the sum of
two numbers. The first number is the similarity of the states of t and of [MASK]. The second number compares the words around t
with the words around [MASK]: it is a convolution over the matrix of word similarities, and the initial kernel favours equal
words at equal distances.

The paper has no copy head. A BERT needs much training text until its attention layers copy; the copy head copies from the first
training steps on. If the passage and the sentence have few words in common, the copy head contributes little.

Axis letters: B rows, T tokens, H hidden, P predicted positions, M predicted positions of one row, S = T + 1 (each token, and
"not copying"), V vocabulary, W = 2 REACH + 1 distances.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.tokens.layouts import Tokens

REACH = 8
"""Number of wordpieces on each side of a position that are compared."""


class CopyHead(nn.Module):
    """Computes for each masked word the probability of copying each token of the passage, and that of not copying."""

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
        # At the start, not copying is as probable as copying from 148 = exp(5) tokens with score 0.
        nn.init.constant_(self.sentinel.bias, 5.0)
        nn.init.ones_(self.importance.weight)

    def forward(
        self, states_BTH: Tensor, words_BTH: Tensor, tokens: Tokens, row_P: Tensor, position_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of copying each token [P, T], and of not copying [P]; the probabilities add up to 1.

        `words_BTH` are the word embeddings. Every token of the passage can be copied except the closing [SEP]; the probability
        of copying is 0 if the passage is empty, or if the masked word is itself in the passage.
        """
        mask_PH = states_BTH[row_P, position_P]
        asked_P = tokens.segments_BT[row_P, position_P] == 0  # a masked word of the passage is not copied
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
        """Sets the weight that each word of the vocabulary has when the words around two positions are compared."""
        with torch.no_grad():
            self.importance.weight.copy_(weight_V[:, None])

    def _surroundings(self, words_BTH: Tensor, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
        """Compares the words around each masked position p with the words around each position t of the passage -> [P, T].

        The result is the sum over d and e of kernel[d, e] times the similarity of the words at p + d and t + e.
        """
        length, span = words_BTH.shape[1], 2 * REACH + 1
        with torch.autocast(words_BTH.device.type, enabled=False):  # sums of many products need float32
            weighed_BTH = F.normalize(words_BTH.float(), dim=-1) * self.importance(tokens.ids_BT)
            real_BT1 = tokens.mask_BT[:, :, None]
            asked_BTH = weighed_BTH * (real_BT1 * (1 - tokens.segments_BT[:, :, None]))
            read_BTH = weighed_BTH * (real_BT1 * tokens.segments_BT[:, :, None])
            similar_BTT = F.pad(asked_BTH @ read_BTH.mT, (REACH, REACH, REACH, REACH))
            near_PW = position_P[:, None] + torch.arange(span, device=position_P.device)
            part_PWT = (self.kernel.T @ similar_BTT[row_P[:, None], near_PW]).contiguous()
            # The sum over e of part[e, t + e], by the strides of contiguous numbers. A sum of slices would be slow, because the
            # gradient of each slice has the size of all parts.
            width = part_PWT.shape[2]
            diagonal_PTW = part_PWT.as_strided((len(row_P), length, span), (span * width, 1, width + 1))
            return diagonal_PTW.sum(dim=2)


def _first_kernel() -> Tensor:
    """Initial kernel: a weight for each distance from [MASK] and each distance from the position in the passage -> [W, W].

    Weights fall with both distances. Two equal distances have the largest weights, two distances of the same sign have smaller
    weights, and two distances of opposite signs have the smallest weights. A weight is 0 if one distance is 0, because the word
    at distance 0 is the masked word or the word to be copied.
    """
    distance_W = torch.arange(-REACH, REACH + 1).float()
    near_WW = (-0.1 * (distance_W.abs()[:, None] + distance_W.abs()[None])).exp()
    side_WW = distance_W.sign()[:, None] * distance_W.sign()[None]
    kernel_WW = torch.where(side_WW > 0, 0.75, 0.15) * near_WW
    kernel_WW += torch.diag(4.25 * near_WW.diagonal())
    return kernel_WW * side_WW.abs()


def passage_mask(tokens: Tokens) -> Tensor:
    """True at the tokens of the passage (the second segment of a row), except the closing [SEP] -> [B, T] bool."""
    followed_BT = F.pad(tokens.mask_BT[:, 1:], (0, 1))
    return (tokens.segments_BT == 1) & (followed_BT == 1)


def mixed_target_logp(
    word_logp_P: Tensor, copy_logp_PT: Tensor, keep_P: Tensor, ids_PT: Tensor, target_P: Tensor
) -> Tensor:
    """log p of each target under the mixture of both heads -> [P]; `word_logp_P` is log p of the target under the MLM head."""
    lowest = torch.finfo(torch.float32).min  # finite, because logsumexp over -inf alone has no gradient
    copied_PT = copy_logp_PT.masked_fill(ids_PT != target_P[:, None], -torch.inf).clamp_min(lowest)
    return torch.logaddexp(keep_P + word_logp_P, copied_PT.logsumexp(dim=1))


def mixed_vocabulary_logp(
    word_logp_PV: Tensor, copy_logp_PT: Tensor, keep_P: Tensor, ids_PT: Tensor
) -> Tensor:
    """log p of every word under the mixture of both heads -> [P, V]; not used in training."""
    probability_PV = (keep_P[:, None] + word_logp_PV).exp().scatter_add(1, ids_PT, copy_logp_PT.exp())
    return probability_PV.clamp_min(1e-30).log()


def _by_row(row_P: Tensor, position_P: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """For each predicted position, its place among the predicted positions of its row [P]; and the predicted positions of each
    row, padded with 0 [B, M].

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
