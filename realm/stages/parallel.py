"""Runs stages in several processes at the same time.

Each stage is a process with its share of torch's threads and, on a machine with several GPUs, with one of the GPUs. The output
of a stage is appended to a log of this stage. The processes end when the process that started them ends, also by a kill.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from realm.environment import usable_cores
from realm.errors import RealmError
from realm.stages.runner import Printer, Record, Stage, command_line, spent_words
from realm.watchdog import in_words
from realm.worker_threads import WorkerThreads

_PROGRAM = """
import signal, sys
from realm.watchdog import end_with_parent
signal.signal(signal.SIGTERM, signal.default_int_handler)  # a command that is stopped removes its temporary files
end_with_parent()
from realm.cli import program
sys.exit(program())
"""
"""Runs the command in the arguments."""


class Chain(NamedTuple):
    """Stages that run one after another."""

    name: str
    stages: Iterable[Stage]
    """A stage is taken from the iterable when the stages before it are done, so that it can depend on their results."""
    after: Sequence[str] = ()
    """Names of the chains that must be done before this chain begins."""

    @classmethod
    def of(cls, stage: Stage, after: Sequence[str] = ()) -> "Chain":
        """A chain of one stage, which has the name of the stage."""
        return cls(stage.name, [stage], after)


def run_chains(chains: Iterable[Chain], record: Record, logs: Path, jobs: int) -> None:
    """Runs chains, at most `jobs` of them at the same time. The logs of the stages are files in the folder `logs`.

    If a stage fails, or this process gets SIGINT, SIGTERM or SIGHUP, no further stage is started, and the running stages get
    SIGTERM: a training stage then saves a checkpoint and ends. (A shell can start processes that ignore SIGINT.)

    Raises:
        RealmError: a stage failed; the message has its last line of output and the path of its log.
        KeyboardInterrupt: the process got a signal.
    """
    waiting, finished = list(chains), set[str]()
    assert {name for chain in waiting for name in chain.after} <= {chain.name for chain in waiting}
    running = 0
    ended: queue.SimpleQueue[tuple[Chain, BaseException | None]] = queue.SimpleQueue()
    processes = _Processes(record, logs, jobs)

    def run(chain: Chain) -> None:
        try:
            processes.run(chain)
        except BaseException as error:
            ended.put((chain, error))
        else:
            ended.put((chain, None))

    with _signals_interrupt():
        threads = WorkerThreads(jobs, "stages")
        try:
            while waiting or running:
                ready = [chain for chain in waiting if finished.issuperset(chain.after)]
                for chain in ready[: jobs - running]:
                    waiting.remove(chain)
                    running += 1
                    threads.submit(partial(run, chain))
                chain, error = ended.get()
                if error is not None:
                    raise error
                running -= 1
                finished.add(chain.name)
        except BaseException:
            processes.interrupt()
            raise
        finally:
            threads.close()
    processes.printer.ends()


class _Processes:
    """The processes of the stages that are running."""

    def __init__(self, record: Record, logs: Path, jobs: int):
        self.printer = Printer(record)
        self._record, self._logs = record, logs
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._interrupted = False
        self._slots: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for environment in environments(jobs, _devices(), os.environ):
            self._slots.put(environment)
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, chain: Chain) -> None:
        """Runs the stages of a chain that are not done."""
        environment = self._slots.get()
        try:
            for stage in chain.stages:
                with self._lock:
                    skipped = self.printer.skips(stage)
                if not skipped:
                    self._run(stage, environment)
        finally:
            self._slots.put(environment)

    def interrupt(self) -> None:
        """Starts no further stage, sends SIGTERM to the running stages, and waits for their end.

        A further interruption, for example by a second Ctrl-C, kills the stages.
        """
        with self._lock:
            self._interrupted = True
            running = list(self._running)
        try:
            for process in running:
                _send(process, signal.SIGTERM)
            if running:
                count = f"{len(running)} commands" if len(running) > 1 else "a command"
                print(f"stopping {count}; press Ctrl-C again to kill", file=sys.stderr, flush=True)
            for process in running:
                process.wait()
        except KeyboardInterrupt:
            for process in running:
                _send(process, signal.SIGKILL)
            raise

    def _run(self, stage: Stage, environment: dict[str, str]) -> None:
        log = self._logs / f"{stage.name.replace(' ', '-')}.log"
        with self._record.timing(stage), log.open("ab") as output:
            start = output.tell()
            with self._lock:
                if self._interrupted:
                    raise KeyboardInterrupt
                self.printer.begins(stage)
                command = [sys.executable, "-c", _PROGRAM, *stage.argv]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=environment,
                )
                self._running.add(process)
            code = process.wait()
            with self._lock:
                self._running.discard(process)
            if process.stdin is not None:
                process.stdin.close()
            if code:
                # A command that was killed has printed no reason.
                why = in_words(code) if code < 0 else _last_line(log, start) or in_words(code)
                raise RealmError(f"{command_line(stage)}: {why} (log: {log})")
        with self._lock:
            print(f"({spent_words(self._record.spent(stage))}: {stage.name})", flush=True)


def environments(jobs: int, devices: Sequence[str], given: Mapping[str, str]) -> list[dict[str, str]]:
    """Environment variables of the processes that run at the same time: `given`, and each process's share of the machine.

    Each process has as many threads of torch as its share of the cores, unless `given` has a number of threads. With several
    GPUs, each process has one.

    >>> [one["CUDA_VISIBLE_DEVICES"] for one in environments(3, ["4", "5"], {})]
    ['4', '5', '4']
    """
    threads = str(max(1, usable_cores() // jobs))
    shares = [{"OMP_NUM_THREADS": threads, **given} for _ in range(jobs)]
    if len(devices) > 1:
        for place, share in enumerate(shares):
            share["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    return shares


def _devices() -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to a stage and its child processes, as a terminal does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _last_line(log: Path, start: int) -> str:
    """The last line of a log that is not empty, from the byte `start` on; "" if there is none."""
    lines = log.read_bytes()[start:].decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("realm: ")


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, so that running stages are stopped and not killed."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
