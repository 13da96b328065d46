"""An index build for which training waits, divided among the ranks: each rank embeds a part of the passages."""

import shutil
from pathlib import Path

import numpy as np

from realm import distributed
from realm.errors import writing
from realm.index.embedding import embed_passages
from realm.index.versions import warn_if_cut
from realm.model.folder import Model
from realm.search.shards import own_passages
from realm.store.knowledge_base import KnowledgeBase


def embed_together(kb: KnowledgeBase, model: Model, folder: Path) -> np.ndarray | None:
    """Vectors of all passages on rank 0 -> [N, D] float16; None on the other ranks.

    All ranks must call this function with the same weights. Each rank embeds its part, and writes the vectors to `folder`,
    which all ranks can read.

    Raises:
        DamagedError: a vector is not finite.
        WriteFailed: the vectors of this rank cannot be written.
    """
    rank = distributed.rank()
    if not rank:
        warn_if_cut(kb, model)
    own = np.arange(len(kb))[own_passages(len(kb))]
    array_nD = embed_passages(model, kb.tokens, own, description=None if rank else "embed")
    files = [folder / f"vectors-{one}.npy" for one in range(distributed.world_size())]
    with writing(files[rank]):
        folder.mkdir(parents=True, exist_ok=True)
        np.save(files[rank], array_nD)
    distributed.barrier()
    if rank:
        return None
    array_ND = np.concatenate([np.load(file, mmap_mode="r") for file in files])
    shutil.rmtree(folder)
    return array_ND
