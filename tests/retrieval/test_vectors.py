"""Vectors: aligned with the passages of today; a version is whole or not there."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm.config import InputError
from realm.retrieval import vectors as vectors_module
from realm.retrieval.knowledge_base import KnowledgeBase, Vectors, VectorsInfo
from realm.text.corpus import Document
from tests.retrieval.tiny import TinyTagger, make

DIM = 4
INFO = VectorsInfo(model="m1", model_path="models/realm", step=7, dim=DIM, created="2026-01-01T00:00:00Z")


@pytest.fixture
def kb(tmp_path: Path) -> KnowledgeBase:
    return make(tmp_path / "kb")


def vectors_of(kb: KnowledgeBase, numbers: np.ndarray | None = None, dim: int = DIM) -> np.ndarray:
    """Vectors that follow from the passage's id, so that each is known wherever it turns up."""
    keys = kb.keys_N if numbers is None else kb.keys_N[numbers]
    return np.stack([np.random.default_rng(key).normal(size=dim) for key in keys]).astype(np.float16)


def newest(kb: KnowledgeBase, version: int | None = None) -> Vectors:
    vectors = kb.vectors(version)
    assert vectors is not None
    return vectors


def assert_aligned(kb: KnowledgeBase, missing: set[int]) -> None:
    vectors = newest(kb)
    have = np.setdiff1d(np.arange(len(kb)), vectors.missing)
    assert set(vectors.missing.tolist()) == missing
    assert vectors.array.dtype == np.float16 and vectors.array.shape == (len(kb), DIM)
    if len(have):
        assert (vectors.array[have] == vectors_of(kb, have)).all()
    assert not vectors.array[vectors.missing].any()


def test_without_an_index_there_are_no_vectors(kb: KnowledgeBase) -> None:
    assert kb.vectors() is None
    assert kb.vectors_version() is None
    assert kb.vectors_info() is None
    assert kb.keep_versions(1) == 0


def test_what_is_published_is_read_with_what_it_says_about_itself(kb: KnowledgeBase) -> None:
    version = kb.publish(vectors_of(kb), INFO)
    assert_aligned(kb, missing=set())
    assert newest(kb).version == version == kb.vectors_version()
    assert newest(kb).info == kb.vectors_info() == dataclasses.replace(INFO, corpus=kb.fingerprint)


def test_every_version_can_be_read_until_it_is_removed(kb: KnowledgeBase) -> None:
    versions = [
        kb.publish(vectors_of(kb) * np.float16(step), dataclasses.replace(INFO, step=step))
        for step in (1, 2, 3, 4)
    ]
    wide = kb.publish(vectors_of(kb, dim=9), dataclasses.replace(INFO, dim=9))
    assert [newest(kb, v).info.step for v in versions] == [1, 2, 3, 4]
    assert (newest(kb, versions[1]).array == vectors_of(kb) * np.float16(2)).all()
    assert newest(kb).array.shape[1] == 9
    size = disk(kb)
    assert kb.keep_versions(2) == 3
    assert disk(kb) < size
    assert newest(kb).version == wide and newest(kb, versions[3]).info.step == 4
    with pytest.raises(InputError, match=f"no version {versions[0]}: the newest is {wide}"):
        kb.vectors(versions[0])
    assert kb.keep_versions(1) == 1
    assert newest(kb).version == wide
    with pytest.raises(InputError, match="the newest always stays"):
        kb.keep_versions(0)


def disk(kb: KnowledgeBase) -> int:
    return sum(file.stat().st_size for file in (kb.folder / "vectors.lance" / "data").iterdir())


def test_new_passages_get_vectors_beside_those_that_are_there(kb: KnowledgeBase) -> None:
    kb.publish(vectors_of(kb), INFO)
    kb.delete(["d3", "d7"])
    kb.add(
        [Document("New", "It is in town. " * 9, "new"), Document("Newer", "One inn.", "newer")], TinyTagger()
    )
    new = set(kb.numbers_of(["new", "newer"]).tolist())
    assert_aligned(kb, missing=new)
    assert newest(kb).left_over > 0
    missing = newest(kb).missing
    version = kb.add_vectors(vectors_of(kb, missing), missing, "m1")
    assert newest(kb).version == version
    assert newest(kb).info == dataclasses.replace(INFO, corpus=kb.fingerprint)
    assert_aligned(kb, missing=set())
    before = newest(kb, version - 1)
    assert before.info.corpus != kb.fingerprint and before.missing.tolist() == missing.tolist()
    kb.publish(vectors_of(kb), INFO)
    assert newest(kb).left_over == 0


