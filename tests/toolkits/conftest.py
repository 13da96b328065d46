"""A workspace of the towns, and a server of the same passages, for the components of other toolkits."""

import os
import shutil
from pathlib import Path

import pytest

import realm
from realm.workspace.living import LivingKnowledge
from tests.qa.conftest import qa_folder
from tests.serve.conftest import qa_model, served
from tests.store.tiny import TinyTagger

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
__all__ = ["qa_folder", "qa_model", "served"]


@pytest.fixture(scope="session")
def dated(workspace: str, tmp_path_factory: pytest.TempPathFactory) -> "realm.Workspace":
    """A workspace with the towns, which have no fields, and with two documents that have fields; read-only for tests."""
    folder = tmp_path_factory.mktemp("dated") / "towns"
    shutil.copytree(workspace, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LivingKnowledge.__init__, "__defaults__", (lambda name: TinyTagger(),))
        opened = realm.load(folder)
    for year in (1999, 2020):
        text = f"Zebulon built a lighthouse in {year}."
        opened.add(
            [
                {
                    "id": f"z{year}",
                    "title": "Zebulon",
                    "text": text,
                    "year": year,
                    "document": "a field",
                    "score": "b",
                }
            ]
        )
    return opened


@pytest.fixture(scope="session")
def workspace(tiny_kb, qa_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a workspace; read-only for tests."""
    folder = tmp_path_factory.mktemp("toolkits") / "towns"
    shutil.copytree(tiny_kb.folder, folder / "kb")
    shutil.copytree(qa_folder, folder / "model")
    return str(folder)
