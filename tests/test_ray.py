"""A Ray cluster of two nodes on this machine: the same results as one process, whatever dies."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from realm import ray_actors
from realm.cli import main
from realm.errors import InputError, RealmError
from realm.index.embedding import IndexConfig
from realm.index.versions import build_index, complete_index
from realm.model.folder import load_model
from realm.ray_actors import RESULTS_AHEAD, EngineConfig, map_on_ray
from realm.refusals import OwnWork, Refused
from realm.store import unfinished, vectors
from realm.store.ingest import build
from realm.store.knowledge_base import KnowledgeBase
from realm.store.settings import KnowledgeBaseConfig
from realm.text.salient_spans import load_tagger
from realm.tokens.tokenizer import Tokenizer
from tests.conftest import tiny_documents
from tests.test_distributed import SETTINGS, assert_same_curve
from tests.train.refresh.refreshing import expected
from tests.train.stages import metrics, pretraining


def squares(folder: Path, seconds: float) -> Callable[[int], list[int]]:
    """Prepares the function that notes each call by a file, and squares."""

    def square(number: int) -> list[int]:
        (folder / f"{number} {os.getpid()}").touch()
        time.sleep(seconds)
        return [number * number]

    return square


def pids(folder: Path) -> set[int]:
    return {int(path.name.split()[1]) for path in folder.iterdir()}


def test_cluster_that_is_not_there_is_one_line() -> None:
    ray.shutdown()  # an open connection would be used
    with pytest.raises(InputError, match=r"cannot reach the Ray cluster 127\.0\.0\.1:1: "):
        next(map_on_ray(deadly, iter(range(5)), "127.0.0.1:1"))


def test_cluster_of_the_environment_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InputError, match=r"cannot reach the Ray cluster 127\.0\.0\.1:1: "):
        next(map_on_ray(deadly, iter(range(5)), ""))


def test_the_end_of_ray_on_this_machine_is_one_line_and_starts_no_cluster() -> None:
    lost = MagicMock()
    lost.wait.side_effect = BrokenPipeError(32, "Broken pipe")
    lost.is_initialized.return_value = False
    pool: ray_actors._Pool[int, int] = ray_actors._Pool(lost, MagicMock(), deadly, None)
    pool.start_actor()
    with pytest.raises(RealmError, match=r"Broken pipe\): start Ray again, then repeat the command"):
        pool.submit(1)
    pool.close()
    lost.kill.assert_not_called()


HEAD = {"Alive": True, "Resources": {"memory": 1.0}}
"""The head of a cluster with `num-cpus: "0"`, as KubeRay has."""
WORKER = {"Alive": True, "Resources": {"CPU": 8.0}}


def test_a_cluster_that_has_only_its_head_is_waited_for(caplog) -> None:
    young = MagicMock()
    young.nodes.side_effect = [[HEAD], [HEAD, {**WORKER, "Alive": False}], [HEAD, WORKER]]
    assert ray_actors.machines(young) == [WORKER]
    assert caplog.messages == ["no machine of the Ray cluster has cores yet: waiting for at most 300 s"]


def test_a_cluster_that_stays_without_workers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actors, "MACHINE_SECONDS", 0.1)
    lonely = MagicMock()
    lonely.nodes.return_value = [HEAD]
    with pytest.raises(
        InputError, match=r"^no machine of the Ray cluster has had cores for 0\.1 s: start one "
    ):
        ray_actors.machines(lonely)


@pytest.mark.slow
def test_results_are_in_order_and_both_nodes_work(cluster, tmp_path) -> None:
    found = list(map_on_ray(partial(squares, tmp_path, 0.1), iter(range(20)), cluster.address))
    assert found == [number**2 for number in range(20)]
    assert len(pids(tmp_path)) == 2


@pytest.mark.slow
def test_items_are_read_while_results_are_used(cluster, tmp_path) -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    results = map_on_ray(partial(squares, tmp_path, 0.0), items(), cluster.address)
    assert next(results) == 0 and len(read) < 10
    results.close()
    assert len(list(tmp_path.iterdir())) < 10


@pytest.mark.slow
def test_work_of_a_killed_process_is_done_by_others(cluster, tmp_path) -> None:
    first: set[int] = set()

    def until_another_process_works() -> Iterator[int]:
        for number in range(300):
            if first and pids(tmp_path) - first:
                return
            yield number

    results = map_on_ray(partial(squares, tmp_path, 0.3), until_another_process_works(), cluster.address)
    assert next(results) == 0
    first |= pids(tmp_path)
    os.kill(min(first), signal.SIGKILL)
    found = list(results)
    assert found == [number**2 for number in range(1, len(found) + 1)]
    assert pids(tmp_path) > first  # another process took the place of the killed process


@pytest.mark.slow
def test_work_of_a_killed_node_is_done_by_the_other(mortal_cluster, tmp_path) -> None:
    results = map_on_ray(partial(squares, tmp_path, 0.3), iter(range(12)), mortal_cluster.address)
    assert next(results) == 0
    kill_node(mortal_cluster)
    assert list(results) == [number**2 for number in range(1, 12)]


def kill_node(cluster: Cluster) -> list[int]:
    """Kills the node to which no program is connected -> the processes that worked there, which end a little later."""
    node = cluster.worker_nodes.copy().pop()
    (raylet,) = node.all_processes["raylet"]
    children = Path(f"/proc/{raylet.process.pid}/task/{raylet.process.pid}/children").read_text().split()
    there = [pid for pid in workers() if str(pid) in children]
    cluster.remove_node(node, allow_graceful=False)
    return there


@pytest.mark.slow
def test_machine_that_joins_later_works_too(cluster, tmp_path) -> None:
    results = map_on_ray(partial(squares, tmp_path, 0.2), iter(range(120)), cluster.address)
    assert next(results) == 0
    joined = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    assert list(results) == [number**2 for number in range(1, 120)]
    assert len(pids(tmp_path)) == 3
    cluster.remove_node(joined)


def countings(folder: Path) -> Callable[[int], Iterator[tuple[int, int]]]:
    """Prepares the function that gives thirty results for an item, and notes each result by a file."""

    def count(number: int) -> Iterator[tuple[int, int]]:
        for step in range(30):
            (folder / f"{number}-{step} {os.getpid()}").touch()
            yield number, step

    return count


COUNTED = [(number, step) for number in range(4) for step in range(30)]


@pytest.mark.slow
def test_process_waits_until_results_of_its_item_are_used(cluster, tmp_path) -> None:
    results = map_on_ray(partial(countings, tmp_path), iter(range(4)), cluster.address)
    found = [next(results) for _ in range(3)]
    time.sleep(2)
    assert len(list(tmp_path.iterdir())) <= 2 * (3 + RESULTS_AHEAD + 2)
    assert [*found, *results] == COUNTED


class Neighbour:
    """An actor of other work on the cluster."""


@pytest.mark.slow
def test_item_of_a_killed_process_goes_on_in_a_waiting_process_if_no_core_is_free(cluster, tmp_path) -> None:
    results = map_on_ray(partial(countings, tmp_path), iter(range(4)), cluster.address)
    found = [next(results) for _ in range(3)]
    time.sleep(1)  # both processes wait
    neighbour = ray.remote(Neighbour).options(num_cpus=1).remote()  # gets the core of the killed process
    (first,) = {int(path.name.split()[1]) for path in tmp_path.glob("0-*")}
    os.kill(first, signal.SIGKILL)
    try:
        assert [*found, *results] == COUNTED
        assert {int(path.name.split()[1]) for path in tmp_path.glob("0-29 *")} != {first}
    finally:
        ray.kill(neighbour)


def deadly() -> Callable[[int], list[int]]:
    def die(number: int) -> list[int]:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return [number]

    return die


@pytest.mark.slow
def test_item_that_kills_every_process_ends_the_work(cluster) -> None:
    with pytest.raises(RealmError, match="3 processes on the Ray cluster died during the same work"):
        list(map_on_ray(deadly, iter(range(5)), cluster.address))


def refusing() -> Callable[[int], list[int]]:
    raise InputError("no such model")


@pytest.mark.slow
def test_error_of_the_work_is_the_error_of_the_call(cluster) -> None:
    with pytest.raises(InputError, match=r"^no such model$"):
        list(map_on_ray(refusing, iter(range(5)), cluster.address))


def test_address_without_the_engine_is_one_line(tiny_kb, tiny_model_folder, capsys) -> None:
    command = ["index", "--kb", str(tiny_kb.folder), "--model", str(tiny_model_folder)]
    assert main([*command, "--ray-address", "head:6379"]) == 2
    assert (
        capsys.readouterr().err
        == 'realm: --set [index]: ray_address is head:6379, which needs engine = "ray"\n'
    )


def test_cluster_embeds_the_vectors_of_one_process_and_continues(
    cluster, tiny_kb, tiny_model, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("realm.index.ray_embedding.CHUNK", 8)
    monkeypatch.setattr(unfinished, "WORTH_KEEPING", 1)
    config = IndexConfig("ray", cluster.address, precision="fp32")
    half = np.arange(len(tiny_kb) // 2)
    model, dim = tiny_model.compute_passage_fingerprint(), tiny_model.embedder.config.dim
    marked = np.full((len(half), dim), 7, dtype=np.float16)  # vectors that an interrupted build has saved
    with unfinished.kept(tmp_path, model, "ray", tiny_kb.keys_N, dim) as kept:
        assert kept is not None
        kept.add(half, marked)
    build_index(tiny_kb, str(tiny_model_folder), config, tmp_path)
    found = vectors.read(tmp_path, tiny_kb.keys_N)
    assert found is not None and len(found.missing) == 0
    np.testing.assert_array_equal(found.array[half], marked)
    rest = slice(len(half), None)
    np.testing.assert_allclose(found.array[rest], expected(tiny_kb, tiny_model)[rest], atol=4e-3)
    assert [path.name for path in tmp_path.glob("unfinished*")] == []


@pytest.mark.slow
def test_vectors_are_those_of_one_process_if_processes_of_the_cluster_are_killed(
    cluster, tiny_kb, tiny_model, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("realm.index.ray_embedding.CHUNK", 2)
    killed: list[int] = []

    def kill() -> None:
        end = time.monotonic() + 120
        while not killed and time.monotonic() < end:
            killed.extend([number] if (number := killed_workers()) else [])
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    build_index(
        tiny_kb, str(tiny_model_folder), IndexConfig("ray", cluster.address, precision="fp32"), tmp_path
    )
    killer.join()
    assert killed
    found = vectors.read(tmp_path, tiny_kb.keys_N)
    assert found is not None and len(found.missing) == 0
    np.testing.assert_allclose(found.array, expected(tiny_kb, tiny_model), atol=4e-3)


def pausing(
    prepare: Callable[[], Callable[[np.ndarray], list[np.ndarray]]], begun: Path, removed: Path
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Prepares the function whose second half of calls notes itself by a file and waits until `removed` exists."""
    embed = prepare()

    def pause(number_n: np.ndarray) -> list[np.ndarray]:
        if number_n[0] >= 14:
            (begun / f"{number_n[0]} {os.getpid()}").touch()
            while not removed.exists():
                time.sleep(0.05)
        return embed(number_n)

    return pause


