"""The copy head of the masked reader: the masked word may be copied from the passage.

    p(y) = g p_mlm(y) + sum of a_t over the passage's wordpieces t that are y,      (a_1, ..., a_T, g) = softmax(scores)

This is a pointer network with a sentinel (Merity et al. 2016). The score of a wordpiece has two parts: the similarity of its
state to the state of [MASK], and the match of its surroundings with those of [MASK], a convolution over the matrix of word
similarities that initially favours equal words at equal distances.

The paper has no copy head. A BERT learns to copy with its attention layers, and needs much text to learn it; the copy head
copies from the first steps on. It contributes little if the passage shares few words with the sentence.

Axis letters: B rows, T tokens, H hidden, P predicted positions, V vocabulary, W = 2 REACH + 1 distances.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.tokens.layouts import Tokens

REACH = 8
"""Words on either side that belong to the surroundings."""


class CopyHead(nn.Module):
    """Scores of the tokens that a [MASK] may be copied from, and of not copying."""

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
        nn.init.constant_(self.sentinel.bias, 5.0)  # about even with 100 wordpieces of score 0
        nn.init.ones_(self.importance.weight)

    def forward(
        self, states_BTH: Tensor, words_BTH: Tensor, tokens: Tokens, row_P: Tensor, position_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of copying from each token [P, T], and of not copying [P]; the probabilities sum to 1.

        `words_BTH` are the word embeddings. Only positions of the sentence copy, and only from the passage without its closing
        [SEP]; with an empty passage nothing is copied.
        """
        mask_PH = states_BTH[row_P, position_P]
        # A word that is masked in the passage itself is not copied.
        asked_P = tokens.segments_BT[row_P, position_P] == 0
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
        """Sets the weight of each word in the comparison of surroundings."""
        with torch.no_grad():
            self.importance.weight.copy_(weight_V[:, None])

    def _surroundings(self, words_BTH: Tensor, tokens: Tokens, row_P: Tensor, position_P: Tensor) -> Tensor:
        """sum over distances d, e of kernel[d, e] times the similarity of query word p + d and passage word t + e -> [P, T]."""
        length, span = words_BTH.shape[1], 2 * REACH + 1
        with torch.autocast(words_BTH.device.type, enabled=False):  # sums of many products need float32
            weighed_BTH = F.normalize(words_BTH.float(), dim=-1) * self.importance(tokens.ids_BT)
            real_BT1 = tokens.mask_BT[:, :, None]
            asked_BTH = weighed_BTH * (real_BT1 * (1 - tokens.segments_BT[:, :, None]))
            read_BTH = weighed_BTH * (real_BT1 * tokens.segments_BT[:, :, None])
            similar_BTT = F.pad(asked_BTH @ read_BTH.mT, (REACH, REACH, REACH, REACH))
            near_PW = position_P[:, None] + torch.arange(span, device=position_P.device)
            part_PWT = self.kernel.T @ similar_BTT[row_P[:, None], near_PW]
            return torch.stack([part_PWT[:, e, e : e + length] for e in range(span)]).sum(dim=0)


def _first_kernel() -> Tensor:
    """Initial weights of (query distance, passage distance) -> [W, W], falling with the distance.

    Equal distances weigh most, distances on the same side less. The middle has weight 0: the masked word and the word to copy.
    """
    distance_W = torch.arange(-REACH, REACH + 1).float()
    near_WW = (-0.1 * (distance_W.abs()[:, None] + distance_W.abs()[None])).exp()
    side_WW = distance_W.sign()[:, None] * distance_W.sign()[None]
    kernel_WW = torch.where(side_WW > 0, 0.75, 0.15) * near_WW
    kernel_WW += torch.diag(4.25 * near_WW.diagonal())
    return kernel_WW * side_WW.abs()


def passage_mask(tokens: Tokens) -> Tensor:
    """True at the second sequence of a row without its closing [SEP] -> [B, T] bool."""
    followed_BT = F.pad(tokens.mask_BT[:, 1:], (0, 1))
    return (tokens.segments_BT == 1) & (followed_BT == 1)


def mixed_target_logp(
    word_logp_P: Tensor, copy_logp_PT: Tensor, keep_P: Tensor, ids_PT: Tensor, target_P: Tensor
) -> Tensor:
    """log p of each target under the mixture -> [P]; `word_logp_P` is its log-probability under the MLM head."""
    lowest = torch.finfo(torch.float32).min  # finite, because logsumexp over -inf alone has no gradient
    copied_PT = copy_logp_PT.masked_fill(ids_PT != target_P[:, None], -torch.inf).clamp_min(lowest)
    return torch.logaddexp(keep_P + word_logp_P, copied_PT.logsumexp(dim=1))


def mixed_vocabulary_logp(
    word_logp_PV: Tensor, copy_logp_PT: Tensor, keep_P: Tensor, ids_PT: Tensor
) -> Tensor:
    """log p of every word under the mixture -> [P, V]; for looking at predictions."""
    probability_PV = (keep_P[:, None] + word_logp_PV).exp().scatter_add(1, ids_PT, copy_logp_PT.exp())
    return probability_PV.clamp_min(1e-30).log()


def _by_row(row_P: Tensor, position_P: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The slot of each position within its row [P], and the positions by row and slot, padded with 0 [B, M].

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
