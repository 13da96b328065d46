"""Question and passage -> span scores: ORQA section 3, REALM section 3.2 "fine-tuning".

Axis letters: B rows or questions, K passages read per question, R rows, T tokens, H hidden, W span widths.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.model.bert import Bert
from realm.model.states import hidden_states
from realm.tokens.layouts import Tokens

Objective = Literal["joint", "mixture"]

IMPOSSIBLE = -1e9
"""Used for log 0 in the total of a passage: if the passage has no span, gradients are NaN with -inf, and 0 with this number."""


@dataclass(frozen=True)
class SpanConfig:
    """Settings of the head that scores spans; the defaults are the values of the released code."""

    head: Literal["pairs", "ends"] = "pairs"
    """"pairs": an MLP over the first and the last state of a span (ORQA). "ends": start logit plus end logit of a span, minus
    start and end logit of [CLS], which stand for "no answer" (BERT's question-answering head, as trained on SQuAD 2.0)."""
    max_width: int = 10
    """Longest answer in wordpieces."""
    hidden: int = 256
    """Width of the hidden layer of a "pairs" head."""
    norm_eps: float = 1e-3
    """Epsilon of the LayerNorm of a "pairs" head."""
    finds_none: bool = False
    """True: "no answer" competes with the spans, with the score 0. False: every question has an answer (released code)."""
    objective: Objective = "joint"
    """How spans of several passages are compared. "joint": by span score plus retrieval score (ORQA section 3, released code).
    "mixture": by p(z|x) p(span|z,x), where p(span|z,x) is a softmax over the spans of one passage (REALM eq. 1)."""
    retrieval_score: bool = True
    """False: spans are compared by their span scores alone; only possible with "joint"."""

    def __post_init__(self) -> None:
        for name, value in (("max_width", self.max_width), ("hidden", self.hidden)):
            if not 1 <= value < 2**31:
                raise ValueError(f"{name} is {value}: it must be 1 or more, and fit 32 bits")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps is {self.norm_eps}: it must be 0 or more, and finite")
        if self.objective == "mixture" and not self.retrieval_score:
            raise ValueError(
                'objective "mixture" weights passages by retrieval scores: retrieval_score must be true'
            )


class SpanReader(nn.Module):
    """Scores every span of up to `max_width` wordpieces by the states of its first and last wordpiece (`SpanConfig.head`)."""

    continues_V: Tensor
    """True at wordpieces that continue a word: a span neither begins with nor ends before such a wordpiece. Released code: all
    False."""

    def __init__(self, encoder: Bert, continues_V: Tensor | None = None, config: SpanConfig | None = None):
        super().__init__()
        self.encoder, self.config = encoder, config or SpanConfig()
        none_V = torch.zeros(encoder.config.vocab_size, dtype=torch.bool)
        self.register_buffer("continues_V", none_V if continues_V is None else continues_V)
        pairs = self.config.head == "pairs"
        width = self.config.hidden if pairs else 1
        self.ends = nn.Linear(encoder.config.hidden_size, 2 * width)
        self.norm = nn.LayerNorm(width, eps=self.config.norm_eps) if pairs else nn.Identity()
        self.score = nn.Linear(width, 1) if pairs else nn.Identity()
        for layer in (self.ends, self.score):
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02, a=-0.04, b=0.04)
                nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tokens, body_BT: Tensor) -> Tensor:
        """Score of the span of w+1 wordpieces that starts at t -> [B, W, T] float32; -inf for spans outside `body_BT`."""
        states_BTH = hidden_states(self.encoder, tokens)
        start_BTS, end_BTS = self.ends(states_BTH).chunk(2, dim=-1)
        if self.config.head == "ends":  # differences need float32
            start_BTS, end_BTS = start_BTS.float(), end_BTS.float()
        length = tokens.ids_BT.shape[1]
        first_BT, last_BT = word_bounds(self.continues_V[tokens.ids_BT], body_BT)
        widths = []
        for width in range(min(self.config.max_width, length)):
            both = start_BTS[:, : length - width] + end_BTS[:, width:]
            if self.config.head == "pairs":
                score = self.score(self.norm(F.relu(both))).squeeze(-1).float()
            else:
                score = (both - start_BTS[:, :1] - end_BTS[:, :1]).squeeze(-1)
            inside = first_BT[:, : length - width] & last_BT[:, width:]
            widths.append(F.pad(score.masked_fill(~inside, -torch.inf), (0, width), value=-torch.inf))
        return torch.stack(widths, dim=1)

    def head(self) -> list[nn.Module]:
        """The layers that turn states of the encoder into span scores."""
        return [part for part in (self.ends, self.norm, self.score) if not isinstance(part, nn.Identity)]

    def log_partition(self, span_RWT: Tensor) -> Tensor:
        """For "mixture", the logarithm of the denominator of p(span|z,x) of each passage -> [R]; for "joint", 0.

        The denominator is the sum of exp(score) over all spans of the passage, and over "no answer" if `finds_none`.
        """
        if self.config.objective == "joint":
            return span_RWT.new_zeros(len(span_RWT))
        none = 0.0 if self.config.finds_none else IMPOSSIBLE
        return F.pad(span_RWT.flatten(1), (0, 1), value=none).logsumexp(dim=1)

    def passage_score(self, score_BK: Tensor, log_partition_BK: Tensor) -> Tensor:
        """The score that is added to all span scores of a passage, so that spans of all passages can be compared -> [B, K].

        With "mixture" the score is log p(z|x) over the passages read, minus `log_partition`. With "joint" the score is the
        retrieval score for a "pairs" head, and log p(z|x) for an "ends" head. An "ends" head scores spans relative to "no
        answer" in the same passage; if log p(z|x) is added, the score of "no answer" for all passages together is 0.
        """
        if not self.config.retrieval_score:
            return torch.zeros_like(score_BK)
        if self.config.head == "ends" or self.config.objective == "mixture":
            score_BK = score_BK.log_softmax(dim=-1)
        return score_BK - log_partition_BK

    def no_answer_score(self, passage_BK: Tensor) -> Tensor:
        """Score of "no answer" -> [B]: 0 for "joint", and log sum_z p(z|x) p("no answer"|z,x) for a "mixture"."""
        if self.config.objective == "joint":
            return torch.zeros_like(passage_BK[..., 0])
        return passage_BK.logsumexp(dim=-1)


def word_bounds(inner_BT: Tensor, body_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Where spans of whole words can begin, and where they can end -> two tensors [B, T] bool.

    `inner_BT` is True at wordpieces that continue a word, and `body_BT` at wordpieces that can be part of a span.
    """
    return body_BT & ~inner_BT, body_BT & ~F.pad(inner_BT[:, 1:], (0, 1))


def body_mask(tokens: Tokens, sep_id: int) -> Tensor:
    """True at the tokens of the passage in rows of a question and a passage, except the closing [SEP] -> [B, T] bool."""
    return (tokens.segments_BT == 1) & (tokens.ids_BT != sep_id) & (tokens.mask_BT == 1)
