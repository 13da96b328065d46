"""A small knowledge base whose documents have fields."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from tests.store.tiny import DOCUMENTS, make

FIELDS: list[dict[str, Any]] = [
    {"year": 2000, "source": "handbook", "price": 1.5, "draft": True, "day": "2020-01-05"},
    {"year": 2020, "source": "notes", "price": 3.0, "draft": False, "day": "2020-02-05"},
    {"year": 2021, "source": "handbook", "at": "2020-03-01T10:00:00Z", "tags": ["a", "b"]},
    {"source": "it's", "at": "2020-03-01T12:30:00Z", "tags": ["b"], "og_url": "https://example.org"},
    {},
    {"year": 2019, "mixed": 1, "number": 2},
    {"year": 2030, "mixed": "one", "number": 2.5, "draft": True},
]


def with_fields(documents: list[Document] = DOCUMENTS) -> list[Document]:
    return [one._replace(fields=FIELDS[n % len(FIELDS)]) for n, one in enumerate(documents)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("fields") / "kb", with_fields()).folder


@pytest.fixture
def kb(made: Path, tmp_path: Path) -> KnowledgeBase:
    shutil.copytree(made, tmp_path / "kb")
    return KnowledgeBase.open(tmp_path / "kb")
