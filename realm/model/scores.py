"""The retrieval score: inner products of query and passage vectors, in float32 also under autocast.

In 16 bits the scores of a positive and of a hard negative could be equal. All retrieval scores are computed with these
functions. There are two exceptions: the approximate scores of the prefilters, and the exact scores that a kernel computes for
the candidates of a GPU (`realm.search.group_kernels`).

Axis letters: B queries, K candidates per query, N passages, D embedding.
"""

import torch
from torch import Tensor


def scores(query_BD: Tensor, passage_ND: Tensor, out_BN: Tensor | None = None) -> Tensor:
    """Scores of every query with every passage -> [B, N], written into `out_BN` if given."""
    with torch.autocast(query_BD.device.type, enabled=False):
        return torch.mm(query_BD.float(), passage_ND.float().T, out=out_BN)


def own_scores(query_BD: Tensor, passage_BKD: Tensor) -> Tensor:
    """Scores of every query with its own candidates -> [B, K]."""
    with torch.autocast(query_BD.device.type, enabled=False):
        return (query_BD.float()[:, None] * passage_BKD).sum(dim=-1)


def log_softmax_inside(score: Tensor, inside: Tensor) -> Tensor:
    """Log-softmax over the last axis among the entries that are `inside` -> -inf at all other entries.

    If no entry of a row is `inside`, all entries of this row are -inf.

    >>> log_softmax_inside(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[True, False], [False, False]]))
    tensor([[0., -inf],
            [-inf, -inf]])
    """
    lowest = torch.finfo(score.dtype).min  # not -inf, of which an empty row would give NaN
    return score.masked_fill(~inside, lowest).log_softmax(dim=-1).masked_fill(~inside, -torch.inf)


def weighted_sums(weight_BN: Tensor, passage_ND: Tensor) -> Tensor:
    """Sums of the vectors of all passages, with weights of each query -> [B, D]."""
    with torch.autocast(weight_BN.device.type, enabled=False):
        return weight_BN.float() @ passage_ND.float()
