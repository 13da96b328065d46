"""Cached passage states: the pooled states of all passages, computed once for a passage tower whose encoder is frozen.

The projection of the tower computes vectors from the pooled states. So a new index costs one matrix product instead of a
forward pass of the encoder over the corpus: on a CPU, seconds instead of minutes.

Axis letters: N passages, H hidden, D embedding, n requested passages.
"""

import hashlib
import json
import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from realm import distributed
from realm.errors import writing
from realm.files import new_file
from realm.folders import one_writer
from realm.index.embedding import pooled_states
from realm.model.device import Precision, autocast, chosen
from realm.model.embedder import Tower
from realm.model.folder import Model, add_weights
from realm.model.modes import evaluating
from realm.store import unfinished
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import passage_inputs
from realm.train.sharding import whole_model

_log = logging.getLogger(__name__)
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
    """Loads the states that a run with the same passages and encoder saved in `folder`, or computes and saves them.

    If the process is killed while it computes the states, the next call continues. If several runs use the folder, one computes
    the states and the others wait.

    Raises:
        WriteFailed: the folder cannot be written.
    """
    model = whole_model(model)
    name = _name(kb, model, precision)
    file = folder / f"states-{name}.npy"
    if distributed.is_main_process():
        if not file.exists():
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            with one_writer(folder, lambda: _log.info("%s: waiting for another run to end its work", folder)):
                if not file.exists():
                    for left in folder.glob(".states-*.tmp"):  # of a killed process
                        left.unlink()
                    _save(_compute(kb, model, folder, name, precision), file)
        unfinished.forget(folder, name)
    distributed.barrier()
    return CachedPassageStates(np.load(file, mmap_mode="r", allow_pickle=False), model.device)


def _name(kb: KnowledgeBase, model: Model, precision: Precision) -> str:
    """Digest of all on which the states depend. The weights of the projection are not among it, because they change."""
    tower = model.embedder.passage
    made_of = kb.fingerprint, model.tokenizer.fingerprint, model.lengths.passage, tower.config.pooling
    digest = hashlib.sha256(json.dumps([*made_of, chosen(model.device, precision)]).encode())
    weights = tower.state_dict()
    add_weights(digest, {name: value for name, value in weights.items() if name.startswith("encoder.")})
    return digest.hexdigest()[:16]


def _save(states_NH: np.ndarray, file: Path) -> None:
    with writing(file), new_file(file) as aside, aside.open("wb") as stream:
        np.save(stream, states_NH)


@torch.no_grad()
def _compute(kb: KnowledgeBase, model: Model, folder: Path, name: str, precision: Precision) -> np.ndarray:
    tower, nothing = model.embedder.passage, [np.zeros(0, dtype=np.int64)]
    hidden = model.embedder.encoder_config.hidden_size
    with (
        autocast(model.device, precision),
        evaluating(tower),
        unfinished.kept(folder, name, "states", kb.keys_N, hidden) as kept,
    ):
        numbers = np.arange(len(kb))
        states_NH = pooled_states(tower, kb.tokens, numbers, model.tokenizer, model.lengths, kept)
        null = tower.pooled(passage_inputs(nothing, nothing, model.tokenizer, model.lengths).to(model.device))
    return torch.cat([states_NH.half(), null.half().cpu()]).numpy()
