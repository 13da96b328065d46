"""Fixtures of the tests of training."""

from pathlib import Path

import pytest

from realm.model.folder import load_model
from tests.train.toy import config, train


@pytest.fixture(scope="session")
def plain(tiny_model_folder, tmp_path_factory) -> Path:
    """What an uninterrupted run gives."""
    return train(load_model(tiny_model_folder), tmp_path_factory.mktemp("plain") / "out", config())
