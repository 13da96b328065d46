"""What the span reader reads of a question and its passages, and where each wordpiece stands in a passage's text.

Ours cuts the passage only, and reads what a text spells as text. `reference_reading` does as transformers 4.57.6 does, for
numbers that are to be equal to its own: `AnswerConfig.reference_compat`.

Letters: B rows, a question and a passage each; T tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from realm.model.span_reader import body_mask
from realm.qa.spans import body_start
from realm.tokens.layouts import Lengths, Tokens, reading_inputs
from realm.tokens.tokenizer import Tokenizer


class Reading(NamedTuple):
    """Inputs of the span reader, with the characters [start, end) of the passage behind each of their positions."""

    tokens: Tokens
    body_BT: Tensor
    """True where an answer may stand."""
    starts: list[list[int]]
    ends: list[list[int]]

    def text_span(self, row: int, first: int, last: int) -> tuple[int, int]:
        """Characters of the wordpieces from position `first` to position `last`."""
        return self.starts[row][first], self.ends[row][last]

    def crossing_WT(self, row: int, text: str, widths: int) -> Tensor:
        """True at the spans, of up to `widths` wordpieces, that go from one paragraph into the next -> [W, T] bool."""
        ends, starts = self.ends[row], self.starts[row]
        paragraph, paragraph_T = 0, torch.zeros(self.tokens.ids_BT.shape[1], dtype=torch.int64)
        read = min(len(starts), len(paragraph_T))  # the end of a long text is cut
        for place in range(1, read):
            paragraph += "\n\n" in text[ends[place - 1] : starts[place]]
            paragraph_T[place] = paragraph
        last_T = torch.arange(len(paragraph_T))
        last_WT = (last_T + torch.arange(widths)[:, None]).clamp(max=max(0, read - 1))
        return paragraph_T[last_WT] > paragraph_T


def joint_reading(
    questions: Sequence[Sequence[int]], texts: Sequence[str], tokenizer: Tokenizer, lengths: Lengths
) -> Reading:
    """A row for each tokenized question and the passage's text beside it."""
    bodies = tokenizer.encode_with_offsets(texts)
    tokens = reading_inputs(questions, [body.ids for body in bodies], tokenizer, lengths)
    before = [[0] * body_start(question, lengths) for question in questions]
    return Reading(
        tokens,
        body_mask(tokens, tokenizer.sep_id),
        [none + body.starts for none, body in zip(before, bodies, strict=True)],
        [none + body.ends for none, body in zip(before, bodies, strict=True)],
    )


def reference_question(question: str, tokenizer: Tokenizer) -> list[int]:
    """A question's wordpieces as a user of transformers makes them: a special piece that it spells becomes one."""
    return list(tokenizer.as_huggingface().encode(question, add_special_tokens=False).ids)


def reference_reading(
    questions: Sequence[Sequence[int]], texts: Sequence[str], tokenizer: Tokenizer, longest: int
) -> Reading:
    """As transformers 4.57.6: the question decoded and tokenized again, which loses its [UNK]; longest first is cut."""
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
