"""Builds, completes and loads the index of a knowledge base for a model.

Each index is stored under the fingerprint of the passage tower that computed its vectors (`realm.store.vectors`). If a training
stage changes only the query tower of a model, the new model uses the index of the old model.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from realm.errors import InputError
from realm.index.embedding import IndexConfig, embed_passages
from realm.index.multi_process import embed_on_devices
from realm.index.ray_embedding import embed_on_ray
from realm.model.device import autocast, choose_device
from realm.model.embedder import Embedder
from realm.model.folder import Model, load_model
from realm.search.approximate import approximate_index
from realm.search.exact import MipsIndex, PassageIndex
from realm.search.postgres import PostgresIndex
from realm.search.postgres_table import is_address, parsed
from realm.search.ray_index import RayIndex
from realm.store import unfinished, vectors
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.store.tables.table import made_anew
from realm.store.vectors import Vectors, VectorsInfo

_log = logging.getLogger(__name__)
EXACT, APPROXIMATE, RAY = "exact", "approximate", "ray"
"""How an index is searched, if not in a database."""
LOG_EVERY = 5.0
"""Seconds between two log lines of a build that a training run supervises."""
KEPT_VERSIONS = 2
"""Number of versions of an index that stay on disk. In a training run, the versions that a checkpoint needs stay too."""


@dataclass(frozen=True)
class IndexVersion:
    """An index that can be searched, and its origin."""

    index: PassageIndex
    number: int
    """Number of the version on disk; 0 if the index is only in memory."""
    step: int
    """Training step of the embedder that computed the vectors."""
    created: str = ""
    """Time of the build, ISO 8601; adding vectors of new passages does not change this time."""
    embedder: Embedder | None = None
    """The embedder that computed the vectors, if searches use it instead of the embedder that is being trained."""
    cost: dict[str, float] = field(default_factory=dict)
    """Cost of the build, for the metrics."""


class IndexReport(TypedDict):
    """Report of `realm index`; `passages` is the number of vectors in the version, `embedded` how many of them are new."""

    folder: str
    version: int
    passages: int
    embedded: int
    model: str
    step: int


def build_index(
    kb: KnowledgeBase, model_path: str, config: IndexConfig, run_folder: Path | None = None
) -> IndexReport:
    """Embeds the passages that have no vector by this model, and publishes a new version with one atomic commit.

    `run_folder` is the folder of the index of the training run that has started the build. Such a build logs its progress every
    few seconds, publishes a version even if no vector has changed, and removes no version, because checkpoints need some of
    them. A warning is logged if the passages are longer than the model embeds.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    on_ray, devices = config.engine == "ray", config.devices
    for name in devices[1:]:
        choose_device(name)  # check all devices before any process starts
    model = load_model(model_path, reader=False).to(choose_device(devices[0]))
    kb.check_tokenizer(model.tokenizer, model_path)
    warn_if_cut(kb, model)
    folder = run_folder or index_folder(kb, model)
    folder.mkdir(parents=True, exist_ok=True)
    report_done = _log_progress(len(kb)) if run_folder else None

    def build() -> tuple[int, int]:
        number = vectors.newest(folder)
        info = vectors.info_of(folder, number)
        same_model = info is not None and info.model == model.compute_passage_fingerprint()
        known = vectors.read(folder, kb.keys_N, number) if same_model else None
        if known is None:
            if on_ray:
                array_ND = embed_on_ray(kb, model, model_path, folder, config, report_done)
            elif len(devices) == 1:
                array_ND = _embed(kb.tokens, kb.keys_N, model, folder, report_done)
            else:
                array_ND = embed_on_devices(kb, model_path, folder, config, report_done)
            return publish(kb, model, model_path, folder, array_ND), len(kb)
        if len(known.missing):
            return _complete(kb, model, folder, known).version, len(known.missing)
        if run_folder or known.left_over:
            # Only the training step of the model has changed, or passages were deleted.
            info = replace(known.info, step=model.step, corpus=kb.fingerprint)
            return vectors.publish(folder, kb.keys_N, known.array, info), 0
        return known.version, 0

    with autocast(model.device, config.precision):
        version, embedded = made_anew(folder, build)
    if run_folder is None:
        vectors.keep_versions(folder, KEPT_VERSIONS)
    return {
        "folder": str(folder),
        "version": version,
        "passages": len(kb),
        "embedded": embedded,
        "model": model.compute_passage_fingerprint(),
        "step": model.step,
    }


