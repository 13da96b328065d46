"""The forward pass and the losses of the span reader in fine-tuning.

Axis letters: B questions, N retrieved passages, K passages read, W span widths, T tokens, R rows (a question and a passage
each), r rows that are read again, X spans of all passages of a question.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from realm.model.modes import evaluating
from realm.model.span_reader import SpanReader
from realm.train.examples import Rows

SpanLoss = Literal["marginal", "first", "hard-em"]

SURE = 0.5
"""Rows whose gradient has at least this size are always read again; other rows are drawn (`sampled_reader_loss`). A larger
value saves time, but adds noise to the gradient."""


def read(reader: SpanReader, rows: Rows, sampled: bool) -> Tensor:
    """Scores of all spans -> [R, W, T].

    With `sampled` the scores are computed without gradient and dropout, and are a new leaf of the autograd graph;
    `sampled_reader_loss` computes the gradient of the reader's weights.
    """
    if not sampled:
        scores_RWT: Tensor = reader(rows.tokens, rows.body_RT)
        return scores_RWT
    with torch.no_grad(), evaluating(reader):
        scores_RWT = reader(rows.tokens, rows.body_RT)
    return scores_RWT.requires_grad_()


def joint_scores(reader: SpanReader, span_RWT: Tensor, rows: Rows, score_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the spans of all passages read [B, X], and whether each span is an answer [B, X].

    The softmax of the logits of a question is the probability of each span. With the objective "joint" a logit is the span
    score plus the retrieval score; with "mixture" it is log p(z|x) p(span|z,x). X is K * W * T. For a reader that can find "no
    answer", the last of X + 1 columns is "no answer".
    """
    passages = len(span_RWT) // rows.questions
    log_partition_BK = reader.log_partition(span_RWT).view(rows.questions, passages)
    passage_BK = reader.passage_score(score_BN[:, :passages], log_partition_BK)
    logit_BX = (span_RWT.view(rows.questions, passages, -1) + passage_BK[:, :, None]).flatten(1)
    correct_BX = rows.correct_RWT.view(rows.questions, -1)
    if reader.config.finds_none:
        none_B1 = ~correct_BX.any(dim=1, keepdim=True)
        logit_BX = torch.cat([logit_BX, reader.no_answer_score(passage_BK)[:, None]], dim=1)
        correct_BX = torch.cat([correct_BX, none_B1], dim=1)
    return logit_BX, correct_BX


def counted(
    logit_BX: Tensor, correct_BX: Tensor, span_RWT: Tensor, span_loss: SpanLoss, hard: bool = False
) -> Tensor:
    """The correct spans whose total probability the loss maximizes (Min et al. 2019, section 3) -> [B, X] bool.

    "marginal": all correct spans. "first": the first correct span in the first passage that contains one; the shortest span, if
    several begin at the same token. "hard-em": in a `hard` step the correct span with the highest logit, else all correct
    spans. A single span is chosen only among spans with a finite logit.
    """
    if span_loss == "marginal" or (span_loss == "hard-em" and not hard):
        return correct_BX
    possible_BX = correct_BX & logit_BX.isfinite()
    if span_loss == "hard-em":
        place_B = logit_BX.masked_fill(~possible_BX, -torch.inf).argmax(dim=1)
    else:
        _, widths, length = span_RWT.shape
        entry_X = torch.arange(logit_BX.shape[1], device=logit_BX.device)
        passage_X, width_X, start_X = (
            entry_X // (widths * length),
            entry_X // length % widths,
            entry_X % length,
        )
        order_X = (passage_X * length + start_X) * widths + width_X  # "no answer" comes last
        place_B = order_X.where(possible_BX, len(order_X)).argmin(dim=1)
    alone_BX = torch.zeros_like(possible_BX).scatter_(1, place_B[:, None], True)
    return alone_BX & possible_BX


def sampled_reader_loss(
    reader: SpanReader, rows: Rows, span_RWT: Tensor, loss: Tensor, rng: np.random.Generator
) -> tuple[Tensor, int]:
    """A loss with the value 0, and with the expected gradient that `loss` has for the reader's weights.

    Returns the loss as a scalar, and the number of rows that are read again.

    The size of a row's gradient is the sum of the absolute gradients of `loss` with respect to the span scores of the row,
    times the number of questions; this size is at most 2. Rows with at least the size `SURE` are read again with gradient. Any
    other row is read again with the probability size / `SURE`, and the gradient of this row is divided by this probability.
    """
    (gradient_RWT,) = torch.autograd.grad(loss, span_RWT, retain_graph=True)
    # The loss is a mean over questions.
    chance_R = (gradient_RWT.abs().sum(dim=(1, 2)) * rows.questions / SURE).clamp(max=1)
    drawn_R = torch.from_numpy(rng.random(len(chance_R), dtype=np.float32))
    weight_R = torch.where(drawn_R.to(chance_R.device) < chance_R, 1 / chance_R, 0)
    again_r = weight_R.nonzero().squeeze(1)
    if len(again_r) == 0:
        again_r = again_r.new_zeros(1)  # with weight 0: the gradient of the reader is then 0 and not None
    again = rows.of(again_r)
    score_rWT = reader(again.tokens, again.body_RT)
    weight_rWT = (
        weight_R[again_r, None, None] * gradient_RWT[again_r, : score_rWT.shape[1], : score_rWT.shape[2]]
    )
    value = (weight_rWT * score_rWT.masked_fill(~score_rWT.isfinite(), 0)).sum()
    return value - value.detach(), len(again_r)
