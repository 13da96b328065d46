"""Items that actors refuse, on a cluster in the memory of this process whose clock the test moves."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from realm.errors import RealmError
from realm.ray_actors import AHEAD, _Pool, _Worker
from realm.refusals import OwnWork, Refused

SECONDS = 10.0
"""Time that a process needs for an item."""


class Never(Exception):
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
    """Takes the place of the module `ray`. Some actors refuse every item after some results."""

    exceptions = SimpleNamespace(RayTaskError=Never, RayError=Never)

    def __init__(self, refusing: int, after: int = 0):
        self.now, self.started, self.killed = 0.0, 0, 0
        self.refusing, self.after = refusing, after

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
        self.started += 1
        refuses = self.started <= self.refusing

        def results(number: int) -> Iterator[tuple[int, int]]:
            for step in range(4):
                if refuses and step == self.after:
                    raise Refused("no key")
                yield number, step

        def calls(name: str, seconds: float) -> Any:
            return SimpleNamespace(
                remote=lambda *values: Call(self.now + seconds, lambda: getattr(worker, name)(*values))
            )

        worker = _Worker(lambda: results)
        seconds = 0.001 if refuses else SECONDS / 4
        return Actor(calls("prepare", 0.0), calls("begin", seconds), calls("go_on", seconds))


def run(
    cluster: Cluster, actors: int, items: int, own: OwnWork[int, tuple[int, int]] | None
) -> Iterator[tuple[int, int]]:
    pool: _Pool[int, tuple[int, int]] = _Pool(cluster, cluster, None, own)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(("actors", "refusing"), [(16, 0), (16, 1), (16, 15), (64, 16), (1, 1), (8, 8)])
def test_every_result_comes_once_and_refusing_actors_do_not_attract_the_work(
    actors: int, refusing: int, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, mine = Cluster(refusing, after), list[int]()
    with caplog.at_level(logging.WARNING):
        assert list(run(cluster, actors, 400, owned(cluster, mine))) == ALL
    helping = actors - refusing
    # The process of the command works beside the actors, and in the end waits for the slowest of them.
    assert cluster.now < 400 * SECONDS / max(helping, 1) * 1.5 + 10 * SECONDS
    if helping:
        assert len(mine) <= 4 + 400 / helping + 2
        assert caplog.text.count("gets no further work: no key") == cluster.killed == refusing
    else:
        assert len(mine) == 400
        assert caplog.text.count("this process does what the Ray cluster refused: no key") == 1


def test_a_refusal_that_nobody_expects_is_an_error() -> None:
    with pytest.raises(RealmError, match="refused its work: no key"):
        list(run(Cluster(1), 4, 20, None))
