"""Embeds passages on a Ray cluster: each actor opens the knowledge base and the model, and embeds chunks of passages.

All machines of the cluster need the knowledge base and the model at the same paths. The process that started the build saves
the finished chunks, so that an interrupted build can continue.

Axis letters: N passages, n passages of a chunk, M passages that are not embedded yet, D embedding.
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch

from realm.index.embedding import IndexConfig, embed_passages, open_worker
from realm.model.device import autocast
from realm.model.folder import Model
from realm.progress import progress
from realm.ray_actors import map_on_ray
from realm.store import unfinished
from realm.store.knowledge_base import KnowledgeBase

CHUNK = 4096
"""Largest number of passages in a chunk: with a BERT-base, a core embeds a chunk in about a minute."""


def embed_on_ray(
    kb: KnowledgeBase,
    model: Model,
    model_path: str,
    folder: Path,
    config: IndexConfig,
    report_done: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Vectors of all passages -> [N, D] float16; `report_done` is called with the number of finished passages.

    Raises:
        InputError: Ray is not installed, or there is no cluster at `config.ray_address`.
        RealmError: an actor failed.
    """
    dim = model.embedder.config.dim
    vectors_ND = np.empty((len(kb), dim), dtype=np.float16)
    missing_M = np.arange(len(kb))
    with unfinished.kept(folder, model.compute_passage_fingerprint(), "ray", kb.keys_N, dim) as kept:
        if kept is not None:
            number_n, vectors_nD = kept.recover()
            vectors_ND[number_n] = vectors_nD
            missing_M = np.setdiff1d(missing_M, number_n)
        done = len(kb) - len(missing_M)
        chunks = [missing_M[start : start + CHUNK] for start in range(0, len(missing_M), CHUNK)]
        # On the other machines, the folder of a model is found only by an absolute path.
        model_name = str(Path(model_path).absolute()) if Path(model_path).exists() else model_path
        prepare = partial(_prepare, kb.folder.absolute(), kb.fingerprint, model_name, config)
        gpus = config.device != "cpu"
        found = map_on_ray(prepare, iter(chunks), config.ray_address, prefer_gpus=gpus)
        bar = progress(
            total=len(kb), description="embed", unit="passage", done=done, shown=report_done is None
        )
        with closing(found), bar:
            for number_n, vectors_nD in zip(chunks, found, strict=True):
                vectors_ND[number_n] = vectors_nD
                if kept is not None:
                    kept.add(number_n, vectors_nD)
                done += len(number_n)
                bar.update(len(number_n))
                if report_done is not None:
                    report_done(done)
    return vectors_ND


def _prepare(
    kb_folder: Path, corpus: str, model_path: str, config: IndexConfig
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Loads the knowledge base and the model in an actor -> a function that embeds the passages with given numbers."""
    kb, model = open_worker(kb_folder, corpus, model_path, config.device)
    if model.device.type == "cpu":
        torch.set_num_threads(1)  # an actor has one core

    def embed(number_n: np.ndarray) -> list[np.ndarray]:
        tokens = kb.tokens_of(number_n)  # only the wordpieces of the chunk are in memory
        with autocast(model.device, config.precision):
            return [embed_passages(model, tokens, np.arange(len(number_n)), description=None)]

    return embed
