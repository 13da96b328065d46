"""Scores keep float32 inside autocast, wherever they are computed: hard negatives differ by less than bf16 can say."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import realm
from realm.masking.candidates import CandidateRule, choose_candidates, read_inputs
from realm.masking.masked_queries import MaskingRule, SpanIndex, draw_queries
from realm.model.device import autocast
from realm.model.losses import in_batch_loss
from realm.model.scores import own_scores, scores
from realm.search.exact import MipsIndex
from realm.train import ict, pretrain

BF16 = torch.device("cpu"), "bf16"


def close_vectors() -> tuple[torch.Tensor, torch.Tensor]:
    """Six queries, and passages that all lie close to them: in bf16 they cannot be told apart."""
    torch.manual_seed(0)
    centre_D = 4 * torch.randn(16)
    return centre_D + 0.01 * torch.randn(6, 16), centre_D + 0.01 * torch.randn(6, 16)


def test_scores_in_bf16_autocast_are_those_of_float64() -> None:
    query_BD, passage_BD = close_vectors()
    wanted_BB = query_BD.double() @ passage_BD.double().T
    with autocast(*BF16):
        assert (query_BD @ passage_BD.T - wanted_BB).abs().max() > 0.1  # what the guard is for
        torch.testing.assert_close(scores(query_BD, passage_BD).double(), wanted_BB, rtol=1e-6, atol=0)
        own_BB = own_scores(query_BD, passage_BD.expand(6, 6, 16))
        torch.testing.assert_close(own_BB.double(), wanted_BB, rtol=1e-6, atol=0)
        half_BB = own_scores(query_BD.bfloat16(), passage_BD.bfloat16().expand(6, 6, 16))
    assert half_BB.dtype == torch.float32


def test_in_batch_loss_and_its_gradient_in_bf16_autocast_are_those_of_float64() -> None:
    query_BD, passage_BD = close_vectors()
    query_BD.requires_grad_()
    with autocast(*BF16):
        loss = in_batch_loss(query_BD, passage_BD)
    (gradient,) = torch.autograd.grad(loss, query_BD)
    exact_BD = query_BD.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact_BD @ passage_BD.double().T, torch.arange(6))
    (wanted_gradient,) = torch.autograd.grad(wanted, exact_BD)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-3, atol=1e-4)


def test_index_ranks_and_sums_in_bf16_autocast_as_in_float64() -> None:
    query_BD, passage_BD = close_vectors()
    index = MipsIndex(passage_BD)
    wanted_BB = query_BD.double() @ passage_BD.double().T
    with autocast(*BF16):
        hits = index.search(query_BD, 6)
        rest_B = index.rest_logsumexp(query_BD, [np.array([0])] * 6)
    assert torch.equal(hits.number_BK, wanted_BB.argsort(dim=1, descending=True))
    torch.testing.assert_close(rest_B.double(), wanted_BB[:, 1:].logsumexp(1), rtol=1e-6, atol=0)


def test_embedder_scores_its_own_vectors_in_bf16_autocast_as_in_float64(tiny_kb, tiny_model) -> None:
    tokens, words, lengths = tiny_kb.tokens, tiny_model.tokenizer, tiny_model.lengths
    queries = draw_queries(
        tokens,
        np.arange(len(tiny_kb)),
        3,
        np.random.default_rng(0),
        MaskingRule(words.mask_id, lengths.query - 2),
    )
    number_BK = np.array([[-1, 0, 1, 2]] * 3)
    batch = read_inputs(queries, number_BK, tokens, words, lengths)
    with torch.no_grad(), autocast(*BF16):
        passage_UD = tiny_model.embedder.passage(batch.passages)
        query_BD, score_BK = tiny_model.embedder.score(batch.queries, passage_UD, batch.place_BK)
    wanted_BK = (query_BD.double()[:, None] * passage_UD.double()[batch.place_BK]).sum(-1)
    torch.testing.assert_close(score_BK.double(), wanted_BK, rtol=1e-5, atol=1e-5)


def test_guided_candidates_in_bf16_autocast_are_those_of_full_precision(tiny_kb, tiny_model) -> None:
    """The best positives of a span by score, where the scores of all of them are close."""
    tokens, words, lengths = tiny_kb.tokens, tiny_model.tokenizer, tiny_model.lengths
    torch.manual_seed(1)
    centre_D = 4 * torch.randn(16)
    index = MipsIndex(centre_D + 0.01 * torch.randn(len(tiny_kb), 16))
    queries = draw_queries(
        tokens,
        np.arange(len(tiny_kb)),
        12,
        np.random.default_rng(0),
        MaskingRule(words.mask_id, lengths.query - 2),
    )
    query_BD = centre_D + 0.01 * torch.randn(12, 16)

    def chosen() -> np.ndarray:
        return choose_candidates(
            queries, query_BD, index, tokens, CandidateRule(5, True, 3), SpanIndex(tokens)
        ).number_BK

    exact_BK = chosen()
    with autocast(*BF16):
        assert (chosen() == exact_BK).all()


def test_warm_start_inside_pretraining_has_the_loss_of_ict(tiny_kb, tiny_model) -> None:
    """The same vectors, one loss inside autocast as pre-training computes it, the other outside as ICT does."""
    config = pretrain.PretrainConfig(ict=1.0, ict_batch=4, injected=1)
    passages = np.arange(len(tiny_kb))
    torch.manual_seed(0)
    with torch.no_grad(), autocast(*BF16):
        inside = pretrain.warm_start_loss(
            tiny_model, tiny_kb.tokens, passages, np.random.default_rng(3), config
        )
        rule = ict.ClozeRule(size=4, removal=0.9)
        vectors = ict.cloze_vectors(tiny_model, tiny_kb.tokens, passages, rule, np.random.default_rng(3))
    query_BD, passage_BD = (part.double() for part in vectors)
    outside = torch.nn.functional.cross_entropy(query_BD @ passage_BD.T, torch.arange(len(query_BD)))
    assert inside.item() == pytest.approx(outside.item(), rel=1e-5)


def test_no_other_file_multiplies_vectors_of_queries() -> None:
    """Except the prefilters, which rotate in float64."""
    product = re.compile(r"query_\w*D\S* @ | @ \S*query_\w*D\b|query_\w*D\[:, None\] \*")
    found = {
        file.name
        for file in Path(realm.__file__).parent.rglob("*.py")
        if any(product.search(line) for line in file.read_text(encoding="utf-8").splitlines())
    }
    assert found == {"group_prefilter.py", "int8_prefilter.py"}
