"""Scores of the answers in passages, for GraphRetriever and PathRetriever.

An answer is a span of whole words in one paragraph, as in the other systems, and has at most `ANSWER_TOKENS` wordpieces. Its
probability is the probability of its first wordpiece times the probability of its last wordpiece.

Axis letters: R rows (question and text), W span widths, T tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from realm.model.bert import BertConfig
from realm.model.scores import log_softmax_inside
from realm.model.span_reader import word_bounds
from realm.qa.reading import Reading
from realm.qa.spans import span_scores
from realm.tokens.tokenizer import Tokenizer

ANSWER_TOKENS = 10
"""Largest number of wordpieces of an answer."""
WHOLE_WORDS = {"answers": "whole words"}
"""Recorded with the settings of each training. Earlier versions, whose answers could be parts of words, did not record it, so
their unfinished trainings are not continued."""


class AnswerEnds(nn.Module):
    """A layer that scores the first and the last wordpiece of an answer."""

    continues_V: Tensor
    """True at wordpieces that continue a word."""

    def __init__(self, config: BertConfig, tokenizer: Tokenizer):
        super().__init__()
        self.score = nn.Linear(config.hidden_size, 2)
        continues_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        continues_V[list(tokenizer.continuing_ids)] = True
        self.register_buffer("continues_V", continues_V, persistent=False)

    def forward(self, state_RTH: Tensor, reading: Reading) -> Tensor:
        """log p of the first and the last wordpiece -> [2, R, T]; -inf where the body of a row has no bound of a word."""
        ids_RT, body_RT = (part.to(state_RTH.device) for part in (reading.tokens.ids_BT, reading.body_BT))
        bounds_2RT = torch.stack(word_bounds(self.continues_V[ids_RT], body_RT))
        return log_softmax_inside(self.score(state_RTH).permute(2, 0, 1), bounds_2RT)


def answer_scores(end_2RT: Tensor, reading: Reading, texts: Sequence[str]) -> Tensor:
    """log p of the answers in each text -> [R, W, T]; -inf for spans that can be no answer (`answer_bounds`)."""
    no_answer_RWT = torch.stack(
        [reading.no_answer_WT(row, text, ANSWER_TOKENS) for row, text in enumerate(texts)]
    )
    return span_scores(end_2RT[0], end_2RT[1], ANSWER_TOKENS).masked_fill(no_answer_RWT, -torch.inf)
