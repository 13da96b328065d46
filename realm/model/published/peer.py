"""The pre-training loss in the terms of transformers 4.57.6: labels and a mask over all positions of the joint input.

Equal to its numbers for all input that means something, from the masked positions alone: the [B, T, V] logits that it forms
never exist here. `peer_compat` gives its numbers for the rest too.

Letters: B queries, K candidates per query, T tokens of a joint row, M masked tokens.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from realm.model.encoders import MaskedReader
from realm.model.losses import token_marginal
from realm.text.inputs import Tokens

IGNORED = -100


def masked_lm_loss(
    reader: MaskedReader,
    joint: Tokens,
    score_BK: Tensor,
    label_BT: Tensor,
    mask_BT: Tensor | None = None,
    peer_compat: bool = False,
) -> Tensor:
    """-log p(y|x), the sum over candidates taken for each token, the mean over masked tokens -> scalar.

    `joint` has a row for each query beside each candidate, candidate fastest; the labels of a query hold for all of its rows.
    Without a mask, what has a label is masked. With `peer_compat` labels of -100 count as tokens predicted with certainty
    where the mask, by default everywhere, says so, and a NaN is a loss of 0, as it is there.

    Raises:
        ValueError: a score is not a number, without `peer_compat`.
    """
    if not peer_compat and not score_BK.isfinite().all():
        raise ValueError("a relevance score is not a finite number: the embedder or its inputs are broken")
    mask_BT = torch.ones_like(label_BT) if mask_BT is None else mask_BT
    known_BT = (label_BT != IGNORED) & (mask_BT != 0)
    places = [row.nonzero().squeeze(1) for row in known_BT]
    position_BM = pad_sequence(places, batch_first=True)
    known_BM = pad_sequence([torch.ones_like(p) for p in places], batch_first=True).to(score_BK.dtype)
    target_BM = label_BT.gather(1, position_BM) * known_BM.long()
    logp_BKM = reader.token_logp(joint, position_BM, target_BM, known_BM)
    weight_BM = mask_BT.gather(1, position_BM) * known_BM
    counted = mask_BT.sum() if peer_compat else weight_BM.sum().clamp_min(1)
    loss = -(token_marginal(score_BK, logp_BKM) * weight_BM).sum() / counted
    return loss.nan_to_num(nan=0.0) if peer_compat else loss