def complete_index(
    kb: KnowledgeBase, model: Model, model_path: str, mapped: bool = False, search: str = EXACT
) -> IndexVersion:
    """Loads the newest index of this model. Passages that were added after the build are embedded first, and a version with
    their vectors is published.

    With `mapped`, the vectors are not loaded into memory, but mapped from a file. `search` is `EXACT`, `APPROXIMATE` or `RAY`
    (with both, the vectors are mapped in any case), or the address of a table in PostgreSQL, whose vectors are then used.

    Raises:
        InputError: the knowledge base has no index of this model, or the table or the Ray cluster cannot be used.
    """
    if is_address(search):
        found = PostgresIndex(parsed(search), kb, model.compute_passage_fingerprint())
        contents = found.contents
        return IndexVersion(found, contents.version, contents.step, contents.created)
    known = complete_vectors(kb, model, model_path, mapped or search != EXACT)
    index: PassageIndex
    if search == RAY:
        file = vectors.mapped_file(index_folder(kb, model), kb.keys_N)
        index = RayIndex(file, len(kb))
    elif search == APPROXIMATE:
        index = approximate_index(index_folder(kb, model), kb.keys_N, known)
    else:
        index = MipsIndex(known.array, model.device)
    return IndexVersion(index, known.version, known.info.step, known.info.created)


def complete_vectors(kb: KnowledgeBase, model: Model, model_path: str, mapped: bool) -> Vectors:
    """The vectors of the newest index of this model; see `complete_index`."""
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

    return made_anew(folder, load)


def index_folder(kb: KnowledgeBase, model: Model) -> Path:
    """The folder with the vectors of a model in a knowledge base."""
    return vectors.folder_of(kb.folder, model.compute_passage_fingerprint())


def publish(
    kb: KnowledgeBase,
    model: Model,
    model_path: str,
    folder: Path,
    array_ND: np.ndarray | None = None,
    bits: int = 16,
) -> int:
    """Publishes a version with the vectors of all passages -> number of the version.

    If `array_ND` is None, the passages are embedded now, and a warning is logged if the passages are longer than the model
    embeds. `bits` is the number of bits in which a number is stored: 16, or 32 for the vectors of a converted checkpoint.
    """
    if array_ND is None:
        warn_if_cut(kb, model)
        array_ND = _embed(kb.tokens, kb.keys_N, model, folder)
    info = VectorsInfo(
        model=model.compute_passage_fingerprint(),
        model_path=model_path,
        step=model.step,
        dim=array_ND.shape[1],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        corpus=kb.fingerprint,
        bits=bits,
    )
    version = vectors.publish(folder, kb.keys_N, array_ND, info)
    unfinished.forget(folder)
    return version


def warn_if_cut(kb: KnowledgeBase, model: Model) -> None:
    """Logs one warning per process if the knowledge base was built with longer passages than the model embeds."""
    if kb.config.passage_tokens > model.lengths.passage:
        _warn_once(kb.folder, kb.config.passage_tokens, model.lengths.passage)


@cache
def _warn_once(folder: Path, longest: int, embedded: int) -> None:
    _log.warning(
        "passages of %s have up to %d wordpieces, and the model embeds only the first %d: build the knowledge base with "
        "`--set passage_tokens=%d`",
        folder, longest, embedded, embedded,
    )  # fmt: skip


def _complete(kb: KnowledgeBase, model: Model, folder: Path, known: Vectors) -> Vectors:
    """Embeds the passages that have no vector, and publishes a version with their vectors -> the vectors of all passages."""
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
    """A callback that prints the progress of a build every few seconds.

    The loop that embeds calls this function, so a build that hangs prints nothing.
    """
    started = said = time.monotonic()

    def report_done(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= LOG_EVERY:
            said = now
            rate = done / (now - started)
            print(f"{done} of {total} passages embedded, {rate:.0f} a second", file=sys.stderr, flush=True)

    return report_done
