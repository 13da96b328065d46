"""Approximate search finds most of the best passages, and gives each passage the score of exact search."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.cli import main
from realm.errors import DamagedError, InputError
from realm.index.versions import APPROXIMATE, complete_index
from realm.search import approximate
from realm.search.approximate import ApproximateIndex, approximate_index
from realm.search.exact import MipsIndex
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase
from realm.store.vectors import Vectors, VectorsInfo
from realm.text.corpus import Document
from tests.store.tiny import TinyTagger

N, D = 4000, 16


def stored(array_ND: np.ndarray, version: int = 1) -> Vectors:
    info = VectorsInfo("m", "models/m", 0, array_ND.shape[1], "", "c", 8 * array_ND.dtype.itemsize)
    return Vectors(array_ND, np.zeros(0, dtype=np.int64), info, version, 0)


def drawn(count: int = N, dim: int = D, seed: int = 0) -> np.ndarray:
    """Vectors of different lengths around a few centres, as texts on a few subjects have. Their products have no rounding."""
    draw = np.random.default_rng(seed)
    centre_CD = draw.standard_normal((20, dim))
    around_ND = centre_CD[draw.integers(20, size=count)] + 0.7 * draw.standard_normal((count, dim))
    return (np.round(8 * around_ND * draw.uniform(0.8, 1.2, (count, 1))) / 8).astype(np.float16)


def brute_force(vectors_ND: np.ndarray, query_BD: np.ndarray, k: int) -> np.ndarray:
    score_BN = query_BD.astype(np.float64) @ vectors_ND.astype(np.float64).T
    return np.argsort(-score_BN, axis=1, kind="stable")[:, :k]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "SMALLEST", 20)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches read all partitions, and score all passages of the table."""
    monkeypatch.setattr(approximate, "READ", 1)
    monkeypatch.setattr(approximate, "LEAST", 10 * N)


@pytest.fixture
def keys_N() -> np.ndarray:
    return np.random.default_rng(1).permutation(1 << 20)[:N].astype(np.uint64)


def opened(folder: Path, keys_N: np.ndarray, array_ND: np.ndarray, version: int = 1) -> ApproximateIndex:
    found = approximate_index(folder, keys_N, stored(array_ND, version))
    assert isinstance(found, ApproximateIndex)
    return found


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_most_of_the_best_passages_are_found_with_exact_scores(tmp_path, keys_N, kind) -> None:
    vectors_ND, query_BD = drawn().astype(kind), drawn(50, seed=2).astype(np.float32)
    index = opened(tmp_path, keys_N, vectors_ND)
    index.prepare()
    hits = index.search(torch.from_numpy(query_BD), 20)
    truth_BK = brute_force(vectors_ND, query_BD, 20)
    found = [len(np.intersect1d(*pair)) / 20 for pair in zip(hits.number_BK.numpy(), truth_BK, strict=True)]
    assert np.mean(found) > 0.9
    number_BK = hits.number_BK.numpy()
    score_BK = np.einsum("bd,bkd->bk", query_BD, vectors_ND.astype(np.float32)[number_BK])
    np.testing.assert_allclose(hits.score_BK, score_BK, rtol=1e-4, atol=1e-4)
    assert (np.diff(hits.score_BK.numpy(), axis=1) <= 0).all()


@pytest.mark.parametrize("dim", [16, 10, 7, 2])
def test_if_all_partitions_are_read_the_search_equals_exact_search(tmp_path, keys_N, whole, dim) -> None:
    vectors_ND, query_BD = drawn(N, dim), torch.from_numpy(drawn(9, dim, seed=2)).float()
    vectors_ND[::7] = vectors_ND[1]  # equal scores
    index, exact = opened(tmp_path, keys_N, vectors_ND), MipsIndex(vectors_ND)
    for k in (0, 1, 30, N - 1, N + 5):
        assert index.search(query_BD, k).number_BK.tolist() == exact.search(query_BD, k).number_BK.tolist()
    assert index.search(query_BD[:0], 3).number_BK.shape == (0, 3)
    some_n = np.arange(5, N, 11)
    assert (
        index.search_subset(query_BD, some_n, 8).number_BK.tolist()
        == exact.search_subset(query_BD, some_n, 8).number_BK.tolist()
    )


def test_added_passages_are_found_and_deleted_passages_are_not(tmp_path, keys_N, whole) -> None:
    vectors_ND = drawn()
    opened(tmp_path, keys_N[:-200], vectors_ND[:-200])
    left_n = np.delete(np.arange(N), np.arange(0, 100))
    index = opened(tmp_path, keys_N[left_n], vectors_ND[left_n], version=2)
    assert index.changed == pytest.approx(300 / (N - 100))
    assert [table.name for table in (tmp_path / "approximate").glob("[0-9]*")] == ["1"]
    query_BD = torch.from_numpy(vectors_ND[[0, 5, N - 1, N - 150]]).float()
    expected = MipsIndex(vectors_ND[left_n]).search(query_BD, 25)
    assert index.search(query_BD, 25).number_BK.tolist() == expected.number_BK.tolist()


