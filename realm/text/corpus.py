"""Documents, passages and annotations, and the split of documents into passages.

The tokenizer is an argument, and `realm.documents` reads file formats. All offsets count characters, and ends are exclusive.
"""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

CountTokens = Callable[[Sequence[str]], list[int]]
"""Counts the wordpieces of each text, without special tokens."""


class Link(NamedTuple):
    """A link in a text: the position of the first character of the linked words, and the title of the linked page."""

    start: int
    title: str


class Document(NamedTuple):
    """An article, a page or a file. The id is unique in a corpus; several documents may have the same title."""

    title: str
    text: str
    id: str
    links: tuple[Link, ...] | None = None
    """Links in the order of the text; None if the format of the file has no links."""


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
    links: tuple[str, ...] | None = None
    """Titles of the pages to which the passage links, each once, in the order of the text; None if links are unknown."""


class HeldOut(NamedTuple):
    """The held-out passages: a share of all passages, chosen by the hash of their text.

    Two knowledge bases of the same text with equal `HeldOut` hold out the same passages. If `passage_tokens` differ, the
    passages differ, and so do the held-out sentences.
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
    There are three differences from the released code. A passage is a slice of the text and not joined again from sentences, so
    that offsets stay valid. A sentence that is too long is not truncated, but cut at white space, and a word that is too long
    is cut between characters. A title counts as at most half of `max_tokens`, so that there is room for the text.

    The passages contain all characters of the text in order, except white space at cuts. A span across a cut is dropped. A link
    belongs to the passage in which the linked words begin.
    """
    title_tokens = min(count_tokens([document.title])[0], max_tokens // 2)
    budget = max_tokens - 3 - title_tokens
    pieces = _pieces(document.text, annotations.sentences, count_tokens, budget)
    return [_passage(document, annotations.spans, block) for block in _pack(pieces, budget)]


class _Piece(NamedTuple):
    """A sentence or a part of a sentence."""

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
        else:  # long text without white space, as in Chinese, is cut between characters
            characters = count_tokens(list(text[a:b]))
            units.extend(_Piece(a + i, a + i + 1, n) for i, n in enumerate(characters))
    for block in _pack(units, budget):
        yield _Piece(block[0].start, block[-1].end, sum(unit.tokens for unit in block))


def _pack(pieces: Iterable[_Piece], budget: int) -> Iterator[list[_Piece]]:
    """Groups of consecutive pieces with at most `budget` tokens; a group of one piece may have more tokens."""
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
        links=None if document.links is None else _titles(document.links, start, end),
    )


def _titles(links: Sequence[Link], start: int, end: int) -> tuple[str, ...]:
    """Titles of the links whose words begin in [start, end), each once."""
    first, last = (bisect_left(links, place, key=lambda link: link.start) for place in (start, end))
    return tuple(dict.fromkeys(link.title for link in links[first:last]))


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end]
    return end - len(piece.lstrip()), start + len(piece.rstrip())
