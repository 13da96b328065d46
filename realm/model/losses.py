"""The objectives of REALM and ORQA as pure functions of tensors: no networks, no indexes, no devices.

Letters: B queries, K candidates per query, M masked tokens per query, S spans per candidate, N passages of the index.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from realm.model.scores import scores


def token_marginal(score_BK: Tensor, token_logp_BKM: Tensor) -> Tensor:
    """log p(y_m|x) = log sum_k p(z_k|x) p(y_m|z_k,x) for each masked token by itself -> [B, M]  (released code).

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
    """The pre-training loss: -log p(y|x), the mean over masked tokens -> scalar.

    `per` is "span" (the paper: one product over the span's tokens inside the sum over passages) or "token" (the released
    code). Both divide by the number of masked tokens, so that their sizes compare.
    """
    if per == "token":
        total = (token_marginal(score_BK, token_logp_BKM) * mask_BM).sum()
    else:
        total = span_marginal(score_BK, token_logp_BKM, mask_BM).sum()
    return -total / mask_BM.sum().clamp_min(1)


def with_unretrieved(
    score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor, rest_score_B: Tensor, gap: float
) -> tuple[Tensor, Tensor]:
    """Adds all passages that nobody read as one more candidate -> scores [B, K+1], log-likelihoods [B, K+1, M].

    Normalising over the whole index instead of over the candidates keeps the softmax honest: scores cannot be gained by
    pushing down what was not retrieved. The likelihood of an unread passage is imputed: the null passage's (candidate 0)
    less `gap` nats per span, shared evenly by its tokens. `rest_score_B` is the logsumexp of the unread passages' scores.
    """
    length_B = mask_BM.sum(dim=1).clamp_min(1)
    imputed_B1M = token_logp_BKM[:, :1].detach() - (gap / length_B)[:, None, None]
    return torch.cat([score_BK, rest_score_B[:, None]], dim=1), torch.cat(
        [token_logp_BKM, imputed_B1M], dim=1
    )


def index_marginal_loss(score_BN: Tensor, gain_BN: Tensor) -> Tensor:
    """-log p(y|x) over a whole index, less the null passage's -log p(y|null,x): the mean over queries -> scalar.

    `gain_BN` is log p(y|z,x) - log p(y|null,x) per span; -inf where a passage is none for the query.

    >>> index_marginal_loss(torch.zeros(1, 3), torch.tensor([[torch.inf.__neg__(), 0.0, 0.0]])).item()
    0.0
    """
    score_BN = score_BN.masked_fill(gain_BN == -torch.inf, -torch.inf)
    return (score_BN.logsumexp(dim=1) - (score_BN + gain_BN).logsumexp(dim=1)).mean()


def posterior(score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor) -> Tensor:
    """p(z_k|x,y): which passages the answer credits -> [B, K]."""
    span_logp_BK = (token_logp_BKM * mask_BM[:, None, :]).sum(dim=-1)
    return (score_BK.log_softmax(dim=-1) + span_logp_BK).softmax(dim=-1)


def token_credit(score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor, per: str = "span") -> Tensor:
    """What the gradient of `marginal_loss` weighs each d log p(y_m|z_k,x) with, before its mean -> [B, K, M]; 0 at padding.

    Per span it is p(z_k|x,y) at every token, per token that token's own posterior.
    """
    if per == "token":
        credit_BKM = (score_BK[:, :, None] + token_logp_BKM).softmax(dim=1)
    else:
        credit_BKM = posterior(score_BK, token_logp_BKM, mask_BM)[:, :, None]
    return credit_BKM * mask_BM[:, None, :]


def retrieval_utility(score_BK: Tensor, token_logp_BKM: Tensor, mask_BM: Tensor) -> Tensor:
    """How much retrieval helps: the token marginal less the null passage's log-likelihood, mean over masked tokens -> scalar.

    This is what the released code logs; candidate 0 is the null passage. Per passage, log p(y|z,x) - log p(y|null,x) is the
    paper's RU (appendix D): `passage_utility`.
    """
    gain_BM = token_marginal(score_BK, token_logp_BKM) - token_logp_BKM[:, 0]
    return (gain_BM * mask_BM).sum() / mask_BM.sum().clamp_min(1)


def passage_utility(token_logp_BKM: Tensor, mask_BM: Tensor) -> Tensor:
    """RU(z|x) = log p(y|z,x) - log p(y|null,x) per span and candidate, in nats -> [B, K]  (REALM appendix D)."""
    span_logp_BK = (token_logp_BKM * mask_BM[:, None, :]).sum(dim=-1)
    return span_logp_BK - span_logp_BK[:, :1]


def in_batch_loss(query_BD: Tensor, passage_BD: Tensor) -> Tensor:
    """Softmax cross-entropy of each query against all passages of the batch, its own being right -> scalar.

    This is ICT's loss (Lee et al. 2019, section 4).
    """
    score_BB = scores(query_BD, passage_BD)
    return F.cross_entropy(score_BB, torch.arange(len(score_BB), device=score_BB.device))


def any_correct_loss(logit_BX: Tensor, correct_BX: Tensor) -> Tensor:
    """-log of the probability that falls on any correct entry -> scalar  (ORQA section 3: L_early, L_full).

    The mean is over the rows that have a correct entry.
    Entries with logit -inf are impossible. Rows without a correct entry teach nothing; without any such row the loss is 0.
    """
    usable_B = (correct_BX & logit_BX.isfinite()).any(dim=1)
    if not usable_B.any():
        return logit_BX.masked_fill(~logit_BX.isfinite(), 0).sum() * 0
    logit_BX, correct_BX = logit_BX[usable_B], correct_BX[usable_B]
    right_B = logit_BX.masked_fill(~correct_BX, -torch.inf).logsumexp(dim=1)
    return (logit_BX.logsumexp(dim=1) - right_B).mean()
