"""Fixtures of the tests of answering: a tiny model with a span reader, and a workspace with that model."""

import shutil
from pathlib import Path

import pytest
import torch

from realm.model.folder import load_model, save_model
from realm.train.finetune import start_reader

PASSAGE_KEYS = {"id", "title", "text", "rank", "probability", "document", "fields"}
"""The keys of a passage in the JSON of an answer and of `realm fill`."""


@pytest.fixture(scope="session")
def qa_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a span reader of large random weights; it uses the index of the tiny model."""
    model = load_model(tiny_model_folder)
    reader = start_reader(model, seed=0)
    torch.nn.init.normal_(reader.ends.weight)
    torch.nn.init.normal_(reader.score.weight)
    folder = tmp_path_factory.mktemp("qa") / "model"
    save_model(model, folder)
    return folder


@pytest.fixture(scope="session")
def towns(tiny_kb, qa_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a workspace; read-only for tests."""
    folder = tmp_path_factory.mktemp("workspace") / "towns"
    shutil.copytree(tiny_kb.folder, folder / "kb")
    shutil.copytree(qa_folder, folder / "model")
    return folder
