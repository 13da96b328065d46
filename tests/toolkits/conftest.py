"""A workspace of the towns, and a server of the same passages, for the components of other toolkits."""

import os
import shutil
from pathlib import Path

import pytest

import realm
from realm.workspace.living import LivingKnowledge
from tests.qa.conftest import qa_folder, towns
from tests.serve.conftest import qa_model, served
from tests.store.tiny import TinyTagger

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
__all__ = ["qa_folder", "qa_model", "served", "towns"]


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
def workspace(towns: Path) -> str:
    """The folder of a workspace; read-only for tests."""
    return str(towns)