@settings(max_examples=10)
@given(have=st.sets(st.integers(0, 39)), gone=st.sets(st.integers(0, 19), max_size=18))
def test_vectors_stay_with_their_passages_through_deletions(
    tmp_path_factory: pytest.TempPathFactory, have: set[int], gone: set[int]
) -> None:
    kb = make(tmp_path_factory.mktemp("kb") / "kb")
    numbers = np.array(sorted(n for n in have if n < len(kb)), dtype=np.int64)[::-1]
    if not len(numbers):
        return
    kb.publish(vectors_of(kb, numbers), INFO, numbers)
    with_vector = {kb.ids[n] for n in numbers}
    if gone:
        kb.delete([f"d{n}" for n in sorted(gone)])
    assert_aligned(kb, missing={n for n, name in enumerate(kb.ids) if name not in with_vector})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda v: v.astype(np.float32), "float32: they must be float16"),
        (lambda v: v[:, :3], r"3\): \d+ passages of dimension 4 were expected"),
        (lambda v: v[1:], r"\(\d+, 4\): \d+ passages"),
        (lambda v: np.where(np.arange(len(v))[:, None] == 5, np.float16("nan"), v), "vector 5 has a NaN"),
        (lambda v: v * np.float16(65504) * np.float16(65504), "infinity"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow")
def test_vectors_that_cannot_be_searched_are_refused(kb: KnowledgeBase, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        kb.publish(spoil(vectors_of(kb)), INFO)
    assert kb.vectors() is None
    kb.publish(vectors_of(kb), INFO)
    with pytest.raises(InputError, match=message):
        kb.add_vectors(spoil(vectors_of(kb)), np.arange(len(kb)), "m1")


def test_vectors_of_another_corpus_or_model_are_refused(kb: KnowledgeBase) -> None:
    with pytest.raises(InputError, match="the vectors are of corpus other"):
        kb.publish(vectors_of(kb), dataclasses.replace(INFO, corpus="other"))
    numbers = np.arange(2)
    with pytest.raises(InputError, match="no vectors to add to"):
        kb.add_vectors(vectors_of(kb, numbers), numbers, "m1")
    kb.publish(vectors_of(kb), INFO)
    with pytest.raises(InputError, match=r"vectors of model m1 \(models/realm\), not m2"):
        kb.add_vectors(vectors_of(kb, numbers), numbers, "m2")


@pytest.mark.parametrize("begun", [False, True])
def test_a_half_written_version_is_never_seen(
    begun: bool, kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    if begun:
        kb.publish(vectors_of(kb), INFO)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vectors_module, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            kb.publish(vectors_of(kb) * np.float16(2), dataclasses.replace(INFO, step=8))
    if begun:
        assert_aligned(kb, missing=set())
        assert newest(kb).info.step == INFO.step
    else:
        assert kb.vectors() is None
    assert kb.verify() == []
    kb.publish(vectors_of(kb), INFO)
    assert_aligned(kb, missing=set())


def test_an_open_knowledge_base_reads_vectors_that_were_published_for_a_later_one(kb: KnowledgeBase) -> None:
    later = KnowledgeBase.open(kb.folder)
    later.delete(["d5"])
    later.add([Document("New", "It is in town.", "new")], TinyTagger())
    later.publish(vectors_of(later), INFO)
    assert_aligned(kb, missing=set(kb.numbers_of(["d5"]).tolist()))
    assert newest(kb).left_over == 1


def test_a_knowledge_base_that_lost_all_its_passages_still_works(kb: KnowledgeBase) -> None:
    kb.publish(vectors_of(kb), INFO)
    kb.delete(kb.titles)
    assert len(kb) == len(kb.tokens.body.lengths) == len(kb.passages([])) == 0
    assert newest(kb).array.shape == (0, DIM)
    kb.publish(np.zeros((0, DIM), dtype=np.float16), INFO)
    assert newest(kb).array.shape == (0, DIM) and newest(kb).left_over == 0
    assert kb.verify() == []
    kb.add([Document("New", "It is in town.", "new")], TinyTagger())
    assert_aligned(kb, missing={0})
