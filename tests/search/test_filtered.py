"""Search among the passages that match a filter equals brute force over these passages alone."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.cli import main
from realm.errors import RealmError
from realm.model.scores import scores
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.search import exact
from realm.search.bm25 import Bm25Index
from realm.search.exact import MipsIndex
from realm.search.hybrid import DENSE_WEIGHT
from realm.search.retriever import FUSION_DEPTH
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE
from tests.conftest import tiny_documents
from tests.store.tiny import TinyTagger

QUESTIONS = ["who built a tower in Arden?", "which town sells salt and wool to Kelso?"]
FILTERS = [
    ("number < 3", lambda n: n < 3),
    ("number >= 2 and river = 'Ouse'", lambda n: n >= 2 and n % 4 == 0),
    ("number = 99", lambda n: False),
    ("river is not null", lambda n: True),
]


@pytest.fixture
def answerer(own_kb: KnowledgeBase, tiny_model_folder: Path) -> Answerer:
    rivers = "Ouse Tarn Velka Wear".split()
    documents = [
        one._replace(fields={"number": n, "river": rivers[n % 4]}) for n, one in enumerate(tiny_documents())
    ]
    own_kb.add(documents, TinyTagger())
    return Answerer.load(str(own_kb.folder), str(tiny_model_folder), AnswerConfig(device="cpu"))


def brute_force(
    answerer: Answerer, question: str, matching: list[int], method: str
) -> list[tuple[float, int]]:
    """Score and number of the matching passages, best first: each passage is scored, and all are sorted."""
    kb = answerer.kb
    query_1D = answerer.embed(answerer.tokenized([question]))
    dense = dict(zip(matching, (query_1D @ answerer.version.index.rows(matching).T)[0].tolist(), strict=True))
    (all_words,) = Bm25Index(kb.titles, kb.texts()).scores([question])
    words = {n: float(all_words[n]) for n in matching if all_words[n] > 0}
    if method == "bm25":
        return sorted(((score, n) for n, score in words.items()), key=lambda one: (-one[0], one[1]))
    if method == "dense":
        return sorted(((score, n) for n, score in dense.items()), key=lambda one: (-one[0], one[1]))
    assert len(kb) <= FUSION_DEPTH  # so the scores are scaled by their spread over all passages
    all_dense = (query_1D @ answerer.version.index.rows(range(len(kb))).T)[0].detach().numpy().astype(float)
    spread = all_dense.std(), all_words.astype(float).std()
    fused = {
        n: DENSE_WEIGHT * dense[n] / spread[0] + (words.get(n, 0.0) / spread[1] if spread[1] else 0.0)
        for n in matching
    }
    return sorted(
        ((score, n) for n, score in fused.items()), key=lambda one: (-one[0], -dense[one[1]], one[1])
    )


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
@pytest.mark.parametrize(("where", "holds"), FILTERS, ids=[where for where, _ in FILTERS])
def test_retrieval_equals_brute_force_over_the_matching_passages(answerer, where, holds, method) -> None:
    matching = [n for n, one in enumerate(answerer.kb) if holds(int(one.document_id[1:]))]
    for k in (1, 3, 50):
        score_BK, number_BK = answerer.retrieve(QUESTIONS, k, method, where)
        for question, score_K, number_K in zip(QUESTIONS, score_BK, number_BK, strict=True):
            expected = brute_force(answerer, question, matching, method)[:k]
            found = [int(n) for n in number_K if n != NULL_PASSAGE]
            assert found == [n for _, n in expected]
            assert score_K[: len(found)].tolist() == pytest.approx([score for score, _ in expected], abs=1e-4)


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
@pytest.mark.parametrize("where", [where for where, _ in FILTERS])
def test_a_filter_does_not_change_the_score_of_a_passage(answerer, where, method) -> None:
    every = len(answerer.kb)
    for question in QUESTIONS:
        (score_K,), (number_K,) = answerer.retrieve([question], every, method)
        without = dict(zip(number_K.tolist(), score_K.tolist(), strict=True))
        (score_K,), (number_K,) = answerer.retrieve([question], every, method, where)
        for number, score in zip(number_K.tolist(), score_K.tolist(), strict=True):
            if number != NULL_PASSAGE:
                assert score == pytest.approx(without[number], rel=1e-4, abs=1e-4)


def test_a_filter_that_matches_everything_changes_nothing(answerer) -> None:
    for method in ("dense", "bm25", "hybrid"):
        for mine, plain in zip(
            answerer.retrieve(QUESTIONS, 5, method, "river like '%'"),
            answerer.retrieve(QUESTIONS, 5, method),
            strict=True,
        ):
            np.testing.assert_allclose(mine, plain, atol=1e-5)


def test_passages_and_their_json_carry_the_fields_of_their_document(answerer) -> None:
    for one in answerer.passages(QUESTIONS[0], 5, "bm25", "number < 3"):
        number = int(one.document[1:])
        assert one.fields == asdict(one)["fields"] == {"number": number, "river": one.fields["river"]}
        assert number < 3


@pytest.mark.parametrize("bits", [torch.float16, torch.float32])
def test_a_subset_is_searched_in_chunks_as_a_sort_would(bits, monkeypatch) -> None:
    draw = torch.Generator().manual_seed(0)
    vectors, query = torch.randn(700, 16, generator=draw).to(bits), torch.randn(5, 16, generator=draw)
    vectors[300:350] = vectors[0]  # equal scores across chunks
    monkeypatch.setattr(exact, "SCORES", 1024)
    number_n = np.flatnonzero(np.random.default_rng(0).random(700) < 0.6)
    for k in (1, 7, 1000):
        hits = MipsIndex(vectors).search_subset(query, number_n, k)
        score = scores(query, vectors.float())[:, number_n]
        order = score.sort(dim=1, descending=True, stable=True).indices[:, :k]
        assert hits.number_BK.tolist() == torch.from_numpy(number_n)[order].tolist()
    empty = MipsIndex(vectors).search_subset(query, number_n[:0], 3)
    assert empty.score_BK.shape == empty.number_BK.shape == (5, 0)


def test_the_commands_retrieve_with_the_filter_and_refuse_a_wrong_one(answerer, tmp_path, capsys) -> None:
    asked, out = tmp_path / "q.jsonl", tmp_path / "hits.jsonl"
    asked.write_text(json.dumps({"question": QUESTIONS[0], "answers": ["x"]}))
    words = ["retrieve", "--kb", str(answerer.kb.folder), "--questions", str(asked), "--out", str(out)]
    assert main([*words, "--method", "bm25", "--where", "river = 'Ouse'"]) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["passages"]
    assert {one["fields"]["river"] for one in row["passages"]} == {"Ouse"}
    capsys.readouterr()
    assert main([*words, "--method", "bm25", "--where", "river = 5"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "compares river (text) with 5: write '5'" in message
    with pytest.raises(RealmError, match="is not a field"):
        answerer.answer_batch(QUESTIONS[:1], where="nothing = 1")
