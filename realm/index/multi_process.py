"""Embeds passages on several devices: one worker process per device embeds an even share of the passages.

A worker opens the knowledge base and the model, sends the number of embedded passages after each batch, and sends the vectors
at the end. If a worker is killed, another worker takes its place, and continues after the last vectors that the killed one
saved. If a worker fails, the whole build fails. If the parent process ends, a worker ends when it sends its next message.

Axis letters: N passages, n passages of one worker, D embedding.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from realm.errors import InputError, RealmError
from realm.index.embedding import IndexConfig, embed_passages, open_worker
from realm.model.device import autocast
from realm.progress import progress
from realm.store import unfinished
from realm.store.knowledge_base import KnowledgeBase
from realm.watchdog import in_words

MOST_KILLS = 3
"""The build fails if the processes of one device were killed this many times: the next one would probably be killed too."""


class Share(NamedTuple):
    """The passages that a worker embeds, and the settings of the worker."""

    kb: Path
    corpus: str
    """Fingerprint of the knowledge base, which ensures that passages have the same numbers in all processes."""
    model_path: str
    folder: Path
    """Folder of the index."""
    config: IndexConfig
    device: str
    first: int
    step: int
    """The worker embeds the passages `first`, `first + step`, `first + 2 step` and so on, so all workers get long and short
    passages."""


def embed_on_devices(
    kb: KnowledgeBase,
    model_path: str,
    folder: Path,
    config: IndexConfig,
    report_done: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Vectors of all passages -> [N, D] float16. `report_done` is called with the number of finished passages.

    Raises:
        RealmError: a worker failed, or the workers of a device were killed `MOST_KILLS` times.
    """
    devices = config.devices
    spawn, count = multiprocessing.get_context("spawn"), len(devices)
    done, parts = [0] * count, [np.zeros((0, 0), dtype=np.float16)] * count
    with contextlib.ExitStack() as stack:
        workers, kills = {}, [0] * count

        def start(place: int) -> None:
            share = Share(kb.folder, kb.fingerprint, model_path, folder, config, devices[place], place, count)
            ours, theirs = spawn.Pipe(duplex=False)
            worker = spawn.Process(target=_work, args=(share, theirs), daemon=True)
            worker.start()
            stack.callback(worker.join)
            stack.callback(worker.kill)
            theirs.close()  # so that the end of the worker closes the pipe
            workers[ours] = place, worker

        for place in range(count):
            start(place)
        bar = stack.enter_context(
            progress(total=len(kb), description="embed", unit="passage", shown=report_done is None)
        )
        while workers:
            for pipe in wait(list(workers)):
                assert isinstance(pipe, Connection)
                place, worker = workers[pipe]
                try:
                    said = pipe.recv()
                except (EOFError, OSError):  # the worker ended, perhaps in the middle of a message
                    worker.join()
                    code = worker.exitcode or 0
                    kills[place] += code < 0
                    if code < 0 and kills[place] < MOST_KILLS:
                        del workers[pipe]
                        start(place)
                        continue
                    raise InputError(
                        f"the process that embeds on {devices[place]} failed with {in_words(code)}"
                    ) from None
                if isinstance(said, str):
                    raise InputError(f"{devices[place]}: {said}")
                if isinstance(said, np.ndarray):
                    parts[place] = said
                    del workers[pipe]
                    continue
                done[place] = max(done[place], said)  # a new worker counts from the saved vectors on
                bar.update(sum(done) - bar.n)
                if report_done is not None:
                    report_done(sum(done))
    vectors_ND = np.empty((len(kb), parts[0].shape[1]), dtype=np.float16)
    for place, part_nD in enumerate(parts):
        vectors_ND[place::count] = part_nD
    return vectors_ND


def _work(share: Share, pipe: Connection) -> None:
    # Ctrl-C sends SIGINT to the whole process group; the parent process ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):  # the parent process has ended
        try:
            pipe.send(_embed(share, pipe.send))
        except RealmError as error:
            pipe.send(str(error))


def _embed(share: Share, report_done: Callable[[int], None]) -> np.ndarray:
    if share.config.threads:
        torch.set_num_threads(share.config.threads)
    kb, model = open_worker(share.kb, share.corpus, share.model_path, share.device)
    numbers = np.arange(share.first, len(kb), share.step)
    name, dim = f"{share.first}-of-{share.step}", model.embedder.config.dim
    with (
        autocast(model.device, share.config.precision),
        unfinished.kept(
            share.folder, model.compute_passage_fingerprint(), name, kb.keys_N[numbers], dim
        ) as kept,
    ):
        return embed_passages(model, kb.tokens, numbers, description=None, report_done=report_done, kept=kept)
