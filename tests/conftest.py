"""What every test shares: one thread, properties checked without a clock, and a tiny corpus with its model and index.

The rooms are imported inside the fixtures, so that tests of plain text need no networks.
"""

import gc
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from realm.model.folder import Model
    from realm.store.knowledge_base import KnowledgeBase
    from realm.text.corpus import Document

torch.set_num_threads(1)  # the tests' tensors are tiny, and other work may share the machine
os.environ["OMP_NUM_THREADS"] = "1"  # also in the processes that tests start
os.environ["REALM_CACHE"] = ""  # the tests tag their texts

hypothesis.settings.register_profile("realm", deadline=None, max_examples=50)
hypothesis.settings.load_profile("realm")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Lets torch use two."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Tunes the garbage collector as `realm.cli.program` does: what was imported lives until the process ends."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--trials",
        type=int,
        help="how many kills, damages, inputs, requests or additions each slow trial makes (default: its own number)",
    )
    parser.addoption(
        "--data",
        type=Path,
        help="folder with the files that docs/compare.md lists, for the tests on a real Wikipedia and on published questions",
    )
    parser.addoption("--trials-seed", type=int, default=0, help="draws what the slow trials do")


class Trials(NamedTuple):
    """What the command line says about the slow trials."""

    wanted: int | None
    seed: int

    def count(self, usual: int) -> int:
        """How many the test makes, which are `usual` where the command line says nothing."""
        return usual if self.wanted is None else self.wanted


@pytest.fixture(scope="session")
def trials(pytestconfig: pytest.Config) -> Trials:
    return Trials(pytestconfig.getoption("--trials"), pytestconfig.getoption("--trials-seed"))


TOWNS = (
    "Arden Bexley Corvo Dunmore Elstow Fenwick Garlan Halden Ivrea Jarrow Kelso Lorca Marlow Norden".split()
)
RIVERS = "Ouse Tarn Velka Wear".split()
RULERS = "Alaric Berthe Cunimund Dagobert Ermina Folkmar".split()
GOODS = "wool salt amber glass honey paper copper cider".split()
WHEN = "spring summer autumn winter".split()


def tiny_documents() -> "list[Document]":
    """Fourteen made-up towns; every name but a town's own title stands in several of them."""
    from realm.text.corpus import Document

    draw = random.Random(0)
    documents = []
    for number, town in enumerate(TOWNS):
        first, second, third = draw.sample([t for t in TOWNS if t != town], 3)
        ruler, other = draw.sample(RULERS, 2)
        goods, more = draw.sample(GOODS, 2)
        sentences = [
            f"{town} lies on the river {RIVERS[number % 4]} between {first} and the hills of {second}.",
            f"{ruler} built a tower in {town} for {other}, who kept {draw.randint(2, 99)} horses there.",
            f"{town} sells {goods} and {more} to {third} every {draw.choice(WHEN)}.",
            f"{other} of {second} burnt the bridge over the {RIVERS[number % 4]} in {1100 + 37 * number}.",
            f"{third} and {town} share a mint, a market for {more} and a school that {ruler} founded.",
            f"{draw.choice(RULERS)} is buried under the old mill of {town} beside {draw.randint(2, 99)} monks.",
        ]
        documents.append(Document(town, " ".join(sentences), f"d{number}"))
    return documents


@pytest.fixture(scope="session")
def tiny_kb(tmp_path_factory: pytest.TempPathFactory) -> "KnowledgeBase":
    """The towns as a knowledge base of 28 passages; shared, so only to be read."""
    from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
    from tests.store.tiny import KNOWN, TinyTagger, tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "kb"
    documents = tiny_documents()
    # Every word a piece of its own; a trained vocabulary would be another one in each process.
    words = set(re.findall(r"[a-z0-9]{2,}", " ".join(document.text.lower() for document in documents)))
    tokenizer = tiny_tokenizer(*sorted(words - set(KNOWN.split())))
    build(folder, documents, KnowledgeBaseConfig(passage_tokens=48, held_out=0.2), tokenizer, TinyTagger())
    return KnowledgeBase.open(folder)


@pytest.fixture(scope="session")
def tiny_model_folder(tiny_kb: "KnowledgeBase", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose projection is fitted to the towns; its index is in `tiny_kb`."""
    import numpy as np

    from realm.index.embedding import IndexConfig, pooled_states
    from realm.index.versions import build_index
    from realm.model.embedder import EmbedderConfig, embedder_from, fit_projection
    from realm.model.folder import Model, save_model
    from realm.model.masked_reader import EncoderConfig, new_reader
    from realm.tokens.layouts import Lengths

    torch.manual_seed(0)
    reader = new_reader(EncoderConfig(layers=2, hidden=32, heads=2, positions=96), tiny_kb.tokenizer)
    embedder = embedder_from(reader, EmbedderConfig(dim=16))
    model = Model(tiny_kb.tokenizer, Lengths(query=32, passage=48), reader, embedder, step=3)
    everything = np.arange(len(tiny_kb))
    pooled_NH = pooled_states(embedder.passage, tiny_kb.tokens, everything, model.tokenizer, model.lengths)
    fit_projection(embedder.query, pooled_NH, whiten=True)
    folder = tmp_path_factory.mktemp("tiny_model") / "model"
    save_model(model, folder)
    build_index(tiny_kb, str(folder), IndexConfig(device="cpu", precision="fp32"))
    return folder


@pytest.fixture
def tiny_model(tiny_model_folder: Path) -> "Model":
    """A fresh copy of the tiny model, to be trained or broken."""
    from realm.model.folder import load_model

    return load_model(tiny_model_folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator["Cluster"]:
    """A Ray cluster of two nodes of one core each, for all tests of a file, because Ray needs seconds to start."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def mortal_cluster(cluster: "Cluster") -> Iterator["Cluster"]:
    """The cluster, for a test that removes a node: the next test has two nodes again."""
    yield cluster
    if not cluster.worker_nodes:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()


@pytest.fixture
def own_kb(tiny_kb: "KnowledgeBase", tiny_model_folder: Path, tmp_path: Path) -> "KnowledgeBase":
    """A copy of the towns and their index, to be changed."""
    from realm.store.knowledge_base import KnowledgeBase

    shutil.copytree(tiny_kb.folder, tmp_path / "kb")
    return KnowledgeBase.open(tmp_path / "kb")


@pytest.fixture
def rules_kb(tiny_kb: "KnowledgeBase", tiny_model_folder: Path, tmp_path: Path) -> Path:
    """The towns and their index, to be changed by another process, which has only the packaged taggers."""
    from realm.index.embedding import IndexConfig
    from realm.index.versions import build_index
    from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
    from realm.text.salient_spans import load_tagger

    folder, config = tmp_path / "kb", KnowledgeBaseConfig(passage_tokens=48, tagger="rules")
    build(folder, tiny_documents(), config, tiny_kb.tokenizer, load_tagger("rules"))
    fp32 = IndexConfig(device="cpu", precision="fp32")
    build_index(KnowledgeBase.open(folder), str(tiny_model_folder), fp32)
    return folder
