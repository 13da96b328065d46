"""Documents are tagged in groups, and further work on the documents, such as cutting them into passages, is done where they are
tagged: in the same process of this machine or of a cluster.

A group has whole documents. Groups do not depend on the number of processes, so that results are rounded equally with any
number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from realm.text.corpus import Annotations, Document, Span

PIECE_CHARS = 50_000
"""Longest text that is tagged at once: memory grows with the text, and spaCy refuses texts of over a million characters."""

GROUP, GROUP_CHARS = 64, 100_000
"""Approximate limits of texts and of characters in a group. A group takes a few seconds."""

Result = TypeVar("Result")
Find = Callable[[Sequence[str]], list[Annotations]]
"""Finds the annotations of some texts, each of at most `PIECE_CHARS`, in one call."""
Work = Callable[[Sequence[Document], Sequence[Annotations]], Result]
"""Further work on the documents of a group and their annotations."""


class Asked(NamedTuple):
    """A document whose annotations are asked for, or are known."""

    document: Document
    known: Annotations | None = None


class GroupTagger(ABC):
    """A tagger that annotates groups of documents, and does further work where it annotates them."""

    name: str

    @abstractmethod
    def apply(
        self, documents: Iterable[Asked], prepare: Callable[[], Work[Result]]
    ) -> Generator[Result, None, None]:
        """The results of the work that `prepare` returns, one per group of documents, in order.

        Each process that tags calls `prepare` once. `prepare` must be picklable, and so must the results. The documents are
        read as needed; to stop early, close the generator.
        """

    def annotate(self, texts: Iterable[str]) -> Generator[Annotations, None, None]:
        """One `Annotations` per text, in order (`realm.text.salient_spans.Tagger`)."""
        for found in self.apply((Asked(Document("", text, "")) for text in texts), _no_work):
            yield from found


def _no_work() -> Work[Sequence[Annotations]]:
    return lambda documents, found: found


def grouped(documents: Iterable[Asked]) -> Iterator[list[Asked]]:
    """Groups of documents. If an error ends `documents`, the documents before the error are the last group."""
    group: list[Asked] = []
    characters = 0
    end: Exception | None = None
    rest = iter(documents)
    while end is None:
        try:
            one = next(rest)
            group.append(one)
            characters += len(one.document.text)
        except Exception as error:
            end = error
        if len(group) == GROUP or characters >= GROUP_CHARS or (end and group):
            yield group
            group, characters = [], 0
    if not isinstance(end, StopIteration):
        raise end


def working(load: Callable[[], Find], prepare: Callable[[], Work[Result]]) -> Callable[[list[Asked]], Result]:
    """A function that annotates those documents of a group whose annotations are not known, and does the further work.

    `load` and `prepare` are called once, now.
    """
    find, work = load(), prepare()

    def result(group: list[Asked]) -> Result:
        new = _annotations((one.document.text for one in group if one.known is None), find)
        found = [next(new) if one.known is None else one.known for one in group]
        return work([one.document for one in group], found)

    return result


def _annotations(texts: Iterable[str], find: Find) -> Iterator[Annotations]:
    """The annotations of each text. A long text is tagged in pieces."""
    sentences: list[tuple[int, int]] = []
    spans: list[Span] = []
    for pieces in _at_once(_in_pieces(texts)):
        for found, piece in zip(find([piece.text for piece in pieces]), pieces, strict=True):
            start = piece.start
            sentences += [(a + start, b + start) for a, b in found.sentences]
            spans += [Span(a + start, b + start, label) for a, b, label in found.spans]
            if piece.last:
                yield Annotations(tuple(sentences), tuple(spans))
                sentences, spans = [], []


class _Piece(NamedTuple):
    """A piece of a text."""

    text: str
    start: int
    """Number of characters before the piece."""
    last: bool
    """Whether the piece is the last one of its text."""


def _in_pieces(texts: Iterable[str]) -> Iterator[_Piece]:
    """The pieces of each text, of at most `PIECE_CHARS`, cut at a blank line, else at a line break, else at a space."""
    for text in texts:
        start = 0
        while len(text) - start > PIECE_CHARS:
            limit = start + PIECE_CHARS
            cuts = (text.rfind(mark, start + 1, limit) for mark in ("\n\n", "\n", " "))
            cut = next((cut for cut in cuts if cut > 0), limit)
            yield _Piece(text[start:cut], start, last=False)
            start = cut
        yield _Piece(text[start:], start, last=True)


def _at_once(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that are tagged in one call: those of a group, unless the group has a long text."""
    group: list[_Piece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if len(group) == GROUP or characters >= GROUP_CHARS:
            yield group
            group, characters = [], 0
    if group:
        yield group
