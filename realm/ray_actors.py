"""Applies a function to items on a Ray cluster, with an actor per core or per GPU. Results have the order of the items.

The function gives any number of results for an item. An actor that is `RESULTS_AHEAD` results ahead of the caller waits, so
that an item with many results, such as a long file, needs little memory.

Ray restarts an actor that died only if a machine has a free core. But all cores are in use, so the items of this actor would
never be done. Therefore other actors do the items of an actor that died. In addition, a new actor is requested; it starts when
the cluster has a free core, for example on a machine that an autoscaler adds.

An actor can refuse an item (`realm.refusals`). The item goes to an actor of another machine. The process of the command does
the item itself if an actor of each machine has refused it, or if its results are needed now.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Literal, NamedTuple, TextIO, TypeVar, cast

from realm.errors import InputError, RealmError, first_line
from realm.refusals import OwnWork, Refused

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)
AHEAD = 2
"""Most items per actor that have begun or wait, so that all actors have work while the oldest item is not finished."""
RESULTS_AHEAD = 4
"""Number of unused results of an item at which the actor of this item waits."""
READING_CORES, TAGGING_CORES = 0.1, 0.9
"""Cores of an actor that reads files, and of an actor that tags texts. During a build, each core has one actor of each kind;
for most of the time, the readers wait."""
CONNECT_SECONDS = 10
"""Most seconds until a cluster accepts a connection."""
MACHINE_SECONDS = 300
"""Most seconds until a cluster has a machine with cores, as when Kubernetes has started only the head of the cluster."""
RAYLET_ENDED = "Ray's process on this machine has ended"
START_AGAIN = "start Ray again, then repeat the command"
REFUSALS = 3
"""Number of items that a machine refused and another machine then did, without an item that the machine did itself in between,
after which the machine gets no further work."""
TRIES = 3
"""The work ends with an error if this number of actors die during the same item, or one after another at their start."""


def _move_messages() -> None:
    """Moves messages of Ray from standard output to standard error, so that the output of a command can be parsed.

    Ray prints such a message when a process of the cluster was killed, and has no setting for the place. Called before Ray is
    imported.
    """
    # repeated messages would be printed at the end, by the main thread
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if not isinstance(sys.stdout, _WithoutRay):
        sys.stdout = cast(TextIO, _WithoutRay(sys.stdout))


class _WithoutRay:
    """Standard output for all threads except the thread in which Ray prints its messages."""

    def __init__(self, stdout: TextIO):
        self._stdout = stdout

    def write(self, text: str) -> int:
        is_ray = threading.current_thread().name == "ray_listen_error_messages"
        return (sys.stderr if is_ray else self._stdout).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of where the independent parts of a command run."""

    engine: Literal["local", "ray"] = "local"
    """"local": on this machine. "ray": on all cores or GPUs of a Ray cluster; its machines need the same files and paths."""
    ray_address: str = ""
    """Address of the Ray cluster, as for `ray.init`. With "", the address in RAY_ADDRESS is used, else a cluster that runs on
    this machine; if there is none, a cluster is started on this machine."""

    def __post_init__(self) -> None:
        if self.ray_address and self.engine != "ray":
            raise ValueError(f'ray_address is {self.ray_address}, which needs engine = "ray"')


def map_on_ray(
    prepare: Callable[[], Callable[[Item], Iterable[Result]]],
    items: Iterator[Item],
    address: str = "",
    prefer_gpus: bool = False,
    cores_each: float = 1.0,
    own: OwnWork[Item, Result] | None = None,
) -> Generator[Result, None, None]:
    """The results of a function for all items, in order. Items are read while results are used.

    Each actor calls `prepare` once, and applies the function that `prepare` returns. There is an actor per core; with
    `prefer_gpus`, there is an actor per GPU if the cluster has GPUs at the start. Machines that join later get actors too, as
    long as there are further items. If two calls run at the same time, the sum of their `cores_each` must be at most 1, because
    otherwise the actors of the second call would wait for a free core. All actors end with the iterator.

    If an actor dies, another actor applies the function to the same item again, and skips the results that were received.
    Therefore the function must give the same results for the same item. If it raises `Refused`, another actor or `own` gives
    the rest of the results.

    Raises:
        InputError: Ray is not installed, or there is no cluster at the address.
        RealmError: `TRIES` actors died during the same item, or at their start.
        Exception: `prepare` or the function raised this exception.
    """
    ray = connect(address)
    on_gpus = prefer_gpus and ray.cluster_resources().get("GPU", 0) > 0
    resources = {"num_cpus": 0, "num_gpus": 1} if on_gpus else {"num_cpus": cores_each}
    actor_class = ray.remote(_Worker).options(**resources, scheduling_strategy="SPREAD")
    pool: _Pool[Item, Result] = _Pool(ray, actor_class, prepare, own)
    count = 0
    try:
        for item in items:
            units = int(ray.cluster_resources().get("GPU" if on_gpus else "CPU", 0))
            for _ in range(max(1, units) - count):  # a cluster may start without machines
                pool.start_actor()
                count += 1
            pool.submit(item)
            yield from pool.results(unfinished=AHEAD * count)
        yield from pool.results(unfinished=0)
    finally:
        pool.close()


