"""Keeping the index fresh while training goes on (REALM section 3.3, "asynchronous MIPS refreshes").

A refresh is `realm index` run on a snapshot of the model, into the run's own folder:

    trainer                                   build (another process)
    snapshot -> RUN/snapshot  ------------->  embeds every passage, says how far it is in RUN/index.log
    goes on training with the old index       commits a new version of RUN/index, ends with exit code 0
    looks between two steps   <-------------
    swaps to the new version

This file is what the trainer sees: which version it searches, what it waits for (the first index only, and where it is told
to: `lag`, `max_age`), how an index ages, how an interrupted run goes on, and that the finished model finds its index.
`realm.train.refresh.build_process` sees a build to its end. With several ranks, rank 0 runs the builds and all swap at the
same step.

What a checkpoint needs to go on exactly is `place`: the version in use, and the build under way. What came after it is
forgotten by `first`: a run that was killed finds its index as the checkpoint left it.

Candidates found by an index that is some steps old do no harm by their age alone: they are scored anew by the live model.
docs/refresh.md has the picture.
"""

import contextlib
import copy
import math
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
from realm.errors import ConflictError, InputError, RealmError, reason
from realm.index.embedding import embed_passages
from realm.index.versions import IndexVersion, index_folder, publish
from realm.model.device import Precision, autocast
from realm.model.embedder import Embedder
from realm.model.folder import Model, read_manifest, save_model
from realm.search.exact import MipsIndex
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase
from realm.train.refresh.build_process import BuildConfig, Builder, StepTimes
from realm.train.refresh.frozen_passages import PassageStates

WARN, WIDEN = 0.5, 0.75
"""Shares of `max_age` from which an old index is said to be old, and searched with more care."""
WIDER = 4
"""How many times more candidates are retrieved and embedded anew then."""


