"""The probe, against plain loops over passages, candidates and masks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from realm.errors import InputError
from realm.index.versions import complete_index
from realm.masking.candidates import CandidateRule, choose_candidates, embed_queries
from realm.masking.held_out import held_out, held_out_queries
from realm.masking.masked_queries import SpanIndex, holds, repeats_text
from realm.model.folder import load_model
from realm.qa.probe import (
    ProbeConfig,
    first_positives,
    first_positives_by,
    probe,
    read_queries,
)
from realm.qa.scoring.metrics import recall_at
from realm.search.bm25 import Bm25Index
from realm.search.retriever import Retriever
from realm.tokens.layouts import joint_inputs, passage_inputs, query_inputs
from tests.store.tiny import holding_out
from tests.train.test_ict import corpus
from tests.transformers_twin import masked_twin


@pytest.fixture(scope="module")
def queries(tiny_kb):
    return held_out_queries(holding_out(tiny_kb, 0.6), 30, 100)


@pytest.fixture(scope="module")
def model(tiny_model_folder):
    """The tiny model with a reader whose predictions depend on the passages."""
    model = load_model(tiny_model_folder)
    with torch.no_grad():
        for parameter in model.reader.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


@pytest.fixture(scope="module")
def index(tiny_kb, model, tiny_model_folder):
    return complete_index(tiny_kb, model, str(tiny_model_folder)).index


# -- the queries


def test_queries_are_held_out_facts_that_stand_elsewhere_too(tiny_kb, queries) -> None:
    out = held_out(tiny_kb.ids, 0.6)
    mask_id = tiny_kb.tokenizer.mask_id
    assert 5 < len(queries) <= out.sum()
    assert len({query.passage for query in queries}) == len(queries)
    for query in queries:
        assert out[query.passage]
        others = [n for n in range(len(tiny_kb)) if n != query.passage]
        assert any(holds(tiny_kb.tokens.body.row(n), query.targets) for n in others)
        assert not holds(query.ids, query.targets)  # repeats are hidden too
        assert (query.ids[query.positions] == mask_id).all()


def test_queries_are_the_same_in_every_run_and_as_many_as_asked(tiny_kb, queries) -> None:
    again = held_out_queries(holding_out(tiny_kb, 0.6), 30, 4)
    assert [q.ids.tolist() for q in again] == [q.ids.tolist() for q in queries[:4]]
    assert held_out_queries(holding_out(tiny_kb, 0.0), 30, 4) == []


# -- retrieval


def test_query_vectors_are_the_query_towers_in_any_batches(tiny_kb, model, queries) -> None:
    inputs = query_inputs([q.ids for q in queries], model.tokenizer, model.lengths)
    with torch.no_grad():
        expected = model.embedder.query(inputs)
    for at_once in (1, 3, 100):
        assert torch.allclose(embed_queries(model, queries, at_once), expected, atol=1e-5)


def plain_ranks(kb, queries, order_BN, depth: int) -> list[int]:
    """Rank of the first passage with the span, without the query's own passage and its copies."""
    ranks = []
    for query, order in zip(queries, order_BN, strict=True):
        others = [
            n for n in order if n != query.passage and not repeats_text(query.original, kb.tokens.body.row(n))
        ]
        hits = [rank for rank, n in enumerate(others, 1) if holds(kb.tokens.body.row(n), query.targets)]
        ranks.append(hits[0] if hits and hits[0] <= depth else 0)
    return ranks


@pytest.mark.parametrize("depth", [1, 3, 20, 100])
def test_first_positives_equal_those_of_sorting_every_passage(tiny_kb, model, index, queries, depth) -> None:
    vectors = embed_queries(model, queries)
    order = (vectors @ index.rows(np.arange(len(tiny_kb))).T).argsort(dim=1, descending=True).tolist()
    ranks = first_positives(queries, vectors, index, tiny_kb.tokens, depth)
    assert ranks.tolist() == plain_ranks(tiny_kb, queries, order, depth)


def test_a_positive_behind_many_copies_of_the_query_is_found(queries) -> None:
    query = queries[0]
    tokens = corpus(*[[query.original.tolist()]] * 30, [[*query.targets.tolist(), 9]])

    class InOrder:
        """An index in which the copies are better than the positive."""

        def search(self, query_BD: torch.Tensor, k: int) -> SimpleNamespace:
            return SimpleNamespace(number_BK=torch.arange(min(k, 31)).expand(len(query_BD), -1))

    ranks = first_positives([query], torch.zeros(1, 4), InOrder(), tokens, 20)
    assert ranks.tolist() == [1]


def test_first_positives_of_bm25_are_searched_with_the_visible_words(tiny_kb, queries) -> None:
    order = []
    for query in queries:
        visible = " ".join(w for w in tiny_kb.tokenizer.tokens(query.ids) if w != "[MASK]")
        row = Bm25Index(tiny_kb.titles, tiny_kb.texts()).search([visible], 28).number_BK[0]
        order.append([n for n in row.tolist() if n >= 0])
    ranks = first_positives_by("bm25", queries, Retriever(tiny_kb), tiny_kb, depth=20)
    assert ranks.tolist() == plain_ranks(tiny_kb, queries, order, 20)


