"""Passages to vectors: the whole corpus, or the part of it that is new.

Batches hold passages of similar length and about the same number of tokens, so that little is padding.

Letters: N passages, H hidden, D embedding.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from realm.config import InputError, progress
from realm.model.encoders import Tower, evaluating
from realm.retrieval.knowledge_base import PassageTokens
from realm.text.inputs import Lengths, Tokenizer, Tokens, passage_inputs

BATCH_TOKENS = 4096
"""Tokens of a batch, padding counted."""


def embed_passages(
    tower: Tower,
    tokens: PassageTokens,
    numbers: np.ndarray,
    tokenizer: Tokenizer,
    lengths: Lengths,
    device: torch.device,
    description: str | None = "embed",
    tell: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Vectors of the given passages, in their order -> [n, D] float16; `tell` hears after each batch how many are done.

    Without a `description` there is no progress bar.

    Raises:
        InputError: a vector is not finite.
    """
    vectors = _embed(
        tower, tower.forward, tokens, numbers, tokenizer, lengths, device, description, tell
    ).numpy()
    if not np.isfinite(vectors).all():
        raise InputError("the embedder gives vectors that are not finite numbers: its weights are damaged")
    return vectors.astype(np.float16)


def pooled_states(
    tower: Tower,
    tokens: PassageTokens,
    numbers: np.ndarray,
    tokenizer: Tokenizer,
    lengths: Lengths,
    device: torch.device,
) -> Tensor:
    """The tower's pooled states before projection, for fitting one -> [n, H] float32."""
    return _embed(tower, tower.pooled, tokens, numbers, tokenizer, lengths, device, "pool").float()


def batches_by_length(length_N: np.ndarray, budget: int = BATCH_TOKENS) -> list[np.ndarray]:
    """Row numbers in batches of similar length, the longest first, each at most `budget` tokens with padding.

    >>> [b.tolist() for b in batches_by_length(np.array([3, 9, 4, 4]), budget=10)]
    [[1], [2, 3], [0]]
    """
    order = np.argsort(-length_N, kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, budget // max(1, int(length_N[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches


@torch.no_grad()
def _embed(
    tower: Tower,
    function: Callable[[Tokens], Tensor],
    tokens: PassageTokens,
    numbers: np.ndarray,
    tokenizer: Tokenizer,
    lengths: Lengths,
    device: torch.device,
    description: str | None,
    tell: Callable[[int], None] | None = None,
) -> Tensor:
    length_N = np.minimum(tokens.title.lengths[numbers] + tokens.body.lengths[numbers] + 3, lengths.passage)
    result: Tensor | None = None
    done = 0
    bar = progress(total=len(numbers), description=description or "", unit="passage")
    bar.disable |= description is None
    with evaluating(tower), bar:
        for batch in batches_by_length(length_N):
            inputs = passage_inputs(
                [tokens.title.row(n) for n in numbers[batch]],
                [tokens.body.row(n) for n in numbers[batch]],
                tokenizer,
                lengths,
            ).to(device)
            values = function(inputs).float().cpu()
            if result is None:
                result = torch.empty(len(numbers), values.shape[1])
            result[torch.from_numpy(batch)] = values
            bar.update(len(batch))
            done += len(batch)
            if tell is not None:
                tell(done)
    return torch.empty(0, tower.config.dim) if result is None else result
