"""The spans of all passages of a question, in one ranking by joint scores (ORQA's softmax over passages and spans).

Axis letters: K passages, W span widths, T tokens, F spans of all passages.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.model.span_reader import SpanReader
from realm.qa.reading import Reading


class PassageSpans(NamedTuple):
    """Scores [W, T] of the spans of one passage (-inf for invalid spans), and the row of the passage in `reading`."""

    score_WT: Tensor
    reading: Reading
    row: int


class Located(NamedTuple):
    """Where a span is: the passage, the characters [start, end) in its text, and the wordpieces that were read."""

    passage: int
    start: int
    end: int
    ids: list[int]


class SpanRanking:
    """The joint scores of the spans of a question. A span is named by its place in `joint_F`."""

    def __init__(self, reader: SpanReader, spans: Sequence[PassageSpans], retrieved_K: Tensor):
        """`retrieved_K` has the retrieval part of the score of each passage; there is at least one passage."""
        log_partition_K = torch.cat([reader.log_partition(one.score_WT[None]) for one in spans])
        passage_K = reader.passage_score(retrieved_K, log_partition_K)
        self._spans = spans
        self._ends = np.cumsum([one.score_WT.numel() for one in spans])
        self.joint_F = torch.cat(
            [(one.score_WT + added).flatten() for one, added in zip(spans, passage_K, strict=True)]
        )
        none = self.joint_F[:0]
        if reader.config.finds_none:
            none = reader.no_answer_score(passage_K[None]).to(self.joint_F.dtype)
        self.share_F = torch.cat([self.joint_F, none]).softmax(dim=0)
        """Probability of each span; with a reader that finds no answer too, the last entry is the probability of none."""
        self.tops = [
            int(end - one.score_WT.numel() + one.score_WT.argmax())
            for one, end in zip(spans, self._ends, strict=True)
        ]
        """The best span of each passage."""

    def likely(self, count: int) -> list[int]:
        """The `count` best spans, best first, and then the best span of each passage; invalid spans are left out."""
        order = self.joint_F.argsort(descending=True, stable=True).tolist()
        places = dict.fromkeys(order[:count] + self.tops)
        return [place for place in places if self.joint_F[place] > -torch.inf]

    def locate(self, place: int) -> Located:
        """Where a span is."""
        k = int(np.searchsorted(self._ends, place, side="right"))
        score_WT, reading, row = self._spans[k]
        width, first = divmod(place - int(self._ends[k]) + score_WT.numel(), score_WT.shape[1])
        start, end = reading.text_span(row, first, first + width)
        return Located(k, start, end, reading.tokens.ids_BT[row, first : first + width + 1].tolist())
