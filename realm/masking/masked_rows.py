"""Draws the rows of masked-LM training from passages.

    plain      [CLS] title [SEP] body [SEP]      wordpieces and whole salient spans of the body are masked
    reading    [CLS] sentence [SEP] body [SEP]   half of the salient spans and some wordpieces of the sentence are masked; the
                                                 body is the passage that contains the sentence, a neighbouring passage,
                                                 another passage with a masked span, or empty

Axis letters: P predicted wordpieces.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.errors import InputError
from realm.masking.masked_queries import SpanIndex
from realm.store.knowledge_base import PassageTokens
from realm.tokens.layouts import Lengths, Tokens, joint_inputs, passage_inputs
from realm.tokens.tokenizer import Tokenizer

MASKED_TOKENS = 0.12
"""Share of single wordpieces that are masked, in both kinds of rows."""
MASKED_SPANS = 0.3
"""Share of salient spans that are masked in plain rows. In reading rows, half of the salient spans are masked, at least one."""
VISIBLE = 0.1
"""Share of the targets of plain rows that are not replaced by [MASK], so that the states of visible words are trained too."""
OWN_PASSAGE = 0.3
"""Share of reading rows with the passage that contains the sentence."""
NEAR_PASSAGE = 0.2
"""Share of reading rows with a neighbouring passage, at most two passages before or after the passage of the sentence. From
these rows the reader learns when not to copy."""
NO_PASSAGE = 0.1
"""Share of reading rows without a passage. All remaining reading rows have another passage that contains a masked span; if no
other passage contains the span, these rows have the passage of the sentence."""


class Rows(NamedTuple):
    """Masked rows of one kind, and the targets at their masked positions."""

    tokens: Tokens
    row_P: Tensor
    position_P: Tensor
    target_P: Tensor

    def to(self, device: torch.device) -> "Rows":
        return Rows._make(part.to(device) for part in self)

    def rows(self, index: Tensor) -> "Rows":
        """The rows with the numbers `index`, which must be ascending, and the targets of these rows."""
        own_P = torch.isin(self.row_P, index)
        row_P = torch.searchsorted(index, self.row_P[own_P])
        return Rows(self.tokens.rows(index), row_P, self.position_P[own_P], self.target_P[own_P])


@dataclass(frozen=True)
class RowMaker:
    """Makes masked rows from the passages of a corpus."""

    tokens: PassageTokens
    tokenizer: Tokenizer
    lengths: Lengths

    def batch(self, passages: np.ndarray, size: int, reading: float, rng: np.random.Generator) -> list[Rows]:
        """Reading rows and plain rows from `passages`, `size` rows together; `reading` is the share of reading rows.

        The passages of a batch have similar lengths, to limit padding. The probability of a passage is proportional to the
        square of its length. Otherwise most batches of a corpus such as a dictionary would consist of very short passages, from
        which the reader does not learn to use passages.

        Raises:
            InputError: there is no passage with a wordpiece.
        """
        lengths_N = self.tokens.body.lengths
        weight = lengths_N[passages].astype(np.float64) ** 2
        if not weight.any():
            raise InputError(
                "no passage is left to train on, because all passages with text are held out: use more text, or build the "
                "knowledge base with a smaller held_out"
            )
        drawn = rng.choice(passages, size * 4, p=weight / weight.sum())
        drawn = drawn[np.argsort(lengths_N[drawn], kind="stable")]
        first = int(rng.integers(len(drawn) - size + 1))
        chosen = rng.permutation(drawn[first : first + size])
        count = round(reading * size)
        parts = []
        if count > 0:
            parts.append(self.reading_rows(chosen[:count], rng))
        if count < size:
            parts.append(self.plain_rows(chosen[count:], rng))
        return parts

    def plain_rows(self, passages: np.ndarray, rng: np.random.Generator) -> Rows:
        tokens = self.tokens
        titles, bodies, hidden_rows, offsets = [], [], [], []
        for passage in passages:
            title, body = tokens.title.row(passage), tokens.body.row(passage)
            title = title if rng.random() < 0.5 else title[:0]
            hidden = rng.random(len(body)) < MASKED_TOKENS
            for start, end in zip(
                tokens.span_starts.row(passage), tokens.span_ends.row(passage), strict=True
            ):
                hidden[start:end] |= rng.random() < MASKED_SPANS
            shown = body.copy()
            shown[hidden & (rng.random(len(body)) >= VISIBLE)] = self.tokenizer.mask_id
            titles.append(title)
            bodies.append(shown)
            hidden_rows.append((body, np.flatnonzero(hidden)))
            offsets.append(2 + len(title))
        return _rows(passage_inputs(titles, bodies, self.tokenizer, self.lengths), hidden_rows, offsets)

    def reading_rows(self, passages: np.ndarray, rng: np.random.Generator) -> Rows:
        tokens = self.tokens
        sentences, bodies, hidden_rows = [], [], []
        for passage in passages:
            body = tokens.body.row(passage)
            bounds = np.append(tokens.sentences.row(passage), len(body))
            # A sentence of control characters has no wordpieces.
            number = int(rng.choice(np.flatnonzero(np.diff(bounds))))
            first = int(bounds[number])
            sentence = body[first : min(int(bounds[number + 1]), first + self.lengths.query - 2)]
            starts, ends = tokens.span_starts.row(passage) - first, tokens.span_ends.row(passage) - first
            inside = np.flatnonzero((starts >= 0) & (ends <= len(sentence)))
            hidden = rng.random(len(sentence)) < MASKED_TOKENS
            hidden[rng.integers(len(sentence))] = True
            beside = body
            if len(inside):
                picked = rng.permutation(inside)[: max(1, (len(inside) + 1) // 2)]
                for pick in picked:
                    hidden[starts[pick] : ends[pick]] = True
                beside = self.beside(int(passage), sentence[starts[picked[0]] : ends[picked[0]]], rng)
            shown = sentence.copy()
            shown[hidden] = self.tokenizer.mask_id
            sentences.append(shown)
            bodies.append(beside)
            hidden_rows.append((sentence, np.flatnonzero(hidden)))
        inputs = joint_inputs(sentences, bodies, self.tokenizer, self.lengths)
        return _rows(inputs, hidden_rows, [1] * len(sentences))

    def beside(self, own: int, span: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Wordpieces of the passage in a reading row: the passage `own` of the sentence, a neighbouring passage, another
        passage with the masked span, or no passage."""
        bodies = self.tokens.body
        draw = rng.random()
        if draw < NO_PASSAGE:
            return bodies.row(own)[:0]
        if draw < NO_PASSAGE + NEAR_PASSAGE:
            near = [n for n in (own - 2, own - 1, own + 1, own + 2) if 0 <= n < len(bodies.lengths)]
            return bodies.row(int(rng.choice(near)) if near else own)
        if draw < NO_PASSAGE + NEAR_PASSAGE + OWN_PASSAGE:
            return bodies.row(own)
        others = self._spans.passages(span)
        others = others[others != own]
        return bodies.row(int(rng.choice(others)) if len(others) else own)

    @cached_property
    def _spans(self) -> SpanIndex:
        return SpanIndex(self.tokens)


def _rows(inputs: Tokens, hidden_rows: list[tuple[np.ndarray, np.ndarray]], offsets: list[int]) -> Rows:
    """Rows with their targets. For each row, `offsets` has the position in the input at which the masked text starts. Tokens
    that were cut off are not targets."""
    longest = inputs.mask_BT.sum(dim=1).tolist()
    row, position, target = [], [], []
    for number, ((original, hidden), offset) in enumerate(zip(hidden_rows, offsets, strict=True)):
        kept = hidden[hidden + offset < longest[number] - 1]
        row += [number] * len(kept)
        position += (kept + offset).tolist()
        target += original[kept].tolist()
    return Rows(inputs, *(torch.tensor(values, dtype=torch.int64) for values in (row, position, target)))
