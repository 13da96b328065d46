"""The pre-training loss in the terms of transformers 4.57.6: labels and a mask over all positions of the joint input.

Equal to its numbers for all input that means something, from the masked positions alone: the [B, T, V] logits that it forms
never exist here. `reference_compat` gives its numbers for the rest too.

Letters: B queries, K candidates per query, T tokens of a joint row, M masked tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from realm.model.losses import token_marginal
from realm.model.masked_reader import MaskedReader
from realm.tokens.layouts import Tokens

IGNORED = -100


def masked_lm_loss(
    reader: MaskedReader,
    joint: Tokens,
    score_BK: Tensor,
    label_BT: Tensor,
    mask_BT: Tensor | None = None,
    reference_compat: bool = False,
) -> Tensor:
    """-log p(y|x), the sum over candidates taken for each token, the mean over masked tokens -> scalar.

    `joint` has a row for each query beside each candidate, candidate fastest; the labels of a query hold for all of its rows.
    Without a mask, what has a label is masked. With `reference_compat` labels of -100 count as tokens predicted with certainty
    where the mask, by default everywhere, says so, and a NaN is a loss of 0, as it is there.

    Raises:
        ValueError: a label that counts stands at padding of one of its rows, or is no word; or, without `reference_compat`, a
            score is not a number.
    """
    if not reference_compat and not score_BK.isfinite().all():
        raise ValueError("a relevance score is not a finite number: the embedder or its inputs are broken")
    mask_BT = torch.ones_like(label_BT) if mask_BT is None else mask_BT
    known_BT = (label_BT != IGNORED) & (mask_BT != 0)
    real_BT = joint.mask_BT.view(len(label_BT), -1, joint.mask_BT.shape[1]).bool().all(dim=1)
    real_BT = F.pad(real_BT, (0, label_BT.shape[1] - real_BT.shape[1]))
    for wrong_BT, where in (
        (~real_BT, "stands at padding: only tokens of all of its query's joint rows can be predicted"),
        ((label_BT < 0) | (label_BT >= reader.config.vocab_size), "is not a word of the vocabulary"),
    ):
        if (known_BT & wrong_BT).any():
            row, position = (known_BT & wrong_BT).nonzero()[0].tolist()
            raise ValueError(f"label {label_BT[row, position]} of query {row} at position {position} {where}")
    places = [row.nonzero().squeeze(1) for row in known_BT]
    position_BM = pad_sequence(places, batch_first=True)
    known_BM = pad_sequence([torch.ones_like(p) for p in places], batch_first=True).to(score_BK.dtype)
    target_BM = label_BT.gather(1, position_BM) * known_BM.long()
    logp_BKM = reader.token_logp(joint, position_BM, target_BM, known_BM)
    weight_BM = mask_BT.gather(1, position_BM) * known_BM
    counted = mask_BT.sum() if reference_compat else weight_BM.sum().clamp_min(1)
    loss = -(token_marginal(score_BK, logp_BKM) * weight_BM).sum() / counted
    return loss.nan_to_num(nan=0.0) if reference_compat else loss
