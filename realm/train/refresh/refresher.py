"""Refreshes the index during training (REALM section 3.3, "asynchronous MIPS refreshes").

A refresh runs `realm index` on a snapshot of the model, and writes into the folder of the run:

    trainer                                   build (another process)
    snapshot -> RUN/snapshot  ------------->  embeds every passage, writes its progress to RUN/index.log
    trains with the old version               commits a new version of RUN/index, ends with exit code 0
    polls between two steps   <-------------
    loads the new version

This file decides which version the trainer searches, when the trainer waits (for the first index, and for `lag`), and how an
interrupted run resumes. It also publishes the index of the finished model. `realm.train.refresh.build_process` runs the builds.
Builds for which the trainer waits run in the process of the trainer, unless the settings name another device or a Ray cluster.
With several ranks, each rank then embeds a part of the passages. Rank 0 runs all other builds. All ranks change to the new
version at the same step.

A checkpoint contains `state_dict`, that is, the version in use and the build that is running, so that a run resumes exactly.
`build_initial` removes the versions that the interrupted run built after the checkpoint.

The model that is being trained scores the candidates again, so an old index changes which candidates are found, but not the
scores of the candidates. docs/refresh.md shows the timeline.
"""

import contextlib
import copy
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from realm import distributed
from realm.errors import ConflictError, DamagedError, RealmError, at_least, reason
from realm.index.versions import KEPT_VERSIONS, IndexVersion, index_folder, publish
from realm.model.device import Precision, autocast
from realm.model.embedder import Embedder
from realm.model.folder import Model, save_model
from realm.model.manifest import read_manifest
from realm.search.shards import divided_index, own_passages
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase
from realm.store.tables.table import committed
from realm.train.refresh.build_process import BuildConfig, Builder, StepTimes
from realm.train.refresh.cached_states import CachedPassageStates
from realm.train.refresh.divided_build import embed_together
from realm.train.sharding import whole, whole_model


