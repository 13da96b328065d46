"""Ends this rank when another rank is silent, for example because its machine has lost its power or its network.

The connections of a process that ends are closed, so the other ranks notice the end at once. A machine that falls silent closes
no connection, and a rank that waits for it would wait for many hours. Therefore each rank counts in a key of the store of
`torchrun`, and reads the keys of all ranks. A rank counts while it waits or builds an index too.
"""

import itertools
import os
import sys
import threading
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

INTERVAL = 5.0
"""Seconds between two heartbeats of a rank."""
SILENCE = 300.0
"""Seconds without a heartbeat after which a rank is silent. A call of a library that keeps Python from running other threads,
and a short failure of the network, delay heartbeats too."""


class Heartbeats:
    """The heartbeats of this rank, and the watch over the other ranks, in two threads that `stop` ends."""

    def __init__(self, store: Store, rank: int, count: int):
        self._store, self._rank = store, rank
        self._keys = [f"realm/heartbeat/{number}" for number in range(count)]
        self._missed = [0] * count
        """For each rank, the number of intervals since its last heartbeat. Not seconds: after a pause of all ranks together, no
        rank is silent."""
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._exchange, self._watch)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the heartbeats and the watch."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(INTERVAL)  # the store may not answer

    def _exchange(self) -> None:
        """Sends and reads heartbeats until `stop` is called, or until the store fails; then all ranks become silent."""
        heard = [b""] * len(self._keys)
        # Calls on one connection wait for each other, so the heartbeats need a connection of their own.
        store = self._store.clone()  # type: ignore[attr-defined]
        with suppress(dist.DistError, RuntimeError):
            for number in itertools.count():
                store.set(self._keys[self._rank], str(number))
                for rank, value in enumerate(store.multi_get(self._keys)):
                    if value != heard[rank]:
                        heard[rank], self._missed[rank] = value, 0
                if self._stopped.wait(INTERVAL):
                    return

    def _watch(self) -> None:
        """Ends this process if a rank is silent. This thread does not call the store: if the machine of the store is silent, a
        call waits longer than the timeout of the store."""
        while not self._stopped.wait(INTERVAL):
            self._missed[:] = [missed + 1 for missed in self._missed]
            silent = [rank for rank, missed in enumerate(self._missed) if missed * INTERVAL > SILENCE]
            if silent:
                # This rank counts too, so it is silent only if the store does not answer.
                whom = (
                    "the store of torchrun (on the machine of --rdzv-endpoint, or of rank 0)"
                    if self._rank in silent
                    else f"rank {', '.join(map(str, silent))}"
                )
                print(
                    f"realm: rank {self._rank} has heard nothing from {whom} for {SILENCE:g} s: if its machine or network has "
                    "failed, repeat the command without this machine, or after the repair",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(2)  # the main thread waits in a library
