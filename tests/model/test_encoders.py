"""The networks against plain transformers forwards, explicit loops and numpy."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertForMaskedLM, DistilBertConfig, DistilBertModel

from realm.config import InputError
from realm.model import encoders
from realm.model.bert import Bert, BertConfig, MaskedBert
from realm.model.bert_files import save_bert
from realm.model.device import autocast
from realm.model.encoders import (
    Embedder,
    EmbedderConfig,
    MaskedReader,
    SpanReader,
    TrunkTower,
    WordTower,
    body_mask,
    embedder_from,
    evaluating,
    fit_projection,
    keep_rows,
    load_pooler,
    load_reader,
    new_tower,
    set_dropout,
)
from realm.text.inputs import Lengths, Tokenizer, Tokens, joint_inputs, passage_inputs
from tests.transformers_twin import masked_twin, twin

VOCAB = 40
CONFIG = BertConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    initializer_range=0.5,  # states that differ visibly
)
LENGTHS = Lengths(query=8, passage=20)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c d e f g h"], vocab_size=VOCAB)


@pytest.fixture
def reader() -> MaskedReader:
    torch.manual_seed(0)
    return MaskedReader(MaskedBert(CONFIG)).eval()


def some_ids(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(5, VOCAB, size=length) for length in lengths]


def passages(tokenizer: Tokenizer, seed: int = 0) -> Tokens:
    return passage_inputs(some_ids(1, 2, 0), some_ids(9, 3, 0, seed=seed), tokenizer, LENGTHS)


def plain_states(trunk: Bert, tokens: Tokens, row: int) -> torch.Tensor:
    """One row through transformers' layers by itself, without padding."""
    real = int(tokens.mask_BT[row].sum())
    with torch.no_grad():
        return twin(trunk)(
            tokens.ids_BT[row : row + 1, :real], token_type_ids=tokens.segments_BT[row : row + 1, :real]
        )