def test_first_positives_of_a_hybrid_search_are_those_of_the_search_for_answers(
    tiny_kb, model, index, queries
) -> None:
    vectors, retriever = embed_queries(model, queries), Retriever(tiny_kb, index)
    order = []
    for row, query in enumerate(queries):
        visible = " ".join(w for w in tiny_kb.tokenizer.tokens(query.ids) if w != "[MASK]")
        _, number_BK = retriever.search([visible], 28, "hybrid", vectors[row : row + 1])
        order.append(number_BK[0].tolist())
    ranks = first_positives_by("hybrid", queries, retriever, tiny_kb, vectors, 20)
    assert ranks.tolist() == plain_ranks(tiny_kb, queries, order, 20)


def test_recall_is_the_percentage_of_ranks_within_k() -> None:
    ranks = np.array([1, 0, 5, 6, 2])
    assert [recall_at(ranks, k) for k in (1, 5, 20)] == [20.0, 60.0, 80.0]
    assert np.isnan(recall_at(np.array([]), 5))


# -- reading


def test_reading_report_is_that_of_a_plain_loop(tiny_kb, model, index, queries, monkeypatch) -> None:
    monkeypatch.setattr("realm.qa.probe.CANDIDATES", 3)
    tokens, spans = tiny_kb.tokens, SpanIndex(tiny_kb.tokens)
    vectors = embed_queries(model, queries)
    report = read_queries(model, queries, vectors, index, tokens, spans, at_once=4)
    chosen = choose_candidates(queries, vectors, index, tokens, CandidateRule(5, True, 2), spans)
    plain = masked_twin(model.reader.bert)
    right, right_without, utility, null = [], [], [], []
    gains: dict[bool, list[float]] = {True: [], False: []}
    for query, vector, numbers in zip(queries, vectors, chosen.number_BK.tolist(), strict=True):
        titles = [tokens.title.row(n) if n >= 0 else [] for n in numbers]
        bodies = [tokens.body.row(n) if n >= 0 else [] for n in numbers]
        with torch.no_grad():
            passages = model.embedder.passage(passage_inputs(titles, bodies, model.tokenizer, model.lengths))
            prior = (passages @ vector).log_softmax(0)
            rows = []
            for body in bodies:
                joint = joint_inputs([query.ids], [body], model.tokenizer, model.lengths)
                logits = plain(joint.ids_BT, token_type_ids=joint.segments_BT).logits[0]
                rows.append(logits[query.positions + 1].log_softmax(-1))
        logp_KMV = torch.stack(rows)
        # The two injected positives only count for the gap.
        prior = prior[:3].log_softmax(0)
        marginal_MV = (prior[:, None, None] + logp_KMV[:3]).logsumexp(0)
        target = torch.from_numpy(query.targets.astype(np.int64))
        right.append(bool((marginal_MV.argmax(-1) == target).all()))
        right_without.append(bool((logp_KMV[0].argmax(-1) == target).all()))
        token_KM = logp_KMV[:, torch.arange(len(target)), target]
        utility += ((prior[:, None] + token_KM[:3]).logsumexp(0) - token_KM[0]).tolist()
        null.append(prior[0].exp().item())
        for number, gain in zip(numbers[1:], (token_KM.sum(1) - token_KM[0].sum())[1:].tolist(), strict=True):
            gains[holds(tokens.body.row(number), query.targets)].append(gain)
    assert report["span_accuracy"] == pytest.approx(100 * np.mean(right))
    assert report["span_accuracy_without"] == pytest.approx(100 * np.mean(right_without))
    assert report["retrieval_utility"] == pytest.approx(np.mean(utility), abs=1e-3)
    assert report["null_probability"] == pytest.approx(np.mean(null), rel=1e-3)
    assert gains[True] and gains[False]
    assert report["positive_gap"] == pytest.approx(np.mean(gains[True]) - np.mean(gains[False]), abs=1e-3)


def test_reading_leaves_the_networks_in_their_mode(tiny_kb, model, index, queries) -> None:
    model.reader.train()
    read_queries(
        model,
        queries[:2],
        embed_queries(model, queries[:2]),
        index,
        tiny_kb.tokens,
        SpanIndex(tiny_kb.tokens),
    )
    assert model.reader.training and not model.embedder.training
    model.reader.eval()


# -- the command


def test_probe_reports_the_contracts_numbers(tiny_kb, tiny_model_folder) -> None:
    kb = holding_out(tiny_kb, 0.6)
    config = ProbeConfig(queries=10, read=6, device="cpu", precision="fp32")
    report = probe(kb, str(tiny_model_folder), config)
    said = report.as_dict()
    assert list(said) == [
        *("n", "recall", "span_accuracy", "span_accuracy_without"),
        *("retrieval_utility", "null_probability", "positive_gap"),
    ]
    assert said["n"] == 10 and list(said["recall"]) == ["1", "5", "20"]
    assert probe(kb, str(tiny_model_folder), config).as_dict() == said


def test_corpus_that_cannot_be_probed_is_one_line(tiny_kb, tiny_model_folder) -> None:
    kb = holding_out(tiny_kb, 0.0)
    with pytest.raises(
        InputError, match=r"none of the 28 passages .*`realm kb build \.\.\. --set held_out"
    ) as error:
        probe(kb, str(tiny_model_folder), ProbeConfig(device="cpu"))
    assert "\n" not in str(error.value)
