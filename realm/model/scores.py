"""The retrieval score: inner products of query and passage vectors, in float32 also under autocast.

In 16 bits the scores of a positive and of a hard negative would be equal. Every product of vectors is computed here.

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
        return (query_BD.float()[:, None] * passage_BKD.float()).sum(dim=-1)


def weighted_sums(weight_BN: Tensor, passage_ND: Tensor) -> Tensor:
    """Sums of the vectors of all passages, with weights of each query -> [B, D]."""
    with torch.autocast(weight_BN.device.type, enabled=False):
        return weight_BN.float() @ passage_ND.float()
