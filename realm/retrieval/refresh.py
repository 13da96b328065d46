"""Keeping the index fresh while training goes on (REALM section 3.3, "asynchronous MIPS refreshes").

A refresh is `realm index` run on a snapshot of the model, into the run's own folder:

    trainer                                   build (another process)
    snapshot -> RUN/snapshot  ------------->  embeds every passage
    goes on training with the old index       commits a new version of RUN/index, ends with exit code 0
    polls between two steps  <-------------
    swaps to the new version

Training waits for the first index only. The exit code is the message: a build that died is an error that names its log.
Candidates found by an index that is some steps old do no harm by their age alone: they are scored anew by the live model.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from realm.config import InputError
from realm.model.device import autocast
from realm.model.folder import Model, save_model
from realm.retrieval import vectors
from realm.retrieval.index import IndexVersion, publish
from realm.retrieval.knowledge_base import KnowledgeBase
from realm.retrieval.mips import MipsIndex

KEEP = 2
"""Index versions of a run that stay on disk."""


@dataclass(frozen=True)
class RefreshConfig:
    """When and where the index is rebuilt while training."""

    every: int = 500
    """Steps between two builds; one starts later if the last still runs (paper: about 500). 0: never."""
    in_background: bool = True
    """False: training waits for each build. For runs that must repeat exactly, and for a single GPU."""
    threads: int = 1
    """CPU threads of a background build."""


class IndexRefresher(AbstractContextManager["IndexRefresher"]):
    """Builds index versions for a run; leaving the `with` block stops a build that is still going."""

    def __init__(self, kb: KnowledgeBase, run_folder: Path, config: RefreshConfig, precision: str):
        self._kb, self._config, self._precision = kb, config, precision
        self._snapshot, self._folder = run_folder / "snapshot", run_folder / "index"
        self._log = run_folder / "index.log"
        self._build: subprocess.Popen[bytes] | None = None
        self._ready: IndexVersion | None = None
        self._building_step = 0

    def first(self, model: Model, step: int, place: tuple[int, int] | None = None) -> IndexVersion:
        """The index to start from: the one of an interrupted run's `place` while it is there, else built now."""
        self._device = model.device
        if place is not None:
            number, self._building_step = place
            with contextlib.suppress(InputError):  # swept away since, or damaged: a new one does as well
                return self._load(number)
        self._building_step = step
        return self._publish_here(model, step)

    def place(self, version: IndexVersion) -> tuple[int, int]:
        """What `first` needs to go on from here: the version in use, and the step of the last build."""
        return version.number, self._building_step

    def request(self, model: Model, step: int) -> None:
        """Starts a build from the model as it is, if one is due and none is running; `step` steps are done."""
        every = self._config.every
        if not every or step - self._building_step < every or self._build is not None:
            return
        self._building_step = step
        if not self._config.in_background:
            self._ready = self._publish_here(model, step)
            return
        model.step = step
        save_model(model, self._snapshot)
        settings = {
            "folder": self._folder,
            "threads": self._config.threads,
            "precision": self._precision,
            "keep": KEEP,
            "device": self._device,
        }
        command = [
            sys.executable,
            "-m",
            "realm",
            "index",
            "--kb",
            str(self._kb.folder),
            "--model",
            str(self._snapshot),
        ]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        with self._log.open("ab") as log:
            self._build = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def poll(self) -> IndexVersion | None:
        """A version finished since the last call, if any; never waits.

        Raises:
            InputError: the build failed; the message names its log.
        """
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        if self._build is None or (code := self._build.poll()) is None:
            return None
        self._build = None
        if code != 0:
            raise InputError(
                f"the index build of step {self._building_step} failed with exit code {code}: see {self._log}"
            )
        return self._load()

    def last(self, model: Model, step: int) -> IndexVersion:
        """The index of the finished model, built now; an older build that still runs is stopped."""
        self._stop()
        self._building_step = step
        return self._publish_here(model, step)

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._snapshot, ignore_errors=True)

    def _stop(self) -> None:
        if self._build is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._build.pid, signal.SIGKILL)
            self._build.wait()
            self._build = None

    @torch.no_grad()
    def _publish_here(self, model: Model, step: int) -> IndexVersion:
        self._folder.mkdir(parents=True, exist_ok=True)
        model.step = step
        with autocast(model.device, self._precision):
            publish(self._kb, model, str(self._snapshot), self._folder)
        vectors.keep_versions(self._folder, KEEP)
        return self._load()

    def _load(self, number: int | None = None) -> IndexVersion:
        found = vectors.read(self._folder, self._kb.keys_N, number)
        if found is None:
            raise InputError(f"{self._folder} holds no index")
        if len(found.missing):
            raise InputError(
                f"{self._folder} has no vector for {len(found.missing)} of {len(self._kb)} passages: "
                f"{self._kb.folder} was changed while training; run the command again"
            )
        return IndexVersion(MipsIndex(found.array, self._device), found.version, found.info.step)
