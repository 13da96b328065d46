"""Damage of every kind is found: by the disk, and by hands that meant well."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from realm.errors import DamagedError, RealmError
from realm.store import upkeep, vectors
from realm.store.ingest import TABLE
from realm.store.knowledge_base import KnowledgeBase
from realm.store.schema import SCHEMA
from realm.store.tables.table import commit, open_table, stream_rows, write_rows
from realm.store.vectors import VectorsInfo
from realm.text.corpus import Document
from tests.store.tiny import TinyTagger, make

INFO = VectorsInfo("m1", model_path="models/realm", step=7, dim=4, created="2026-01-01T00:00:00Z", corpus="")


def publish(kb: KnowledgeBase, name: str = "m1", model: str = "m1") -> None:
    """An index of ones, in the folder of a name."""
    folder = vectors.folder_of(kb.folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    info = dataclasses.replace(INFO, model=model, corpus=kb.fingerprint)
    vectors.publish(folder, kb.keys_N, np.ones((len(kb), 4), dtype=np.float16), info)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kb = make(tmp_path_factory.mktemp("made") / "kb")
    kb.delete(["d3"])
    kb.add([Document("New", "It is in town.", "new")], TinyTagger())
    publish(kb)
    assert kb.verify() == []
    return kb.folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "kb"))


def problems(folder: Path) -> list[str]:
    """What a user is told, by opening or by verifying."""
    try:
        return KnowledgeBase.open(folder).verify()
    except RealmError as error:
        return [str(error)]


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << position % 8
    file.write_bytes(content)


VECTORS = "indexes/m1/vectors.lance"
FILES = ["passages.lance/data", "passages.lance/_deletions", f"{VECTORS}/data", f"{VECTORS}/_versions"]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_flipped_bit_is_found(kind: str, place: float, folder: Path) -> None:
    file = next(f for f in sorted((folder / kind).iterdir()) if f.suffix != ".json")
    flip(file, int(place * file.stat().st_size))
    found = problems(folder)
    assert len(found) == 1 and file.name in found[0] and "changed since it was written" in found[0]


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
@pytest.mark.parametrize("kind", FILES)
def test_a_file_cut_short_or_gone_is_found(kind: str, damage: str, folder: Path) -> None:
    file = next(f for f in sorted((folder / kind).iterdir()) if f.suffix != ".json")
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: -9 if damage == "cut" else 0])
    found = problems(folder)
    assert len(found) == 1 and "\n" not in found[0]


@pytest.mark.parametrize("place", range(8))
def test_a_damaged_list_of_passages_is_found_when_it_is_opened(place: int, folder: Path) -> None:
    newest = min((folder / "passages.lance" / "_versions").glob("*.manifest"))
    flip(newest, place * newest.stat().st_size // 8)
    with pytest.raises(RealmError, match="is damaged"):
        KnowledgeBase.open(folder)


def test_damage_met_while_reading_is_one_line(folder: Path) -> None:
    kb = KnowledgeBase.open(folder)
    for file in (folder / "passages.lance" / "data").iterdir():
        file.unlink()
    for read in (lambda: kb.passages([0]), lambda: kb.tokens, lambda: kb.titles, lambda: list(kb)):
        with pytest.raises(RealmError, match=r"^.*cannot be read: .*; `realm kb verify` checks all files$"):
            read()


def test_damage_met_while_rows_are_rewritten_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kb = KnowledgeBase.open(folder)
    kb.add([Document(f"New {n}", f"It has {n} inns.", f"n{n}") for n in range(20)], TinyTagger())
    for file in (folder / "passages.lance" / "data").iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    says = r"^.*cannot be read: .*; `realm kb verify` checks all files$"
    with pytest.raises(DamagedError, match=says):
        upkeep.compacted(folder / "passages.lance", kb.table)
    with pytest.raises(DamagedError, match=says):
        list(stream_rows(folder / "passages.lance", kb.table))
    monkeypatch.setattr(upkeep, "TIDY_EVERY", 1)
    assert upkeep.tidy(folder / "passages.lance", kb.table) is kb.table
    assert "was not compacted" in caplog.text and "cannot be read" in caplog.text


def test_a_file_without_a_checksum_is_found(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text("")
    assert all("has no checksum in SHA256SUMS" in problem for problem in problems(folder))
    assert problems(folder)


def test_a_damaged_tokenizer_is_found(folder: Path) -> None:
    file = folder / "tokenizer" / "tokenizer.json"
    for content in ("{", file.read_text().replace('"[UNK]"', '"[NUK]"'), None):
        file.write_text(content) if content else file.unlink()
        with pytest.raises(RealmError, match="tokenizer"):
            KnowledgeBase.open(folder)


Rows = dict[str, list[object]]


def rewrite(folder: Path, change: Callable[[Rows], None]) -> None:
    """All passages written anew, properly, with a change: damage that no checksum knows of."""
    table = open_table(folder / "passages.lance")
    rows = table.to_table().to_pydict()
    change(rows)
    batch = pa.RecordBatch.from_pydict(rows, schema=SCHEMA)
    fragments = write_rows(folder / "passages.lance", [batch], SCHEMA, new=True)
    schema = SCHEMA.with_metadata(table.schema.metadata)
    commit(folder / "passages.lance", lance.LanceOperation.Overwrite(schema, fragments), table)


def spoil(column: str, value: object) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[column][5] = value

    return change


def twice(rows: Rows) -> None:
    for values in rows.values():
        values[5] = values[6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("text", "Other."), "have an id that is not the hash of their title and text: {id} (number 5)"),
        (spoil("title", "Other"), "have an id that is not the hash of their title and text: {id} (number 5)"),
        (spoil("document_id", "x"), "have a document key that is not the hash of their document id"),
        (spoil("sentence_ends", [999]), "have sentences or spans outside their text"),
        (spoil("span_starts", [1, 2, 3, 4]), "have sentences or spans outside their text"),
        (spoil("body_ids", [10**6] * 20), "have wordpieces that are not in the vocabulary"),
        (spoil("sentence_pieces", [-1]), "have sentences or spans outside their wordpieces"),
        (spoil("span_end_pieces", [77, 78]), "have sentences or spans outside their wordpieces"),
        (twice, "have the same id as another passage"),
    ],
)
def test_rows_that_contradict_themselves_are_found(
    change: Callable[[Rows], None], message: str, folder: Path
) -> None:
    name = KnowledgeBase.open(folder).ids[5]
    rewrite(folder, change)
    assert any(f"1 passages {message.format(id=name)}" in problem for problem in problems(folder))


def test_a_deleted_document_leaves_nothing_to_complain_of(folder: Path) -> None:
    KnowledgeBase.open(folder).delete(["d4", "d5"])
    assert problems(folder) == []


def test_an_index_older_than_its_passages_lags_and_is_sound(folder: Path) -> None:
    kb = KnowledgeBase.open(folder)
    assert kb.lagging() == []
    kb.delete(["d4", "d5"])
    assert kb.lagging() == []
    kb.add([Document("Newer", "Two inns.", "newer")], TinyTagger())
    assert problems(folder) == []
    assert kb.lagging() == [
        f"indexes/m1 is incomplete: 1 of {len(kb)} passages have no vector in version 1; `realm index` embeds these passages"
    ]


def test_an_index_of_these_passages_without_all_their_vectors_is_found(folder: Path) -> None:
    kb = KnowledgeBase.open(folder)
    info = vectors.info_of(folder / "indexes" / "m1")
    assert info is not None
    vectors.publish(
        folder / "indexes" / "m1", kb.keys_N[:-1], np.ones((len(kb) - 1, info.dim), np.float16), info
    )
    assert problems(folder) == [
        f"indexes/m1: 1 passages have no vector in version 2: run `realm index`: "
        f"{kb.ids[-1]} (number {len(kb) - 1})",
    ]


def test_a_lost_newest_version_is_found_and_nothing_older_is_read_in_its_place(folder: Path) -> None:
    kb = KnowledgeBase.open(folder)
    kb.delete(["d4"])
    newest = min((folder / TABLE / "_versions").glob("*.manifest"))
    newest.unlink()
    with pytest.raises(RealmError, match=f"was committed later: {newest.name} is missing"):
        KnowledgeBase.open(folder)


def test_vectors_of_an_unknown_model_and_vectors_that_are_not_finite_are_found(folder: Path) -> None:
    kb = KnowledgeBase.open(folder)
    publish(kb, model="")
    assert problems(folder) == [
        "indexes/m1: vectors version 2 has no fingerprint of the model that computed the vectors: run `realm index`"
    ]
    path = folder / VECTORS
    schema = pa.schema([("id", pa.uint64()), ("vector", pa.list_(pa.float16(), 4))])
    bad = np.full(len(kb) * 4, np.nan, dtype=np.float16)
    batch = pa.record_batch(
        [pa.array(kb.keys_N), pa.FixedSizeListArray.from_arrays(pa.array(bad), 4)], schema=schema
    )
    commit(path, lance.LanceOperation.Overwrite(schema, write_rows(path, [batch], schema, new=True)))
    assert problems(folder) == [f"indexes/m1: {path} has no description of the model: run `realm index`"]
    info = schema.with_metadata(open_table(path, 1).schema.metadata)
    commit(path, lance.LanceOperation.Overwrite(info, write_rows(path, [batch], info, new=True)))
    assert f"{len(kb)} passages have a vector with a NaN or an infinity in version 4" in problems(folder)[0]


def test_the_vectors_of_every_model_are_checked(folder: Path) -> None:
    kb = KnowledgeBase.open(folder)
    publish(kb, "m2", "m2")
    assert [path.name for path in vectors.folders(folder)] == ["m1", "m2"]
    assert problems(folder) == []
    file = next((folder / "indexes" / "m2" / "vectors.lance" / "data").iterdir())
    flip(file, 100)
    (found,) = problems(folder)
    assert found.startswith("indexes/m2: vectors.lance/data") and "changed since it was written" in found


def test_an_index_that_was_never_finished_is_no_problem(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vectors, "commit", stop)
        for name in ("m1", "m2"):
            with pytest.raises(KeyboardInterrupt):
                publish(KnowledgeBase.open(folder), name)
    assert (folder / "indexes" / "m2" / "vectors.lance" / "data").is_dir()
    assert [path.name for path in vectors.folders(folder)] == ["m1"]
    assert problems(folder) == []


def test_a_table_whose_files_are_in_another_folder_is_not_read(tmp_path: Path) -> None:
    """A knowledge base of another person could name any folder, or a bucket of the user."""
    kb = make(tmp_path / "kb")
    table, outside = kb.folder / TABLE, tmp_path / "outside"
    rows = lance.dataset(table).to_table()
    shutil.rmtree(table)
    outside.mkdir()
    base = lance.DatasetBasePath(str(outside), name="x", is_dataset_root=False)
    lance.write_dataset(rows, table, initial_bases=[base], target_bases=["x"])
    (kb.folder / "SHA256SUMS").unlink()
    assert list(outside.iterdir())
    assert ["outside of its folder" in one for one in problems(kb.folder)] == [True]
