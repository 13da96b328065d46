"""Index refreshes: on time, of the right weights, noticed when they die, and gone when the run is."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.config import InputError
from realm.retrieval import refresh, vectors
from realm.retrieval.embedding import embed_passages
from realm.retrieval.index import publish
from realm.retrieval.knowledge_base import KnowledgeBase
from realm.retrieval.refresh import IndexRefresher, RefreshConfig

PYTHON = sys.executable
"""Before `fake_build` puts another in its place."""


@pytest.fixture
def fake_build(tmp_path: Path, monkeypatch):
    """Puts a shell script in the place of the Python that a build runs in."""

    def install(script: str) -> None:
        file = tmp_path / f"python{len(list(tmp_path.glob('python*')))}"  # one that runs cannot be written
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(refresh.sys, "executable", str(file))

    return install


def refresher(kb, folder: Path, say=print, stopping=lambda: False, **config) -> IndexRefresher:
    return IndexRefresher(kb, folder, RefreshConfig(**{"every": 10, **config}), "fp32", say, stopping)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model.training"
    folder.mkdir()
    return folder


def expected(kb, model) -> np.ndarray:
    return embed_passages(
        model.embedder.passage, kb.tokens, np.arange(len(kb)), model.tokenizer, model.lengths, model.device
    )


def rows(version) -> np.ndarray:
    return version.index.rows(np.arange(len(version.index))).numpy()


def move(model) -> None:
    with torch.no_grad():
        for parameter in model.embedder.passage.projection.parameters():
            parameter.mul_(-1)


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def wait_until_ended(builds: IndexRefresher) -> None:
    """Looks at the child without taking its exit code away."""
    assert builds._child is not None
    os.waitid(os.P_PID, builds._child.pid, os.WEXITED | os.WNOWAIT)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()  # an orphan may wait for its reaper
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_refresh_in_the_foreground_comes_every_so_many_steps(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        first = builds.first(tiny_model, 0)
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


def test_refresh_never_comes_with_every_0(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, every=0, in_background=False) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 1000)
        assert builds.poll(10) is None


def test_build_in_the_background_swaps_in_the_index_of_its_snapshot(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
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
    fake_build(f"echo started >> {tmp_path}/starts; sleep 60")
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
        for step in (10, 20, 30):
            builds.request(tiny_model, step)
            assert builds.poll(10) is None
        wait_for((tmp_path / "starts").exists)
        assert (tmp_path / "starts").read_text() == "started\n"


def test_dead_build_is_one_line_that_names_its_log(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    fake_build("echo out of memory >&2; exit 3")
    with refresher(tiny_kb, run_folder, restarts=0) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)

        wait_until_ended(builds)
        with pytest.raises(InputError, match="step 10 failed with exit code 3") as error:
            builds.poll(10)
        assert "\n" not in str(error.value) and str(run_folder / "index.log") in str(error.value)
        assert "out of memory" in (run_folder / "index.log").read_text()
        kept = vectors.read(run_folder / "index", tiny_kb.keys_N)
        assert kept is not None and kept.version == 1


def counted(tmp_path: Path) -> int:
    return len((tmp_path / "tries").read_text().splitlines()) if (tmp_path / "tries").exists() else 0


def until_it_gives_up(builds: IndexRefresher) -> str:
    end = time.monotonic() + 60
    while True:
        try:
            assert builds.poll(10) is None and time.monotonic() < end
        except InputError as error:
            return str(error)
        time.sleep(0.01)


def test_failed_build_is_started_again_with_longer_waits_and_then_ends_the_run(
    tiny_kb, tiny_model, run_folder, fake_build, tmp_path
) -> None:
    fake_build(f"date +%s.%N >> {tmp_path}/tries; exit 7")
    said: list[str] = []
    with refresher(tiny_kb, run_folder, say=said.append, restarts=3, backoff=0.2) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        error = until_it_gives_up(builds)
    assert "tried 4 times" in error and "step 10 failed with exit code 7" in error and "index.log" in error
    assert counted(tmp_path) == 4
    times = [float(line) for line in (tmp_path / "tries").read_text().splitlines()]
    gaps = np.diff(times)
    assert gaps[0] >= 0.2 and gaps[1] >= 0.4 and gaps[2] >= 0.8
    assert [text.rsplit("in ", 1)[1] for text in said] == ["0.2 s", "0.4 s", "0.8 s"]
    assert all(str(run_folder / "index.log") in text for text in said)


@pytest.mark.parametrize(
    ("script", "limits", "how"),
    [
        ("sleep 60", {"silence": 0.3}, "said nothing for 0.3 s"),
        ("while true; do echo slow; sleep 0.05; done", {"deadline": 0.5}, "took longer than 0.5 s"),
    ],
    ids=["stuck", "slow"],
)
def test_stuck_and_slow_builds_are_killed_and_named_with_their_log(
    tiny_kb, tiny_model, run_folder, fake_build, script, limits, how
) -> None:
    fake_build(script)
    with refresher(tiny_kb, run_folder, restarts=0, **limits) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        pid = builds._child.pid
        error = until_it_gives_up(builds)
        assert how in error and str(run_folder / "index.log") in error and not alive(pid)


@pytest.mark.slow
def test_run_that_may_goes_on_with_the_old_index_until_the_next_build_is_due(
    tiny_kb, tiny_model, run_folder, fake_build, tmp_path, monkeypatch
) -> None:
    fake_build(f"echo >> {tmp_path}/tries; exit 1")
    said: list[str] = []
    with refresher(tiny_kb, run_folder, say=said.append, restarts=0, on_failure="continue") as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        wait_for(lambda: builds.poll(10) is None and said)
        assert "going on with the old index" in said[0]
        for step in range(11, 20):
            builds.request(tiny_model, step)
            assert builds.poll(step) is None and counted(tmp_path) == 1
        monkeypatch.undo()  # the cause is mended
        builds.request(tiny_model, 20)
        found: list = []
        wait_for(lambda: found.append(builds.poll(20)) or found[-1] is not None)
        assert found[-1].step == 20


def test_build_killed_after_its_commit_counts(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    """Nothing more is wanted of it than its version."""
    fake_build("sleep 60")
    with refresher(tiny_kb, run_folder, restarts=0) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        build_here(tiny_kb, tiny_model, run_folder)
        os.kill(builds._child.pid, signal.SIGKILL)
        wait_until_ended(builds)
        version = builds.poll(10)
        assert version is not None and (version.step, version.number) == (10, 2)


class PowerCut(BaseException):
    """Nobody catches it."""


def test_half_written_version_is_never_loaded(tiny_kb, tiny_model, run_folder, monkeypatch) -> None:
    """Files are written, the commit is not: the old version is the newest, and the files go when the run goes on."""

    def cut(*_: object) -> None:
        raise PowerCut

    files = run_folder / "index" / "vectors.lance" / "data"
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        first = builds.first(tiny_model, 0)
        start, place = rows(first).copy(), builds.place(first)
        move(tiny_model)
        with monkeypatch.context() as patch:
            patch.setattr(vectors, "commit", cut)
            with pytest.raises(PowerCut):
                builds.request(tiny_model, 10)
    assert len(list(files.iterdir())) == 2
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        again = builds.first(tiny_model, 9, place)
        assert (again.number, again.step) == (1, 0) and (rows(again) == start).all()
        assert len(list(files.iterdir())) == 1
        builds.request(tiny_model, 10)
        second = builds.poll(10)
        assert second is not None and second.number == 2
        np.testing.assert_allclose(rows(second), expected(tiny_kb, tiny_model), atol=4e-3)


@pytest.mark.slow
def test_build_killed_before_its_commit_leaves_nothing_to_load(
    tiny_kb, tiny_model, run_folder, fake_build, tmp_path
) -> None:
    """A build that dies between its files and its commit leaves the old version the newest; the next try is whole."""
    code = (
        "import os, signal, sys; from realm.cli import main; from realm.retrieval import tables, vectors; "
        f"first = not os.path.exists('{tmp_path}/died'); open('{tmp_path}/died', 'a'); "
        "vectors.commit = (lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if first else vectors.commit; "
        "sys.exit(main(sys.argv[1:]))"
    )
    fake_build(f'shift 2; exec {PYTHON} -c "{code}" "$@"')
    said: list[str] = []
    with refresher(tiny_kb, run_folder, say=said.append, restarts=1, backoff=0.0) as builds:
        builds.first(tiny_model, 0)
        move(tiny_model)
        builds.request(tiny_model, 10)
        files = run_folder / "index" / "vectors.lance" / "data"
        before = len(list(files.iterdir()))
        found: list = []

        def nothing_torn() -> bool:
            found.append(builds.poll(10))
            kept = vectors.read(run_folder / "index", tiny_kb.keys_N)
            assert kept is not None and kept.info.step == (10 if kept.version == 2 else 0)
            if said and found[-1] is None and kept.version == 1:
                assert len(list(files.iterdir())) > before  # it had written all, and committed nothing
            return found[-1] is not None

        wait_for(nothing_torn)
        assert "failed with signal SIGKILL" in said[0]
        np.testing.assert_allclose(rows(found[-1]), expected(tiny_kb, tiny_model), atol=4e-3)


def test_training_waits_for_the_first_index_then_never(
    tiny_kb, tiny_model, run_folder, fake_build, tmp_path
) -> None:
    fake_build("sleep 60")
    with refresher(tiny_kb, run_folder) as builds:
        version = builds.first(tiny_model, 0)
        assert len(version.index) == len(tiny_kb)
        began = time.monotonic()
        for step in range(1, 200):
            builds.request(tiny_model, step)
            assert builds.poll(step) is None
        assert time.monotonic() - began < 10 and builds._child is not None


def slow_build(seconds: float) -> str:
    return f'sleep {seconds}; exec {PYTHON} "$@"'


def build_here(kb, model, run_folder: Path) -> None:
    """Does the work of a build whose process is a fake."""
    publish(kb, model, "snapshot", run_folder / "index")


def test_index_older_than_its_limit_is_waited_for(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    fake_build("sleep 1")
    with refresher(tiny_kb, run_folder, max_age=12) as builds:
        version = builds.first(tiny_model, 0)
        ages = []
        for step in range(1, 20):
            ages.append(step - 1 - version.step)
            builds.request(tiny_model, step)
            if step == 10:
                build_here(tiny_kb, tiny_model, run_folder)
            new = builds.poll(step)
            version = new or version
            builds.place(version)
        assert max(ages) == 12 and version.step == 10


def test_build_that_never_ends_does_not_make_an_age_limit_wait_for_ever(
    tiny_kb, tiny_model, run_folder, fake_build
) -> None:
    fake_build("sleep 60")
    with refresher(tiny_kb, run_folder, max_age=10, silence=0.2, restarts=1, backoff=0.1) as builds:
        builds.place(builds.first(tiny_model, 0))
        builds.request(tiny_model, 10)
        assert builds.poll(10) is None
        with pytest.raises(InputError, match=r"said nothing for 0\.2 s.*tried 2 times"):
            builds.poll(11)


def test_run_that_is_asked_to_stop_waits_for_no_index(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    fake_build("sleep 60")
    with refresher(tiny_kb, run_folder, max_age=10, stopping=lambda: True) as builds:
        builds.place(builds.first(tiny_model, 0))
        builds.request(tiny_model, 10)
        assert builds.poll(15) is None


@pytest.mark.slow
def test_with_a_lag_every_version_comes_in_at_its_step(tiny_kb, tiny_model, run_folder, fake_build) -> None:
    fake_build(slow_build(0.2))
    swaps = {}
    for background in (False, True):
        folder = run_folder / str(background)
        folder.mkdir()
        with refresher(tiny_kb, folder, lag=3, in_background=background) as builds:
            builds.first(tiny_model, 0)
            swaps[background] = []
            for step in range(1, 26):
                builds.request(tiny_model, step)
                version = builds.poll(step)
                swaps[background] += [(step, version.step, version.number)] if version else []
    assert swaps[True] == swaps[False] == [(13, 10, 2), (23, 20, 3)]


def test_index_near_its_limit_ranks_its_best_hits_by_the_live_model(tiny_kb, tiny_model, run_folder) -> None:
    said: list[str] = []
    with refresher(tiny_kb, run_folder, max_age=20, say=said.append) as builds:
        version = builds.first(tiny_model, 0)
        move(tiny_model)
        stale, fresh = rows(version), expected(tiny_kb, tiny_model)
        query_BD = torch.from_numpy(fresh[:3]).float()
        builds.freshen(version, tiny_model, query_BD, 2, step=9)
        assert not said
        builds.freshen(version, tiny_model, query_BD, 2, step=10)
        assert "10 steps old, 20 are allowed" in said[0] and (rows(version) == stale).all()
        hits = np.unique(version.index.search(query_BD, 8).number_BK)
        builds.freshen(version, tiny_model, query_BD, 2, step=15)
        others = np.setdiff1d(np.arange(len(tiny_kb)), hits)
        np.testing.assert_allclose(rows(version)[hits], fresh[hits], atol=4e-3)
        assert len(others) and (rows(version)[others] == stale[others]).all()
        builds.freshen(version, tiny_model, query_BD, 2, step=16)
        assert len(said) == 1


def test_vectors_of_a_step_are_written_through_where_asked(tiny_kb, tiny_model, run_folder) -> None:
    number_BK = np.array([[-1, 4, 2], [-1, 2, 9]])
    vectors_UD = torch.randn(4, 16)
    for on in (False, True):
        with refresher(tiny_kb, run_folder, write_through=on) as builds:
            version = builds.first(tiny_model, 0)
            before = rows(version).copy()
            builds.write_through(version, number_BK, vectors_UD)
            changed = np.flatnonzero((rows(version) != before).any(axis=1)).tolist()
            assert changed == ([2, 4, 9] if on else [])
            if on:
                np.testing.assert_allclose(rows(version)[[2, 4, 9]], vectors_UD[1:], atol=4e-3)
                on_disk = vectors.read(run_folder / "index", tiny_kb.keys_N)
                assert on_disk is not None and (on_disk.array == before.astype(np.float16)).all()


def test_snapshots_query_tower_searches_its_index_where_asked(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, in_background=False, search="snapshot", lag=2) as builds:
        version = builds.first(tiny_model, 0)
        weight = tiny_model.embedder.query.projection.weight.detach().clone()
        move(tiny_model)
        assert torch.equal(builds.searcher(tiny_model, version).embedder.query.projection.weight, weight)
        builds.request(tiny_model, 10)
        assert builds.poll(10) is None
        place = builds.place(version)
        move(tiny_model)
        new = builds.poll(12)
        assert new is not None
        assert torch.equal(builds.searcher(tiny_model, new).embedder.query.projection.weight, -weight)
    with refresher(tiny_kb, run_folder, in_background=False, search="snapshot", lag=2) as builds:
        version = builds.first(tiny_model, 10, place)
        assert torch.equal(builds.searcher(tiny_model, version).embedder.query.projection.weight, weight)
        new = builds.poll(12)
        assert torch.equal(builds.searcher(tiny_model, new).embedder.query.projection.weight, -weight)


# -- going on after a kill


@pytest.mark.slow
def test_run_goes_on_with_the_index_and_the_build_of_its_checkpoint(
    tiny_kb, tiny_model, run_folder, fake_build
) -> None:
    """What came after the checkpoint is gone, the build under way there is done again from the same snapshot."""
    fake_build("sleep 60")
    with refresher(tiny_kb, run_folder) as builds:
        version = builds.first(tiny_model, 0)
        start = rows(version).copy()
        move(tiny_model)
        builds.request(tiny_model, 10)
        place = builds.place(version)
    snapshot = expected(tiny_kb, tiny_model)
    move(tiny_model)
    fake_build(f'exec {PYTHON} "$@"')
    with refresher(tiny_kb, run_folder) as builds:
        version = builds.first(tiny_model, 12, place)
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
            places[step] = builds.place(version)

    places: dict = {}
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        go(builds, 1, 45, builds.first(tiny_model, 0), places)
    assert places[44]["version"] == 5
    with refresher(tiny_kb, run_folder, in_background=False) as builds:
        version = builds.first(tiny_model, 25, places[25])
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
        version = builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        assert builds.poll(11) is None
        place = builds.place(version)
        assert builds.poll(14) is not None
        move(tiny_model)
        builds.request(tiny_model, 20)
    with refresher(tiny_kb, run_folder, in_background=False, lag=4) as builds:
        assert builds.first(tiny_model, 11, place).number == 1
        assert builds.poll(13) is None
        version = builds.poll(14)
        assert version is not None and (version.number, version.step) == (2, 10)
        assert vectors.newest(run_folder / "index") == 2


def test_rows_written_through_are_there_again(tiny_kb, tiny_model, run_folder) -> None:
    with refresher(tiny_kb, run_folder, write_through=True) as builds:
        version = builds.first(tiny_model, 0)
        builds.write_through(version, np.array([[-1, 4, 2]]), torch.randn(3, 16))
        before, place = rows(version).copy(), builds.place(version)
    with refresher(tiny_kb, run_folder, write_through=True) as builds:
        assert (rows(builds.first(tiny_model, 1, place)) == before).all()


def test_old_versions_go_and_those_of_checkpoints_stay(tiny_kb, tiny_model, run_folder) -> None:
    places = []
    with refresher(tiny_kb, run_folder, in_background=False, keep=2) as builds:
        version = builds.first(tiny_model, 0)
        for step in range(10, 60, 10):
            builds.request(tiny_model, step)
            version = builds.poll(step) or version
            places.append(builds.place(version))
        builds.sweep([places[2], places[4]])  # versions 4 and 6
        assert kept_versions(run_folder) == [4, 5, 6]
        builds.sweep([places[4]])
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
        builds.first(tiny_model, 0)
        changed = KnowledgeBase.open(own_kb.folder)
        changed.delete([changed.titles[0]])
        builds.request(tiny_model, 10)
        build_here(changed, tiny_model, run_folder)
        wait_until_ended(builds)
        with pytest.raises(InputError, match="was changed while training"):
            builds.poll(10)


# -- the end


def test_leaving_the_block_kills_the_build(tiny_kb, tiny_model, run_folder, fake_build, tmp_path) -> None:
    """And whatever it started: embedding may have helpers of its own."""
    fake_build(
        f"sleep 60 & echo $! > {tmp_path}/helper.writing; mv {tmp_path}/helper.writing {tmp_path}/helper; wait"
    )
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        wait_for((tmp_path / "helper").exists)
        assert builds._child is not None
        pid, helper = builds._child.pid, int((tmp_path / "helper").read_text())
        assert alive(pid) and alive(helper)
    wait_for(lambda: not alive(pid))
    wait_for(lambda: not alive(helper))


def test_leaving_the_block_after_a_build_ended_unseen_is_quiet(
    tiny_kb, tiny_model, run_folder, fake_build
) -> None:
    fake_build("exit 0")
    with refresher(tiny_kb, run_folder) as builds:
        builds.first(tiny_model, 0)
        builds.request(tiny_model, 10)
        wait_until_ended(builds)
