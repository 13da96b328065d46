"""A run that was killed finds its index as its checkpoint left it, and the build that was under way."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from realm import distributed
from realm.errors import DamagedError
from realm.model.folder import load_model
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase
from tests.train.refresh.refreshing import PYTHON, expected, move, refresher, rows, wait_for


@pytest.mark.slow
def test_run_goes_on_with_the_index_and_the_build_of_its_checkpoint(
    tiny_kb, tiny_model, run_folder, fake_build
) -> None:
    """What came after the checkpoint is gone, the build under way there is done again from the same snapshot."""
    fake_build("sleep 60")
    with refresher(tiny_kb, run_folder) as builds:
        version = builds.build_initial(tiny_model, 0)
        start = rows(version).copy()
        move(tiny_model)
        builds.request(tiny_model, 10)
        place = builds.state_dict(version)
    snapshot = expected(tiny_kb, tiny_model)
    move(tiny_model)
    fake_build(f'exec {PYTHON} "$@"')
    with refresher(tiny_kb, run_folder) as builds:
        version = builds.build_initial(tiny_model, 12, place)
        assert (version.number, version.step) == (1, 0) and (rows(version) == start).all()
        found: list = []
        wait_for(lambda: found.append(builds.poll(12)) or found[-1] is not None)
        assert (found[-1].number, found[-1].step) == (2, 10)
        np.testing.assert_allclose(rows(found[-1]), snapshot, atol=4e-3)


def test_versions_after_the_checkpoint_are_forgotten(tiny_kb, tiny_model, run_folder) -> None:
    def go(builds, start: int, end: int, version, places: dict) -> None:
        for step in range(start, end):
            builds.request(tiny_model, step)
            version = builds.poll(step) or version
            places[step] = builds.state_dict(version)

    places: dict = {}
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        go(builds, 1, 45, builds.build_initial(tiny_model, 0), places)
    assert places[44]["version"] == 5
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        version = builds.build_initial(tiny_model, 25, places[25])
        assert (version.number, version.step) == (3, 20)
        assert vectors.newest(run_folder / "index") == 3
        again: dict = {}
        go(builds, 26, 45, version, again)
    assert again == {step: places[step] for step in range(26, 45)}
    sums = (run_folder / "index" / "SHA256SUMS").read_text().splitlines()
    assert len({line.split("  ")[1] for line in sums}) == len(sums)


def test_finished_build_that_the_checkpoint_was_waiting_for_is_taken_up(
    tiny_kb, tiny_model, run_folder
) -> None:
    with refresher(tiny_kb, run_folder, in_background=False, lag=4) as builds:
        version = builds.build_initial(tiny_model, 0)
        builds.request(tiny_model, 10)
        assert builds.poll(11) is None
        place = builds.state_dict(version)
        assert builds.poll(14) is not None
        move(tiny_model)
        builds.request(tiny_model, 20)
    with refresher(tiny_kb, run_folder, in_background=False, lag=4) as builds:
        assert builds.build_initial(tiny_model, 11, place).number == 1
        assert builds.poll(13) is None
        version = builds.poll(14)
        assert version is not None and (version.number, version.step) == (2, 10)
        assert vectors.newest(run_folder / "index") == 2


def on_rank(rank: int, file: str, kb: Path, model: Path, run_folder: Path, place: dict) -> None:
    """Resumes on one of two ranks; the second cannot read the version at first."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    read = vectors.read

    def damaged(*_: object) -> None:
        vectors.read = read
        raise DamagedError("gone")

    if rank == 1:
        vectors.read = damaged
    with refresher(KnowledgeBase.open(kb), run_folder) as builds:
        version = builds.build_initial(load_model(model), 12, place)
    assert version.step == 12
    distributed.shutdown()


@pytest.mark.slow
def test_all_ranks_build_a_new_index_where_one_cannot_read_its_version(
    tiny_kb, tiny_model, tiny_model_folder, run_folder, tmp_path
) -> None:
    with refresher(tiny_kb, run_folder) as builds:
        place = builds.state_dict(builds.build_initial(tiny_model, 0))
    arguments = str(tmp_path / "meet"), tiny_kb.folder, tiny_model_folder, run_folder, place
    torch.multiprocessing.spawn(on_rank, arguments, nprocs=2)
