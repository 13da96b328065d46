"""A tiny knowledge base, made once for the tests of a module and copied for each test."""

import shutil
from pathlib import Path

import pytest

from realm.store.knowledge_base import KnowledgeBase
from tests.store.tiny import make


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "kb"
    return make(folder).folder


@pytest.fixture
def kb(made: Path, tmp_path: Path) -> KnowledgeBase:
    shutil.copytree(made, tmp_path / "kb")
    return KnowledgeBase.open(tmp_path / "kb")