@dataclass(frozen=True)
class RefreshConfig(BuildConfig):
    """When and where the index is rebuilt during training."""

    every: int = 500
    """Steps between two builds (paper: about 500). A build starts later if the previous build is still running. 0: the index
    is not rebuilt."""
    in_background: bool = True
    """False: training waits for each build, and the processes of `torchrun` share the build. Use False for runs that must be
    repeatable exactly, and on GPUs that all train."""
    lag: int = 0
    """Steps from a snapshot to the use of the index of this snapshot; training waits for the build if necessary. 0: the index
    is used as soon as it is built. With a lag, runs with background builds are repeatable exactly too."""
    search: Literal["live", "snapshot"] = "live"
    """Query tower that embeds the queries for a search. "live": the query tower that is being trained. "snapshot": the query
    tower of the snapshot from which the index was built (released code)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, every=0, lag=0)
        if self.every and self.lag >= self.every:
            raise ValueError(f"lag is {self.lag}: it must be smaller than every, {self.every}")


class IndexRefresher(AbstractContextManager["IndexRefresher"]):
    """Builds index versions for a run; leaving the `with` block kills a running build."""

    def __init__(
        self,
        kb: KnowledgeBase,
        run_folder: Path,
        config: RefreshConfig,
        precision: Precision,
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ):
        """`report` shows one line to the user."""
        self._kb, self._config, self._precision, self._report = kb, config, precision, report
        self._states: CachedPassageStates | None = None
        self._builder = Builder(kb.folder, run_folder, config, precision, report)
        self._folder = self._builder.folder
        self._requested = 0
        """Step at which the last build was requested."""
        self._building: int | None = None
        """Step of the snapshot whose index is being built or is not in use yet; None if there is no such snapshot."""
        self._built = False
        """Whether the index of `_building` is on disk."""
        self._newest = 0
        """Largest number of a version that the trainer has loaded."""
        self._embedder: Embedder | None = None
        """The embedder of the last snapshot if `search` is "snapshot", else None."""
        self._times = StepTimes()

    # -- between two steps ----------------------------------------------------------------------------------------

    def build_initial(
        self,
        model: Model,
        step: int,
        saved: dict[str, Any] | None = None,
        states: CachedPassageStates | None = None,
    ) -> IndexVersion:
        """The index version with which a run starts or resumes.

        `saved` is the `state_dict` in the checkpoint of an interrupted run. The version that was in use at this checkpoint is
        loaded, later versions are removed, and the build that was running at this checkpoint is started again. If `saved` is
        None, or if the version is not on disk, a new version is built. If `states` (cached passage states) are given, every
        build is one matrix product in this process.
        """
        self._device, self._states = model.device, states
        if saved is not None:
            # If the version was removed or is damaged, a new version is built.
            with contextlib.suppress(RealmError):
                return self._resume(model, saved)
        if distributed.is_main_process():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._requested, self._building, self._newest = step, None, 0
        self._copy_embedder(model)
        self._announce(step)
        return self._load(distributed.broadcast(self._build_now(model, step)))

    def request(self, model: Model, step: int) -> None:
        """Starts a build from the current weights if a build is due after `step` steps and no build is running."""
        every = self._config.every
        if not every or step - self._requested < every or self._building is not None:
            return
        self._requested = self._building = step
        self._built = False
        self._copy_embedder(model)
        if not self._config.in_background or self._states is not None:
            self._build_now(model, step)
            self._built = True
            return
        saved = whole_model(model)
        saved.step = step
        if distributed.is_main_process():
            self._begin(saved)

    def poll(self, step: int) -> IndexVersion | None:
        """The new version to use after `step` steps, or None. Waits only for a build whose index must be used now (`lag`).

        Raises:
            RealmError: a build failed more than `RESTARTS` times; the message has the path of the log.
        """
        self._times.end(self._builder.running)
        number = distributed.broadcast(self._ready_version(step)) if self._building is not None else None
        version = None
        if number is not None:
            version = self._load(number)
            self._building, self._built = None, False
        self._times.begin(self._builder.running)
        return version

    def state_dict(self, version: IndexVersion) -> dict[str, Any]:
        """The state from which `build_initial` resumes, as plain values and tensors; `version` is the version in use."""
        state: dict[str, Any] = {
            "version": version.number,
            "newest": self._newest,
            "requested": self._requested,
            "building": self._building,
        }
        if version.embedder is not None:
            state["searches"] = version.embedder.state_dict()
            if self._building is not None and self._embedder is not None:
                state["will_search"] = self._embedder.state_dict()
        return state

    def build_final(self, model: Model, step: int) -> IndexVersion:
        """Kills a running build, and builds the index of the finished model while training waits -> the new version."""
        self._builder.stop()
        self._requested, self._building = step, None
        self._copy_embedder(model)
        self._announce(step)
        return self._load(distributed.broadcast(self._build_now(model, step)))

    @torch.no_grad()
    def publish_final(self, model: Model, step: int, version: IndexVersion, out: Path) -> None:
        """Publishes the index of the finished model in the knowledge base, as `realm index` would for the model at `out`.

        The vectors of `version` are reused if they were computed with the weights of the finished model. Otherwise (the
        embedder was set back or trained after the build of `version`) this process embeds the passages now. If the knowledge
        base cannot be written, a line with the reason is printed, and no error is raised.
        """
        model = whole_model(model)
        model.step = step
        if not distributed.is_main_process():
            return
        folder = index_folder(self._kb, model)
        try:
            existing = vectors.info_of(folder)
            if existing is not None and existing.corpus == self._kb.fingerprint:
                return  # an interrupted run published the index, or the passage tower did not change
            folder.mkdir(parents=True, exist_ok=True)
            made = vectors.read(self._folder, self._kb.keys_N, version.number)
            if made is not None and made.info.model == model.compute_passage_fingerprint():
                publish(self._kb, model, str(out), folder, made.array)
                return
            self._embed(model, str(out), folder)
        except (RealmError, OSError) as error:
            self._report(
                f"the index of the model could not be written to the knowledge base: {reason(error)}; run "
                f"`realm index --kb {self._kb.folder} --model {out}`"
            )

    def prune(self, saved: Sequence[dict[str, Any]]) -> None:
        """Removes old versions from disk, except the newest versions and the versions that checkpoints need.

        `saved` has the `state_dict` of each checkpoint.
        """
        vectors.keep_versions(
            self._folder, KEPT_VERSIONS, min((state["version"] for state in saved), default=None)
        )

    # -- within a step --------------------------------------------------------------------------------------------

    def query_model(self, model: Model, version: IndexVersion) -> Model:
        """The model whose query tower embeds the queries for a search of `version`."""
        return model if version.embedder is None else replace(model, embedder=version.embedder)

    def metrics(self, version: IndexVersion, step: int) -> dict[str, float]:
        """Age of the index in steps, and whether a build is running, for the metrics of a step."""
        # Only rank 0 has a build process, and metrics are means over the ranks.
        running = distributed.world_size() * self._builder.running
        return {"index_age": step - version.step, "building": float(running)}

    def __exit__(self, *_: object) -> None:
        self._builder.stop()

    # -- builds ---------------------------------------------------------------------------------------------------

    def _ready_version(self, step: int) -> int | None:
        """On rank 0, the number of the new version if the version is ready for use; None otherwise."""
        if not distributed.is_main_process():
            return None
        assert self._building is not None
        due = step >= self._building + self._config.lag
        while True:
            if not self._built:
                self._built = self._builder.poll() == "done"
            if self._built and due:
                return vectors.newest(self._folder)
            if not (due and self._config.lag):
                return None
            time.sleep(0.02)

    def _build_now(self, model: Model, step: int) -> int:
        """Builds an index, and training waits -> the number of the new version on rank 0, and 0 on the other ranks."""
        model = whole_model(model)
        model.step = step
        if self._waits_for_child:
            return self._wait_for_child(model) if distributed.is_main_process() else 0
        started = time.monotonic()
        array_ND = None
        if distributed.world_size() > 1 and self._states is None:
            with torch.no_grad(), autocast(model.device, self._precision):
                array_ND = embed_together(self._kb, model, self._builder.parts)
        if not distributed.is_main_process():
            return 0
        self._folder.mkdir(parents=True, exist_ok=True)
        number = self._embed(model, str(self._builder.snapshot), self._folder, array_ND)
        self._builder.seconds = time.monotonic() - started
        return number

    def _wait_for_child(self, model: Model) -> int:
        """Builds an index with a whole model in another process -> the number of the new version."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begin(model)
        while self._builder.poll() == "running":
            time.sleep(0.02)
        number = vectors.newest(self._folder)
        assert number is not None  # the build was done
        return number

    @property
    def _waits_for_child(self) -> bool:
        """Whether the builds for which training waits run in another process, on the devices or the cluster of the settings."""
        return self._states is None and self._config.apart

    def _announce(self, step: int) -> None:
        """Says that training waits for a build that shows no progress here."""
        if self._waits_for_child and distributed.is_main_process():
            self._report(
                f"training waits for the index of step {step}; the log of its build is {self._builder.log}"
            )

    def _begin(self, model: Model) -> None:
        """Starts a build in another process from a snapshot of a whole model."""
        save_model(model, self._builder.snapshot)
        self._builder.begin(model.step, vectors.newest(self._folder) or 0, str(self._device))

    @torch.no_grad()
    def _embed(self, model: Model, name: str, folder: Path, array_ND: np.ndarray | None = None) -> int:
        """Publishes vectors in `folder` -> the number of the new version. Without `array_ND`, all passages are embedded now."""
        with autocast(model.device, self._precision):
            if self._states is not None:
                array_ND = self._states.index(model.embedder.passage)
            return publish(self._kb, model, name, folder, array_ND)

    def _copy_embedder(self, model: Model) -> None:
        """Keeps a copy of the current embedder if `search` is "snapshot"."""
        if self._config.search == "snapshot":
            self._embedder = _embedder_of(model)

    def _load(self, number: int) -> IndexVersion:
        keys_N = self._kb.keys_N[own_passages(len(self._kb))]
        found = vectors.read(self._folder, keys_N, number)
        if found is None:
            raise DamagedError(f"{self._folder} holds no index")
        if found.info.corpus != self._kb.fingerprint or len(found.missing):
            raise ConflictError(
                f"version {number} of {self._folder} was made of knowledge base {found.info.corpus}, this run reads "
                f"{self._kb.fingerprint} ({len(found.missing)} of {len(keys_N)} passages have no vector): "
                f"{self._kb.folder} was changed while training; run the command again"
            )
        self._newest = max(self._newest, found.version)
        return IndexVersion(
            divided_index(found.array, len(self._kb), self._device),
            found.version,
            found.info.step,
            found.info.created,
            self._embedder,
            self._cost(number),
        )

    def _cost(self, number: int) -> dict[str, float]:
        """Cost of a version: seconds of the build, passages per second, seconds from the commit to the first use, and how many
        times longer a training step takes during a build."""
        seconds, slowdown = self._builder.seconds, self._times.slowdown()
        if not seconds:  # the version was built before an interruption, or by another rank
            return {}
        cost = {
            "build_seconds": seconds,
            "build_passages_per_second": len(self._kb) / seconds,
            "swap_seconds": time.time() - committed(self._folder / vectors.TABLE, number),
        }
        return cost if slowdown is None else {**cost, "build_slowdown": slowdown}

    # -- resuming -------------------------------------------------------------------------------------------------

    def _resume(self, model: Model, saved: dict[str, Any]) -> IndexVersion:
        self._newest, self._requested, self._building = saved["newest"], saved["requested"], saved["building"]
        rewound = distributed.broadcast(
            self._rewind(saved["newest"]) if distributed.is_main_process() else False
        )
        if not rewound:
            raise DamagedError(f"{self._folder} has no version {saved['newest']}")
        self._embedder = self._embedder_from(model, saved.get("searches"))
        version = None
        with contextlib.suppress(RealmError):
            version = self._load(saved["version"])
        # All ranks resume, or all build a new index.
        if distributed.any_rank(version is None) or version is None:
            raise DamagedError(f"{self._folder} has no version {saved['version']}")
        self._embedder = self._embedder_from(model, saved.get("will_search")) or self._embedder
        if self._building is not None and not distributed.broadcast(self._built or self._has_snapshot()):
            # The snapshot is lost. The next build is due `every` steps after the lost snapshot.
            self._building = None
        if self._building is not None and not self._built and distributed.is_main_process():
            self._builder.begin(self._building, self._newest, str(self._device))
        return version

    def _rewind(self, number: int) -> bool:
        """Makes `number` the newest version -> whether this was possible.

        If the build that was running at the checkpoint is finished, its version `number + 1` is made the newest.
        """
        with contextlib.suppress(RealmError):
            self._built = self._building is not None and self._finished_after(number)
            vectors.go_back(self._folder, number + self._built)
            return True
        return False

    def _finished_after(self, number: int) -> bool:
        """Whether the build that was running at the last checkpoint was finished before the interruption."""
        newest = vectors.newest(self._folder)
        if newest is None or newest <= number:
            return False
        with contextlib.suppress(RealmError):
            info = vectors.info_of(self._folder, number + 1)
            return info is not None and info.step == self._building
        return False

    def _has_snapshot(self) -> bool:
        """Whether the snapshot that was being built is still on disk."""
        try:
            return bool(read_manifest(self._builder.snapshot)["step"] == self._building)
        except RealmError:
            return False

    def _embedder_from(self, model: Model, states: dict[str, Tensor] | None) -> Embedder | None:
        if states is None:
            return None
        embedder = _embedder_of(model)
        embedder.load_state_dict(states)
        return embedder


def _embedder_of(model: Model) -> Embedder:
    """A copy of the embedder of a model, with whole weights."""
    embedder = whole(model.embedder)
    return copy.deepcopy(embedder) if embedder is model.embedder else embedder
