"""Every layout that a network reads (reference: REALM appendix B, released featurisation).

`pack` turns sequences of wordpiece ids into `Tokens`, and the layouts below are the only callers of it.

    query      [CLS] sentence [SEP]                 segments 0
    passage    [CLS] title [SEP] body [SEP]         segments 0 | 1
    joint      [CLS] sentence [SEP] body [SEP]      segments 0 | 1   (no title: it serves retrieval only)
    reading    the same of a question, for the span reader
    null       an empty title and an empty body     [CLS] [SEP] [SEP]

Letters: B rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.tokens.tokenizer import Tokenizer

NULL_PASSAGE = -1
"""The number of the empty passage that is candidate 0 of every query; it is in no index."""


@dataclass(frozen=True)
class Lengths:
    """Longest inputs in wordpieces, special tokens counted (paper: 288 for a passage; released code: 96 for a query)."""

    query: int = 96
    """A masked sentence or a question."""
    passage: int = 288
    """A passage with its title."""
    reading: int = 0
    """What the span reader reads of a question and a passage's body; 0: as long as `joint` (released code: 320)."""

    def __post_init__(self) -> None:
        for name, least in (("query", 2), ("passage", 3), ("reading", 0)):
            if not least <= getattr(self, name) < 2**31:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: it must be {least} or more, and fit 32 bits"
                )

    @property
    def joint(self) -> int:
        """A query and a passage's body together; the query never takes more than its own share."""
        return self.query + self.passage


class Ragged(NamedTuple):
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    >>> ragged = Ragged(np.array([5, 6, 7]), np.array([0, 2, 2, 3]))
    >>> [ragged.row(i).tolist() for i in range(3)]
    [[5, 6], [], [7]]
    """

    values: np.ndarray
    offsets: np.ndarray

    def row(self, number: int) -> np.ndarray:
        """A view, not a copy."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Of these rows alone."""
        return self.offsets[numbers + 1] - self.offsets[numbers]


class Tokens(NamedTuple):
    """What a network reads: ids, attention mask (1 = real) and segment ids, each [B, T] int64."""

    ids_BT: Tensor
    mask_BT: Tensor
    segments_BT: Tensor

    def to(self, device: torch.device) -> "Tokens":
        return Tokens(*(t.to(device, non_blocking=True) for t in self))

    def rows(self, index: Tensor) -> "Tokens":
        """The given rows, cut to the longest of them."""
        longest = int(self.mask_BT[index].sum(dim=1).max())
        return Tokens(*(t[index, :longest] for t in self))


def pack(
    rows: Sequence[Sequence[Sequence[int] | np.ndarray]],
    tokenizer: Tokenizer,
    max_length: int,
    first: int | None = None,
) -> Tokens:
    """[CLS] s1 [SEP] s2 [SEP] ... per row, padded to the longest row.

    The budget is spent left to right: an earlier sequence wins, tails are cut; `first` bounds the first sequence besides.
    Every sequence is closed by its own [SEP] and carries its index as segment ([CLS] is segment 0).
    """
    cached_rows: list[list[Sequence[int] | np.ndarray]] = []
    for row in rows:
        budget, kept = max_length - 1 - len(row), []
        for number, sequence in enumerate(row):
            room = min(budget, first) if number == 0 and first is not None else budget
            kept.append(sequence[: max(room, 0)])
            budget -= len(kept[-1])
        cached_rows.append(kept)
    longest = max(1 + sum(len(sequence) + 1 for sequence in kept) for kept in cached_rows)
    ids_BT = np.full((len(rows), longest), tokenizer.pad_id, dtype=np.int64)
    mask_BT = np.zeros((len(rows), longest), dtype=np.int64)
    segments_BT = np.zeros((len(rows), longest), dtype=np.int64)
    ids_BT[:, 0] = tokenizer.cls_id
    for row_number, kept in enumerate(cached_rows):
        start = 1
        for number, sequence in enumerate(kept):
            end = start + len(sequence)
            ids_BT[row_number, start:end] = sequence
            ids_BT[row_number, end] = tokenizer.sep_id
            segments_BT[row_number, start : end + 1] = number
            start = end + 1
        mask_BT[row_number, :start] = 1
    return Tokens(torch.from_numpy(ids_BT), torch.from_numpy(mask_BT), torch.from_numpy(segments_BT))


Ids = Sequence[int] | np.ndarray


def query_inputs(sentences: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths) -> Tokens:
    """What the embedder reads of a (masked) sentence or question."""
    return pack([[sentence] for sentence in sentences], tokenizer, lengths.query)


def passage_inputs(
    titles: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """What the embedder reads of a passage: the only place where its title is seen."""
    return pack(list(zip(titles, bodies, strict=True)), tokenizer, lengths.passage)


def passage_rows(
    titles: Ragged, bodies: Ragged, number_B: np.ndarray, tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """`passage_inputs` of these rows of a corpus, without a step of Python for each: a third of its time."""
    title_B = np.minimum(titles.lengths_of(number_B), lengths.passage - 3)
    body_B = np.minimum(bodies.lengths_of(number_B), lengths.passage - 3 - title_B)
    title_end_B1, body_end_B1 = (1 + title_B)[:, None], (2 + title_B + body_B)[:, None]
    place_T = np.arange(body_end_B1.max() + 1)
    # Everywhere what the corpus holds around the body, then over it the title, the special tokens and the padding.
    ids_BT = _around(bodies, bodies.offsets[number_B][:, None] - title_end_B1 - 1 + place_T).astype(np.int64)
    front_T = place_T[: title_B.max() + 1]
    title_BT = _around(titles, titles.offsets[number_B][:, None] - 1 + front_T)
    np.copyto(ids_BT[:, : len(front_T)], title_BT, where=front_T < title_end_B1)
    ids_BT[:, 0] = tokenizer.cls_id
    ends_B2 = np.concatenate([title_end_B1, body_end_B1], axis=1)
    np.put_along_axis(ids_BT, ends_B2, tokenizer.sep_id, axis=1)
    mask_BT = place_T <= body_end_B1
    np.copyto(ids_BT, tokenizer.pad_id, where=~mask_BT)
    segments_BT = mask_BT & (place_T > title_end_B1)
    return Tokens(*(torch.from_numpy(part.astype(np.int64)) for part in (ids_BT, mask_BT, segments_BT)))


def _around(rows: Ragged, places: np.ndarray) -> np.ndarray:
    """The values at these places, any where there are none."""
    values = rows.values if len(rows.values) else np.zeros(1, dtype=np.int32)
    return values.take(places, mode="clip")


def joint_inputs(
    sentences: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """What the knowledge-augmented encoder reads: a query and one passage's body."""
    return pack(list(zip(sentences, bodies, strict=True)), tokenizer, lengths.joint, first=lengths.query - 2)


def reading_inputs(
    questions: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """What the span reader reads: the joint layout, in the span reader's own length."""
    longest = lengths.reading or lengths.joint
    return pack(list(zip(questions, bodies, strict=True)), tokenizer, longest, first=lengths.query - 2)
