"""Index refreshes as the trainer sees them: on time, of the right weights, waited for where told to, never too old."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.errors import RealmError
from realm.store.knowledge_base import KnowledgeBase
from realm.train.refresh import build_process
from tests.train.refresh.refreshing import (
    PYTHON,
    build_here,
    expected,
    move,
    refresher,
    rows,
    wait_for,
    wait_until_ended,
)


def test_refresh_in_the_foreground_comes_every_so_many_steps(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        first = builds.build_initial(tiny_model, 0)
        assert first.step == 0
        np.testing.assert_allclose(rows(first), expected(tiny_kb, tiny_model), atol=4e-3)
        move(tiny_model)
        for step in range(1, 10):
            builds.request(tiny_model, step)
            assert builds.poll(step) is None
        builds.request(tiny_model, 10)
        second = builds.poll(10)
        assert second is not None and second.step == 10 and second.number > first.number
        np.testing.assert_allclose(rows(second), expected(tiny_kb, tiny_model), atol=4e-3)
        assert builds.poll(10) is None


def test_the_first_build_runs_on_the_device_of_the_settings(tiny_kb, tiny_model, run_folder) -> None:
    said: list[str] = []
    with refresher(tiny_kb, run_folder, said.append, device="cpu") as builds:
        first = builds.build_initial(tiny_model, 0)
    log = run_folder / "index.log"
    assert said == [f"training waits for the index of step 0; the log of its build is {log}"]
    assert f"{len(tiny_kb):,}" in log.read_text()
    assert first.step == 0 and first.cost["build_seconds"] > 0
    np.testing.assert_allclose(rows(first), expected(tiny_kb, tiny_model), atol=4e-3)


def test_a_first_build_that_fails_ends_the_run_with_the_path_of_its_log(
    tiny_kb, tiny_model, run_folder, fake_build, monkeypatch
) -> None:
    monkeypatch.setattr(build_process, "RESTARTS", 0)
    fake_build("exit 3")
    with refresher(tiny_kb, run_folder, device="cpu") as builds:
        with pytest.raises(RealmError, match=r"step 0 failed with exit code 3.*index\.log"):
            builds.build_initial(tiny_model, 0)
        assert not builds._builder.running


@pytest.mark.slow
def test_training_waits_for_builds_on_several_devices(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, device="cpu,cpu", in_background=False) as builds:
        versions = [builds.build_initial(tiny_model, 0)]
        move(tiny_model)
        builds.request(tiny_model, 10)
        versions.append(builds.poll(10))
        np.testing.assert_allclose(rows(versions[-1]), expected(tiny_kb, tiny_model), atol=4e-3)
        move(tiny_model)
        versions.append(builds.build_final(tiny_model, 15))
        assert [version.step for version in versions] == [0, 10, 15]
        np.testing.assert_allclose(rows(versions[-1]), expected(tiny_kb, tiny_model), atol=4e-3)


def test_refresh_never_comes_with_every_0(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, every=0, in_background=False) as builds:
        builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 1000)
        assert builds.poll(10) is None


def test_build_in_the_background_swaps_in_the_index_of_its_snapshot(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        move(tiny_model)
        snapshot = expected(tiny_kb, tiny_model)
        builds.request(tiny_model, 10)
        move(tiny_model)  # back to the start: training goes on
        found: list = []
        wait_for(lambda: found.append(builds.poll(10)) or found[-1] is not None)
        version = found[-1]
        assert version.step == 10 and version.number == 2
        np.testing.assert_allclose(rows(version), snapshot, atol=4e-3)
        assert builds.poll(10) is None


def test_one_build_at_a_time(tiny_kb, tiny_model, run_folder, fake_build, tmp_path) -> None:
    starts = tmp_path / "starts"
    starts.touch()  # the shell creates a file before `echo` writes to it
    fake_build(f"echo started >> {starts}; sleep 60")
    with refresher(tiny_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        for step in (10, 20, 30):
            builds.request(tiny_model, step)
            assert builds.poll(10) is None
        wait_for(starts.read_text)
        assert starts.read_text() == "started\n"


def test_training_waits_for_the_first_index_then_never(
    tiny_kb, tiny_model, run_folder, fake_build, tmp_path
) -> None:
    fake_build("sleep 60")
    with refresher(tiny_kb, run_folder) as builds:
        version = builds.build_initial(tiny_model, 0)
        assert len(version.index) == len(tiny_kb)
        began = time.monotonic()
        for step in range(1, 200):
            builds.request(tiny_model, step)
            assert builds.poll(step) is None
        assert time.monotonic() - began < 10 and builds._builder._child is not None


@pytest.mark.slow
def test_with_a_lag_every_version_comes_in_at_its_step(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    fake_build(f'sleep 0.2; exec {PYTHON} "$@"')
    swaps = {}
    for background in (False, True):
        folder = run_folder / str(background)
        folder.mkdir()
        with refresher(tiny_kb, folder, lag=3, in_background=background) as builds:
            builds.build_initial(tiny_model, 0)
            swaps[background] = []
            for step in range(1, 26):
                builds.request(tiny_model, step)
                version = builds.poll(step)
                swaps[background] += [(step, version.step, version.number)] if version else []
    assert swaps[True] == swaps[False] == [(13, 10, 2), (23, 20, 3)]


def test_snapshots_query_tower_searches_its_index_where_asked(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, in_background=False, search="snapshot", lag=2) as builds:
        version = builds.build_initial(tiny_model, 0)
        weight = tiny_model.embedder.query.projection.weight.detach().clone()
        move(tiny_model)
        assert torch.equal(builds.query_model(tiny_model, version).embedder.query.projection.weight, weight)
        builds.request(tiny_model, 10)
        assert builds.poll(10) is None
        place = builds.state_dict(version)
        move(tiny_model)
        new = builds.poll(12)
        assert new is not None
        assert torch.equal(builds.query_model(tiny_model, new).embedder.query.projection.weight, -weight)
    with refresher(tiny_kb, run_folder, in_background=False, search="snapshot", lag=2) as builds:
        version = builds.build_initial(tiny_model, 10, place)
        assert torch.equal(builds.query_model(tiny_model, version).embedder.query.projection.weight, weight)
        new = builds.poll(12)
        assert torch.equal(builds.query_model(tiny_model, new).embedder.query.projection.weight, -weight)


def test_old_versions_go_and_those_of_checkpoints_stay(tiny_kb, tiny_model, run_folder) -> None:
    places = []
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        version = builds.build_initial(tiny_model, 0)
        for step in range(10, 60, 10):
            builds.request(tiny_model, step)
            version = builds.poll(step) or version
            places.append(builds.state_dict(version))
        builds.prune([places[2], places[4]])  # versions 4 and 6
        assert kept_versions(run_folder) == [4, 5, 6]
        builds.prune([places[4]])
        assert kept_versions(run_folder) == [5, 6]


def kept_versions(run_folder: Path) -> list[int]:
    return sorted(
        2**64 - 1 - int(file.stem)
        for file in (run_folder / "index" / "vectors.lance" / "_versions").glob("*.manifest")
    )


def test_version_of_another_corpus_is_refused(own_kb, tiny_model, run_folder, fake_build) -> None:
    """A build reads the knowledge base of its day."""
    fake_build("exit 0")
    with refresher(own_kb, run_folder) as builds:
        builds.build_initial(tiny_model, 0)
        changed = KnowledgeBase.open(own_kb.folder)
        changed.delete([changed.titles[0]])
        builds.request(tiny_model, 10)
        build_here(changed, tiny_model, run_folder, step=10)
        wait_until_ended(builds)
        with pytest.raises(RealmError, match="was changed while training"):
            builds.poll(10)
