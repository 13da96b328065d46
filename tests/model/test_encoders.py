"""Towers and embedders against plain transformers forwards, explicit loops and numpy."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from realm.model.embedder import (
    BagOfWordsTower,
    Embedder,
    EmbedderConfig,
    TransformerTower,
    embedder_from,
    fit_projection,
    new_tower,
)
from realm.model.masked_reader import MaskedReader
from realm.model.modes import evaluating, set_dropout
from realm.tokens.tokenizer import Tokenizer
from tests.model.networks import CONFIG, VOCAB, passages, plain_states


def test_mean_pooled_vector_is_the_mean_of_real_states_projected_and_scaled(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = TransformerTower(CONFIG, EmbedderConfig(dim=6, scale=9.0)).eval()
    tokens = passages(tokenizer)
    vectors = tower(tokens).detach().numpy()
    weight, bias = tower.projection.weight.detach().numpy(), tower.projection.bias.detach().numpy()
    for row, vector in enumerate(vectors):
        states = plain_states(tower.encoder, tokens, row).last_hidden_state[0].numpy()
        expected = weight @ states.mean(axis=0) + bias
        np.testing.assert_allclose(vector, 3 * expected / np.linalg.norm(expected), atol=1e-5)


def test_word_pooled_state_is_the_weighted_mean_of_the_words(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = BagOfWordsTower(CONFIG, EmbedderConfig(dim=6, pooling="words"))
    tokens = passages(tokenizer)
    for weight_V in (torch.ones(VOCAB), 1 + torch.rand(VOCAB)):
        tower.fit_importance(weight_V)
        pooled_BH = tower.pooled(tokens)
        for row in range(3):
            ids = tokens.ids_BT[row, : int(tokens.mask_BT[row].sum())].tolist()
            total = sum(weight_V[i] * tower.words.weight[i] for i in ids)
            assert torch.allclose(pooled_BH[row], total / weight_V[ids].sum(), atol=1e-5)


def test_passage_of_words_that_do_not_count_still_has_a_vector(tokenizer: Tokenizer) -> None:
    """Such as the null passage, when special tokens count next to nothing: its gradient must not drown the others'."""
    torch.manual_seed(0)
    tower = BagOfWordsTower(CONFIG, EmbedderConfig(dim=6, pooling="words"))
    sizes = []
    for weight in (0.01, 1.0):
        tower.fit_importance(torch.full((VOCAB,), weight))
        vectors = tower(passages(tokenizer))
        assert vectors.isfinite().all()
        tower.zero_grad()
        vectors[:, 0].sum().backward()
        sizes.append(float(tower.slow_log_importance.weight.grad.norm()))
    assert sizes[0] < 100 * sizes[1]


def test_word_tower_has_no_layers_and_the_others_have_an_encoder() -> None:
    words = new_tower(CONFIG, EmbedderConfig(dim=6, pooling="words"))
    assert {name.split(".")[0] for name, _ in words.named_parameters()} == {
        "words",
        "slow_log_importance",
        "projection",
    }
    for pooling in ("mean", "cls"):
        tower = new_tower(CONFIG, EmbedderConfig(dim=6, pooling=pooling))
        assert isinstance(tower, TransformerTower)
        assert (tower.encoder.pooler is not None) == (pooling == "cls")


