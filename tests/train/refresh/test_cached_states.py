"""States computed once against the tower that made them."""

import numpy as np
import pytest
import torch

from realm.errors import InputError
from realm.index import embedding
from realm.index.embedding import embed_passages
from realm.model.embedder import Embedder, EmbedderConfig, freeze_input_embeddings, freeze_passage_encoder
from realm.store import unfinished
from realm.tokens.layouts import NULL_PASSAGE, Tokens, passage_inputs
from realm.train.refresh.cached_states import cached_passage_states


@pytest.fixture
def states(tiny_kb, tiny_model, tmp_path):
    freeze_passage_encoder(tiny_model.embedder)
    tiny_model.embedder.eval()
    return cached_passage_states(tiny_kb, tiny_model, tmp_path, "fp32")


def test_an_index_of_states_is_that_of_the_texts(states, tiny_kb, tiny_model) -> None:
    tower = tiny_model.embedder.passage
    torch.nn.init.normal_(tower.projection.weight)  # another projection than the states were made beside
    texts_ND = embed_passages(tiny_model, tiny_kb.tokens, np.arange(len(tiny_kb)))
    np.testing.assert_allclose(states.index(tower), texts_ND, atol=5e-3)


def test_null_passage_is_found_by_its_number(states, tiny_model) -> None:
    nothing = [np.zeros(0, dtype=np.int64)]
    null = tiny_model.embedder.passage(
        passage_inputs(nothing, nothing, tiny_model.tokenizer, tiny_model.lengths)
    )
    torch.testing.assert_close(
        states.vectors(tiny_model.embedder.passage, np.array([NULL_PASSAGE])), null, atol=5e-3, rtol=0
    )


def test_gradients_of_states_reach_the_projection_alone(states, tiny_model) -> None:
    tower = tiny_model.embedder.passage
    states.vectors(tower, np.array([2, 0]))[:, 0].sum().backward()
    assert {name for name, p in tower.named_parameters() if p.grad is not None} == {
        "projection.weight",
        "projection.bias",
    }


def test_states_of_an_interrupted_run_are_used_again(states, tiny_kb, tiny_model, tmp_path) -> None:
    (file,) = tmp_path.glob("states-*.npy")
    before, tower = file.stat().st_mtime_ns, tiny_model.embedder.passage
    torch.nn.init.normal_(tower.projection.weight)  # trained meanwhile
    name = file.stem.removeprefix("states-")
    left, other = (tmp_path / f"unfinished-{one}-states" for one in (name, "another"))
    for one in (left, other):  # a kill came after the states were saved; another run computes other states
        one.touch()
    again = cached_passage_states(tiny_kb, tiny_model, tmp_path, "fp32")
    assert list(tmp_path.glob("states-*.npy")) == [file] and file.stat().st_mtime_ns == before
    assert np.array_equal(again.index(tower), states.index(tower))
    assert other.exists() and not left.exists()


def test_states_of_another_encoder_are_not_used(states, tiny_kb, tiny_model, tmp_path) -> None:
    tower = tiny_model.embedder.passage
    torch.nn.init.normal_(tower.encoder.embeddings.word_embeddings.weight)
    other = cached_passage_states(tiny_kb, tiny_model, tmp_path, "fp32")
    assert not np.allclose(other.index(tower), states.index(tower), atol=0.1)
    texts_ND = embed_passages(tiny_model, tiny_kb.tokens, np.arange(len(tiny_kb)))
    np.testing.assert_allclose(other.index(tower), texts_ND, atol=5e-3)


def test_states_that_a_killed_run_has_computed_are_not_computed_again(
    tiny_kb, tiny_model, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(unfinished, "WORTH_KEEPING", 1)
    monkeypatch.setattr(embedding, "BATCH_TOKENS", 100)
    freeze_passage_encoder(tiny_model.embedder)
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    whole = cached_passage_states(tiny_kb, tiny_model, tmp_path / "whole", "fp32")
    tower, asked = tiny_model.embedder.passage, []

    def killed(tokens: Tokens) -> torch.Tensor:
        asked.append(len(tokens.ids_BT))
        if sum(asked) > len(tiny_kb) // 2:
            raise KeyboardInterrupt
        return pooled(tokens)

    pooled = tower.pooled
    monkeypatch.setattr(tower, "pooled", killed)
    with pytest.raises(KeyboardInterrupt):
        cached_passage_states(tiny_kb, tiny_model, tmp_path / "run", "fp32")
    assert sum(asked) > asked[-1]
    monkeypatch.setattr(tower, "pooled", lambda tokens: again.append(len(tokens.ids_BT)) or pooled(tokens))
    again: list[int] = []
    states = cached_passage_states(tiny_kb, tiny_model, tmp_path / "run", "fp32")
    null = 1
    assert sum(again) == len(tiny_kb) + null - (sum(asked) - asked[-1])
    assert np.array_equal(states.index(tower), whole.index(tower))
    assert {file.name.partition("-")[0] for file in (tmp_path / "run").iterdir()} == {"states", ".lock"}


def test_towers_of_words_have_nothing_to_freeze(tiny_model) -> None:
    words = Embedder(tiny_model.embedder.encoder_config, EmbedderConfig(dim=16, pooling="words"))
    with pytest.raises(InputError, match='passage_encoder = "frozen" needs towers with layers'):
        freeze_passage_encoder(words)
    with pytest.raises(InputError, match='input_embeddings = "frozen" needs towers with layers'):
        freeze_input_embeddings(words)