@dataclass(frozen=True)
class RefreshConfig(BuildConfig):
    """When and where the index is rebuilt while training, and what happens when a build fails."""

    every: int = 500
    """Steps between two builds; one starts later if the last still runs (paper: about 500). 0: never."""
    in_background: bool = True
    """False: training waits for each build. For runs that must repeat exactly, and for a single GPU."""
    lag: int = 0
    """Steps from a snapshot to the use of its index, waited for if need be; 0: as soon as it is built. With a lag, runs with
    background builds repeat exactly too."""
    max_age: int = 0
    """Steps that an index may be old; 0: any. At half of it the run says so, from three quarters on it embeds four times as
    many candidates anew before it chooses, and at the limit it waits for the build."""
    search: Literal["live", "snapshot"] = "live"
    """Which query tower searches: the one that trains, or the one whose passage tower made the index (released code)."""
    write_through: bool = False
    """Puts the passage vectors of every step into the index in memory: they are fresh for free."""
    keep: int = 2
    """Index versions of a run that stay on disk; those that a checkpoint needs always do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("every", 0), ("lag", 0), ("max_age", 0), ("keep", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be {least} or more")
        if self.every and self.lag >= self.every:
            raise ValueError(f"lag is {self.lag}: it must be smaller than every, {self.every}")
        if self.every and 0 < self.max_age < self.every + self.lag:
            raise ValueError(
                f"max_age is {self.max_age}: with a build every {self.every} steps and a lag of {self.lag} an index "
                f"gets {self.every + self.lag} steps old"
            )


class IndexRefresher(AbstractContextManager["IndexRefresher"]):
    """Builds index versions for a run; leaving the `with` block stops a build that is still going."""

    def __init__(
        self,
        kb: KnowledgeBase,
        run_folder: Path,
        config: RefreshConfig,
        precision: Precision,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
        stopping: Callable[[], bool] = lambda: False,
    ):
        """`say` tells the person who watches; a run that is `stopping` does not wait for an age limit."""
        self._kb, self._config, self._precision = kb, config, precision
        self._say, self._stopping = say, stopping
        self._states: PassageStates | None = None
        self._builder = Builder(kb.folder, run_folder, config, precision, say)
        self._folder = self._builder.folder
        self._requested = 0
        """Step of the last snapshot."""
        self._building: int | None = None
        """The same while its index is not in use yet."""
        self._built = False
        """Whether that one is on disk."""
        self._newest = 0
        """Number of the last version that the trainer has seen."""
        self._age_limit_at = math.inf
        """Step at which the version in use is too old."""
        self._warned = -1
        self._embedder: Embedder | None = None
        """As it was at the last snapshot, where that one searches."""
        self._times = StepTimes()

    # -- between two steps ----------------------------------------------------------------------------------------

    def first(
        self,
        model: Model,
        step: int,
        place: dict[str, Any] | None = None,
        states: PassageStates | None = None,
    ) -> IndexVersion:
        """The index to start from: that of an interrupted run's `place` while it is there, else built now.

        What the interrupted run built after `place` is removed; the build that was under way there starts again. With
        `states` every build is one matrix product, done here and now.
        """
        self._device, self._states = model.device, states
        if place is not None:
            with contextlib.suppress(RealmError):  # removed by somebody, or damaged: a new one does as well
                return self._go_on(model, place)
        if distributed.is_first():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._requested, self._building, self._newest = step, None, 0
        self._remember(model)
        return self._load(distributed.from_first(self._publish_here(model, step)))

    def request(self, model: Model, step: int) -> None:
        """Starts a build from the model as it is, if one is due and none is under way; `step` steps are done."""
        every = self._config.every
        if not every or step - self._requested < every or self._building is not None:
            return
        self._requested = self._building = step
        self._built = False
        self._remember(model)
        if not self._config.in_background or self._states is not None:
            self._publish_here(model, step)
            self._built = True
        elif distributed.is_first():
            model.step = step
            save_model(model, self._builder.snapshot)
            self._builder.begin(step, self._newest, str(self._device))

    def poll(self, step: int) -> IndexVersion | None:
        """A version to use from now on, `step` steps being done; waits only for `lag` and `max_age`.

        Raises:
            InputError: builds failed more often than they may; the message names their log.
        """
        self._times.end(self._builder.running)
        number = distributed.from_first(self._look(step)) if self._building is not None else None
        version = None
        if number == 0:  # given up
            self._building = None
        elif number is not None:
            version = self._load(number)
            self._building, self._built = None, False
        self._times.begin(self._builder.running)
        return version

    def place(self, version: IndexVersion) -> dict[str, Any]:
        """What `first` needs to go on from here with this version in use; plain values and tensors."""
        self._age_limit_at = version.step + (self._config.max_age or math.inf)  # this one was not refused
        place: dict[str, Any] = {
            "version": version.number,
            "newest": self._newest,
            "requested": self._requested,
            "building": self._building,
            "written": version.index.written(),
        }
        if version.embedder is not None:
            place["searches"] = version.embedder.state_dict()
            if self._building is not None and self._embedder is not None:
                place["will_search"] = self._embedder.state_dict()
        return place

    def last(self, model: Model, step: int) -> IndexVersion:
        """The index of the finished model, built now; an older build that still runs is stopped."""
        self._builder.stop()
        self._requested, self._building = step, None
        self._remember(model)
        return self._load(distributed.from_first(self._publish_here(model, step)))

    @torch.no_grad()
    def hand_over(self, model: Model, step: int, version: IndexVersion, out: Path) -> None:
        """Publishes the finished model's index in the knowledge base, as `realm index` would of the model at `out`.

        It is `version` where these very weights made it, as a rule; where the embedder was set back, or moved on since,
        passages are embedded now. A knowledge base that cannot be written costs the index only.
        """
        model.step = step
        if not distributed.is_first():
            return
        folder = index_folder(self._kb, model)
        try:
            there = vectors.info_of(folder)
            if there is not None and there.corpus == self._kb.fingerprint:
                return  # an interrupted run had come this far, or the passage tower is the start's
            folder.mkdir(parents=True, exist_ok=True)
            made = vectors.read(self._folder, self._kb.keys_N, version.number)
            if made is not None and made.info.model == model.passage_fingerprint:
                publish(self._kb, model, str(out), folder, made.array)
                return
            with autocast(model.device, self._precision):
                array_ND = self._states.index(model.embedder.passage) if self._states else None
                publish(self._kb, model, str(out), folder, array_ND)
        except (RealmError, OSError) as error:
            self._say(
                f"the model's index could not be published: {reason(error)}; run `realm index --kb {self._kb.folder} "
                f"--model {out}`"
            )

    def sweep(self, places: Sequence[dict[str, Any]]) -> None:
        """Removes old versions from disk: all but the newest ones and those at the `place` of a checkpoint."""
        vectors.keep_versions(
            self._folder, self._config.keep, min((place["version"] for place in places), default=None)
        )

    # -- within a step --------------------------------------------------------------------------------------------

    def searcher(self, model: Model, version: IndexVersion) -> Model:
        """The model whose query tower searches this version."""
        return model if version.embedder is None else replace(model, embedder=version.embedder)

    def freshen(self, version: IndexVersion, model: Model, query_BD: Tensor, count: int, step: int) -> None:
        """Embeds the best `WIDER * count` hits anew where the index is near its age limit, so that they rank as they should."""
        age, limit = step - version.step, self._config.max_age
        if not limit or age < WARN * limit:
            return
        if self._warned != version.step:
            self._warned = version.step
            self._say(
                f"the index is {age} steps old, {limit} are allowed: its build is slow, see {self._builder.log}"
            )
        if age < WIDEN * limit:
            return
        hits = version.index.search(query_BD, WIDER * count).number_BK.cpu().numpy()
        numbers = np.unique(np.concatenate(distributed.gathered(np.unique(hits))))
        with autocast(model.device, self._precision):
            fresh = embed_passages(
                model.embedder.passage, self._kb.tokens, numbers, model.tokenizer, model.lengths, model.device
            )
        version.index.write(numbers, torch.from_numpy(fresh))

    def write_through(self, version: IndexVersion, number_BK: np.ndarray, passage_UD: Tensor) -> None:
        """Puts vectors that a step made into the index in memory, where that is asked for.

        `passage_UD` are those of the distinct numbers of `number_BK`, ascending, the null passage among them.
        """
        if not self._config.write_through:
            return
        numbers = np.unique(number_BK)
        real = numbers >= 0
        ours = numbers[real], passage_UD.detach()[torch.from_numpy(real).to(passage_UD.device)].half().cpu()
        for theirs in distributed.gathered(ours):
            version.index.write(*theirs)

    def describe(self, version: IndexVersion, step: int) -> dict[str, float]:
        """What a step's metrics say of its index: its age in steps, and whether a build runs beside it."""
        beside = distributed.count() * self._builder.running  # rank 0 alone has one, and metrics are means
        return {"index_age": step - version.step, "building": float(beside)}

    # -- edges ----------------------------------------------------------------------------------------------------

    def __exit__(self, *_: object) -> None:
        self._builder.stop()

    def _look(self, step: int) -> int | None:
        """Rank 0: the number of a version to swap in; 0 where its build was given up, none while it is not ready."""
        if not distributed.is_first():
            return None
        assert self._building is not None
        lag = self._config.lag
        due = step >= self._building + lag
        while True:
            if not self._built:
                how = self._builder.look()
                if how == "given up":
                    return 0
                self._built = how == "done"
            if self._built and due:
                return vectors.newest(self._folder)
            too_old = step > self._age_limit_at and not self._built and not self._stopping()
            if not too_old and not (due and lag):
                return None
            time.sleep(0.02)

    @torch.no_grad()
    def _publish_here(self, model: Model, step: int) -> int:
        """Rank 0 embeds every passage now -> the version's number."""
        model.step = step
        if not distributed.is_first():
            return 0
        started = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        with autocast(model.device, self._precision):
            array_ND = self._states.index(model.embedder.passage) if self._states else None
            number = publish(self._kb, model, str(self._builder.snapshot), self._folder, array_ND)
        self._builder.seconds = time.monotonic() - started
        return number

    def _remember(self, model: Model) -> None:
        """Keeps the embedder as it is now, where that one is to search its index."""
        if self._config.search == "snapshot":
            self._embedder = copy.deepcopy(model.embedder)

    def _load(self, number: int) -> IndexVersion:
        found = vectors.read(self._folder, self._kb.keys_N, number)
        if found is None:
            raise InputError(f"{self._folder} holds no index")
        if found.info.corpus != self._kb.fingerprint or len(found.missing):
            raise ConflictError(
                f"version {number} of {self._folder} was made of knowledge base {found.info.corpus}, this run reads "
                f"{self._kb.fingerprint} ({len(found.missing)} of {len(self._kb)} passages have no vector): "
                f"{self._kb.folder} was changed while training; run the command again"
            )
        self._newest = max(self._newest, found.version)
        return IndexVersion(
            MipsIndex(found.array, self._device),
            found.version,
            found.info.step,
            found.info.created,
            self._embedder,
            self._cost(number),
        )

    def _cost(self, number: int) -> dict[str, float]:
        """What a version cost: seconds, passages per second over all of them, seconds from its commit to here, and how many
        times longer a step takes beside a build."""
        seconds, slowdown = self._builder.seconds, self._times.slowdown()
        if not seconds:  # an earlier sitting built it, or another rank
            return {}
        cost = {
            "build_seconds": seconds,
            "build_passages_per_second": len(self._kb) / seconds,
            "swap_seconds": time.time() - vectors.committed_at(self._folder, number),
        }
        return cost if slowdown is None else {**cost, "build_slowdown": slowdown}

    # -- an interrupted run ----------------------------------------------------------------------------------------

    def _go_on(self, model: Model, place: dict[str, Any]) -> IndexVersion:
        self._newest, self._requested, self._building = place["newest"], place["requested"], place["building"]
        there = distributed.from_first(self._rewound(place["newest"]) if distributed.is_first() else False)
        if not there:
            raise InputError(f"{self._folder} has no version {place['newest']}")
        self._embedder = self._restored(model, place.get("searches"))
        version = self._load(place["version"])
        if place["written"] is not None:
            version.index.write(*place["written"])
        self._embedder = self._restored(model, place.get("will_search")) or self._embedder
        if self._building is not None and not distributed.from_first(self._built or self._has_snapshot()):
            self._building = None  # the next one is due `every` steps after it
        if self._building is not None and not self._built and distributed.is_first():
            self._builder.begin(self._building, self._newest, str(self._device))
        return version

    def _rewound(self, number: int) -> bool:
        """Makes `number` the newest version, or the one after it where that is of the build under way."""
        with contextlib.suppress(RealmError):
            self._built = self._building is not None and self._version_after(number)
            vectors.go_back(self._folder, number + self._built)
            return True
        return False

    def _version_after(self, number: int) -> bool:
        """Whether the build under way at a checkpoint was finished by the run that was killed after it."""
        newest = vectors.newest(self._folder)
        if newest is None or newest <= number:
            return False
        with contextlib.suppress(RealmError):
            info = vectors.info_of(self._folder, number + 1)
            return info is not None and info.step == self._building
        return False

    def _has_snapshot(self) -> bool:
        """Whether the snapshot is that of the build under way; it is, unless somebody removed it."""
        try:
            return bool(read_manifest(self._builder.snapshot)["step"] == self._building)
        except RealmError:
            return False

    def _restored(self, model: Model, states: dict[str, Tensor] | None) -> Embedder | None:
        if states is None:
            return None
        embedder = copy.deepcopy(model.embedder)
        embedder.load_state_dict(states)
        return embedder
