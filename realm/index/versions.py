"""The index of a knowledge base under a model: built, completed, loaded.

Vectors of different models live side by side (`realm.store.vectors`), by the fingerprint of the passage tower. A model
whose query side alone was trained on finds the index of the model it came from.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from realm.errors import InputError
from realm.index.embedding import embed_passages
from realm.index.multi_process import embed_on_devices
from realm.model.device import Precision, autocast, choose_device
from realm.model.embedder import Embedder
from realm.model.folder import Model, load_model
from realm.search.exact import MipsIndex
from realm.store import unfinished, vectors
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.store.tables import made_anew
from realm.store.vectors import Vectors, VectorsInfo

SIGN_OF_LIFE = 5.0
"""Seconds between two lines of a supervised build."""


@dataclass(frozen=True)
class IndexConfig:
    """How a knowledge base is embedded."""

    device: str = "auto"
    """"auto": a GPU when there is one, else the CPU; or any torch device; or several, "cuda:0,cuda:1", each with a process
    of its own and a share of the passages."""
    precision: Precision = "auto"
    """Of matrix products; vectors are stored in 16 bits either way."""
    threads: int = 0
    """CPU threads of each process; 0: as many as torch takes by itself."""
    keep: int = 2
    """Index versions of this model that stay; 0: all."""
    folder: str = ""
    """Where the index goes, if not into the knowledge base (training keeps its own)."""


@dataclass(frozen=True)
class IndexVersion:
    """An index to search and where it comes from."""

    index: MipsIndex
    number: int
    """Of the version on disk; 0: in memory only."""
    step: int
    """Training step of the embedder that made it."""
    created: str = ""
    """When it was built, ISO 8601; passages that came later do not change it."""
    embedder: Embedder | None = None
    """That embedder, where searches are to use it and not the live one."""
    cost: dict[str, float] = field(default_factory=dict)
    """What building it took, for the log."""


class IndexReport(TypedDict):
    """What `realm index` reports: the version, and how many of its passages were embedded anew."""

    folder: str
    version: int
    passages: int
    embedded: int
    model: str
    step: int


def build_index(
    kb: KnowledgeBase, model_path: str, config: IndexConfig, supervised: bool = False
) -> IndexReport:
    """Embeds what the model's index lacks, everything if there is none, and publishes a version by one atomic commit.

    A build that a training run supervises says how far it is every few seconds, and always publishes.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    devices = [name.strip() for name in config.device.split(",")]
    for name in devices[1:]:
        choose_device(name)  # all are there, or none begins
    model = load_model(model_path, reader=False).to(choose_device(devices[0]))
    kb.check_tokenizer(model.tokenizer, model_path)
    folder = Path(config.folder) if config.folder else index_folder(kb, model)
    folder.mkdir(parents=True, exist_ok=True)
    tell = _sign_of_life(len(kb)) if supervised else None

    def build() -> tuple[int, int]:
        known = vectors.read(folder, kb.keys_N)
        if known is None or known.info.model != model.compute_passage_fingerprint():
            if len(devices) == 1:
                array_ND = _embed(kb.tokens, kb.keys_N, model, folder, tell)
            else:
                array_ND = embed_on_devices(
                    kb, model_path, folder, devices, config.precision, config.threads, tell
                )
            return publish(kb, model, model_path, folder, array_ND), len(kb)
        if len(known.missing):
            return _complete(kb, model, folder, known).version, len(known.missing)
        if supervised or known.left_over:
            # A retriever that stood still: of this step all the same. Or without the vectors of passages that are gone.
            info = replace(known.info, step=model.step, corpus=kb.fingerprint)
            return vectors.publish(folder, kb.keys_N, known.array, info), 0
        return known.version, 0

    with autocast(model.device, config.precision):
        version, embedded = made_anew(folder, build)
    if config.keep:
        vectors.keep_versions(folder, config.keep)
    return {
        "folder": str(folder),
        "version": version,
        "passages": len(kb),
        "embedded": embedded,
        "model": model.compute_passage_fingerprint(),
        "step": model.step,
    }


def load_index(kb: KnowledgeBase, model: Model, model_path: str, mapped: bool = False) -> IndexVersion:
    """The newest index of this model; passages added since it was built are embedded first.

    A `mapped` one stays on disk.

    Raises:
        InputError: the knowledge base has no index of this model.
    """
    folder = index_folder(kb, model)
    read = vectors.mapped if mapped else vectors.read

    def load() -> Vectors:
        known = read(folder, kb.keys_N) if folder.exists() else None
        if known is None:
            raise InputError(
                f"{kb.folder} has no index of {model_path}: "
                f"run `realm index --kb {kb.folder} --model {model_path}`"
            )
        return _complete(kb, model, folder, known)

    known = made_anew(folder, load)
    return IndexVersion(
        MipsIndex(known.array, model.device), known.version, known.info.step, known.info.created
    )


def index_folder(kb: KnowledgeBase, model: Model) -> Path:
    """Where a model's vectors live in a knowledge base."""
    return vectors.folder_of(kb.folder, model.compute_passage_fingerprint())


def publish(
    kb: KnowledgeBase,
    model: Model,
    model_path: str,
    folder: Path,
    array_ND: np.ndarray | None = None,
) -> int:
    """Publishes a version with these vectors of all passages, or embeds them now -> its number."""
    if array_ND is None:
        array_ND = _embed(kb.tokens, kb.keys_N, model, folder)
    info = VectorsInfo(
        model=model.compute_passage_fingerprint(),
        model_path=model_path,
        step=model.step,
        dim=array_ND.shape[1],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        corpus=kb.fingerprint,
    )
    version = vectors.publish(folder, kb.keys_N, array_ND, info)
    unfinished.forget(folder)
    return version


def _complete(kb: KnowledgeBase, model: Model, folder: Path, known: Vectors) -> Vectors:
    """The same vectors with those of missing passages, which are embedded and published now."""
    if len(known.missing) == 0:
        return known
    keys_M = kb.keys_N[known.missing]
    array_MD = _embed(kb.tokens_of(known.missing), keys_M, model, folder)
    version = vectors.append(folder, known.version, keys_M, array_MD, known.info.model, kb.fingerprint)
    unfinished.forget(folder)
    known.array[known.missing] = array_MD
    return known._replace(missing=known.missing[:0], version=version)


def _embed(
    tokens: PassageTokens,
    keys_n: np.ndarray,
    model: Model,
    folder: Path,
    tell: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Vectors of the passages with these keys; those that a killed call left in the index's folder are among them."""
    dim = model.embedder.config.dim
    with unfinished.kept(folder, model.compute_passage_fingerprint(), "all", keys_n, dim) as kept:
        return embed_passages(
            model.embedder.passage, tokens, np.arange(len(keys_n)), model.tokenizer, model.lengths, model.device,
            description="embed" if tell is None else None, tell=tell, kept=kept,
        )  # fmt: skip


def _sign_of_life(total: int) -> Callable[[int], None]:
    """Prints how far a build is, now and then: it is its own heartbeat, so it comes from the loop that does the work."""
    started = said = time.monotonic()

    def tell(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= SIGN_OF_LIFE:
            said = now
            rate = done / (now - started)
            print(f"{done} of {total} passages embedded, {rate:.0f} a second", file=sys.stderr, flush=True)

    return tell
