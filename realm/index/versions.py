"""The index of a knowledge base under a model: built, completed, loaded.

Vectors of different models are stored side by side (`realm.store.vectors`) under the fingerprint of the passage tower. A model
of which only the query tower was trained uses the index of its start model.
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
from realm.index.ray_embedding import embed_on_ray
from realm.model.device import Precision, autocast, choose_device
from realm.model.embedder import Embedder
from realm.model.folder import Model, load_model
from realm.ray_actors import EngineConfig
from realm.search.exact import MipsIndex, PassageIndex
from realm.store import unfinished, vectors
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.store.tables import made_anew
from realm.store.vectors import Vectors, VectorsInfo

LOG_EVERY = 5.0
"""Seconds between two log lines of a supervised build."""


@dataclass(frozen=True)
class IndexConfig(EngineConfig):
    """Settings of `realm index`."""

    device: str = "auto"
    """"auto": a GPU if there is one, else the CPU; or any torch device; or several, "cuda:0,cuda:1", each with its own process
    and an even share of the passages. On a Ray cluster: "auto" for its GPUs, or its cores if it has no GPUs, or "cpu"."""
    precision: Precision = "auto"
    """Precision of matrix products; vectors are stored as float16 in any case."""
    threads: int = 0
    """CPU threads of each process; 0: torch's default. Processes on a Ray cluster have one."""
    keep: int = 2
    """Newest index versions of the model that stay on disk; 0: all versions."""
    folder: str = ""
    """Folder of the index; "": a folder in the knowledge base. Training runs have index folders of their own."""


@dataclass(frozen=True)
class IndexVersion:
    """A searchable index and its origin."""

    index: PassageIndex
    number: int
    """Number of the version on disk; 0: in memory only."""
    step: int
    """Training step of the embedder that made the vectors."""
    created: str = ""
    """Time of the build, ISO 8601; vectors of passages that were added later do not change it."""
    embedder: Embedder | None = None
    """The embedder that made the vectors, if searches use it instead of the live embedder."""
    cost: dict[str, float] = field(default_factory=dict)
    """Cost of the build, for the metrics."""


class IndexReport(TypedDict):
    """Report of `realm index`: the version, and how many of its passages were embedded in this call."""

    folder: str
    version: int
    passages: int
    embedded: int
    model: str
    step: int


def build_index(
    kb: KnowledgeBase, model_path: str, config: IndexConfig, supervised: bool = False
) -> IndexReport:
    """Embeds the passages that the model's index lacks, and publishes a new version by one atomic commit.

    A build that a training run supervises logs its progress every few seconds, and always publishes a version.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    on_ray = config.engine == "ray"
    devices = ["cpu"] if on_ray else [name.strip() for name in config.device.split(",")]
    for name in devices[1:]:
        choose_device(name)  # check all devices before any process starts
    model = load_model(model_path, reader=False).to(choose_device(devices[0]))
    kb.check_tokenizer(model.tokenizer, model_path)
    folder = Path(config.folder) if config.folder else index_folder(kb, model)
    folder.mkdir(parents=True, exist_ok=True)
    report_done = _log_progress(len(kb)) if supervised else None

    def build() -> tuple[int, int]:
        known = vectors.read(folder, kb.keys_N)
        if known is None or known.info.model != model.compute_passage_fingerprint():
            if on_ray:
                array_ND = embed_on_ray(
                    kb,
                    model,
                    model_path,
                    folder,
                    config.ray_address,
                    config.device,
                    config.precision,
                    report_done,
                )
            elif len(devices) == 1:
                array_ND = _embed(kb.tokens, kb.keys_N, model, folder, report_done)
            else:
                array_ND = embed_on_devices(
                    kb, model_path, folder, devices, config.precision, config.threads, report_done
                )
            return publish(kb, model, model_path, folder, array_ND), len(kb)
        if len(known.missing):
            return _complete(kb, model, folder, known).version, len(known.missing)
        if supervised or known.left_over:
            # The weights did not change, but the step did; or passages were deleted.
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
    """The newest index of this model; passages that were added since the build are embedded first.

    A `mapped` index stays on disk.

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
    """The folder of a model's vectors in a knowledge base."""
    return vectors.folder_of(kb.folder, model.compute_passage_fingerprint())


def publish(
    kb: KnowledgeBase,
    model: Model,
    model_path: str,
    folder: Path,
    array_ND: np.ndarray | None = None,
) -> int:
    """Publishes a version with the vectors of all passages, which are embedded now if not given -> its number."""
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
    """The vectors completed with those of missing passages, which are embedded and published now."""
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
    report_done: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Vectors of the passages with these keys; vectors that an interrupted call saved are reused."""
    dim = model.embedder.config.dim
    with unfinished.kept(folder, model.compute_passage_fingerprint(), "all", keys_n, dim) as kept:
        return embed_passages(
            model,
            tokens,
            np.arange(len(keys_n)),
            description="embed" if report_done is None else None,
            report_done=report_done,
            kept=kept,
        )


def _log_progress(total: int) -> Callable[[int], None]:
    """A callback that prints the progress of a build every few seconds, from the loop that does the work: a heartbeat."""
    started = said = time.monotonic()

    def report_done(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= LOG_EVERY:
            said = now
            rate = done / (now - started)
            print(f"{done} of {total} passages embedded, {rate:.0f} a second", file=sys.stderr, flush=True)

    return report_done
