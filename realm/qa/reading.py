"""Inputs of the span reader: rows of a question and a passage, and for each wordpiece its characters in the passage.

`joint_reading` cuts only the passage, and treats special wordpieces such as "[SEP]" in a text as text. `reference_reading`
reproduces transformers 4.57.6 exactly (`AnswerConfig.reference_compat`).

Axis letters: B rows, each with a question and a passage; W span widths; T tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.model.span_reader import body_mask
from realm.qa.spans import answer_bounds, body_start
from realm.tokens.layouts import Lengths, Tokens, reading_inputs
from realm.tokens.tokenizer import Tokenizer


class Reading(NamedTuple):
    """Inputs of the span reader; `starts` and `ends` have, for each position, the characters [start, end) of the passage."""

    tokens: Tokens
    body_BT: Tensor
    """True at positions that can be part of an answer."""
    starts: list[list[int]]
    ends: list[list[int]]

    def text_span(self, row: int, first: int, last: int) -> tuple[int, int]:
        """Characters [start, end) of the wordpieces from position `first` to position `last`."""
        return self.starts[row][first], self.ends[row][last]

    def no_answer_WT(self, row: int, text: str, widths: int) -> Tensor:
        """True at spans of up to `widths` wordpieces that can be no answer (`answer_bounds`) -> [W, T] bool."""
        length = self.tokens.ids_BT.shape[1]
        read = min(len(self.starts[row]), length)  # a long text is cut at its end
        begin_T, end_T = np.full((2, length), -1)
        begin_T[:read], end_T[:read] = answer_bounds(text, self.starts[row][:read], self.ends[row][:read])
        last_WT = (np.arange(length) + np.arange(widths)[:, None]).clip(max=max(0, read - 1))
        return torch.from_numpy((end_T[last_WT] != begin_T) | (begin_T < 0))


def joint_reading(
    questions: Sequence[Sequence[int]], texts: Sequence[str], tokenizer: Tokenizer, lengths: Lengths
) -> Reading:
    """A row for each pair of a tokenized question and the text of a passage."""
    bodies = tokenizer.encode_with_offsets(texts)
    tokens = reading_inputs(questions, [body.ids for body in bodies], tokenizer, lengths)
    before = [[0] * body_start(question, lengths) for question in questions]
    return Reading(
        tokens,
        body_mask(tokens, tokenizer.sep_id),
        [zeros + body.starts for zeros, body in zip(before, bodies, strict=True)],
        [zeros + body.ends for zeros, body in zip(before, bodies, strict=True)],
    )


def reference_question(question: str, tokenizer: Tokenizer) -> list[int]:
    """The wordpieces of a question as in transformers, where the text "[SEP]" becomes the special wordpiece."""
    return list(tokenizer.as_huggingface().encode(question, add_special_tokens=False).ids)


def reference_reading(
    questions: Sequence[Sequence[int]], texts: Sequence[str], tokenizer: Tokenizer, longest: int
) -> Reading:
    """Rows as in transformers 4.57.6.

    The question is decoded and tokenized again, which removes [UNK]. The longer of question and passage is cut first.
    """
    published = tokenizer.as_huggingface()
    published.enable_truncation(longest, strategy="longest_first")
    published.enable_padding(pad_id=tokenizer.pad_id)
    again = [published.decode(list(ids), skip_special_tokens=True) for ids in questions]
    rows = published.encode_batch(list(zip(again, texts, strict=True)))
    tokens = Tokens(
        torch.tensor([row.ids for row in rows]),
        torch.tensor([row.attention_mask for row in rows]),
        torch.tensor([row.type_ids for row in rows]),
    )
    special_BT = torch.tensor([row.special_tokens_mask for row in rows], dtype=torch.bool)
    return Reading(
        tokens,
        (tokens.segments_BT == 1) & ~special_BT,
        [[start for start, _ in row.offsets] for row in rows],
        [[end for _, end in row.offsets] for row in rows],
    )
