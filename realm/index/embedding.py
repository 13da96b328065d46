"""Passages to vectors: the whole corpus, or the part of it that is new.

Batches hold passages of similar length and about the same number of tokens, so that little is padding. On a CPU each thread
packs and embeds whole batches by itself: nobody waits for another one within a batch.

Letters: N passages, H hidden, D embedding.
"""

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from realm.errors import DamagedError
from realm.model.cpu.threads import thread_map
from realm.model.embedder import Tower
from realm.model.modes import evaluating
from realm.progress import progress
from realm.store.knowledge_base import PassageTokens
from realm.store.unfinished import Kept
from realm.tokens.layouts import Lengths, Tokens, passage_rows
from realm.tokens.tokenizer import Tokenizer

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
    kept: Kept | None = None,
) -> np.ndarray:
    """Vectors of the given passages, in their order -> [n, D] float16; `tell` hears after each batch how many are done.

    Without a `description` there is no progress bar. Batches that are `kept` from an earlier call are not made again.

    Raises:
        InputError: a vector is not finite.
    """

    def checked(inputs: Tokens) -> Tensor:
        vector_BD = tower(inputs).half()
        if not vector_BD.isfinite().all():
            raise DamagedError(
                "the embedder gives vectors that are not finite numbers: its weights are damaged"
            )
        return vector_BD

    vectors = _embed(tower, checked, tokens, numbers, tokenizer, lengths, device, description, tell, kept)
    return vectors.half().numpy()


def pooled_states(
    tower: Tower,
    tokens: PassageTokens,
    numbers: np.ndarray,
    tokenizer: Tokenizer,
    lengths: Lengths,
    device: torch.device,
) -> Tensor:
    """The tower's pooled states before projection, for fitting one -> [n, H] float32."""

    def pooled(inputs: Tokens) -> Tensor:
        return tower.pooled(inputs).float()

    return _embed(tower, pooled, tokens, numbers, tokenizer, lengths, device, "pool")


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
    kept: Kept | None = None,
) -> Tensor:
    title, body = tokens.title, tokens.body
    length_N = np.minimum(title.lengths_of(numbers) + body.lengths_of(numbers) + 3, lengths.passage)
    batches = batches_by_length(length_N)
    result: Tensor | None = None
    if kept is not None:
        known, vectors = kept.read()
        result = torch.zeros(len(numbers), vectors.shape[1], dtype=torch.float16)
        result[torch.from_numpy(known)] = torch.from_numpy(vectors)
        there = np.zeros(len(numbers), dtype=bool)
        there[known] = True
        batches = [batch for batch in batches if not there[batch].all()]  # the same ones as without a kill
    done, one_at_a_time = len(numbers) - sum(map(len, batches)), threading.Lock()
    bar = progress(
        total=len(numbers),
        description=description or "",
        unit="passage",
        done=done,
        shown=description is not None,
    )

    def embed(batch: np.ndarray) -> None:
        nonlocal result, done
        inputs = passage_rows(title, body, numbers[batch], tokenizer, lengths).to(device)
        values = function(inputs).cpu()
        with one_at_a_time:
            if result is None:
                result = values.new_empty(len(numbers), values.shape[1])
            result[torch.from_numpy(batch)] = values
            if kept is not None:
                kept.add(batch, values.numpy())
            bar.update(len(batch))
            done += len(batch)
            if tell is not None:
                tell(done)

    with evaluating(tower), bar:
        if device.type == "cpu" and len(batches) >= 2 * torch.get_num_threads():
            thread_map(embed, batches, autocast=True)
        else:
            for batch in batches:
                embed(batch)
    return torch.empty(0, tower.config.dim) if result is None else result
