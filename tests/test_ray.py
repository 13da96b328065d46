"""A Ray cluster of two nodes on this machine: the same results as one process, whatever dies."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from realm.cli import main
from realm.errors import InputError, RealmError
from realm.index.embedding import IndexConfig
from realm.index.versions import build_index
from realm.ray_actors import EngineConfig, map_on_ray
from realm.store import unfinished, vectors
from realm.store.ingest import build
from realm.store.knowledge_base import KnowledgeBase
from realm.store.settings import KnowledgeBaseConfig
from realm.text.salient_spans import load_tagger
from realm.tokens.tokenizer import Tokenizer
from tests.conftest import tiny_documents
from tests.train.refresh.refreshing import expected


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes of one core each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


def squares(folder: Path, seconds: float) -> Callable[[int], int]:
    """Prepares the function that notes each call by a file, and squares."""

    def square(number: int) -> int:
        (folder / f"{number} {os.getpid()}").touch()
        time.sleep(seconds)
        return number * number

    return square


def pids(folder: Path) -> set[int]:
    return {int(path.name.split()[1]) for path in folder.iterdir()}


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
    results = map_on_ray(partial(squares, tmp_path, 0.3), iter(range(12)), cluster.address)
    assert next(results) == 0
    first = pids(tmp_path)
    os.kill(min(first), signal.SIGKILL)
    assert list(results) == [number**2 for number in range(1, 12)]
    assert pids(tmp_path) > first  # another process took its place


@pytest.mark.slow
def test_work_of_a_killed_node_is_done_by_the_other(cluster, tmp_path) -> None:
    results = map_on_ray(partial(squares, tmp_path, 0.3), iter(range(12)), cluster.address)
    assert next(results) == 0
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    assert list(results) == [number**2 for number in range(1, 12)]


def deadly() -> Callable[[int], None]:
    def die(number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


@pytest.mark.slow
def test_item_that_kills_every_process_ends_the_work(cluster) -> None:
    with pytest.raises(RealmError, match="3 processes on the Ray cluster died during the same work"):
        list(map_on_ray(deadly, iter(range(5)), cluster.address))


def refusing() -> Callable[[int], Any]:
    raise InputError("no such model")


@pytest.mark.slow
def test_error_of_the_work_is_the_error_of_the_call(cluster) -> None:
    with pytest.raises(InputError, match=r"^no such model$"):
        list(map_on_ray(refusing, iter(range(5)), cluster.address))


def test_address_without_the_engine_is_one_line(tiny_kb, tiny_model_folder, capsys) -> None:
    command = ["index", "--kb", str(tiny_kb.folder), "--model", str(tiny_model_folder)]
    assert main([*command, "--ray-address", "head:6379"]) == 2
    assert capsys.readouterr().err == 'realm: --set: ray_address is head:6379, which needs engine = "ray"\n'


def test_cluster_that_is_not_there_is_one_line() -> None:
    with pytest.raises(InputError, match=r"cannot reach the Ray cluster 127\.0\.0\.1:1: "):
        next(map_on_ray(deadly, iter(range(5)), "127.0.0.1:1"))


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
