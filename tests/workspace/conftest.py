"""What tests of workspaces share: the towns as a workspace of their own."""

import shutil
from pathlib import Path

import pytest

from realm.qa import living
from tests.qa.conftest import qa_folder
from tests.retrieval.tiny import TinyTagger

__all__ = ["qa_folder"]


@pytest.fixture
def towns(tiny_kb, qa_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a workspace, to be changed."""
    monkeypatch.setattr(living.LivingKnowledge.__init__, "__defaults__", (lambda name: TinyTagger(),))
    shutil.copytree(tiny_kb.folder, tmp_path / "towns" / "kb")
    shutil.copytree(qa_folder, tmp_path / "towns" / "model")
    return tmp_path / "towns"
