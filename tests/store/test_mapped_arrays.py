"""Arrays that several processes map: the same numbers as in memory, written once, and never those of another version."""

import shutil
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from realm import distributed
from realm.folders import LOCK
from realm.masking.masked_queries import SpanIndex
from realm.store import knowledge_base, schema
from realm.store.knowledge_base import KnowledgeBase
from realm.store.mapped_arrays import MAPPED, mapped_arrays
from realm.store.schema import TOKEN_COLUMNS, PassageTokens


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "local_ranks", lambda: 2)


def assert_same_tokens(one: PassageTokens, other: PassageTokens) -> None:
    for name, mine, theirs in zip(TOKEN_COLUMNS, one, other, strict=True):
        for own, given in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(own, given, err_msg=name)
            assert own.dtype == given.dtype


def is_mapped(array: np.ndarray) -> bool:
    while array.base is not None and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)


def test_ranks_of_a_machine_map_the_wordpieces_and_spans_that_one_process_holds(
    own_kb, two_ranks, monkeypatch
) -> None:
    mapped = own_kb.tokens
    spans = SpanIndex(mapped)
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "local_ranks", lambda: 1)
        held = KnowledgeBase.open(own_kb.folder).tokens
    assert is_mapped(mapped.body.values) and not is_mapped(held.body.values)
    assert_same_tokens(mapped, held)
    alone = SpanIndex(held)
    for passage in range(len(own_kb)):
        for start, end in zip(held.span_starts.row(passage), held.span_ends.row(passage), strict=True):
            span = held.body.row(passage)[start:end]
            assert spans.passages(span).tolist() == alone.passages(span).tolist() != []
    assert is_mapped(spans.passages(span))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(mapped.body.row(0))


def test_processes_map_the_wordpieces_of_a_large_knowledge_base(own_kb, monkeypatch) -> None:
    monkeypatch.setattr(knowledge_base, "IN_MEMORY", len(own_kb) - 1)
    mapped = own_kb.tokens
    monkeypatch.setattr(knowledge_base, "IN_MEMORY", len(own_kb))
    held = KnowledgeBase.open(own_kb.folder).tokens
    assert is_mapped(mapped.body.values) and not is_mapped(held.body.values)
    assert_same_tokens(mapped, held)


def test_a_later_process_reads_the_files_that_the_first_process_wrote(own_kb, two_ranks, monkeypatch) -> None:
    first = own_kb.tokens
    monkeypatch.setattr(schema, "load_tokens", None)
    assert_same_tokens(KnowledgeBase.open(own_kb.folder).tokens, first)


def test_damaged_files_are_written_again(own_kb, two_ranks) -> None:
    file = own_kb.tokens.folder / "wordpieces" / "body_ids_values.npy"
    right = file.read_bytes()
    file.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    found = KnowledgeBase.open(own_kb.folder).tokens
    assert_same_tokens(found, schema.load_tokens(own_kb.table, own_kb.tokenizer))
    assert file.read_bytes() == right


def test_files_of_an_earlier_version_are_removed_and_never_read(own_kb, two_ranks) -> None:
    before = own_kb.tokens
    own_kb.delete(["d0"])
    after = own_kb.tokens
    assert len(after.body.lengths) == len(own_kb) < len(before.body.lengths)
    assert {folder.name for folder in (own_kb.folder / MAPPED).iterdir()} == {after.folder.name, LOCK}
    assert_same_tokens(after, schema.load_tokens(own_kb.table, own_kb.tokenizer))
    own_kb.compact()
    assert not (own_kb.folder / MAPPED).exists()


def test_arrays_stay_in_memory_if_the_files_cannot_be_written(own_kb, two_ranks) -> None:
    (own_kb.folder / MAPPED).write_text("not a folder")
    tokens = own_kb.tokens
    assert_same_tokens(tokens, schema.load_tokens(own_kb.table, own_kb.tokenizer))
    assert len(SpanIndex(tokens).passages(np.array([-1], dtype=np.int32))) == 0


def test_arrays_that_cannot_be_computed_are_computed_only_once(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        raise OSError("the passages cannot be read")

    with pytest.raises(OSError, match="cannot be read"):
        mapped_arrays(tmp_path / "1" / "a", make)
    assert len(made) == 1


def test_only_one_of_several_processes_computes_the_arrays(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        time.sleep(0.2)
        return {"numbers": np.arange(5)}

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(mapped_arrays(tmp_path / "1" / "a", make)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and all(one["numbers"].tolist() == list(range(5)) for one in found)
    shutil.rmtree(tmp_path / "1")  # mapped arrays stay usable
    assert found[0]["numbers"].sum() == 10
