"""The objectives of REALM and ORQA as pure functions of tensors, without networks, indexes or devices.

Axis letters: B queries, K candidates per query, M masked tokens per query, S spans per candidate, N passages of the index.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from realm.model.scores import scores


def token_marginal(score_BK: Tensor, token_logp_BKM: Tensor) -> Tensor:
    """log p(y_m|x) = log sum_k p(z_k|x) p(y_m|z_k,x) for each masked token separately -> [B, M]  (released code).

    >>> score = torch.tensor([[2.0, 1.0, 0.0]])
    >>> logp = torch.tensor([[[0.1, 0.2], [0.5, 0.6], [0.9, 0.3]]]).log()
    >>> [round(p, 4) for p in token_marginal(score, logp).exp().flatten().tolist()]
    [0.2699, 0.3069]
    """
    retrieval_logp_BK = score_BK.log_softmax(dim=-1)
    return (retrieval_logp_BK[:, :, None] + token_logp_BKM).logsumexp(dim=1)


def span_marginal(score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor) -> Tensor:
    """log p(y|x) = log sum_k p(z_k|x) prod_m p(y_m|z_k,x) for the whole masked span -> [B]  (REALM eq. 1 and section 3.2).

    `mask_BM` is 1 at real masked tokens and 0 at padding.
    """
    span_logp_BK = (token_logp_BKM * mask_BM[:, None, :]).sum(dim=-1)
    return (score_BK.log_softmax(dim=-1) + span_logp_BK).logsumexp(dim=1)


def marginal_loss(score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor, per: str = "span") -> Tensor:
    """The pre-training loss: -log p(y|x), mean over masked tokens -> scalar.

    `per` is "span" (paper: the sum over passages contains a product over the tokens of the span) or "token" (released code).
    Both losses are divided by the number of masked tokens, so that the values of both can be compared.
    """
    if per == "token":
        total = (token_marginal(score_BK, token_logp_BKM) * mask_BM).sum()
    else:
        total = span_marginal(score_BK, token_logp_BKM, mask_BM).sum()
    return -total / mask_BM.sum().clamp_min(1)


def with_unretrieved(
    score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor, rest_score_B: Tensor, gap: float
) -> tuple[Tensor, Tensor]:
    """Adds all unretrieved passages as one more candidate -> scores [B, K+1], log-likelihoods [B, K+1, M].

    The retrieval probability is then a softmax over the whole index. With a softmax over the candidates alone, preferring
    low-ranked candidates can lower the loss, which inverts the ranking. The log-likelihood of an unretrieved passage is assumed
    to be that of the null passage (candidate 0) minus `gap` nats per span, divided evenly among the tokens of the span.
    `rest_score_B` is the logsumexp of the scores of all unretrieved passages.
    """
    length_B = mask_BM.sum(dim=1).clamp_min(1)
    imputed_B1M = token_logp_BKM[:, :1].detach() - (gap / length_B)[:, None, None]
    return torch.cat([score_BK, rest_score_B[:, None]], dim=1), torch.cat(
        [token_logp_BKM, imputed_B1M], dim=1
    )


def index_marginal_loss(score_BN: Tensor, gain_BN: Tensor) -> Tensor:
    """-log p(y|x) + log p(y|null,x) over a whole index, mean over queries -> scalar.

    `gain_BN` is log p(y|z,x) - log p(y|null,x) per span, and -inf for passages that are not candidates of the query.

    >>> index_marginal_loss(torch.zeros(1, 3), torch.tensor([[torch.inf.__neg__(), 0.0, 0.0]])).item()
    0.0
    """
    score_BN = score_BN.masked_fill(gain_BN == -torch.inf, -torch.inf)
    return (score_BN.logsumexp(dim=1) - (score_BN + gain_BN).logsumexp(dim=1)).mean()


def posterior(score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor) -> Tensor:
    """p(z_k|x,y), the posterior probability of each passage given the masked span, called its credit -> [B, K]."""
    span_logp_BK = (token_logp_BKM * mask_BM[:, None, :]).sum(dim=-1)
    return (score_BK.log_softmax(dim=-1) + span_logp_BK).softmax(dim=-1)


def token_credit(score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor, per: str = "span") -> Tensor:
    """Weight of each d log p(y_m|z_k,x) in the gradient of `marginal_loss`, before the mean -> [B, K, M]; 0 at padding.

    With "span", the weight is p(z_k|x,y) for every token of the span; with "token", it is p(z_k|x,y_m).
    """
    if per == "token":
        credit_BKM = (score_BK[:, :, None] + token_logp_BKM).softmax(dim=1)
    else:
        credit_BKM = posterior(score_BK, token_logp_BKM, mask_BM)[:, :, None]
    return credit_BKM * mask_BM[:, None, :]


def retrieval_utility(score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor) -> Tensor:
    """log p(y_m|x) - log p(y_m|null,x) in nats, mean over masked tokens: the gain by retrieval -> scalar.

    The released code logs this number. Candidate 0 is the null passage. The retrieval utility of a single passage in the paper
    (appendix D) is `passage_utility`.
    """
    gain_BM = token_marginal(score_BK, token_logp_BKM) - token_logp_BKM[:, 0]
    return (gain_BM * mask_BM).sum() / mask_BM.sum().clamp_min(1)


def passage_utility(token_logp_BKM: Tensor, mask_BM: Tensor) -> Tensor:
    """RU(z|x) = log p(y|z,x) - log p(y|null,x) per span and candidate, in nats -> [B, K]  (REALM appendix D)."""
    span_logp_BK = (token_logp_BKM * mask_BM[:, None, :]).sum(dim=-1)
    return span_logp_BK - span_logp_BK[:, :1]


def in_batch_loss(query_BD: Tensor, passage_BD: Tensor) -> Tensor:
    """Softmax cross-entropy over the passages of the batch; passage i is the correct passage of query i -> scalar.

    This is the loss of the inverse cloze task (Lee et al. 2019, section 4).
    """
    score_BB = scores(query_BD, passage_BD)
    return F.cross_entropy(score_BB, torch.arange(len(score_BB), device=score_BB.device))


def any_correct_loss(logit_BX: Tensor, correct_BX: Tensor) -> Tensor:
    """-log of the total probability of the correct entries -> scalar  (ORQA section 3: L_early, L_full).

    Entries with the logit -inf are excluded. The mean is taken over the rows in which a correct entry is left; if there is no
    such row, the loss is 0.
    """
    usable_B = (correct_BX & logit_BX.isfinite()).any(dim=1)
    # The rows without a correct entry get the loss 0; to remove these rows, the CPU would have to wait for a GPU.
    logit_BX = logit_BX.masked_fill(~usable_B[:, None], 0)
    right_B = logit_BX.masked_fill(~correct_BX & usable_B[:, None], -torch.inf).logsumexp(dim=1)
    return (logit_BX.logsumexp(dim=1) - right_B).sum() / usable_B.sum().clamp_min(1)