class _Worker:
    """The class of the actors."""

    def __init__(self, prepare: Callable[[], Callable[[Any], Iterable[Any]]]):
        self._prepare = prepare

    def prepare(self) -> str:
        """Prepares the function -> the machine of the actor."""
        import ray

        self._function = self._prepare()
        return str(ray.get_runtime_context().get_node_id())

    def begin(self, item: Any, received: int) -> _Received[Any]:
        """The first result for an item, without the results that were already received."""
        try:
            self._rest = islice(self._function(item), received, None)
            self._next = list(islice(self._rest, 1))
        except Refused as refused:
            return _Received([], is_last=False, refusal=str(refused))
        return self.go_on()

    def go_on(self) -> _Received[Any]:
        """The next result for the item."""
        found = self._next
        try:
            self._next = list(islice(self._rest, 1))
        except Refused as refused:  # `found` is computed again by another process
            return _Received([], is_last=False, refusal=str(refused))
        return _Received(found, is_last=not self._next)


class _Received(NamedTuple, Generic[Result]):
    """A result for an item as a list of one value; the list is empty if there is no further result."""

    results: list[Result]
    is_last: bool
    refusal: str | None = None
    """The reason, if the actor refuses the item."""


@dataclass(eq=False)
class _Entry(Generic[Item, Result]):
    """An item and its results."""

    item: Item
    results: deque[Result] = field(default_factory=deque)
    """Results that are received and not used."""
    received: int = 0
    """Number of results that are received, used or not."""
    is_done: bool = False
    deaths: int = 0
    """Number of actors that died during this item since the last result."""
    held: Any = None
    """The actor that waits until results of this item are used, if there is one."""
    is_own: bool = False
    """Whether the process of the command gives the rest of the results."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Machine on which an actor refused the item -> the reason."""


