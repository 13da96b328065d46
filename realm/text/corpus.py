"""Documents, passages and annotations, and the split of documents into passages.

No tokenization lives here (a counter comes in as an argument) and no file formats (`formats/`). All
offsets are characters, end exclusive.
"""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

CountTokens = Callable[[Sequence[str]], list[int]]
"""Wordpieces of each text, without special tokens."""


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
    """What is retrieved: an exact slice of a document's text, with the sentences and spans in it."""

    id: str
    document_id: str
    title: str
    text: str
    sentences: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...]


class HeldOut(NamedTuple):
    """Which passages are kept from training: a share of them by the hash of their text.

    Two knowledge bases with equal values hold out the same passages of the same text. A text that is cut at another length
    has other passages, so other sentences are held out.
    """

    held_out: float
    """The share."""
    passage_tokens: int
    """Longest passage."""

    def __str__(self) -> str:
        return f"held_out={self.held_out:g}, passage_tokens={self.passage_tokens}"


def passage_id(title: str, text: str) -> str:
    """Sixteen hex digits that follow from the content: the start of the released code's SHA-1."""
    return hashlib.sha1(f"{title} <sep> {text}".encode(), usedforsecurity=False).hexdigest()[:16]


def split_document(
    document: Document, annotations: Annotations, count_tokens: CountTokens, max_tokens: int = 288
) -> list[Passage]:
    """Passages of as many whole sentences as fit (REALM's blocks: at most 288 wordpieces, no overlap).

    A sentence joins the passage while 3 + |title| + |passage| + |sentence| <= max_tokens; the 3 are [CLS] and
    two [SEP]. Unlike in the released code, the text is sliced, not re-joined, so that offsets stay true; a
    sentence over the budget is cut at white space, and a word over it between characters, not truncated; a
    title over half of `max_tokens` counts as half, or it would leave the text no room.

    Every character but white space at a cut comes back, in order. Spans across a cut are dropped.
    """
    title_tokens = min(count_tokens([document.title])[0], max_tokens // 2)
    budget = max_tokens - 3 - title_tokens
    pieces = _pieces(document.text, annotations.sentences, count_tokens, budget)
    return [_passage(document, annotations.spans, block) for block in _pack(pieces, budget)]


class _Piece(NamedTuple):
    """A sentence, or what a cut left of one."""

    start: int
    end: int
    tokens: int


def _pieces(
    text: str, sentences: Sequence[tuple[int, int]], count_tokens: CountTokens, budget: int
) -> Iterator[_Piece]:
    # A sentence reaches to the next one's start: text that the tagger left between sentences is not lost.
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
        else:  # no white space to cut at, as in Chinese: character by character
            characters = count_tokens(list(text[a:b]))
            units.extend(_Piece(a + i, a + i + 1, n) for i, n in enumerate(characters))
    for block in _pack(units, budget):
        yield _Piece(block[0].start, block[-1].end, sum(unit.tokens for unit in block))


def _pack(pieces: Iterable[_Piece], budget: int) -> Iterator[list[_Piece]]:
    """Neighbours in groups of at most `budget` tokens; a group of one may be over it."""
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
