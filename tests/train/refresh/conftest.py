"""Fixtures of the tests of index refreshes."""

from pathlib import Path

import pytest


@pytest.fixture
def fake_build(tmp_path: Path, monkeypatch):
    """Puts a shell script in the place of the Python that a build runs in."""
    from realm.train.refresh import build_process as builds

    def install(script: str) -> None:
        file = tmp_path / f"python{len(list(tmp_path.glob('python*')))}"  # one that runs cannot be written
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(builds.sys, "executable", str(file))

    return install


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model.training"
    folder.mkdir()
    return folder