class _Pool(Generic[Item, Result]):
    """The actors, and the items whose results are not used yet."""

    def __init__(
        self,
        ray: Any,
        actor_class: Any,
        prepare: Callable[[], Callable[[Item], Iterable[Result]]],
        own: OwnWork[Item, Result] | None,
    ):
        self._ray, self._actor_class, self._own = ray, actor_class, own
        self._prepare = ray.put(prepare)
        self._entries: deque[_Entry[Item, Result]] = deque()
        """All entries, in order."""
        self._waiting: deque[_Entry[Item, Result]] = deque()
        """Entries on which no actor works."""
        self._calls: dict[Any, tuple[Any, _Entry[Item, Result] | None]] = {}
        """Running call -> its actor, and the entry on which the actor works; None while the actor calls `prepare`."""
        self._idle: deque[Any] = deque()
        self._machines: dict[Any, str] = {}
        """Started actor -> its machine."""
        self._refusals: Counter[str] = Counter()
        """Machine -> number of items that it refused and another machine did, since the machine did an item itself."""
        self._failed_starts = 0
        self._is_warned = False

    def start_actor(self) -> None:
        """Requests one more actor."""
        actor = self._actor_class.remote(self._prepare)
        self._calls[actor.prepare.remote()] = actor, None

    def submit(self, item: Item) -> None:
        """Adds an item at the end."""
        entry: _Entry[Item, Result] = _Entry(item, is_own=self._own is not None and self._own.only(item))
        self._entries.append(entry)
        if not entry.is_own:
            self._waiting.append(entry)
        while self._take_ended(0):
            pass
        self._assign()

    def results(self, unfinished: int) -> Iterator[Result]:
        """The next results in order. Waits while more than `unfinished` items are not finished."""
        while self._entries:
            first = self._entries[0]
            if first.results:
                result = first.results.popleft()
                self._go_on(first)
                yield result
            elif first.is_done:
                self._entries.popleft()
            elif len(self._entries) <= unfinished:
                return
            elif first.is_own:
                yield from self._own_results(first)
            else:
                self._assign()
                if not first.is_own:
                    self._take_ended(None)

    def _own_results(self, first: _Entry[Item, Result]) -> Iterator[Result]:
        """The rest of the results of the first entry, from this process. Meanwhile, the actors get further work."""
        assert self._own is not None
        for result in islice(self._own.function(first.item), first.received, None):
            while self._take_ended(0):
                pass
            yield result
        first.is_done = True

    def close(self) -> None:
        """Ends all actors."""
        if (
            not self._ray.is_initialized()
        ):  # the connection broke; Ray would start a new cluster, to end actors in it
            return
        held = [entry.held for entry in self._entries if entry.held is not None]
        for actor in [*self._idle, *held, *(actor for actor, _ in self._calls.values())]:
            self._ray.kill(actor)

    def _assign(self) -> None:
        """Gives the waiting entries to the idle actors. Before, ends the idle actors of machines that get no further work.

        If the first of all entries waits and no actor is idle, the first entry gets an actor that waits for the use of later
        results. Otherwise the work would stop when the actor of the first entry died and the cluster has no room for another.
        """
        for actor in [one for one in self._idle if self._is_given_up(one)]:
            self._idle.remove(actor)
            self._end(actor)
        machines = set(self._machines.values())
        for entry in [one for one in self._waiting if one.refusals]:
            if entry is self._entries[0] or machines <= entry.refusals.keys():
                entry.is_own = True
                self._waiting.remove(entry)
                if not self._is_warned:
                    self._is_warned = True
                    reason = next(iter(entry.refusals.values()))
                    _log.warning("this process does work that the Ray cluster refused: %s", reason)
        if not self._idle and self._entries and self._entries[0] in self._waiting:
            last = next((entry for entry in reversed(self._entries) if entry.held is not None), None)
            if last is not None:
                self._idle.append(last.held)
                last.held = None
                self._waiting.remove(self._entries[0])
                self._waiting.extendleft((last, self._entries[0]))
        for entry in list(self._waiting):
            actor = next((one for one in self._idle if self._machines[one] not in entry.refusals), None)
            if actor is not None:
                self._idle.remove(actor)
                self._waiting.remove(entry)
                self._calls[actor.begin.remote(entry.item, entry.received)] = actor, entry

    def _go_on(self, entry: _Entry[Item, Result]) -> None:
        """Requests the next result of an entry whose actor waits, if few results are unused."""
        if entry.held is not None and len(entry.results) < RESULTS_AHEAD:
            self._calls[entry.held.go_on.remote()] = entry.held, entry
            entry.held = None

    def _take_ended(self, seconds: float | None) -> bool:
        """Waits for the end of a call, takes the result of the call, and gives the actor of the call the next work.

        Waits at most `seconds`, or without limit if `seconds` is None. Returns whether a call has ended."""
        if not self._calls:
            return False
        try:
            ended, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=seconds)
        except OSError as error:  # the connection to Ray's own process on this machine broke
            raise RealmError(f"{RAYLET_ENDED} ({first_line(error)}): {START_AGAIN}") from None
        if not ended:
            return False
        actor, entry = self._calls.pop(ended[0])
        try:
            # The result is fetched now, because it would be lost if its machine died.
            result = self._ray.get(ended[0])
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:  # the actor or its machine died
            self._replace(actor, entry, error)
        else:
            if entry is None:
                self._failed_starts, self._machines[actor] = 0, result
                self._idle.append(actor)
            elif result.refusal is not None:
                self._refuse(entry, actor, result.refusal)
            else:
                self._receive(entry, actor, result)
        self._assign()
        return True

    def _receive(self, entry: _Entry[Item, Result], actor: Any, found: _Received[Result]) -> None:
        entry.results.extend(found.results)
        entry.received += len(found.results)
        entry.is_done, entry.deaths = found.is_last, 0
        if entry.is_done:
            if not self._is_given_up(actor):
                self._refusals[self._machines[actor]] = 0
            self._blame(entry)
            self._idle.append(actor)
        else:
            entry.held = actor
            self._go_on(entry)

    def _refuse(self, entry: _Entry[Item, Result], actor: Any, reason: str) -> None:
        if self._own is None:
            raise RealmError(f"a process on the Ray cluster refused its work: {reason}")
        entry.refusals[self._machines[actor]] = reason
        self._waiting.appendleft(entry)
        self._idle.append(actor)

    def _blame(self, done: _Entry[Item, Result]) -> None:
        """Counts the machines that refused what another machine has done."""
        for machine, reason in done.refusals.items():
            self._refusals[machine] += 1
            if self._refusals[machine] == REFUSALS:
                _log.warning("a machine of the Ray cluster gets no further work: %s", reason)

    def _is_given_up(self, actor: Any) -> bool:
        """Whether the machine of an actor gets no further work."""
        return self._refusals[self._machines[actor]] >= REFUSALS

    def _end(self, actor: Any) -> None:
        self._ray.kill(actor)
        self._machines.pop(actor, None)

    def _replace(self, actor: Any, entry: _Entry[Item, Result] | None, error: Exception) -> None:
        self._end(actor)  # the actor may be alive, if only its result was lost
        if entry is None:
            self._failed_starts += 1
        else:
            entry.deaths += 1
            self._waiting.appendleft(entry)
        if TRIES in (self._failed_starts, entry and entry.deaths):
            what = "while they started" if entry is None else "during the same work"
            raise RealmError(f"{TRIES} processes on the Ray cluster died {what}: {first_line(error)}")
        self.start_actor()