def test_the_table_is_made_again_only_after_many_changes(tmp_path, keys_N, whole, caplog) -> None:
    vectors_ND = drawn()
    names = []
    for version, count in enumerate((2000, 2100, 2500, 2400), start=1):
        index = opened(tmp_path, keys_N[:count], vectors_ND[:count], version)
        assert len(index) == count and index.changed <= approximate.MOST_CHANGED
        names.append(index.folder.name)
    assert names == ["1", "1", "3", "3"]


def test_a_table_that_is_open_stays_until_it_is_closed(tmp_path, keys_N, whole) -> None:
    vectors_ND = drawn()
    first = opened(tmp_path, keys_N[:1000], vectors_ND[:1000])
    second = opened(tmp_path, keys_N, vectors_ND, version=2)
    query_BD = torch.from_numpy(vectors_ND[:3]).float()
    assert first.search(query_BD, 5).number_BK.tolist() == (
        MipsIndex(vectors_ND[:1000]).search(query_BD, 5).number_BK.tolist()
    )
    assert second.folder.name == "2"
    tables = tmp_path / "approximate"
    assert (tables / "1").exists()
    del first
    gc.collect()
    vectors.remove_approximate(tmp_path, keep=second.folder)
    assert {table.name for table in tables.iterdir() if table.is_dir()} == {"2"}


def test_a_damaged_table_is_made_again(tmp_path, keys_N, whole) -> None:
    vectors_ND = drawn()
    folder = opened(tmp_path, keys_N, vectors_ND).folder
    gc.collect()
    for file in folder.glob("_versions/*.manifest"):
        file.write_bytes(b"damaged")
    (folder.parent / "making").mkdir()  # a killed process has left this folder
    index = opened(tmp_path, keys_N, vectors_ND)
    query_BD = torch.from_numpy(vectors_ND[:3]).float()
    assert (
        index.search(query_BD, 4).number_BK.tolist() == brute_force(vectors_ND, query_BD.numpy(), 4).tolist()
    )


def test_files_that_are_lost_while_the_table_is_open_are_one_clear_error(tmp_path, keys_N) -> None:
    index = opened(tmp_path, keys_N, drawn())
    for file in index.folder.rglob("*.idx"):
        file.unlink()
    with pytest.raises(DamagedError, match=r"cannot be read.*remove this folder"):
        index.search(torch.zeros(1, D), 3)


def test_few_passages_are_searched_exactly(tmp_path, keys_N, monkeypatch) -> None:
    monkeypatch.setattr(approximate, "SMALLEST", N + 1)
    assert isinstance(approximate_index(tmp_path, keys_N, stored(drawn())), MipsIndex)
    assert not list(tmp_path.iterdir())


def test_training_refuses_an_approximate_index(tmp_path, keys_N) -> None:
    index = opened(tmp_path, keys_N, drawn())
    for use in (
        lambda: index.rest_logsumexp(torch.zeros(1, D), [np.zeros(0)]),
        lambda: index.search_among(torch.zeros(1, D), [np.arange(3)], 2),
    ):
        with pytest.raises(InputError, match="training searches exactly"):
            use()


def test_commands_search_approximately_on_request(
    own_kb, tiny_model, tiny_model_folder, tmp_path, whole, capsys
) -> None:
    asked, kb, model = tmp_path / "q.jsonl", str(own_kb.folder), str(tiny_model_folder)
    asked.write_text(json.dumps({"question": "who built a tower in Arden?"}) + "\n")
    assert main(["index", "--kb", kb, "--model", model, "--approximate"]) == 0
    (table,) = own_kb.folder.glob("indexes/*/approximate/1")
    made = table.stat().st_mtime_ns
    hits = []
    for search in ("exact", "approximate"):
        for method in ("dense", "hybrid"):
            out = tmp_path / f"{search}-{method}.jsonl"
            words = ["retrieve", "--kb", kb, "--model", model, "--questions", str(asked), "--out", str(out)]
            assert main([*words, "--method", method, "--set", f"search={search}"]) == 0
            hits.append(out.read_text())
    assert hits[:2] == hits[2:]
    assert table.stat().st_mtime_ns == made
    own_kb.add([Document("Zorn", "Zorn is a town on the river Ouse.", "z")], TinyTagger())
    version = complete_index(own_kb, tiny_model, model, search=APPROXIMATE)
    assert isinstance(version.index, ApproximateIndex) and len(version.index) == 29
    capsys.readouterr()
    for setting in ("search=exat", "search=postgresq://me:secret@host/db"):
        assert main(["answer", "who?", "--kb", kb, "--model", model, "--set", setting]) == 2
        told = capsys.readouterr().err
        assert "search is not exact, approximate, ray or an address" in told and "secret" not in told
    del version
    gc.collect()
    assert main(["kb", "compact", "--kb", kb]) == 0
    assert not table.exists() and KnowledgeBase.open(kb).verify() == []


@pytest.mark.parametrize("command", ["pretrain", "adapt", "finetune"])
def test_training_commands_have_no_approximate_search(
    command, own_kb, tiny_model_folder, tmp_path, capsys
) -> None:
    words = [
        command,
        "--kb",
        str(own_kb.folder),
        "--model",
        str(tiny_model_folder),
        "--out",
        str(tmp_path / "out"),
    ]
    if command == "finetune":
        words += ["--train", "t.jsonl", "--dev", "d.jsonl"]
    assert main([*words, "--set", "search=approximate"]) == 2
    assert "training searches exactly" in capsys.readouterr().err
