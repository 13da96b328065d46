"""An index divided among two nodes of a Ray cluster: the results of one index, whatever dies."""

import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from realm.cli import main
from realm.errors import RealmError
from realm.index.versions import complete_index
from realm.model.folder import load_model
from realm.search.exact import MipsIndex
from realm.search.ray_index import RayIndex, _Part
from realm.serve.client import Client
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from tests.serve.process import serving
from tests.store.tiny import TinyTagger
from tests.test_ray import kill_node

COUNT = 1001
pytestmark = pytest.mark.slow


@pytest.fixture
def divided(cluster, tmp_path, monkeypatch) -> tuple[MipsIndex, RayIndex]:
    """The same vectors in one index and in a divided one; some passages have equal scores."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    # Whole numbers, so that equal vectors have equal scores in every part.
    vectors_ND = np.random.default_rng(0).integers(-9, 9, (COUNT, 16)).astype(np.float16)
    vectors_ND[COUNT // 2 - 3 : COUNT // 2 + 3] = 2 * vectors_ND[7]
    np.save(tmp_path / "vectors.npy", vectors_ND)
    return MipsIndex(vectors_ND), RayIndex(tmp_path / "vectors.npy", COUNT)


def queries(count: int) -> torch.Tensor:
    return torch.randint(-9, 9, (count, 16), generator=torch.Generator().manual_seed(1)).float()


def assert_same(one, other) -> None:
    torch.testing.assert_close(one.score_BK, other.score_BK)
    assert torch.equal(one.number_BK, other.number_BK)


def places(index: RayIndex) -> list[tuple[str, int]]:
    """The node and the process of each part."""

    def place(part: _Part) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    return ray.get([part.__ray_call__.remote(place) for part in index._parts])


def test_each_machine_has_one_part_of_each_index(divided, tmp_path) -> None:
    machines = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    for _ in range(4):
        index = RayIndex(tmp_path / "vectors.npy", COUNT)
        assert [node for node, _ in places(index)] == machines


def test_hits_and_vectors_are_those_of_one_index(divided) -> None:
    whole, index = divided
    assert len(index) == COUNT
    index.prepare()
    for k in (1, 5, 700, 2000):
        assert_same(index.search(queries(3), k), whole.search(queries(3), k))
    for chosen in (np.arange(0, COUNT, 3), np.array([COUNT - 1]), np.zeros(0, dtype=np.int64)):
        assert_same(index.search_subset(queries(3), chosen, 5), whole.search_subset(queries(3), chosen, 5))
    numbers = np.array([COUNT - 1, 0, 7, 7, COUNT // 2])
    assert torch.equal(index.rows(numbers), whole.rows(numbers))


def test_parts_of_a_killed_process_and_of_a_killed_node_are_loaded_again(divided, mortal_cluster) -> None:
    whole, index = divided
    os.kill(places(index)[0][1], signal.SIGKILL)
    assert_same(index.search(queries(3), 20), whole.search(queries(3), 20))
    kill_node(mortal_cluster)
    assert_same(index.search(queries(3), 20), whole.search(queries(3), 20))
    assert len({node for node, _ in places(index)}) == 1


def test_processes_end_with_the_index(divided, tmp_path) -> None:
    index = RayIndex(tmp_path / "vectors.npy", COUNT)
    pids = [pid for _, pid in places(index)]
    del index
    gc.collect()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_file_that_is_gone_is_one_line(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(RealmError, match="a part of the index on the Ray cluster failed") as error:
        RayIndex(tmp_path / "none.npy", 10)
    assert "\n" not in str(error.value)


def test_index_of_a_knowledge_base_follows_its_versions(
    own_kb, tiny_model_folder, cluster, monkeypatch
) -> None:
    """Also if passages were added, whose vectors are not in the file that was mapped first."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    model, name = load_model(tiny_model_folder), str(tiny_model_folder)
    query_BD = torch.randn(2, model.embedder.config.dim)
    for added in ([], [Document("Town 99", "Town 99 is on the river Oder.", "new")]):
        if added:
            own_kb.add(added, TinyTagger())
        kb = KnowledgeBase.open(own_kb.folder)
        whole, index = (complete_index(kb, model, name, search=way).index for way in ("exact", "ray"))
        assert isinstance(index, RayIndex) and len(index) == len(kb)
        assert_same(index.search(query_BD, 9), whole.search(query_BD, 9))


def test_commands_find_the_passages_of_exact_search(
    cluster, own_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    asked = ["which river is at Arden?", "who sold the bells?", "Oder"]
    (tmp_path / "q.jsonl").write_text(
        "".join(f'{{"question": "{one}", "answers": ["Oder"]}}\n' for one in asked)
    )
    words = ["--kb", str(own_kb.folder), "--model", str(tiny_model_folder), "--set", "device=cpu"]
    found = {}
    for way in ("exact", "ray"):
        out = tmp_path / f"{way}.jsonl"
        more = ["--questions", str(tmp_path / "q.jsonl"), "--top-k", "7", "--out", str(out)]
        assert main(["retrieve", *words, *more, "--set", f"search={way}"]) == 0
        found[way] = [json.loads(line)["passages"] for line in out.read_text().splitlines()]
    assert_same_passages(found["ray"], found["exact"])
    with serving(*words[1:4:2], "--set", "device=cpu", "--set", "search=ray") as (url, _):
        hits = [Client(url).search(question, 7, method="dense") for question in asked]
        served = [[hit._asdict() for hit in one] for one in hits]
    assert_same_passages(served, found["exact"])


def assert_same_passages(some: list[list[dict[str, Any]]], others: list[list[dict[str, Any]]]) -> None:
    for one, other in zip(some, others, strict=True):
        assert len(one) == 7 and [hit["id"] for hit in one] == [hit["id"] for hit in other]
        assert [hit["score"] for hit in one] == pytest.approx([hit["score"] for hit in other], rel=1e-5)


def test_server_ends_with_one_line_if_ray_ends_on_its_machine(own_kb, tiny_model_folder) -> None:
    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    words = ["--set", "device=cpu", "--set", "search=ray"]
    with serving(own_kb.folder, tiny_model_folder, *words, RAY_ADDRESS=own.address) as (_, process):
        (raylet,) = own.head_node.all_processes["raylet"]
        raylet.process.kill()
        assert process.wait(60) == 2
        said = process.stderr.read()
    own.shutdown()
    assert (
        said == "realm: Ray's process on this machine has ended: start Ray again, then repeat the command\n"
    )