def test_mean_pooled_vector_is_the_mean_of_real_states_projected_and_scaled(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = TrunkTower(CONFIG, EmbedderConfig(dim=6, scale=9.0)).eval()
    tokens = passages(tokenizer)
    vectors = tower(tokens).detach().numpy()
    weight, bias = tower.projection.weight.detach().numpy(), tower.projection.bias.detach().numpy()
    for row, vector in enumerate(vectors):
        states = plain_states(tower.trunk, tokens, row).last_hidden_state[0].numpy()
        expected = weight @ states.mean(axis=0) + bias
        np.testing.assert_allclose(vector, 3 * expected / np.linalg.norm(expected), atol=1e-5)


def test_word_pooled_state_is_the_weighted_mean_of_the_words(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = WordTower(CONFIG, EmbedderConfig(dim=6, pooling="words"))
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
    tower = WordTower(CONFIG, EmbedderConfig(dim=6, pooling="words"))
    sizes = []
    for weight in (0.01, 1.0):
        tower.fit_importance(torch.full((VOCAB,), weight))
        vectors = tower(passages(tokenizer))
        assert vectors.isfinite().all()
        tower.zero_grad()
        vectors[:, 0].sum().backward()
        sizes.append(float(tower.slow_log_importance.weight.grad.norm()))
    assert sizes[0] < 100 * sizes[1]


def test_word_tower_has_no_layers_and_the_others_have_a_trunk() -> None:
    words = new_tower(CONFIG, EmbedderConfig(dim=6, pooling="words"))
    assert {name.split(".")[0] for name, _ in words.named_parameters()} == {
        "words",
        "slow_log_importance",
        "projection",
    }
    for pooling in ("mean", "cls"):
        tower = new_tower(CONFIG, EmbedderConfig(dim=6, pooling=pooling))
        assert isinstance(tower, TrunkTower)
        assert (tower.trunk.pooler is not None) == (pooling == "cls")


def test_projection_is_float32_under_autocast(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = WordTower(CONFIG, EmbedderConfig(dim=6, pooling="words")).eval()  # nothing else to round
    tokens = passages(tokenizer)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = tower(tokens)
    assert torch.allclose(rounded, tower(tokens), atol=1e-6)


def test_scores_of_unit_vectors_are_scale_times_the_cosine(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = TrunkTower(CONFIG, EmbedderConfig(dim=6, scale=20.0)).eval()
    vectors = tower(passages(tokenizer)).detach()
    score = vectors @ vectors.T
    assert torch.allclose(score.diagonal(), torch.full((3,), 20.0), atol=1e-4)
    cosine = nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    assert torch.allclose(score, 20 * cosine, atol=1e-4)


def test_paper_tower_is_a_layer_norm_of_the_projected_tanh_pooler(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = TrunkTower(CONFIG, EmbedderConfig(dim=6, pooling="cls", norm="layer")).eval()
    tokens = passages(tokenizer)
    vectors = tower(tokens).detach().numpy()
    pooler = tower.trunk.pooler
    assert pooler is not None
    for row, vector in enumerate(vectors):
        first = plain_states(tower.trunk, tokens, row).last_hidden_state[0, 0]
        pooled = torch.tanh(first @ pooler.dense.weight.T + pooler.dense.bias).detach().numpy()
        projected = tower.projection.weight.detach().numpy() @ pooled + tower.projection.bias.detach().numpy()
        centred = projected - projected.mean()
        expected = centred / np.sqrt((centred**2).mean() + CONFIG.layer_norm_eps)
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_paper_tower_drops_parts_of_the_vector_only_while_it_trains(tokenizer: Tokenizer) -> None:
    tower = TrunkTower(CONFIG, EmbedderConfig(dim=64, pooling="cls", norm="layer"))
    set_dropout(tower.trunk, 0.0)
    tower.dropout.p = 0.5
    tokens = passages(tokenizer)
    assert (tower.train()(tokens) == 0).any()
    with evaluating(tower):
        assert not (tower(tokens) == 0).any()
    assert tower.training


def test_vectors_do_not_depend_on_padding(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tower = TrunkTower(CONFIG, EmbedderConfig(dim=6)).eval()
    together = tower(passages(tokenizer))
    alone = [tower(passages(tokenizer).rows(torch.tensor([row]))) for row in range(3)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def test_score_is_the_inner_product_with_each_candidate(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    embedder = Embedder(CONFIG, EmbedderConfig(dim=6, shared=False)).eval()
    queries, found = passages(tokenizer, seed=1), passages(tokenizer)
    place = torch.tensor([[0, 2], [1, 1], [2, 0]])
    query_BD, _, score_BK = embedder.score(queries, found, place)
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
        query_BD, _, score_BK = embedder.score(
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


def masked_batch(tokenizer: Tokenizer, queries: int, candidates: int):
    """Joint rows of very different lengths, one to three masks per query."""
    draw = np.random.default_rng(3)
    sentences = some_ids(*draw.integers(3, 9, size=queries), seed=1)
    bodies = some_ids(*draw.integers(0, 15, size=queries * candidates), seed=2)
    counts = draw.integers(1, 4, size=queries)
    position = np.zeros((queries, 3), dtype=np.int64)
    target, mask = np.zeros_like(position), np.zeros((queries, 3), dtype=np.float32)
    for row, count in enumerate(counts):
        position[row, :count] = 1 + np.sort(draw.choice(min(len(sentences[row]), 6), count, replace=False))
        target[row, :count] = draw.integers(5, VOCAB, size=count)
        mask[row, :count] = 1
    joint = joint_inputs([s for s in sentences for _ in range(candidates)], bodies, tokenizer, LENGTHS)
    return joint, *map(torch.from_numpy, (position, target, mask))


def plain_logp(bert: BertForMaskedLM, joint: Tokens, position_BM, target_BM, mask_BM) -> torch.Tensor:
    """Row by row, mask by mask, through the whole BertForMaskedLM."""
    queries, most = position_BM.shape
    candidates = len(joint.ids_BT) // queries
    rows = []
    for row in range(len(joint.ids_BT)):
        real = int(joint.mask_BT[row].sum())
        logits = bert(
            joint.ids_BT[row : row + 1, :real], token_type_ids=joint.segments_BT[row : row + 1, :real]
        ).logits[0]
        query = row // candidates
        values = [
            logits[position_BM[query, m]].log_softmax(-1)[target_BM[query, m]]
            if mask_BM[query, m]
            else torch.zeros(())
            for m in range(most)
        ]
        rows.append(torch.stack(values))
    return torch.stack(rows).view(queries, candidates, most)


@pytest.mark.parametrize("at_once", [4, 64])
def test_token_logp_equals_a_plain_loop_over_unpadded_rows(reader, tokenizer, monkeypatch, at_once) -> None:
    monkeypatch.setattr(encoders, "ROWS_AT_ONCE", at_once)
    batch = masked_batch(tokenizer, queries=5, candidates=3)
    with torch.no_grad():
        assert torch.allclose(
            reader.token_logp(*batch), plain_logp(masked_twin(reader.bert), *batch), atol=1e-4
        )


def test_token_logp_passes_on_the_gradient_of_the_plain_loop(reader, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(encoders, "ROWS_AT_ONCE", 4)
    batch = masked_batch(tokenizer, queries=3, candidates=3)
    weights = torch.randn(3, 3, 3)
    gradients = []
    plain = masked_twin(reader.bert)
    for network, function in ((reader, reader.token_logp), (plain, partial(plain_logp, plain))):
        (function(*batch) * weights).sum().backward()
        gradients.append([p.grad for p in network.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3)


def test_token_logp_is_the_targets_part_of_vocabulary_logp(reader, tokenizer) -> None:
    joint, position, target, mask = masked_batch(tokenizer, queries=4, candidates=3)
    with torch.no_grad():
        token = reader.token_logp(joint, position, target, mask)
        vocabulary = reader.vocabulary_logp(joint, position, mask)
    assert torch.allclose(vocabulary.exp().sum(-1), torch.ones(vocabulary.shape[:2]), atol=1e-5)
    for place, (row, masked) in enumerate(mask.nonzero().tolist()):
        expected = vocabulary[place, :, target[row, masked]]
        assert torch.allclose(token[row, :, masked], expected, atol=1e-4)


def test_no_span_begins_or_ends_inside_a_word(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    trunk = Bert(CONFIG)
    inner = set(range(10, VOCAB, 3))
    continues_V = torch.tensor([i in inner for i in range(VOCAB)])
    free, whole = SpanReader(trunk).eval(), SpanReader(trunk, continues_V).eval()
    whole.load_state_dict(free.state_dict() | {"continues_V": continues_V})
    tokens = joint_inputs(some_ids(4, 2, 1), some_ids(13, 3, 0), tokenizer, LENGTHS)
    body_BT = body_mask(tokens, tokenizer.sep_id)
    with torch.no_grad():
        anywhere, score = free(tokens, body_BT), whole(tokens, body_BT)
    kept = 0
    for row, width, first in anywhere.isfinite().nonzero().tolist():
        ids = tokens.ids_BT[row].tolist()
        after = ids[first + width + 1]
        if ids[first] in inner or after in inner:
            assert score[row, width, first] == -math.inf
        else:
            kept += 1
            assert score[row, width, first] == anywhere[row, width, first]
    assert 0 < kept < int(anywhere.isfinite().sum())
    assert not score[anywhere == -math.inf].isfinite().any()


def test_span_scores_equal_a_double_loop_over_first_and_last_piece(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    reader = SpanReader(Bert(CONFIG)).eval()
    nn.init.normal_(reader.ends.weight)
    nn.init.normal_(reader.score.weight)
    tokens = joint_inputs(some_ids(4, 2, 1), some_ids(13, 3, 0), tokenizer, LENGTHS)
    with torch.no_grad():
        score = reader(tokens, body_mask(tokens, tokenizer.sep_id))
    length = tokens.ids_BT.shape[1]
    assert score.shape == (3, 10, length)
    for row in range(3):
        states = plain_states(reader.trunk, tokens, row).last_hidden_state[0]
        real = len(states)
        body = [t for t in range(real - 1) if tokens.segments_BT[row, t] == 1]
        for first in range(length):
            for width in range(10):
                last = first + width
                value = float(score[row, width, first])
                if first not in body or last not in body:
                    assert value == -math.inf
                    continue
                weight, bias = reader.ends.weight, reader.ends.bias
                hidden = states[first] @ weight[:256].T + bias[:256] + states[last] @ weight[256:].T
                hidden = nn.functional.layer_norm(
                    (hidden + bias[256:]).relu(), (256,), reader.norm.weight, reader.norm.bias, 1e-3
                )
                expected = (hidden @ reader.score.weight[0] + reader.score.bias).item()
                assert math.isclose(value, expected, abs_tol=1e-3)


def test_short_inputs_have_no_spans_wider_than_themselves(tokenizer: Tokenizer) -> None:
    reader = SpanReader(Bert(CONFIG)).eval()
    tokens = joint_inputs(some_ids(1), some_ids(2), tokenizer, LENGTHS)
    score = reader(tokens, body_mask(tokens, tokenizer.sep_id))
    assert score.shape == (1, 6, 6)
    assert int(score.isfinite().sum()) == 3


def test_body_mask_leaves_out_question_separators_and_padding(tokenizer: Tokenizer) -> None:
    tokens = joint_inputs([[7, 8], [7]], [[9], [9, 10, 11]], tokenizer, LENGTHS)
    assert body_mask(tokens, tokenizer.sep_id).int().tolist() == [
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
    ]


# -- loading


def test_masked_lm_loads_with_its_own_head(
    reader: MaskedReader, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    masked_twin(reader.bert).save_pretrained(tmp_path)
    loaded = load_reader(str(tmp_path))
    batch = masked_batch(tokenizer, queries=2, candidates=2)
    with torch.no_grad():
        assert torch.allclose(loaded.eval().token_logp(*batch), reader.token_logp(*batch), atol=1e-5)


def test_headless_bert_gets_a_head_that_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trunk = twin(Bert(CONFIG, pooler=True))
    trunk.save_pretrained(tmp_path)
    loaded = load_reader(str(tmp_path))
    for name, value in loaded.bert.bert.state_dict().items():
        assert torch.equal(value, trunk.state_dict()[name])
    transform = loaded.bert.cls.predictions.transform
    state = torch.randn(4, 16)
    assert torch.equal(transform.dense(state), state)
    assert loaded.bert.cls.predictions.decoder.weight is loaded.bert.bert.embeddings.word_embeddings.weight


def test_pooler_of_a_published_bert_is_kept_for_cls_towers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    published = twin(Bert(CONFIG, pooler=True))
    published.save_pretrained(tmp_path)
    for shared in (True, False):
        embedder = embedder_from(
            load_reader(str(tmp_path)), EmbedderConfig(dim=6, pooling="cls", norm="layer", shared=shared)
        )
        load_pooler(embedder, str(tmp_path))
        for tower in (embedder.query, embedder.passage):
            assert torch.equal(tower.trunk.pooler.dense.weight, published.pooler.dense.weight)
            assert torch.equal(tower.trunk.pooler.dense.bias, published.pooler.dense.bias)


def test_a_decoder_is_refused(tmp_path) -> None:
    save_bert(MaskedBert(CONFIG), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    with pytest.raises(InputError, match="is a decoder"):
        load_reader(str(tmp_path))


def test_encoder_of_another_family_is_refused(tmp_path: Path) -> None:
    config = DistilBertConfig(vocab_size=VOCAB, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    DistilBertModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="distilbert") as error:
        load_reader(str(tmp_path))
    assert "\n" not in str(error.value)


def write_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def write_other_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))


@pytest.mark.parametrize(
    "damage",
    [
        write_garbage,
        cut_weights,
        write_other_shapes,
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text('{"model_type": "bert", "hid'),
        lambda folder: (folder / "config.json").unlink(),
    ],
)
def test_damaged_encoder_is_one_line(reader: MaskedReader, tmp_path: Path, damage) -> None:
    save_bert(reader.bert, tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError) as error:
        load_reader(str(tmp_path))
    assert "\n" not in str(error.value)


# -- the embedder's start


def pooled_states(rows: int, seed: int = 0) -> torch.Tensor:
    """States with a large mean and directions of very different size, as BERT's are."""
    draw = np.random.default_rng(seed)
    states = draw.normal(size=(rows, 16)) * np.geomspace(5, 0.1, 16) @ draw.normal(size=(16, 16)) + 3
    return torch.from_numpy(states.astype(np.float32))


@pytest.mark.parametrize("whiten", [False, True])
def test_fitted_projection_is_the_principal_components_of_numpy(whiten: bool) -> None:
    tower = TrunkTower(CONFIG, EmbedderConfig(dim=5))
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
    plain, cast = (TrunkTower(CONFIG, EmbedderConfig(dim=5)) for _ in range(2))
    fit_projection(plain, pooled_states(200), whiten=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fit_projection(cast, pooled_states(200), whiten=True)
    assert torch.equal(plain.projection.weight, cast.projection.weight)
    assert torch.allclose(plain.projection.bias, cast.projection.bias, atol=1e-4)


def test_whitening_fewer_passages_than_dimensions_blows_up_no_direction() -> None:
    """A corpus of 10 passages fixes 9 directions; a query's part outside them must not drown those."""
    tower = TrunkTower(CONFIG, EmbedderConfig(dim=12))
    fit_projection(tower, pooled_states(60)[:10], whiten=True)
    unseen = tower.projection(pooled_states(60)[10:]).detach()
    assert unseen.abs().max() < 100


def test_embedder_starts_on_a_copy_of_the_readers_trunk(reader: MaskedReader) -> None:
    for config in (EmbedderConfig(dim=5), EmbedderConfig(dim=5, pooling="cls", shared=False)):
        embedder = embedder_from(reader, config)
        for tower in (embedder.query, embedder.passage):
            mine, theirs = tower.trunk.state_dict(), reader.bert.bert.state_dict()
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


def test_networks_without_dropout_train_as_they_evaluate(reader: MaskedReader, tokenizer: Tokenizer) -> None:
    """Also inside the attention."""
    joint, position, target, mask = masked_batch(tokenizer, queries=2, candidates=2)
    with torch.no_grad():
        evaluated = reader.token_logp(joint, position, target, mask)
        assert not torch.allclose(reader.train().token_logp(joint, position, target, mask), evaluated)
        set_dropout(reader, 0.0)
        assert torch.equal(reader.train().token_logp(joint, position, target, mask), evaluated)


def test_evaluating_gives_back_the_mode_even_after_an_error() -> None:
    one, other = nn.Dropout(), nn.Dropout().eval()

    def fail() -> None:
        with evaluating(one, other):
            assert not one.training
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert one.training and not other.training


Loss = Callable[[], torch.Tensor]


def loss_and_gradients(loss_of: Loss, *networks: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    loss = loss_of()
    parameters = [p for network in networks for p in network.parameters()]
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    assert sum(bool(gradient.any()) for gradient in found) > 20
    return [loss.detach(), *found]


def parts_of_a_step(
    reader: MaskedReader, tokenizer: Tokenizer, pooling: str, dropout: float
) -> tuple[Embedder, Loss]:
    """A loss in which each text's vector and each masked word has a weight of its own."""
    embedder = embedder_from(reader, EmbedderConfig(dim=5, pooling=pooling))
    for network in (reader, embedder):
        set_dropout(network.train(), dropout)
    joint, position, target, mask = masked_batch(tokenizer, queries=2, candidates=3)
    weight = torch.randn(6, 5)

    def loss() -> torch.Tensor:
        logp_BKM = reader.token_logp(joint, position, target, mask)
        return (logp_BKM * weight[:, :1].view(2, 3, 1)).sum() + (embedder.query(joint) * weight).sum()

    return embedder, loss


@pytest.mark.parametrize("pooling", ["mean", "cls", "words"])
@pytest.mark.parametrize("kept", [1, 2, 5])
def test_a_batch_whose_activations_are_made_again_gives_the_whole_batchs_loss_and_gradients(
    reader: MaskedReader, tokenizer: Tokenizer, pooling: str, kept: int
) -> None:
    embedder, loss = parts_of_a_step(reader, tokenizer, pooling, dropout=0.0)
    found = []
    for rows in (0, kept):
        keep_rows(reader, rows)
        keep_rows(embedder, rows)
        found.append(loss_and_gradients(loss, reader, embedder))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_activations_that_are_made_again_drop_what_was_dropped(
    reader: MaskedReader, tokenizer: Tokenizer, monkeypatch
) -> None:
    embedder, loss = parts_of_a_step(reader, tokenizer, "mean", dropout=0.3)
    keep_rows(reader, 2)
    keep_rows(embedder, 2)
    made_again = loss_and_gradients(loss, reader, embedder)
    monkeypatch.setattr("realm.model.encoders.recomputed", lambda function, *inputs: function(*inputs))
    for one, other in zip(made_again, loss_and_gradients(loss, reader, embedder), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_many_small_parts_in_bf16_are_added_up_in_float32(
    reader: MaskedReader, tokenizer: Tokenizer
) -> None:
    """The same row 400 times, one at a time: in bf16 the sum stops growing before."""
    embedder = embedder_from(reader, EmbedderConfig(dim=5, pooling="mean")).eval()
    joint, *_ = masked_batch(tokenizer, queries=1, candidates=1)
    many = Tokens(*(part[:1].expand(400, -1) for part in joint))
    weight_D = torch.randn(5)
    dense = embedder.query.trunk.encoder.layer[0].attention.self.query.weight
    norms = []
    for tokens in (Tokens(*(part[:1] for part in joint)), many):
        keep_rows(embedder, 1)
        with autocast(torch.device("cpu"), "bf16"):
            (gradient,) = torch.autograd.grad((embedder.query(tokens) * weight_D).sum(), dense)
        norms.append(gradient.norm().item())
    assert norms[1] / norms[0] == pytest.approx(400, rel=0.01)


def test_a_batch_whose_activations_are_made_again_keeps_few_of_them(
    reader: MaskedReader, tokenizer: Tokenizer
) -> None:
    joint, *_ = masked_batch(tokenizer, queries=4, candidates=8)
    embedder = embedder_from(reader, EmbedderConfig(dim=5, pooling="mean")).train()
    kept_bytes = []
    for rows in (0, 2):
        keep_rows(embedder, rows)
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            vectors = embedder.query(joint)
        weights = {p.untyped_storage().data_ptr() for p in embedder.parameters()}
        kept_bytes.append(sum(size for place, size in saved.items() if place not in weights))
        vectors.sum().backward()
    assert kept_bytes[1] < kept_bytes[0] / 10