@pytest.mark.slow
def test_vectors_are_those_of_one_process_if_a_node_of_the_cluster_is_killed(
    mortal_cluster, tiny_kb, tiny_model, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    begun, removed, out = (tmp_path / name for name in ("begun", "removed", "out"))
    begun.mkdir()

    def paused(prepare: Callable[[], Any], *others: Any, **settings: Any) -> Iterator[np.ndarray]:
        return map_on_ray(partial(pausing, prepare, begun, removed), *others, **settings)

    monkeypatch.setattr("realm.index.ray_embedding.CHUNK", 2)
    monkeypatch.setattr("realm.index.ray_embedding.map_on_ray", paused)

    def kill() -> None:
        end = time.monotonic() + 120
        while len(pids(begun)) < 2 and time.monotonic() < end:  # each node embeds a chunk
            time.sleep(0.05)
        try:
            ending = kill_node(mortal_cluster)
            while any(Path(f"/proc/{pid}").exists() for pid in ending) and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            removed.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    build_index(
        tiny_kb, str(tiny_model_folder), IndexConfig("ray", mortal_cluster.address, precision="fp32"), out
    )
    killer.join()
    assert len(list(begun.iterdir())) > 7  # of the seven chunks, one was given to both nodes
    found = vectors.read(out, tiny_kb.keys_N)
    assert found is not None and len(found.missing) == 0
    np.testing.assert_allclose(found.array, expected(tiny_kb, tiny_model), atol=4e-3)


def killed_workers() -> int:
    """Kills all processes of the cluster that work -> their number."""
    found = 0
    for pid in workers():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            found += 1
    return found


def workers() -> list[int]:
    """The processes of the cluster that work."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            found += [int(path.parent.name)] if b"ray::_Worker" in path.read_bytes() else []
    return found


@pytest.mark.slow
def test_training_with_indexes_from_a_cluster_is_that_of_one_process(
    cluster, tiny_kb, tiny_model_folder, tmp_path
) -> None:
    for name, more in {
        "local": [],
        "ray": ["refresh.engine=ray", f"refresh.ray_address={cluster.address}"],
    }.items():
        words = pretraining(tiny_kb, tiny_model_folder, [*SETTINGS, *more])
        assert main([*words, "--out", str(tmp_path / name)]) == 0
    assert_same_curve(tmp_path / "ray", tmp_path / "local")
    steps = [line["index_step"] for line in metrics(tmp_path / "ray") if "index_step" in line]
    assert steps == [0, 4, 8, 12]


@pytest.mark.slow
def test_index_command_with_a_cluster_searches_as_that_of_one_process(
    cluster, tiny_kb, tiny_model_folder, tmp_path
) -> None:
    found = []
    for name, more in {"local": [], "ray": ["--engine", "ray", "--ray-address", cluster.address]}.items():
        shutil.copytree(tiny_kb.folder, tmp_path / name)
        command = ["index", "--kb", str(tmp_path / name), "--model", str(tiny_model_folder)]
        assert main([*command, "--set", "precision=fp32", *more]) == 0
        kb, model = KnowledgeBase.open(tmp_path / name), load_model(str(tiny_model_folder))
        index = complete_index(kb, model, str(tiny_model_folder)).index
        found.append(index.search(index.rows(np.arange(len(kb))), 6))
    local, on_ray = found
    torch.testing.assert_close(local.score_BK, on_ray.score_BK, atol=4e-3, rtol=4e-3)
    gap_B = (local.score_BK[:, :-1] - local.score_BK[:, 1:]).min(dim=1).values
    clear_B = gap_B > 0.02  # more than rounding
    assert clear_B.sum() > 10
    assert torch.equal(local.number_BK[clear_B, :5], on_ray.number_BK[clear_B, :5])


@pytest.mark.slow
def test_cluster_tags_the_names_of_one_process(cluster, tmp_path) -> None:
    tokenizer = Tokenizer.train((document.text for document in tiny_documents()), 200)
    local, on_ray = (
        _built(tmp_path / engine, tokenizer, engine, cluster.address) for engine in ("local", "ray")
    )
    assert local.fingerprint == on_ray.fingerprint and len(local) > 10
    everything = np.arange(len(local))
    assert local.passages(everything) == on_ray.passages(everything)
    assert any(passage.spans for passage in local.passages(everything))


def _built(folder: Path, tokenizer: Tokenizer, engine: Any, address: str) -> KnowledgeBase:
    tagger = load_tagger("rules", 1, EngineConfig(engine, address if engine == "ray" else ""))
    build(folder, tiny_documents(), KnowledgeBaseConfig(passage_tokens=40), tokenizer, tagger)
    return KnowledgeBase.open(folder)


# -- reading files


def refusing_one(folder: Path, after: int) -> Callable[[int], Iterator[tuple[int, int]]]:
    """Prepares a function with five results per item. The first process that calls it refuses all items after some results."""

    def results(number: int) -> Iterator[tuple[int, int]]:
        first = folder / "first"
        with suppress(FileExistsError):
            os.symlink(str(os.getpid()), first)
        refuses = os.readlink(first) == str(os.getpid())
        for step in range(5):
            if refuses and step == after:
                raise Refused("no key")
            (folder / f"{number}-{step} {os.getpid()}").touch()
            yield number, step
        time.sleep(0.05)

    return results


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3])
def test_items_that_a_process_refuses_are_done_by_others(after, cluster, tmp_path, caplog) -> None:
    def here(number: int) -> Iterator[tuple[int, int]]:
        own.append(number)
        for step in range(5):
            time.sleep(0.1)
            yield number, step

    own: list[int] = []
    work = OwnWork(here, lambda number: number % 10 == 7)
    found = map_on_ray(partial(refusing_one, tmp_path, after), iter(range(100)), cluster.address, own=work)
    assert list(found) == [(number, step) for number in range(100) for step in range(5)]
    assert set(own) >= set(range(7, 100, 10)) and len(own) < 50  # the other process does most of the work
    assert "a machine of the Ray cluster gets no further work: no key" in caplog.text


@pytest.mark.slow
def test_items_that_all_processes_refuse_are_done_here(cluster, tmp_path) -> None:
    own: OwnWork[int, int] = OwnWork(lambda number: [number], lambda number: False)
    found = map_on_ray(partial(refusing_all, tmp_path), iter(range(9)), cluster.address, own=own)
    assert list(found) == list(range(9))


def refusing_all(folder: Path) -> Callable[[int], list[int]]:
    """Prepares a function that refuses all items."""

    def refuse(number: int) -> list[int]:
        raise Refused(f"{folder} is not here")

    return refuse