def test_projection_is_float32_under_autocast(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = BagOfWordsTower(CONFIG, EmbedderConfig(dim=6, pooling="words")).eval()  # nothing else to round
    tokens = passages(tokenizer)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = tower(tokens)
    assert torch.allclose(rounded, tower(tokens), atol=1e-6)


def test_scores_of_unit_vectors_are_scale_times_the_cosine(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = TransformerTower(CONFIG, EmbedderConfig(dim=6, scale=20.0)).eval()
    vectors = tower(passages(tokenizer)).detach()
    score = vectors @ vectors.T
    assert torch.allclose(score.diagonal(), torch.full((3,), 20.0), atol=1e-4)
    cosine = nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    assert torch.allclose(score, 20 * cosine, atol=1e-4)


def test_paper_tower_is_a_layer_norm_of_the_projected_tanh_pooler(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = TransformerTower(CONFIG, EmbedderConfig(dim=6, pooling="cls", norm="layer")).eval()
    tokens = passages(tokenizer)
    vectors = tower(tokens).detach().numpy()
    pooler = tower.encoder.pooler
    assert pooler is not None
    for row, vector in enumerate(vectors):
        first = plain_states(tower.encoder, tokens, row).last_hidden_state[0, 0]
        pooled = torch.tanh(first @ pooler.dense.weight.T + pooler.dense.bias).detach().numpy()
        projected = tower.projection.weight.detach().numpy() @ pooled + tower.projection.bias.detach().numpy()
        centred = projected - projected.mean()
        expected = centred / np.sqrt((centred**2).mean() + CONFIG.layer_norm_eps)
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_paper_tower_drops_parts_of_the_vector_only_while_it_trains(tokenizer: Tokenizer) -> None:
    tower = TransformerTower(CONFIG, EmbedderConfig(dim=64, pooling="cls", norm="layer"))
    set_dropout(tower.encoder, 0.0)
    tower.dropout.p = 0.5
    tokens = passages(tokenizer)
    assert (tower.train()(tokens) == 0).any()
    with evaluating(tower):
        assert not (tower(tokens) == 0).any()
    assert tower.training


def test_vectors_do_not_depend_on_padding(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = TransformerTower(CONFIG, EmbedderConfig(dim=6)).eval()
    together = tower(passages(tokenizer))
    alone = [tower(passages(tokenizer).rows(torch.tensor([row]))) for row in range(3)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def test_score_is_the_inner_product_with_each_candidate(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    embedder = Embedder(CONFIG, EmbedderConfig(dim=6, shared=False)).eval()
    queries, found = passages(tokenizer, seed=1), passages(tokenizer)
    place = torch.tensor([[0, 2], [1, 1], [2, 0]])
    query_BD, score_BK = embedder.score(queries, found, place)
    vectors = embedder.passage(found)
    assert torch.equal(query_BD, embedder.query(queries))
    for row in range(3):
        for column in range(2):
            expected = (query_BD[row] @ vectors[place[row, column]]).item()
            assert math.isclose(score_BK[row, column].item(), expected, abs_tol=1e-4)


def test_scores_under_autocast_are_not_rounded_to_sixteen_bits(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    embedder = Embedder(CONFIG, EmbedderConfig(dim=6)).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        query_BD, score_BK = embedder.score(
            passages(tokenizer), passages(tokenizer), torch.arange(3).expand(3, 3)
        )
    assert query_BD.dtype == score_BK.dtype == torch.float32
    assert torch.allclose(score_BK, query_BD @ query_BD.T, atol=1e-4)
    assert not torch.equal(score_BK, score_BK.bfloat16().float())


def test_shared_tower_is_one_and_untied_towers_are_equal_but_apart(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    embedder = Embedder(CONFIG, EmbedderConfig(dim=6)).eval()
    assert embedder.passage is embedder.query
    before = embedder.passage(passages(tokenizer))
    embedder.untie()
    assert torch.equal(embedder.passage.eval()(passages(tokenizer)), before)
    with torch.no_grad():
        for parameter in embedder.query.parameters():
            parameter.add_(0.3)
    assert torch.equal(embedder.passage(passages(tokenizer)), before)
    assert not torch.allclose(embedder.query(passages(tokenizer)), before)
    passage = embedder.passage
    embedder.untie()
    assert embedder.passage is passage


def test_untied_word_towers_are_equal_but_apart(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    embedder = Embedder(CONFIG, EmbedderConfig(dim=6, pooling="words", shared=False))
    tokens = passages(tokenizer)
    before = embedder.passage(tokens)
    assert torch.equal(embedder.query(tokens), before)
    nn.init.normal_(embedder.query.words.weight)
    assert torch.equal(embedder.passage(tokens), before)
    assert not torch.allclose(embedder.query(tokens), before)


# -- the embedder's start


def pooled_states(rows: int, seed: int = 0) -> torch.Tensor:
    """States with a large mean and directions of very different size, as BERT's are."""
    draw = np.random.default_rng(seed)
    states = draw.normal(size=(rows, 16)) * np.geomspace(5, 0.1, 16) @ draw.normal(size=(16, 16)) + 3
    return torch.from_numpy(states.astype(np.float32))


@pytest.mark.parametrize("whiten", [False, True])
def test_fitted_projection_is_the_principal_components_of_numpy(whiten: bool) -> None:
    tower = TransformerTower(CONFIG, EmbedderConfig(dim=5))
    states = pooled_states(200)
    fit_projection(tower, states, whiten)
    projected = tower.projection(states).detach().numpy()
    centred = states.numpy() - states.numpy().mean(axis=0)
    _, singular, components = np.linalg.svd(centred, full_matrices=False)
    expected = centred @ components[:5].T
    if whiten:
        expected = expected / (singular[:5] / np.sqrt(200))
        np.testing.assert_allclose(projected.var(axis=0), np.ones(5), rtol=1e-3)
    signs = np.sign((projected * expected).sum(axis=0))
    np.testing.assert_allclose(projected, signs * expected, atol=1e-3)
    np.testing.assert_allclose(projected.mean(axis=0), np.zeros(5), atol=1e-3)


def test_projection_is_fitted_in_full_precision_under_autocast() -> None:
    plain, cast = (TransformerTower(CONFIG, EmbedderConfig(dim=5)) for _ in range(2))
    fit_projection(plain, pooled_states(200), whiten=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fit_projection(cast, pooled_states(200), whiten=True)
    assert torch.equal(plain.projection.weight, cast.projection.weight)
    assert torch.allclose(plain.projection.bias, cast.projection.bias, atol=1e-4)


def test_whitening_fewer_passages_than_dimensions_blows_up_no_direction() -> None:
    """A corpus of 10 passages fixes 9 directions; a query's part outside them must not drown those."""
    tower = TransformerTower(CONFIG, EmbedderConfig(dim=12))
    fit_projection(tower, pooled_states(60)[:10], whiten=True)
    unseen = tower.projection(pooled_states(60)[10:]).detach()
    assert unseen.abs().max() < 100


def test_embedder_starts_on_a_copy_of_the_readers_encoder(reader: MaskedReader) -> None:
    for config in (EmbedderConfig(dim=5), EmbedderConfig(dim=5, pooling="cls", shared=False)):
        embedder = embedder_from(reader, config)
        for tower in (embedder.query, embedder.passage):
            mine, theirs = tower.encoder.state_dict(), reader.bert.bert.state_dict()
            assert all(torch.equal(mine[name], value) for name, value in theirs.items())
            ours = {p.data_ptr() for p in tower.parameters()}
            assert ours.isdisjoint(p.data_ptr() for p in reader.parameters())


@pytest.mark.parametrize("shared", [True, False])
def test_word_tower_starts_on_a_copy_of_the_readers_words(reader: MaskedReader, shared) -> None:
    embedder = embedder_from(reader, EmbedderConfig(dim=5, pooling="words", shared=shared))
    theirs = reader.bert.bert.embeddings.word_embeddings.weight
    for tower in (embedder.query, embedder.passage):
        assert torch.equal(tower.words.weight, theirs)
        assert tower.words.weight.data_ptr() != theirs.data_ptr()
