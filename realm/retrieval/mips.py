"""Exact maximum inner product search: vectors in, the best passage numbers out. Knows nothing of text or networks.

Vectors stay in 16 bits; products and comparisons are float32. A chunk of the index is scored at a time, so the [B, N]
matrix never exists in `search`.

Letters: B queries, K hits per query, N passages, D embedding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 17
"""Passages whose scores are ranked at a time."""
BLOCK = 1 << 12
"""Passages that a CPU turns into float32 at a time: 2 MB at D = 128, so that they are multiplied while in its cache."""


class Hits(NamedTuple):
    """The best passages per query, best first; equal scores in no particular order."""

    score_BK: Tensor
    number_BK: Tensor


class MipsIndex:
    """All passages' vectors on one device, row = passage number."""

    def __init__(self, vectors_ND: np.ndarray | Tensor, device: torch.device | None = None):
        self._vectors_ND = torch.as_tensor(vectors_ND).to(device or torch.device("cpu"))
        self._written_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self._vectors_ND)

    @property
    def device(self) -> torch.device:
        return self._vectors_ND.device

    def rows(self, numbers: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Vectors of the given passages -> [n, D] float32."""
        return self._vectors_ND[torch.as_tensor(numbers, device=self.device)].float()

    def write(self, numbers: np.ndarray | Tensor, vectors_UD: Tensor) -> None:
        """Replaces the vectors of some passages, in memory only."""
        number_U = torch.as_tensor(numbers, device=self.device)
        if self._written_N is None:
            self._written_N = torch.zeros(len(self), dtype=torch.bool, device=self.device)
        self._written_N[number_U] = True
        self._vectors_ND[number_U] = vectors_UD.to(self.device, self._vectors_ND.dtype)

    def written(self) -> tuple[Tensor, Tensor] | None:
        """Numbers and vectors of what was replaced, for `write`; none where nothing was."""
        if self._written_N is None:
            return None
        number_U = self._written_N.nonzero().squeeze(1)
        return number_U, self._vectors_ND[number_U]

    @torch.no_grad()
    def search(self, query_BD: Tensor, k: int) -> Hits:
        """The k passages with the largest inner product; k is cut to the size of the index."""
        query_BD = query_BD.detach().float().to(self.device)
        k = min(k, len(self))
        best_score = query_BD.new_empty(len(query_BD), 0)
        best_number = torch.empty(len(query_BD), 0, dtype=torch.int64, device=query_BD.device)
        for start in range(0, len(self), CHUNK):
            score_BN = self._scores(query_BD, self._vectors_ND[start : start + CHUNK])
            score, number = score_BN.topk(min(k, score_BN.shape[1]), dim=1)
            best_score = torch.cat([best_score, score], dim=1)
            best_number = torch.cat([best_number, number + start], dim=1)
            keep = best_score.topk(min(k, best_score.shape[1]), dim=1).indices
            best_score, best_number = best_score.gather(1, keep), best_number.gather(1, keep)
        return Hits(best_score, best_number)

    def rest_logsumexp(self, query_BD: Tensor, left_out: Sequence[np.ndarray]) -> Tensor:
        """logsumexp of each query's scores over all passages but those it leaves out -> [B].

        The gradient reaches the queries; the index is constant. Costs one [B, N] matrix: for indexes up to about 100,000.
        """
        score_BN = _products(query_BD, self._vectors_ND)
        rows = np.concatenate([np.full(len(numbers), row) for row, numbers in enumerate(left_out)])
        columns = np.concatenate([np.asarray(numbers) for numbers in left_out])
        out = torch.zeros_like(score_BN, dtype=torch.bool)
        out[torch.as_tensor(rows, dtype=torch.int64), torch.as_tensor(columns, dtype=torch.int64)] = True
        return score_BN.masked_fill(out, -torch.inf).logsumexp(dim=1)

    def _scores(self, query_BD: Tensor, vectors_ND: Tensor) -> Tensor:
        """Inner products -> [B, N], without gradient."""
        if self.device.type != "cpu" or vectors_ND.dtype == torch.float32:
            return _products(query_BD, vectors_ND)
        score_BN = query_BD.new_empty(len(query_BD), len(vectors_ND))
        space_ND = query_BD.new_empty(BLOCK, vectors_ND.shape[1])
        for start in range(0, len(vectors_ND), BLOCK):
            block_ND = vectors_ND[start : start + BLOCK]
            score_BN[:, start : start + BLOCK] = _products(
                query_BD, space_ND[: len(block_ND)].copy_(block_ND)
            )
        return score_BN


def _products(query_BD: Tensor, vectors_ND: Tensor) -> Tensor:
    """Inner products in float32, also where a training step runs under autocast -> [B, N]."""
    with torch.autocast(query_BD.device.type, enabled=False):
        return query_BD.float() @ vectors_ND.float().T
