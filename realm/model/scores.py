"""The retrieval score: inner products of queries' and passages' vectors, in float32 also where a step runs under autocast.

In 16 bits the score of a hard negative would be its positive's: every product of vectors goes through here.

Letters: B queries, K candidates per query, N passages, D embedding.
"""

import torch
from torch import Tensor


def scores(query_BD: Tensor, passage_ND: Tensor, out_BN: Tensor | None = None) -> Tensor:
    """Of every query with every passage -> [B, N], written into `out_BN` where that is given."""
    with torch.autocast(query_BD.device.type, enabled=False):
        return torch.mm(query_BD.float(), passage_ND.float().T, out=out_BN)


def own_scores(query_BD: Tensor, passage_BKD: Tensor) -> Tensor:
    """Of every query with candidates of its own -> [B, K]."""
    with torch.autocast(query_BD.device.type, enabled=False):
        return (query_BD.float()[:, None] * passage_BKD.float()).sum(dim=-1)