def connect(address: str) -> Any:
    """The module `ray`, connected to the cluster at this address (see `EngineConfig`).

    Raises:
        InputError: Ray is not installed, or there is no cluster at the address.
    """
    # Ray sends usage statistics to its makers only if the user has set this variable.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _move_messages()
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise InputError('"ray" needs Ray: pip install "realm-lm[ray]"') from None
    if ray.is_initialized():
        return ray
    given = address or os.environ.get("RAY_ADDRESS", "")
    if ":" in given:  # checked here, because Ray would try to connect for minutes
        host, _, port = given.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise InputError(f"cannot reach the Ray cluster {given}: {first_line(error)}") from None
    try:
        with warnings.catch_warnings():
            # Ray forks to start a cluster, and the child processes do not call Lance.
            warnings.filterwarnings("ignore", message="lance is not fork-safe")
            ray.init(address or None, log_to_driver=False, configure_logging=False)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        what = (
            f"cannot connect to the Ray cluster {address}"
            if address
            else "cannot start Ray or connect to its cluster"
        )
        hint = (
            ""
            if "RAY_AUTH_MODE" in os.environ or isinstance(error, ValueError)  # ValueError: no valid address
            else " (set RAY_AUTH_MODE=token if the cluster is protected by a token)"
        )
        raise InputError(f"{what}: {first_line(error)}{hint}") from None
    if not given.startswith("ray://"):  # otherwise Ray needs no process on this machine
        _end_with_raylet(ray)
    return ray


def _end_with_raylet(ray: Any) -> None:
    """Starts a thread that ends this process when Ray's own process on this machine ends. Ray would end this process too, but
    would only print the last lines of its logs."""
    own = ray.get_runtime_context().get_node_id()
    raylet = socket.socket(socket.AF_UNIX)
    raylet.connect(next(node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == own))

    def wait() -> None:
        with raylet, suppress(ConnectionResetError):
            raylet.recv(1)  # returns when the other side has ended, because it sends nothing
        with suppress(Exception):  # the program may be disconnecting
            if ray.is_initialized() and ray.get_runtime_context().get_node_id() == own:
                print(f"realm: {RAYLET_ENDED}: {START_AGAIN}", file=sys.stderr, flush=True)
                os._exit(2)  # the main thread may wait for Ray

    threading.Thread(target=wait, daemon=True).start()


def machines(ray: Any) -> list[dict[str, Any]]:
    """The machines of the cluster that have cores, as `ray.nodes` describes them. Waits until there is one.

    Raises:
        InputError: there is none after `MACHINE_SECONDS`.
    """
    end = None
    while not (found := [one for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU")]):
        if end is None:
            _log.warning(
                "no machine of the Ray cluster has cores yet: waiting for at most %g s", MACHINE_SECONDS
            )
            end = time.monotonic() + MACHINE_SECONDS
        if time.monotonic() > end:
            raise InputError(
                f"no machine of the Ray cluster has had cores for {MACHINE_SECONDS:g} s: start one with "
                "`ray start --address`, or set minReplicas of a group of workers (KubeRay) to 1 or more"
            )
        time.sleep(0.5)
    return found
