"""Builds of any size need the same memory. The tests count what Lance keeps, because the memory of a process varies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from realm.store import ingest as build_module
from realm.store.tables.table import commit, open_table, stream_rows, write_rows
from realm.text.corpus import Document
from tests.store.tiny import CONFIG, DOCUMENTS, TinyTagger, make


def cached(table: lance.LanceDataset) -> int:
    """Bytes of the manifests and of the metadata of files that an open table keeps in memory."""
    return int(table.session().size_bytes())


def test_a_build_keeps_no_earlier_version_and_no_file_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[lance.LanceDataset] = []
    sizes: list[tuple[int, int]] = []

    def measured(path: Path, *args: Any) -> lance.LanceDataset:
        tables.append(commit(path, *args))
        sizes.append((cached(tables[-1]), cached(open_table(path))))
        return tables[-1]

    monkeypatch.setattr(build_module, "commit", measured)
    documents = [Document(f"Inn {number}", f"It has {number} inns.", f"i{number}") for number in range(40)]
    kb = make(tmp_path / "kb", documents, replace(CONFIG, commit_every=1))
    assert len(tables) == 41  # the last commit rewrites 40 files as one file
    own, newly_opened = sizes[-2]
    assert own < 4 * newly_opened
    assert cached(tables[-2]) == own
    assert [passage.document_id for passage in kb] == [document.id for document in documents]


def test_streamed_rows_are_all_rows_that_are_not_deleted_and_leave_no_metadata_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[lance.LanceDataset] = []

    def recorded(*args: Any, **settings: Any) -> lance.LanceDataset:
        opened.append(dataset(*args, **settings))
        return opened[-1]

    dataset = lance.dataset
    kb = make(tmp_path / "kb")
    kb.delete(["d2", "d7"])
    kb.add([DOCUMENTS[3]._replace(text="Town 3 has two inns.", fields={"year": 2020})], TinyTagger())
    path = kb.folder / "passages.lance"
    table = open_table(path)
    before = cached(table)
    monkeypatch.setattr(lance, "dataset", recorded)
    streamed = pa.Table.from_batches(stream_rows(path, table))
    assert cached(table) == before
    assert len(opened) == 1 and cached(opened[0]) < 1000
    assert streamed == table.to_table()
    assert cached(table) > before + 1000


def test_few_bytes_of_a_table_with_many_columns_wait_for_their_page(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    schema = pa.schema([(f"column {number}", pa.int64()) for number in range(20)])
    batches = (
        pa.record_batch([pa.array(draw.integers(2**62, size=10_000)) for _ in schema], schema=schema)
        for _ in range(40)
    )
    (fragment,) = write_rows(tmp_path / "numbers.lance", batches, schema)
    columns = (
        LanceFileReader(str(tmp_path / "numbers.lance/data" / fragment.files[0].path)).metadata().columns
    )
    pages = [[sum(buffer.size for buffer in page.buffers) for page in column.pages] for column in columns]
    assert sum(map(sum, pages)) > 60e6
    assert sum(map(max, pages)) < 40e6
