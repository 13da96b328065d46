"""A server over the towns: in this process behind a real socket, so that clients, curl and a browser may ask it."""

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from realm.model.folder import load_model, save_model
from realm.serve import service
from realm.serve.app import create_app
from realm.serve.client import Client
from realm.serve.http.connections import http_server
from realm.serve.http.middleware import own_hosts
from realm.serve.settings import ServeConfig, Tokens
from realm.train.finetune import start_reader
from realm.workspace.living import LivingKnowledge
from tests.store.tiny import TinyTagger

TOKEN = "the towns' own token"
CONFIG = ServeConfig(device="cpu")


@pytest.fixture(scope="session", autouse=True)
def _often() -> Iterator[None]:
    """Servers in this process check for a new version twenty times a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "POLL_SECONDS", 0.05)
        yield


class Served(NamedTuple):
    """A running server and what it serves."""

    url: str
    knowledge: LivingKnowledge
    kb: Path
    model: Path

    def client(self, token: str | None = None, **more: Any) -> Client:
        return Client(self.url, token, **more)


@pytest.fixture(scope="session")
def qa_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a span reader of random but lively weights."""
    model = load_model(tiny_model_folder)
    reader = start_reader(model, seed=0)
    torch.manual_seed(0)
    torch.nn.init.normal_(reader.ends.weight)
    torch.nn.init.normal_(reader.score.weight)
    folder = tmp_path_factory.mktemp("served") / "model"
    save_model(model, folder)
    return folder


@contextmanager
def running(
    kb: Path,
    model: Path,
    config: ServeConfig = CONFIG,
    token: str | None = TOKEN,
    runs: Path | None = None,
    tagger: Callable[[str], Any] = lambda name: TinyTagger(),
    read_token: str | None = None,
    traces: Any = None,
) -> Iterator[Served]:
    """A server on a free port, until the block ends."""
    knowledge = LivingKnowledge(str(kb), str(model), config, tagger)
    hosts = own_hosts("127.0.0.1", config.hosts)
    app = create_app(knowledge, config, Tokens(token, read_token), runs, hosts, traces)
    server = http_server(app, config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                thread.join(0.01)
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", knowledge, kb, model)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def served(tiny_kb: Any, qa_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose knowledge no test changes."""
    folder = tmp_path_factory.mktemp("served_kb") / "kb"
    shutil.copytree(tiny_kb.folder, folder)
    with running(folder, qa_model) as server:
        yield server


@pytest.fixture
def own_server(own_kb: Any, qa_model: Path) -> Iterator[Served]:
    """A server whose knowledge may be changed."""
    with running(own_kb.folder, qa_model) as server:
        yield server
