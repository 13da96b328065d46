"""A disk that refuses: every write of a change fails once, in one line, and the same change succeeds afterwards."""

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest

from realm import cli
from realm.errors import WriteFailed
from realm.store.ingest import TABLE
from realm.store.knowledge_base import KnowledgeBase
from realm.store.tables.digests import CHECKSUMS
from realm.store.tables.table import write_rows
from realm.text.corpus import Document
from tests.store.test_kills import Trial, content
from tests.store.tiny import DOCUMENTS, TinyTagger, make

NEW = [DOCUMENTS[4]._replace(text="Town 4 is two towns."), Document("New", "It is in town.", "new")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "kb").folder


@pytest.fixture
def kb(made: Path, tmp_path: Path) -> KnowledgeBase:
    shutil.copytree(made, tmp_path / "kb")
    return KnowledgeBase.open(tmp_path / "kb")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def change(kb: KnowledgeBase, name: str) -> None:
    if name == "add":
        kb.add(NEW, TinyTagger())
    else:
        kb.delete(["d4"])


@pytest.mark.parametrize("name", ["add", "delete"])
def test_a_change_on_a_full_disk_is_one_line_and_succeeds_once_there_is_room(
    name: str, kb: KnowledgeBase
) -> None:
    before = list(kb)
    listed = (kb.folder / CHECKSUMS).stat().st_size
    for size in (0, 300, 600, 1000, 2000, listed, listed + 100, listed + 200):
        again = KnowledgeBase.open(kb.folder)
        with (
            pytest.raises(WriteFailed, match=rf"{kb.folder}.* cannot be written: [^\n]+\Z"),
            files_of_at_most(size),
        ):
            change(again, name)
        again = KnowledgeBase.open(kb.folder)
        assert list(again) == before
        assert again.verify() == []
    change(kb, name)
    assert list(kb) != before
    assert kb.verify() == []


def test_rows_whose_last_bytes_find_no_room_are_a_failed_write(kb: KnowledgeBase) -> None:
    path, schema = kb.folder / TABLE, kb.table.schema
    (written,) = write_rows(path, kb.table.to_batches(), schema)
    size = (path / "data" / written.files[0].path).stat().st_size
    for missing in (1, 2, 40, size // 2):
        with pytest.raises(WriteFailed, match="cannot be written"), files_of_at_most(size - missing):
            write_rows(path, kb.table.to_batches(), schema)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["build", "build --replace", "index"])
def test_a_command_on_a_full_disk_ends_with_one_line_and_succeeds_once_there_is_room(
    name: str, tiny_kb, tiny_model_folder, tmp_path, capsys
) -> None:
    trial = Trial(name, tiny_kb.folder / "tokenizer", tiny_model_folder, tmp_path)
    trial.reset()
    before = content(trial.folder)
    assert cli.main(trial.argv) == 0
    after, refused = content(trial.folder), 0
    for size in sizes_too_small(trial.folder):
        trial.reset()
        capsys.readouterr()
        with files_of_at_most(size):
            code = cli.main(trial.argv)
        said = capsys.readouterr().err
        if code:
            assert code == 2 and said.startswith("realm: ") and said.count("\n") == 1, said
            assert content(trial.folder) == before, size
            assert cli.main(trial.argv) == 0
            refused += 1
        assert content(trial.folder) == after, size
        assert KnowledgeBase.open(trial.folder).verify() == []
        assert os.listdir(trial.folder.parent) == ["kb"]
    assert refused > 3


def sizes_too_small(folder: Path) -> list[int]:
    """For each file that was written, and each line of the lists of checksums, a size that lacks its last byte."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.stat().st_size for path in files}
    for listed in (path for path in files if path.name == CHECKSUMS):
        sizes.update(accumulate(len(line) for line in listed.read_bytes().splitlines(keepends=True)))
    return sorted(max(size - 1, 0) for size in sizes)
