"""kill -9 while documents are written: whatever was acknowledged is there afterwards, and nothing is damaged.

More of it: `python -m pytest -m slow tests/serve/test_kills.py --trials 1000 --trials-seed 7`.
"""

import multiprocessing
import random
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest
import torch

from realm.index.versions import index_folder
from realm.model.folder import load_model
from realm.serve.client import Client
from realm.store import vectors
from realm.store.ingest import TABLE
from realm.store.knowledge_base import KnowledgeBase
from realm.store.tables.table import damaged_files, open_table
from tests.conftest import tiny_documents
from tests.serve.conftest import CONFIG, TOKEN, running
from tests.store.tiny import TinyTagger


def serve_until_killed(kb: Path, model: Path, told: Connection) -> None:
    """A child: serves for ever, and says where."""
    torch.set_num_threads(1)
    with running(kb, model, CONFIG, tagger=lambda name: TinyTagger()) as served:
        told.send(served.url)
        threading.Event().wait()


class Writer:
    """Adds documents one after another, and deletes every third again; remembers what the server said yes to."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.gone: set[str] = set()
        self.unknown: set[str] = set()
        """Asked for when the server died: either way is right."""
        self.count = 0
        self.acknowledged = 0

    def write(self, url: str) -> None:
        """Until the server is gone."""
        client = Client(url, TOKEN)
        while True:
            id = f"document {self.count}"
            self.unknown.add(id)
            self.count += 1
            try:
                client.add(
                    [
                        {
                            "id": id,
                            "title": id.title(),
                            "text": f"{id.title()} lies on the Ouse, says {self.count}.",
                        }
                    ]
                )
                self.unknown.discard(id)
                self.acknowledged += 1
                if self.count % 3:
                    self.there.add(id)
                else:
                    self.unknown.add(id)
                    client.delete(id)
                    self.unknown.discard(id)
                    self.gone.add(id)
            except ValueError:
                return


def kill_while_writing(kb: Path, model: Path, kills: int, seed: int) -> Writer:
    """Starts a server, lets it be written to, kills it at a random moment; again and again, each time looking first."""
    draw, writer = random.Random(seed), Writer()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "transformers", "fastapi", "uvicorn"]
    )  # not Lance, which cannot be forked
    for kill in range(kills + 1):
        here, there = context.Pipe()
        child = context.Process(target=serve_until_killed, args=(kb, model, there), daemon=True)
        child.start()
        there.close()  # so that a child that dies is heard of
        url = here.recv()
        look(url, writer)
        if kill < kills:
            thread = threading.Thread(target=writer.write, args=(url,))
            enough = writer.acknowledged + draw.randint(0, 6)  # however slow the machine is
            thread.start()
            while writer.acknowledged < enough:
                assert thread.is_alive(), "the writer gave up before the kill"
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.1))
        child.kill()
        child.join()
        if kill < kills:
            thread.join()
    return writer


def look(url: str, writer: Writer) -> None:
    """All that was acknowledged is as it was said, and every passage has its vector."""
    with httpx.Client(base_url=url, timeout=30) as client:
        for id in writer.there | writer.gone:
            assert client.get(f"/v1/documents/{id}").status_code == (200 if id in writer.there else 404), id
        passages = client.get("/health").json()["passages"]
        found = client.post("/v1/retrieve", json={"question": "Ouse", "top_k": 100}).json()["passages"]
        assert len(found) == min(100, passages)


@pytest.mark.slow
def test_no_kill_loses_what_was_acknowledged(rules_kb, qa_model, trials) -> None:
    kills = trials.count(100)
    writer = kill_while_writing(rules_kb, qa_model, kills, trials.seed)
    assert len(writer.there) > kills and writer.gone
    kb = KnowledgeBase.open(rules_kb)
    index = index_folder(kb, load_model(qa_model))
    for table in (rules_kb / TABLE, index / vectors.TABLE):
        assert damaged_files(open_table(table), table) == []
    assert vectors.read(index, kb.keys_N).missing.tolist() == []
    ids = {passage.document_id for passage in kb}
    assert writer.there <= ids and not writer.gone & ids
    assert ids <= writer.there | writer.unknown | {document.id for document in tiny_documents()}
