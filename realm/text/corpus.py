"""Documents, passages and annotations, and the split of documents into passages.

Tokenization (an argument) and file formats (`realm.documents`) are elsewhere. All offsets count characters, ends exclusive.
"""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

CountTokens = Callable[[Sequence[str]], list[int]]
"""Counts the wordpieces of each text, without special tokens."""


class Document(NamedTuple):
    """An article, a page, a file. The id is unique in a corpus; several documents may share a title."""

    title: str
    text: str
    id: str


class Span(NamedTuple):
    """A salient span: characters [start, end) of a text, and the tagger's label (PERSON, GPE, DATE ...)."""

    start: int
    end: int
    label: str


class Annotations(NamedTuple):
    """Annotations of a text by a tagger: sentences in order, and salient spans in order without overlap."""

    sentences: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...]


class Passage(NamedTuple):
    """The unit of retrieval: an exact slice of a document's text, with its sentences and spans."""

    id: str
    document_id: str
    title: str
    text: str
    sentences: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...]


class HeldOut(NamedTuple):
    """The held-out passages: a share of all passages, chosen by the hash of their text.

    Two knowledge bases with equal values hold out the same passages of the same text. With another passage length the passages
    differ, and so do the held-out sentences.
    """

    held_out: float
    """Share of held-out passages."""
    passage_tokens: int
    """Longest passage in wordpieces."""

    def __str__(self) -> str:
        return f"held_out={self.held_out:g}, passage_tokens={self.passage_tokens}"


def passage_id(title: str, text: str) -> str:
    """Sixteen hex digits of the content: the first 64 bits of the SHA-1 that the released code computes."""
    return hashlib.sha1(f"{title} <sep> {text}".encode(), usedforsecurity=False).hexdigest()[:16]


def split_document(
    document: Document, annotations: Annotations, count_tokens: CountTokens, max_tokens: int = 288
) -> list[Passage]:
    """Passages of as many whole sentences as fit (REALM's blocks: at most 288 wordpieces, no overlap).

    A sentence is added to the passage while 3 + |title| + |passage| + |sentence| <= max_tokens; the 3 are [CLS] and two [SEP].
    Differences from the released code: the text is sliced, not re-joined, so that offsets stay valid; sentences that are too
    long are cut at white space, and words that are too long between characters, instead of being truncated; a title counts as
    at most half of `max_tokens`, so that it leaves room for the text.

    Passages contain every character except white space at cuts, in order. Spans across a cut are dropped.
    """
    title_tokens = min(count_tokens([document.title])[0], max_tokens // 2)
    budget = max_tokens - 3 - title_tokens
    pieces = _pieces(document.text, annotations.sentences, count_tokens, budget)
    return [_passage(document, annotations.spans, block) for block in _pack(pieces, budget)]


class _Piece(NamedTuple):
    """A sentence or a part of one."""

    start: int
    end: int
    tokens: int


def _pieces(
    text: str, sentences: Sequence[tuple[int, int]], count_tokens: CountTokens, budget: int
) -> Iterator[_Piece]:
    # A sentence extends to the start of the next one, so that text between the tagger's sentences is not lost.
    starts = [0, *(start for start, _ in sentences[1:]), len(text)]
    ranges = [_trim(text, start, end) for start, end in pairwise(starts)]
    ranges = [(start, end) for start, end in ranges if start < end]
    counts = count_tokens([text[start:end] for start, end in ranges])
    for (start, end), tokens in zip(ranges, counts, strict=True):
        if tokens <= budget:
            yield _Piece(start, end, tokens)
        else:
            yield from _cut(text, start, end, count_tokens, budget)


def _cut(text: str, start: int, end: int, count_tokens: CountTokens, budget: int) -> Iterator[_Piece]:
    words = [match.span() for match in re.compile(r"\S+").finditer(text, start, end)]
    counts = count_tokens([text[a:b] for a, b in words])
    units: list[_Piece] = []
    for (a, b), tokens in zip(words, counts, strict=True):
        if tokens <= budget:
            units.append(_Piece(a, b, tokens))
        else:  # no white space, as in Chinese: cut between characters
            characters = count_tokens(list(text[a:b]))
            units.extend(_Piece(a + i, a + i + 1, n) for i, n in enumerate(characters))
    for block in _pack(units, budget):
        yield _Piece(block[0].start, block[-1].end, sum(unit.tokens for unit in block))


def _pack(pieces: Iterable[_Piece], budget: int) -> Iterator[list[_Piece]]:
    """Groups of neighbours with at most `budget` tokens; a group of one may have more."""
    block: list[_Piece] = []
    tokens = 0
    for piece in pieces:
        if block and tokens + piece.tokens > budget:
            yield block
            block, tokens = [], 0
        block.append(piece)
        tokens += piece.tokens
    if block:
        yield block


def _passage(document: Document, spans: Sequence[Span], block: Sequence[_Piece]) -> Passage:
    start, end = block[0].start, block[-1].end
    text = document.text[start:end]
    first = bisect_left(spans, start, key=lambda span: span.start)
    last = bisect_left(spans, end, key=lambda span: span.start)
    return Passage(
        id=passage_id(document.title, text),
        document_id=document.id,
        title=document.title,
        text=text,
        sentences=tuple((piece.start - start, piece.end - start) for piece in block),
        spans=tuple(
            Span(span.start - start, span.end - start, span.label)
            for span in spans[first:last]
            if span.end <= end
        ),
    )


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end]
    return end - len(piece.lstrip()), start + len(piece.rstrip())
