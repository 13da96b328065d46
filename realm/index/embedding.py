"""Computes vectors of passages: of the whole corpus, or only of new passages.

The passages of a batch have similar lengths, so that there is little padding, and batches have about equally many tokens. On a
CPU each thread embeds whole batches if there are two batches or more per thread, so that threads do not wait for each other
within a batch.

Axis letters: N passages, n requested passages, H hidden, D embedding.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.errors import ConflictError, DamagedError
from realm.model.cpu.threads import thread_map
from realm.model.device import DeviceConfig, choose_device
from realm.model.embedder import Tower, TransformerTower
from realm.model.folder import Model, load_model
from realm.model.modes import evaluating
from realm.progress import progress
from realm.ray_actors import EngineConfig
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.store.unfinished import Kept
from realm.tokens.layouts import Lengths, Tokens, passage_rows
from realm.tokens.tokenizer import Tokenizer

BATCH_TOKENS = 4096
"""Largest number of tokens in a batch on a CPU, including padding."""
WORDS_TOKENS = 65_536
"""The same for a tower without layers. Its batches are so little work that a batch of `BATCH_TOKENS` is mostly Python, during
which other threads wait."""
GPU_SHARE, TOKEN_BYTES = 1 / 16, 64
"""Share of the memory of a GPU for the states of a batch, and their bytes per token and hidden unit: 16 numbers of 32 bits,
because a layer is four times as wide inside, and several states exist at a time."""


@dataclass(frozen=True)
class IndexConfig(DeviceConfig, EngineConfig):
    """Settings of `realm index`. Vectors are stored as float16 in any precision."""

    device: str = "auto"
    """"auto": a GPU if there is one, else the CPU; or any torch device; or several devices, "cuda:0,cuda:1", each with its own
    process and an even share of the passages. On a Ray cluster: "cpu", or "auto", which uses the GPUs of the cluster, or its
    cores if the cluster has no GPUs."""
    threads: int = 0
    """CPU threads of each process; 0: torch's default. Processes on a Ray cluster have one thread."""

    @property
    def devices(self) -> list[str]:
        """The devices in `device`; for a Ray cluster, the device of the process that starts the build."""
        return ["cpu"] if self.engine == "ray" else [name.strip() for name in self.device.split(",")]


def open_worker(kb_folder: Path, corpus: str, model_path: str, device: str) -> tuple[KnowledgeBase, Model]:
    """The knowledge base and the model of a process that embeds a part of the passages.

    Raises:
        ConflictError: the knowledge base has another fingerprint than `corpus`, so its passages may have other numbers.
    """
    kb = KnowledgeBase.open(kb_folder)
    if kb.fingerprint != corpus:
        raise ConflictError(f"{kb_folder} was changed while its index was built: build the index again")
    return kb, load_model(model_path, reader=False).to(choose_device(device))


def embed_passages(
    model: Model,
    tokens: PassageTokens,
    numbers: np.ndarray,
    *,
    description: str | None = "embed",
    report_done: Callable[[int], None] | None = None,
    kept: Kept | None = None,
) -> np.ndarray:
    """Vectors of the given passages in the given order -> [n, D] float16.

    `report_done` is called after each batch with the number of finished passages. Without a `description` there is no progress
    bar. Vectors that an interrupted call saved in `kept` are not computed again.

    Raises:
        DamagedError: a vector is not finite.
    """
    tower = model.embedder.passage

    def checked(inputs: Tokens) -> Tensor:
        vector_BD = tower(inputs).half()
        if not vector_BD.isfinite().all():
            raise DamagedError(
                "the embedder computes vectors that are not finite numbers: the weights are damaged"
            )
        return vector_BD

    rows = _Rows(tokens, numbers, model.tokenizer, model.lengths, model.device)
    vectors = _embed(tower, checked, rows, description, report_done, kept)
    return vectors.half().numpy()


