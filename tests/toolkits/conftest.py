"""A workspace of the towns, and a server of the same passages, for the components of other toolkits."""

import os
import shutil
from pathlib import Path

import pytest

from tests.qa.conftest import qa_folder
from tests.serve.conftest import qa_model, served

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
__all__ = ["qa_folder", "qa_model", "served"]


@pytest.fixture(scope="session")
def workspace(tiny_kb, qa_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a workspace; read-only for tests."""
    folder = tmp_path_factory.mktemp("toolkits") / "towns"
    shutil.copytree(tiny_kb.folder, folder / "kb")
    shutil.copytree(qa_folder, folder / "model")
    return str(folder)
