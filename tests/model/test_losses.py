"""The objectives against published golden numbers and plain loops."""

import math

import numpy as np
import pytest
import torch

from realm.model.losses import (
    any_correct_loss,
    in_batch_loss,
    marginal_loss,
    passage_utility,
    posterior,
    retrieval_utility,
    span_marginal,
    token_marginal,
    with_unretrieved,
)

# Golden numbers: three candidates, the first the null passage, and a span of two wordpieces (reference 3.5).
SCORE_BK = [[2.0, 1.0, 0.0]]
P_KM = [[0.1, 0.2], [0.5, 0.6], [0.9, 0.3]]


@pytest.fixture
def golden() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    score_BK = torch.tensor(SCORE_BK, dtype=torch.float64, requires_grad=True)
    return score_BK, torch.tensor([P_KM], dtype=torch.float64).log(), torch.ones(1, 2, dtype=torch.float64)


def test_token_marginal_has_the_golden_numbers_of_the_released_code(golden):
    score_BK, logp_BKM, mask_BM = golden
    np.testing.assert_allclose(
        token_marginal(score_BK, logp_BKM).exp().detach(), [[0.269916, 0.306894]], atol=1e-6
    )
    loss = marginal_loss(score_BK, logp_BKM, mask_BM, per="token")
    loss.backward()
    assert loss.item() == pytest.approx(1.245448, abs=1e-6)
    np.testing.assert_allclose(score_BK.grad, [[0.325244, -0.221173, -0.104071]], atol=1e-6)


def test_span_marginal_has_the_golden_numbers_of_the_paper(golden):
    score_BK, logp_BKM, mask_BM = golden
    loss = -span_marginal(score_BK, logp_BKM, mask_BM).sum()
    loss.backward()
    assert loss.item() == pytest.approx(2.197940, abs=1e-6)
    np.testing.assert_allclose(score_BK.grad, [[0.545412, -0.416511, -0.128900]], atol=1e-6)


def test_retrieval_utility_has_the_golden_number(golden):
    assert retrieval_utility(*golden).item() == pytest.approx(0.710563, abs=1e-6)


def test_gradient_on_scores_is_prior_less_posterior(golden):
    score_BK, logp_BKM, mask_BM = golden
    (-span_marginal(score_BK, logp_BKM, mask_BM).sum()).backward()
    expected = score_BK.detach().softmax(1) - posterior(score_BK.detach(), logp_BKM, mask_BM)
    np.testing.assert_allclose(score_BK.grad, expected, atol=1e-12)


@pytest.mark.parametrize("per", ["span", "token"])
def test_marginals_equal_a_plain_loop_over_queries_passages_and_tokens(per):
    generator = torch.Generator().manual_seed(1)
    score_BK = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    logp_BKM = -torch.rand(3, 4, 5, generator=generator, dtype=torch.float64) * 3
    lengths = [1, 5, 3]
    mask_BM = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in lengths], dtype=torch.float64)
    total = 0.0
    for b, length in enumerate(lengths):
        z = sum(math.exp(s) for s in score_BK[b])
        prior = [math.exp(s) / z for s in score_BK[b]]
        if per == "token":
            for m in range(length):
                total += math.log(sum(prior[k] * math.exp(logp_BKM[b, k, m]) for k in range(4)))
        else:
            total += math.log(
                sum(prior[k] * math.exp(sum(logp_BKM[b, k, m] for m in range(length))) for k in range(4))
            )
    assert marginal_loss(score_BK, logp_BKM, mask_BM, per).item() == pytest.approx(-total / sum(lengths))


def test_marginals_agree_on_spans_of_one_token(golden):
    score_BK, logp_BKM, mask_BM = golden
    one = mask_BM * torch.tensor([[1.0, 0.0]])
    assert marginal_loss(score_BK, logp_BKM, one, "span").item() == pytest.approx(
        marginal_loss(score_BK, logp_BKM, one, "token").item()
    )


def test_unread_passages_count_as_if_each_were_a_candidate_with_the_imputed_likelihood():
    generator = torch.Generator().manual_seed(2)
    score_BN = torch.randn(2, 10, generator=generator, dtype=torch.float64)
    logp_BKM = -torch.rand(2, 4, 3, generator=generator, dtype=torch.float64)
    mask_BM = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    rest_B = score_BN[:, 4:].logsumexp(1)
    summed = marginal_loss(*with_unretrieved(score_BN[:, :4], logp_BKM, mask_BM, rest_B, 1.5), mask_BM)
    every = torch.cat(
        [logp_BKM, (logp_BKM[:, :1] - (1.5 / mask_BM.sum(1))[:, None, None]).expand(2, 6, 3)], dim=1
    )
    assert summed.item() == pytest.approx(marginal_loss(score_BN, every, mask_BM).item())


def test_passage_utility_is_the_gain_over_the_null_passage(golden):
    _, logp_BKM, mask_BM = golden
    expected = [0.0, math.log(0.3 / 0.02), math.log(0.27 / 0.02)]
    np.testing.assert_allclose(passage_utility(logp_BKM, mask_BM)[0], expected)


def test_in_batch_loss_of_equal_vectors_is_the_log_of_the_batch_size():
    assert in_batch_loss(torch.ones(8, 3), torch.ones(8, 3)).item() == pytest.approx(math.log(8))


def test_any_correct_loss_equals_minus_log_of_the_correct_share():
    logit = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, 0.0, 0.0]])
    correct = torch.tensor([[True, False, True], [False, False, False]])
    expected = -math.log(math.e / (math.e + math.e**2))
    assert any_correct_loss(logit, correct).item() == pytest.approx(expected)


def test_any_correct_loss_without_a_correct_entry_is_zero_with_zero_gradient():
    logit = torch.tensor([[1.0, -torch.inf]], requires_grad=True)
    loss = any_correct_loss(logit, torch.tensor([[False, True]]))
    loss.backward()
    assert loss.item() == 0 and logit.grad is not None and logit.grad.tolist() == [[0, 0]]
