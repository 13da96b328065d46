"""The layouts of network inputs (REALM appendix B, released featurisation).

`pack` makes `Tokens` from sequences of wordpiece ids. Only the functions of the following layouts call `pack`:

    query      [CLS] sentence [SEP]                 segments 0
    passage    [CLS] title [SEP] body [SEP]         segments 0 | 1
    joint      [CLS] sentence [SEP] body [SEP]      segments 0 | 1   (titles are used for retrieval only)
    reading    [CLS] question [SEP] body [SEP]      segments 0 | 1   (for the span reader)
    null       [CLS] [SEP] [SEP]                    segments 0 | 1   (a passage with an empty title and an empty body)

Axis letters: B rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm.tokens.tokenizer import Tokenizer

NULL_PASSAGE = -1
"""The number of the null passage, which is empty, and which no index contains."""


@dataclass(frozen=True)
class Lengths:
    """Longest inputs in wordpieces, including special tokens (paper: 288 for a passage; released code: 96 for a query)."""

    query: int = 96
    """A masked sentence or a question."""
    passage: int = 288
    """A passage with its title."""
    reading: int = 0
    """Longest input of the span reader, question and body together (released code: 320). 0: the value of `joint`."""

    def __post_init__(self) -> None:
        for name, least in (("query", 2), ("passage", 3), ("reading", 0)):
            if not least <= getattr(self, name) < 2**31:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but must be {least} or more and fit in 32 bits"
                )

    @property
    def joint(self) -> int:
        """Longest query and passage body together; a query is cut to `query` in any case."""
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
        """Row i as a view."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Lengths of the given rows."""
        return self.offsets[numbers + 1] - self.offsets[numbers]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Inputs of a network: ids, attention mask (1 = token) and segment ids, each [B, T] int64.

    The tokens of a row are its first columns.
    """

    ids_BT: Tensor
    mask_BT: Tensor
    segments_BT: Tensor

    @cached_property
    def length_B(self) -> Tensor:
        """Number of tokens of each row, always on the CPU, so that the sizes of results are known without waiting for a GPU."""
        return self.mask_BT.sum(dim=1).cpu()

    def to(self, device: torch.device) -> "Tokens":
        parts = self.ids_BT, self.mask_BT, self.segments_BT
        return self._with_lengths(self.length_B, *(t.to(device, non_blocking=True) for t in parts))

    def rows(self, index: Tensor) -> "Tokens":
        """The given rows, with as many columns as the longest of these rows has tokens."""
        length_B = self.length_B[index.cpu()]
        longest, index = int(length_B.max()), index.to(self.ids_BT.device, non_blocking=True)
        parts = self.ids_BT, self.mask_BT, self.segments_BT
        return self._with_lengths(length_B, *(t[index, :longest] for t in parts))

    def _with_lengths(self, length_B: Tensor, *parts: Tensor) -> "Tokens":
        made = Tokens(*parts)
        made.__dict__["length_B"] = length_B  # as if `cached_property` had counted them
        return made


def pack(
    rows: Sequence[Sequence[Sequence[int] | np.ndarray]],
    tokenizer: Tokenizer,
    max_length: int,
    first: int | None = None,
) -> Tokens:
    """[CLS] s1 [SEP] s2 [SEP] ... per row, padded to the longest row.

    If a row is too long, its last sequence is cut first, at the end. `first` is a further limit for the first sequence. Each
    sequence is followed by a [SEP], and has its index in the row as segment; [CLS] has segment 0.
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
    """Inputs of the query tower: (masked) sentences or questions."""
    return pack([[sentence] for sentence in sentences], tokenizer, lengths.query)


def passage_inputs(
    titles: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """Inputs of the passage tower, the only inputs with titles."""
    return pack(list(zip(titles, bodies, strict=True)), tokenizer, lengths.passage)


def passage_rows(
    titles: Ragged, bodies: Ragged, number_B: np.ndarray, tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """`passage_inputs` of these rows of a corpus, vectorised over the rows."""
    title_B = np.minimum(titles.lengths_of(number_B), lengths.passage - 3)
    body_B = np.minimum(bodies.lengths_of(number_B), lengths.passage - 3 - title_B)
    title_end_B1, body_end_B1 = (1 + title_B)[:, None], (2 + title_B + body_B)[:, None]
    place_T = np.arange(body_end_B1.max() + 1)
    # A row is first filled with the corpus around its body; then title, special tokens and padding are written over that.
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
    """The values at these positions; for a position outside of `rows`, an arbitrary value."""
    values = rows.values if len(rows.values) else np.zeros(1, dtype=np.int32)
    return values.take(places, mode="clip")


def joint_inputs(
    sentences: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """Inputs of the knowledge-augmented encoder: a query and the body of one passage."""
    return pack(list(zip(sentences, bodies, strict=True)), tokenizer, lengths.joint, first=lengths.query - 2)


def reading_inputs(
    questions: Sequence[Ids], bodies: Sequence[Ids], tokenizer: Tokenizer, lengths: Lengths
) -> Tokens:
    """Inputs of the span reader: the joint layout with the span reader's length."""
    longest = lengths.reading or lengths.joint
    return pack(list(zip(questions, bodies, strict=True)), tokenizer, longest, first=lengths.query - 2)
