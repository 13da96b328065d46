"""Folders in one another's place, and one writer at a time, whatever is killed when."""

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from realm import folders
from realm.errors import InputError
from realm.files import read_json
from realm.folders import make_once, one_writer, replace_folder, restore


def make(path: Path, content: str) -> Path:
    (path / "in").mkdir(parents=True)
    (path / "in" / "file").write_text(content)
    return path


class Stopped(BaseException):
    """Stands for a kill before or after one call of the system."""


def stop_at(number: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `number`-th call that changes names or removes does not happen, or is the last that does."""
    left = iter(range(number, -1000, -1))

    def counted(call):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            count = next(left)
            if count == 0 and not after:
                raise Stopped
            try:
                return call(*args, **kwargs)
            finally:
                if count == 0:
                    raise Stopped

        return run

    for owner, name in ((os, "rename"), (os, "unlink"), (os, "rmdir"), (folders, "_exchange")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("exchanges", [True, False])
def test_replacement_killed_at_any_call_of_the_system_leaves_the_old_folder_or_the_new(
    exchanges: bool, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    if not exchanges:
        monkeypatch.setattr(folders, "_exchange", refuse)
    seen = set()
    for number in range(100):
        home = tmp_path / str(number)
        target, new = make(home / "kb", "old"), make(home / "kb.building", "new")
        with monkeypatch.context() as patch:
            stop_at(number, after, patch)
            try:
                replace_folder(new, target)
                stopped = False
            except Stopped:
                stopped = True
        if exchanges:
            assert target.exists()
        restore(target)
        seen.add((target / "in" / "file").read_text())
        replace_folder(make(home / "again", "newest"), target)  # whatever was left is no obstacle
        assert (target / "in" / "file").read_text() == "newest"
        if not stopped:
            break
    assert number > 4
    assert seen == {"old", "new"}
    assert [path.name for path in home.iterdir()] == ["kb"]


def test_replacement_without_anything_to_replace_is_a_rename(tmp_path: Path) -> None:
    replace_folder(make(tmp_path / "new", "new"), tmp_path / "kb")
    assert (tmp_path / "kb" / "in" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["kb"]


def test_reader_that_comes_between_the_two_renames_does_not_spoil_the_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, new = make(tmp_path / "kb", "old"), make(tmp_path / "kb.building", "new")
    rename = Path.rename

    def refuse(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    def rename_then_read(self: Path, to: Path) -> Path:
        done = rename(self, to)
        if to.name == "kb.going":
            restore(target)
        return done

    monkeypatch.setattr(folders, "_exchange", refuse)
    monkeypatch.setattr(Path, "rename", rename_then_read)
    replace_folder(new, target)
    assert (target / "in" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["kb"]


def count_up(folder: Path, times: int) -> None:
    """A child: adds one to a number in a file, again and again."""
    for _ in range(times):
        with one_writer(folder), one_writer(folder):
            number = int((folder / "number").read_text())
            (folder / "number").write_text(str(number + 1))


def test_writers_of_a_folder_wait_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("forkserver")
    children = [context.Process(target=count_up, args=(tmp_path, 200)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert (tmp_path / "number").read_text() == "400"


def test_lock_of_a_killed_writer_is_free_and_one_of_a_replaced_folder_is_none(tmp_path: Path) -> None:
    code = (
        f"import os, pathlib; from realm.folders import one_writer\n"
        f"with one_writer(pathlib.Path({str(tmp_path)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with one_writer(tmp_path, lambda: pytest.fail("nobody holds the lock")):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    with one_writer(tmp_path, lambda: pytest.fail("nobody holds the lock")):
        assert (tmp_path / folders.LOCK).exists()


def test_a_folder_that_is_removed_after_its_replacement_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill left of the old folder is no unfinished replacement."""
    target, new = make(tmp_path / "kb", "old"), make(tmp_path / "kb.building", "new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            replace_folder(new, target)
    assert (target / "in" / "file").read_text() == "new"
    folders.remove(target)
    restore(target)
    assert not target.exists()


def test_a_folder_that_several_threads_need_is_made_once_and_without_leftovers(tmp_path: Path) -> None:
    calls = []

    def make(aside: Path) -> None:
        calls.append(aside)
        time.sleep(0.1)
        (aside / "content").write_text("new")

    (tmp_path / "made.writing").mkdir()
    (tmp_path / "made.writing" / "old").write_text("left by a killed process")
    with ThreadPoolExecutor(3) as pool:
        for done in [
            pool.submit(make_once, tmp_path / "made", "of.json", {"of": "1"}, make) for _ in range(3)
        ]:
            done.result()
    assert len(calls) == 1
    assert {file.name for file in (tmp_path / "made").iterdir()} == {"content", "of.json"}


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for folder in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(InputError, match="has other files: choose another folder"):
            make_once(folder, "of.json", {"of": "1"}, lambda aside: None)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]
    make_once(tmp_path / "made", "of.json", {"of": "1"}, lambda aside: None)
    make_once(tmp_path / "made", "of.json", {"of": "2"}, lambda aside: None)  # its own folder
    assert read_json(tmp_path / "made" / "of.json") == {"of": "2"}
