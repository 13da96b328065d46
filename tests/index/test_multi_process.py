"""Several devices embed one knowledge base: the same vectors, one version, and none where a process fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from realm.errors import InputError
from realm.index.embedding import IndexConfig
from realm.index.multi_process import MOST_KILLS, embed_on_devices
from realm.index.versions import build_index
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase
from tests.train.refresh.refreshing import alive, expected, wait_for
from tests.train.stages import children_of


def config(device: str) -> IndexConfig:
    return IndexConfig(device=device, precision="fp32", threads=1)


def test_two_devices_make_one_version_with_the_vectors_of_one(
    tiny_kb, tiny_model, tiny_model_folder, tmp_path
) -> None:
    report = build_index(tiny_kb, str(tiny_model_folder), config("cpu, cpu"), tmp_path)
    assert (report["version"], report["embedded"]) == (1, len(tiny_kb))
    found = vectors.read(tmp_path, tiny_kb.keys_N)
    assert found is not None and len(found.missing) == 0 and found.info.corpus == tiny_kb.fingerprint
    np.testing.assert_allclose(found.array, expected(tiny_kb, tiny_model), atol=4e-3)


@pytest.mark.slow
def test_three_devices_share_one_progress_bar(tiny_kb, tiny_model, tiny_model_folder, tmp_path) -> None:
    heard: list[int] = []
    array_ND = embed_on_devices(
        tiny_kb, str(tiny_model_folder), tmp_path, config("cpu,cpu,cpu"), heard.append
    )
    assert heard == sorted(heard) and heard[-1] == len(tiny_kb)
    np.testing.assert_allclose(array_ND, expected(tiny_kb, tiny_model), atol=4e-3)


def test_device_that_is_not_there_is_one_line_and_no_version(tiny_kb, tiny_model_folder, tmp_path) -> None:
    with pytest.raises(InputError, match="device 'cuda:77' cannot be used"):
        build_index(tiny_kb, str(tiny_model_folder), config("cpu,cuda:77"), tmp_path)
    assert vectors.newest(tmp_path) is None


@pytest.mark.slow
def test_device_that_fails_is_one_line_and_no_version(tiny_kb, tiny_model_folder, tmp_path) -> None:
    """A tensor of "meta" has no numbers."""
    with pytest.raises(InputError, match="the process that embeds on meta failed with exit code 1"):
        build_index(tiny_kb, str(tiny_model_folder), config("cpu,meta"), tmp_path)
    assert vectors.newest(tmp_path) is None


@pytest.mark.slow
def test_knowledge_base_that_changes_meanwhile_is_one_line(own_kb, tiny_model_folder, tmp_path) -> None:
    KnowledgeBase.open(own_kb.folder).delete(["d0"])
    with pytest.raises(InputError, match=r"cpu: .* was changed while its index was built"):
        embed_on_devices(own_kb, str(tiny_model_folder), tmp_path, config("cpu,cpu"))


@contextmanager
def killing(most: int) -> Iterator[list[int]]:
    """Kills up to `most` of the processes that embed, one after the other, once the first two have started."""
    before, killed, over = set(children_of(os.getpid())), [], threading.Event()

    def started() -> set[int]:
        new = set(children_of(os.getpid())) - before - set(killed)
        return {pid for pid in new if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()}

    def kill() -> None:
        wait_for(lambda: len(started()) == 2 or over.is_set())
        while len(killed) < most and not over.is_set():
            if found := started():
                killed.append(max(found))
                os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_another_process_takes_the_place_of_a_killed_one(
    tiny_kb, tiny_model, tiny_model_folder, tmp_path
) -> None:
    with killing(1) as killed:
        array_ND = embed_on_devices(tiny_kb, str(tiny_model_folder), tmp_path, config("cpu,cpu"))
    assert len(killed) == 1
    np.testing.assert_allclose(array_ND, expected(tiny_kb, tiny_model), atol=4e-3)


@pytest.mark.slow
def test_a_device_whose_processes_are_always_killed_is_one_line_and_takes_the_others_along(
    tiny_kb, tiny_model_folder, tmp_path
) -> None:
    before = set(children_of(os.getpid()))
    with (
        killing(2 * MOST_KILLS) as killed,
        pytest.raises(InputError, match="embeds on cpu failed with signal SIGKILL"),
    ):
        embed_on_devices(tiny_kb, str(tiny_model_folder), tmp_path, config("cpu,cpu"))
    assert len(killed) >= MOST_KILLS and not any(map(alive, killed))
    assert not any(
        "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
        for pid in set(children_of(os.getpid())) - before
    )


@pytest.mark.slow
def test_processes_end_when_the_one_that_started_them_is_killed(tiny_kb, tiny_model_folder, tmp_path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "realm", "index", "--kb", str(tiny_kb.folder), "--model", str(tiny_model_folder),
         "--set", "device=cpu,cpu", "--supervised", str(tmp_path)],
        stdin=subprocess.PIPE,
    )  # fmt: skip
    wait_for(lambda: len(children_of(parent.pid)) >= 2)
    children = children_of(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 120  # they hear of it when they are to speak
    while any(map(alive, children)):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert vectors.newest(tmp_path) is None
