"""Vectors of an index against the vectors of a training step, passage by passage."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realm.errors import RealmError
from realm.index import embedding
from realm.index.embedding import batch_tokens, batches_by_length, embed_passages, pooled_states
from realm.model.bert import BertConfig
from realm.model.device import Precision, autocast
from realm.model.embedder import EmbedderConfig, embedder_from, new_tower
from realm.tokens.layouts import Lengths, passage_inputs, query_inputs


def embed(model, kb, numbers, **changes):
    lengths = changes.get("lengths", model.lengths)
    return embed_passages(replace(model, lengths=lengths), kb.tokens, numbers)


@pytest.mark.parametrize("pooling", ["mean", "words"])
@pytest.mark.parametrize("lengths", [Lengths(32, 48), Lengths(32, 20)], ids=["whole", "cut"])
def test_index_scores_are_the_scores_of_a_training_step(tiny_kb, tiny_model, lengths, pooling) -> None:
    tiny_model.embedder = embedder_from(tiny_model.reader, EmbedderConfig(dim=16, pooling=pooling)).eval()
    tokens, numbers = tiny_kb.tokens, np.array([3, 0, 27, 11])
    queries = query_inputs([tokens.body.row(n)[:9] for n in (5, 6)], tiny_model.tokenizer, lengths)
    passages = passage_inputs(
        [tokens.title.row(n) for n in numbers],
        [tokens.body.row(n) for n in numbers],
        tiny_model.tokenizer,
        lengths,
    )
    place_BK = torch.arange(4).expand(2, 4)
    with torch.no_grad():
        query_BD, score_BK = tiny_model.embedder.score(queries, passages, place_BK)
    vectors = embed(tiny_model, tiny_kb, numbers, lengths=lengths)
    assert vectors.dtype == np.float16
    np.testing.assert_allclose(query_BD.numpy() @ vectors.astype(np.float32).T, score_BK, atol=0.02)


@pytest.mark.parametrize("pooling", ["mean", "words"])
@pytest.mark.parametrize("budget", [1, 100, 100_000])
def test_vectors_come_in_the_order_asked_for_whatever_the_batches(
    tiny_kb, tiny_model, monkeypatch, budget, pooling
) -> None:
    tiny_model.embedder = embedder_from(tiny_model.reader, EmbedderConfig(dim=16, pooling=pooling)).eval()
    monkeypatch.setattr(embedding, "WORDS_TOKENS" if pooling == "words" else "BATCH_TOKENS", budget)
    numbers = np.random.default_rng(0).permutation(len(tiny_kb))
    alone = np.concatenate([embed(tiny_model, tiny_kb, np.array([n])) for n in numbers])
    np.testing.assert_allclose(embed(tiny_model, tiny_kb, numbers), alone, atol=4e-3)


def test_threads_that_take_whole_batches_give_the_vectors_of_one(
    tiny_kb, tiny_model, monkeypatch, request
) -> None:
    """Under autocast too, which a thread does not take over by itself."""
    monkeypatch.setattr(embedding, "BATCH_TOKENS", 60)
    told: list[int] = []

    def embed_all(precision: Precision) -> np.ndarray:
        told.clear()
        with autocast(torch.device("cpu"), precision):
            return embed_passages(
                tiny_model, tiny_kb.tokens, np.arange(len(tiny_kb)), report_done=told.append
            )

    alone = embed_all("fp32"), embed_all("bf16")
    assert not np.array_equal(*alone)
    request.getfixturevalue("two_threads")
    assert np.array_equal(embed_all("fp32"), alone[0])
    assert np.array_equal(embed_all("bf16"), alone[1])
    assert told == sorted(told) and told[-1] == len(tiny_kb) and len(told) > 4


def test_projected_pooled_states_are_the_vectors(tiny_kb, tiny_model) -> None:
    numbers, tower = np.array([4, 2, 9]), tiny_model.embedder.passage
    pooled = pooled_states(tower, tiny_kb.tokens, numbers, tiny_model.tokenizer, tiny_model.lengths)
    with torch.no_grad():
        vectors = torch.nn.functional.normalize(tower.projection(pooled), dim=-1) * 20**0.5
    np.testing.assert_allclose(vectors, embed(tiny_model, tiny_kb, numbers), atol=4e-3)


def test_dropout_is_off_while_embedding_and_on_again_afterwards(tiny_kb, tiny_model) -> None:
    tower = tiny_model.embedder.passage.train()
    numbers = np.arange(5)
    assert np.array_equal(embed(tiny_model, tiny_kb, numbers), embed(tiny_model, tiny_kb, numbers))
    assert tower.training and tower.encoder.training


def test_no_passages_give_no_vectors(tiny_kb, tiny_model) -> None:
    assert embed(tiny_model, tiny_kb, np.zeros(0, dtype=np.int64)).shape == (0, 16)


def test_damaged_weights_are_noticed(tiny_kb, tiny_model) -> None:
    with torch.no_grad():
        tiny_model.embedder.passage.projection.bias[3] = torch.nan
    with pytest.raises(RealmError, match="not finite"):
        embed(tiny_model, tiny_kb, np.arange(3))


def test_damaged_weights_are_noticed_by_whichever_thread(
    tiny_kb, tiny_model, two_threads, monkeypatch
) -> None:
    monkeypatch.setattr(embedding, "BATCH_TOKENS", 60)
    tower = tiny_model.embedder.passage.train()
    with torch.no_grad():
        tower.projection.bias[3] = torch.nan
    with pytest.raises(RealmError, match="not finite"):
        embed(tiny_model, tiny_kb, np.arange(len(tiny_kb)))
    assert tower.training


def test_a_vector_too_long_for_16_bits_is_noticed(tiny_kb, tiny_model, monkeypatch) -> None:
    tower = tiny_model.embedder.passage
    monkeypatch.setattr(tower, "project", lambda pooled_BH: torch.full((len(pooled_BH), 16), 1e5))
    with pytest.raises(RealmError, match="not finite"):
        embed(tiny_model, tiny_kb, np.arange(3))


def test_batches_of_a_gpu_grow_with_its_memory_and_shrink_with_the_encoder(monkeypatch) -> None:
    memory = {"cuda:0": 80e9, "cuda:1": 1e6}
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=memory[str(device)])
    )
    large, small, cpu = map(torch.device, ("cuda:0", "cuda:1", "cpu"))
    with torch.device("meta"):
        base, half = (
            new_tower(BertConfig(hidden_size=hidden, num_hidden_layers=1), EmbedderConfig())
            for hidden in (768, 384)
        )
        words = new_tower(BertConfig(), EmbedderConfig(pooling="words"))
    assert batch_tokens(large, base) == 101_725  # 5 GB; a token of BERT-base has 49 kB of states
    assert batch_tokens(large, half) == pytest.approx(2 * 101_725, abs=1)
    assert batch_tokens(small, base) == batch_tokens(cpu, base) == 4096
    assert batch_tokens(small, words) == batch_tokens(cpu, words) == 65_536


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_batches_hold_every_row_once_and_keep_to_their_budget(lengths, budget) -> None:
    length_N = np.array(lengths, dtype=np.int64)
    batches = batches_by_length(length_N, budget)
    assert sorted(n for batch in batches for n in batch.tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * length_N[batch].max() <= budget
    longest = [int(length_N[batch].max()) for batch in batches]
    assert longest == sorted(longest, reverse=True)
