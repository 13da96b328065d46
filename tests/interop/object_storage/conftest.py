"""`realm push` and `realm pull`, with fsspec's file system in memory as the object store."""

from pathlib import Path
from typing import Any

import fsspec
import pytest

from realm.documents import remote
from realm.index.versions import complete_index
from realm.interop.object_storage.copying import pull, push
from realm.model.folder import load_model
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from realm.text.salient_spans import load_tagger

AT = "memory://bucket/kb"


@pytest.fixture(autouse=True)
def store(monkeypatch) -> Any:
    """An empty store. `store.store` has the contents by path."""
    monkeypatch.setattr(remote, "SCHEMES", (*remote.SCHEMES, "memory"))
    monkeypatch.setattr(remote, "STORES", ("memory",))
    monkeypatch.setattr(remote, "WAITS", ())
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.fixture
def copy(rules_kb: Path, tmp_path: Path) -> Path:
    """A pulled copy of the knowledge base `rules_kb`."""
    push(rules_kb, AT)
    pull(AT, tmp_path / "copy")
    return tmp_path / "copy"


def add(kb: Path, model: Path, title: str) -> None:
    """Adds a document and its vectors."""
    text = f"{title} lies on the river Ouse. Alaric built a tower in {title} in 1492."
    opened = KnowledgeBase.open(kb)
    opened.add([Document(title, text, title)], load_tagger("rules"))
    complete_index(opened, load_model(model), str(model))


def names(store: Any) -> set[str]:
    return {path.removeprefix("/bucket/kb/") for path in store.store}
