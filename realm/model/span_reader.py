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
from realm.model.cpu.packed import hidden_states
from realm.tokens.layouts import Tokens

Objective = Literal["joint", "mixture"]

IMPOSSIBLE = -1e9
"""Log of the total probability of a passage without any span: finite, so that gradients are 0 and not NaN."""


@dataclass(frozen=True)
class SpanConfig:
    """Settings of the head that scores spans; defaults are the released values."""

    head: Literal["pairs", "ends"] = "pairs"
    """"pairs": an MLP over the first and the last state of a span (ORQA). "ends": start logit plus end logit, minus those of
    [CLS], which stand for "no answer" (BERT's question-answering head as trained on SQuAD 2.0)."""
    max_width: int = 10
    """Longest answer in wordpieces."""
    hidden: int = 256
    """Width of the hidden layer of "pairs"."""
    norm_eps: float = 1e-3
    """Epsilon of the LayerNorm of "pairs"."""
    finds_none: bool = False
    """"No answer" has the score 0 beside the scores of spans (released reader: always an answer)."""
    objective: Objective = "joint"
    """How spans of several passages compare. "joint": by span score plus retrieval score (ORQA section 3, released code).
    "mixture": by p(z|x) p(span|z,x), where p(span|z,x) is a softmax over the spans of one passage (REALM eq. 1)."""
    retrieval_score: bool = True
    """False: spans compare by their own scores alone; only with "joint"."""

    def __post_init__(self) -> None:
        for name, value in (("max_width", self.max_width), ("hidden", self.hidden)):
            if not 1 <= value < 2**31:
                raise ValueError(f"{name} is {value}: it must be 1 or more, and fit 32 bits")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps is {self.norm_eps}: it must be 0 or more, and finite")
        if self.objective == "mixture" and not self.retrieval_score:
            raise ValueError(
                'objective "mixture" weighs passages by their retrieval scores: retrieval_score must be true'
            )


class SpanReader(nn.Module):
    """Scores every span of up to `max_width` wordpieces by its first and last state (ORQA's S_read, or BERT's head)."""

    continues_V: Tensor
    """True at wordpieces that continue a word: no span begins with one or ends before one. Released code: all False."""

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
        inner_BT = self.continues_V[tokens.ids_BT]
        first_BT, last_BT = body_BT & ~inner_BT, body_BT & ~F.pad(inner_BT[:, 1:], (0, 1))
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

    def total(self, span_RWT: Tensor) -> Tensor:
        """What a mixture divides the spans of each passage by, as a logarithm -> [R]; 0 if the objective is "joint".

        It is the logsumexp of the scores of all spans, and of "no answer" if the reader finds it.
        """
        if self.config.objective == "joint":
            return span_RWT.new_zeros(len(span_RWT))
        none = 0.0 if self.config.finds_none else IMPOSSIBLE
        return F.pad(span_RWT.flatten(1), (0, 1), value=none).logsumexp(dim=1)

    def beside(self, score_BK: Tensor, total_BK: Tensor) -> Tensor:
        """What is added to the span scores of each passage, so that spans of all passages compare -> [B, K].

        A "pairs" head is trained with the retrieval scores themselves, or as a mixture with log p(z|x) over the passages read,
        less `total`. An "ends" head compares spans with "no answer" passage by passage: adding log p(z|x) keeps the score of
        "no answer" at 0 for all passages together.
        """
        if not self.config.retrieval_score:
            return torch.zeros_like(score_BK)
        if self.config.head == "ends" or self.config.objective == "mixture":
            score_BK = score_BK.log_softmax(dim=-1)
        return score_BK - total_BK

    def none(self, beside_BK: Tensor) -> Tensor:
        """Score of "no answer" beside the spans of all passages -> [B]: 0, in a mixture log sum_z p(z|x) p("no answer"|z,x)."""
        if self.config.objective == "joint":
            return torch.zeros_like(beside_BK[..., 0])
        return beside_BK.logsumexp(dim=-1)


def body_mask(tokens: Tokens, sep_id: int) -> Tensor:
    """True at the passage tokens of a joint input without the closing [SEP] -> [B, T] bool."""
    return (tokens.segments_BT == 1) & (tokens.ids_BT != sep_id) & (tokens.mask_BT == 1)
