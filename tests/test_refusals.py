"""Items that actors refuse, on a cluster in the memory of this process whose clock the test moves."""

import logging
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from realm.errors import RealmError
from realm.ray_actors import AHEAD, _Pool, _Worker
from realm.refusals import OwnWork, Refused

SECONDS = 10.0
"""Time that a process needs for an item."""
EACH = 4
"""Actors of a machine."""


class Never(Exception):
    pass


class Died(Exception):
    pass


@dataclass(eq=False)
class Call:
    end: float
    answer: Callable[[], Any]


@dataclass(eq=False)
class Actor:
    prepare: Any
    begin: Any
    go_on: Any


class Cluster:
    """Takes the place of the module `ray`. The first machines refuse every item after some results, and all machines refuse the
    items `hard`. A call of the other machines dies now and then."""

    exceptions = SimpleNamespace(RayTaskError=Never, RayError=Died)

    def __init__(
        self,
        refusing: int = 0,
        after: int = 0,
        hard: Container[int] = (),
        takes: float = 0.001,
        deaths: int = 0,
    ):
        self.now, self.started, self.killed = 0.0, 0, 0
        self.refusing, self.after, self.hard, self.takes, self.deaths = refusing, after, hard, takes, deaths
        self.calls = count(1)

    def prepare(self) -> Callable[[int], Iterator[tuple[int, int]]]:
        raise AssertionError("an actor prepares its own function")

    def put(self, value: Any) -> Any:
        return value

    def kill(self, actor: Any) -> None:
        self.killed += 1

    def get(self, call: Call) -> Any:
        return call.answer()

    def wait(
        self, calls: list[Call], num_returns: int, timeout: float | None
    ) -> tuple[list[Call], list[Call]]:
        first = min(calls, key=lambda call: call.end)
        if timeout is None:
            self.now = max(self.now, first.end)
        return ([first], []) if first.end <= self.now else ([], calls)

    def remote(self, prepare: Any) -> Any:
        """An actor."""
        machine = self.started // EACH
        self.started += 1
        refuses = machine < self.refusing

        def results(number: int) -> Iterator[tuple[int, int]]:
            for step in range(4):
                if (refuses or number in self.hard) and step == self.after:
                    raise Refused("no key")
                yield number, step

        def answer(name: str, *values: Any) -> Any:
            if self.deaths and not refuses and next(self.calls) % 50 == 0:
                self.deaths -= 1
                raise Died
            return getattr(worker, name)(*values)

        def method(name: str, seconds: float) -> Any:
            return SimpleNamespace(
                remote=lambda *values: Call(self.now + seconds, lambda: answer(name, *values))
            )

        worker = _Worker(lambda: results)
        worker._function = results
        prepare = SimpleNamespace(remote=lambda: Call(self.now, lambda: f"machine {machine}"))
        seconds = self.takes if refuses else SECONDS / 4
        return Actor(prepare, method("begin", seconds), method("go_on", seconds))


def run(
    cluster: Cluster, actors: int, items: int, own: OwnWork[int, tuple[int, int]] | None
) -> Iterator[tuple[int, int]]:
    pool: _Pool[int, tuple[int, int]] = _Pool(cluster, cluster, cluster.prepare, own)
    for _ in range(actors):
        pool.start_actor()
    for item in range(items):
        pool.submit(item)
        yield from pool.results(AHEAD * actors)
    yield from pool.results(0)


def owned(cluster: Cluster, mine: list[int]) -> OwnWork[int, tuple[int, int]]:
    """Does an item in the time that an actor needs, and notes it."""

    def function(number: int) -> Iterator[tuple[int, int]]:
        mine.append(number)
        for step in range(4):
            cluster.now += SECONDS / 4
            yield number, step

    return OwnWork(function, lambda number: number % 100 == 50)


ALL = [(number, step) for number in range(400) for step in range(4)]


@pytest.mark.parametrize("takes", [0.001, 2 * SECONDS])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(("machines", "refusing"), [(4, 0), (4, 1), (16, 4), (4, 3)])
def test_every_result_comes_once_and_refusing_machines_do_not_attract_the_work(
    machines: int, refusing: int, after: int, takes: float, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, mine = Cluster(refusing, after, takes=takes, deaths=3), list[int]()
    with caplog.at_level(logging.WARNING):
        assert list(run(cluster, EACH * machines, 400, owned(cluster, mine))) == ALL
    helping = EACH * (machines - refusing)
    # The process of the command works beside the actors, and waits for the slowest of them at the end.
    assert cluster.now < 400 * SECONDS / helping * 1.5 + 10 * SECONDS
    assert len(mine) < 4 + 400 / helping + 4
    assert caplog.text.count("a machine of the Ray cluster gets no further work: no key") == refusing
    assert cluster.killed == EACH * refusing + 3


@pytest.mark.parametrize("machines", [1, 4])
def test_what_all_machines_refuse_is_done_here_and_each_machine_is_asked_once(
    machines: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, mine = Cluster(machines), list[int]()
    with caplog.at_level(logging.WARNING):
        assert list(run(cluster, EACH * machines, 400, owned(cluster, mine))) == ALL
    assert mine == list(range(400)) and cluster.killed == 0
    assert [one.getMessage() for one in caplog.records] == [
        "this process does work that the Ray cluster refused: no key"
    ]


@pytest.mark.parametrize("after", [0, 3])
def test_items_that_all_machines_refuse_end_no_machine(after: int) -> None:
    hard = range(100, 140)
    cluster, mine = Cluster(0, after, hard), list[int]()
    assert list(run(cluster, 16, 400, owned(cluster, mine))) == ALL
    assert set(mine) == {50, 150, 250, 350, *hard} and cluster.killed == 0
    # 44 items in this process, beside the others on 16 actors
    assert cluster.now < 44 * SECONDS + 400 * SECONDS / 16 + 5 * SECONDS


def test_a_refusal_that_nobody_expects_is_an_error() -> None:
    with pytest.raises(RealmError, match="refused its work: no key"):
        list(run(Cluster(1), 4, 20, None))