def pooled_states(
    tower: Tower,
    tokens: PassageTokens,
    numbers: np.ndarray,
    tokenizer: Tokenizer,
    lengths: Lengths,
    kept: Kept | None = None,
) -> Tensor:
    """Pooled states of the given passages, before the projection of the tower -> [n, H] float32; with `kept` float16.

    States that an interrupted call saved in `kept` are not computed again.
    """

    def pooled(inputs: Tokens) -> Tensor:
        return tower.pooled(inputs).float()

    rows = _Rows(tokens, numbers, tokenizer, lengths, tower.projection.weight.device)
    return _embed(tower, pooled, rows, "pool", kept=kept)


class _Rows(NamedTuple):
    """Passages of a corpus, and what is needed to make inputs of a tower from these passages."""

    tokens: PassageTokens
    numbers: np.ndarray
    tokenizer: Tokenizer
    lengths: Lengths
    device: torch.device

    def input_lengths(self) -> np.ndarray:
        """Lengths of the inputs in wordpieces -> [n]."""
        title, body = self.tokens.title, self.tokens.body
        whole_n = title.lengths_of(self.numbers) + body.lengths_of(self.numbers) + 3
        return np.minimum(whole_n, self.lengths.passage)

    def inputs(self, batch: np.ndarray) -> Tokens:
        """Inputs of the passages at these positions of `numbers`."""
        title, body = self.tokens.title, self.tokens.body
        packed = passage_rows(title, body, self.numbers[batch], self.tokenizer, self.lengths)
        return packed.to(self.device)


def batch_tokens(device: torch.device, tower: Tower) -> int:
    """Largest number of tokens in a batch of a tower, including padding."""
    least = BATCH_TOKENS if isinstance(tower, TransformerTower) else WORDS_TOKENS
    if device.type != "cuda":
        return least
    # The whole memory, not the free memory: a build that was interrupted must continue with the same batches.
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(least, int(GPU_SHARE * memory / (TOKEN_BYTES * tower.projection.in_features)))


def batches_by_length(length_N: np.ndarray, budget: int) -> list[np.ndarray]:
    """Row numbers in batches of rows of similar length, longest rows first.

    Each batch has at most `budget` tokens, including padding; a single row may have more.

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
    rows: _Rows,
    description: str | None,
    report_done: Callable[[int], None] | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """`function` of the inputs of each row, in the order of `rows.numbers`; with `kept` in float16."""
    budget = batch_tokens(rows.device, tower)
    count, batches = len(rows.numbers), batches_by_length(rows.input_lengths(), budget)
    result: Tensor | None = None
    if kept is not None:
        known, vectors = kept.recover()
        result = torch.zeros(count, vectors.shape[1], dtype=torch.float16)
        result[torch.from_numpy(known)] = torch.from_numpy(vectors)
        there = np.zeros(count, dtype=bool)
        there[known] = True
        # On the same kind of device the interrupted call had the same batches; otherwise partly known batches are repeated.
        batches = [batch for batch in batches if not there[batch].all()]
    done, one_at_a_time = count - sum(map(len, batches)), threading.Lock()
    bar = progress(
        total=count, description=description or "", unit="passage", done=done, shown=description is not None
    )

    def embed(batch: np.ndarray) -> None:
        nonlocal result, done
        values = function(rows.inputs(batch)).cpu()
        with one_at_a_time:
            if result is None:
                result = values.new_empty(count, values.shape[1])
            values = values.to(result.dtype)
            result[torch.from_numpy(batch)] = values
            if kept is not None:
                kept.add(batch, values.numpy())
            bar.update(len(batch))
            done += len(batch)
            if report_done is not None:
                report_done(done)

    with evaluating(tower), bar:
        if rows.device.type == "cpu" and len(batches) >= 2 * torch.get_num_threads():
            thread_map(embed, batches, autocast=True)
        else:
            for batch in batches:
                embed(batch)
    return torch.empty(0, tower.config.dim) if result is None else result
