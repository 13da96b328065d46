"""Cached passage states: the pooled states of all passages, computed once for a passage tower whose encoder is frozen.

The projection of the tower computes vectors from the pooled states. So a new index costs one matrix product instead of a
forward pass of the encoder over the corpus: on a CPU, seconds instead of minutes.

Axis letters: N passages, H hidden, D embedding, n requested passages.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from realm import distributed
from realm.index.embedding import pooled_states
from realm.model.device import Precision, autocast
from realm.model.embedder import Tower
from realm.model.folder import Model
from realm.model.modes import evaluating
from realm.store import unfinished
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import passage_inputs
from realm.train.sharding import whole_model

ROWS_AT_ONCE = 1 << 15
"""States that are projected at a time."""


class CachedPassageStates:
    """Pooled states [N + 1, H] in float16. The last row is of the null passage, whose number is -1."""

    def __init__(self, states_NH: np.ndarray, device: torch.device):
        self._states_NH, self._device = states_NH, device

    def vectors(self, tower: Tower, numbers: np.ndarray) -> Tensor:
        """Vectors of the given passages, with gradient into the projection -> [n, D] float32."""
        return tower.project(torch.from_numpy(self._states_NH[numbers]).to(self._device).float())

    @torch.no_grad()
    def index(self, tower: Tower) -> np.ndarray:
        """Vectors of all passages except the null passage -> [N, D] float16."""
        numbers = np.arange(len(self._states_NH) - 1)
        with evaluating(tower):
            parts = [
                self.vectors(tower, numbers[start : start + ROWS_AT_ONCE]).half().cpu().numpy()
                for start in range(0, len(numbers), ROWS_AT_ONCE)
            ]
        return np.concatenate(parts)


def cached_passage_states(
    kb: KnowledgeBase, model: Model, folder: Path, precision: Precision
) -> CachedPassageStates:
    """Loads the states that an interrupted run saved in `folder`; if there are none, computes and saves the states.

    If the process is killed while it computes the states, the next call continues.
    """
    file = folder / "states.npy"
    model = whole_model(model)
    if distributed.is_main_process():
        if not file.exists():
            states_NH = _compute(kb, model, folder, precision)
            writing = file.with_suffix(".writing.npy")
            np.save(writing, states_NH)
            os.replace(writing, file)
        unfinished.forget(folder)
    distributed.barrier()
    return CachedPassageStates(np.load(file, mmap_mode="r", allow_pickle=False), model.device)


@torch.no_grad()
def _compute(kb: KnowledgeBase, model: Model, folder: Path, precision: Precision) -> np.ndarray:
    tower, nothing = model.embedder.passage, [np.zeros(0, dtype=np.int64)]
    fingerprint, hidden = model.compute_passage_fingerprint(), model.embedder.encoder_config.hidden_size
    with (
        autocast(model.device, precision),
        evaluating(tower),
        unfinished.kept(folder, fingerprint, "states", kb.keys_N, hidden) as kept,
    ):
        numbers = np.arange(len(kb))
        states_NH = pooled_states(tower, kb.tokens, numbers, model.tokenizer, model.lengths, kept)
        null = tower.pooled(passage_inputs(nothing, nothing, model.tokenizer, model.lengths).to(model.device))
    return torch.cat([states_NH.half(), null.half().cpu()]).numpy()
