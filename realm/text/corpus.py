"""Documents, passages and annotations, and the split of documents into passages.

The tokenizer is an argument, and `realm.documents` reads file formats. All offsets count characters, and ends are exclusive.
"""

import hashlib
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from realm.errors import at_least
from realm.text.fields import NO_FIELDS, FieldNames, Fields

CountTokens = Callable[[Sequence[str]], list[int]]
"""Counts the wordpieces of each text, without special tokens."""


Cuts = Literal["sentences", "rows", "headings", "documents"]
"""Values of the setting `cut`."""


@dataclass(frozen=True)
class PassagesConfig:
    """How passages are made from documents."""

    tagger: str = "realm"
    """Tagger that finds sentences, names and dates: realm, spacy:MODEL, hf:MODEL, or rules (dates only); "" for converted
    passages without tags."""
    cut: Cuts = "sentences"
    """Where passages begin. "sentences": a passage has as many sentences as fit. "rows": the same, but each row of a table
    with column names is a passage of its own, so that a model does not confuse it with the rows around it; its title has the
    headings above it, or the name of its sheet. Other headings are in the passage of the text below them. "headings": a passage
    also begins at each heading of Markdown, HTML, Word documents and EPUB, and its title is the path of the headings.
    "documents": each document, such as a record of JSON Lines, is one passage; models read only the first `passage_tokens`
    wordpieces of a longer passage."""
    passage_overlap: int = 0
    """Largest number of wordpieces that a passage repeats from the end of the previous passage; only whole sentences are
    repeated."""
    max_document_chars: int = 1_000_000
    """Longest document in characters; longer documents are left out, because most of them are no text."""
    title_field: str = ""
    """Key of the title in JSON, or column of the title in tables; "" for `title`, which a record need not have."""
    text_field: str = ""
    """Key or column of the text; "" for `text` or `maintext`."""
    id_field: str = ""
    """Key or column of the id; "" for `id` or `_id`, which a record need not have."""

    @property
    def names(self) -> FieldNames:
        """The keys or columns that are named by settings."""
        return FieldNames(self.title_field, self.text_field, self.id_field)

    @property
    def reads_headings(self) -> bool:
        """Whether readers make sections of headings."""
        return self.cut in ("headings", "rows")

    def __post_init__(self) -> None:
        at_least(self, passage_overlap=0, max_document_chars=1)


def over_limit(characters: int, limit: int, limit_of: str = "the limit") -> str:
    """Why a text with so many characters is not read, and the ways out; `limit` is the setting `max_document_chars`."""
    return f"{characters:,} characters, over {limit_of} of {limit:,}: split it, or raise max_document_chars"


class Link(NamedTuple):
    """A link in a text: the position of the first character of the linked words, and the title of the linked page."""

    start: int
    title: str


class Section(NamedTuple):
    """A part of a document whose passages have their own title. It ends where the next section begins."""

    start: int
    """Position of the first character in the text."""
    title: str
    heading: bool = False
    """Whether the section begins with a heading, so that `cut` decides whether a passage begins there too."""


class Document(NamedTuple):
    """An article, a page or a file. The id is unique in a corpus; several documents may have the same title."""

    title: str
    text: str
    id: str
    links: tuple[Link, ...] | None = None
    """Links in the order of the text; None if the format of the file has no links."""
    fields: Fields = NO_FIELDS
    """Metadata, such as a year or an address."""
    sections: tuple[Section, ...] = ()
    """Sections in the order of the text."""


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
    fields: Fields = NO_FIELDS
    """The fields of the document."""


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


def shorter_titles(title: str) -> list[str]:
    """The title without its last part, without its last two parts, ...; the last part is often the name of a site.

    >>> shorter_titles("Arden - Towns | Encyclopedia")
    ['Arden - Towns', 'Arden']
    """
    return [title[: sign.start()] for sign in reversed(list(re.finditer(r" [-–—|·»:] ", title)))]


def passage_id(title: str, text: str) -> str:
    """Sixteen hex digits of the content: the first 64 bits of the SHA-1 that the released code computes."""
    return hashlib.sha1(f"{title} <sep> {text}".encode(), usedforsecurity=False).hexdigest()[:16]


class Cut(NamedTuple):
    """How documents are split into passages. The default makes the blocks of REALM."""

    max_tokens: int = 288
    """Longest passage in wordpieces, including title and three special tokens."""
    overlap: int = 0
    """Largest number of wordpieces that a passage repeats from the end of the previous passage; only whole sentences are
    repeated."""
    whole: bool = False
    """True: each section, or each document without sections, is one passage of any length."""
    rows: bool = False
    """True: each row of a table with column names (`ROW`) is a passage of its own, with the title of its section. Sections that
    begin with a heading are otherwise not split, and headings at the end of a passage move to the text below them, if they fit
    there."""


BLOCKS = Cut()
_NAMED = r"[^:;\n]{1,100}: [^;\n]*"
ROW = re.compile(rf"^{_NAMED}(?:; {_NAMED})+[.!?]$", re.MULTILINE)
"""A line with a row of a table, as the readers of formats write it: "Country: France; Capital: Paris."."""


def split_document(
    document: Document, annotations: Annotations, count_tokens: CountTokens, cut: Cut = BLOCKS
) -> list[Passage]:
    """Passages of as many whole sentences as fit (REALM's blocks: at most 288 wordpieces, no overlap).

    A sentence is added to the passage while 3 + |title| + |passage| + |sentence| <= max_tokens; the 3 are [CLS] and two [SEP].
    There are three differences from the released code. A passage is a slice of the text and not joined again from sentences, so
    that offsets stay valid. A sentence that is too long is not truncated, but cut at white space, and a word that is too long
    is cut between characters. A title counts as at most half of `max_tokens`, so that there is room for the text.

    The passages contain all characters of the text in order, except white space at cuts. A span across a cut is dropped. A link
    belongs to the passage in which the linked words begin. If the document has sections, each section is split alone, with the
    title of the section; text before the first section has the title of the document.
    """
    passages: list[Passage] = []
    starts = [start for start, _ in annotations.sentences[1:]]
    title_tokens = {
        title: min(tokens, cut.max_tokens // 2)
        for title, tokens in _counted(
            {document.title, *(one.title for one in document.sections)}, count_tokens
        )
    }
    for parts in _parts(document, cut):
        above: list[_Piece] = []
        for part in parts:
            budget = sys.maxsize if cut.whole else cut.max_tokens - 3 - title_tokens[part.title]
            first, last = (
                (0, 0) if part.is_row else (bisect_right(starts, part.start), bisect_left(starts, part.end))
            )
            bounds = [part.start, *starts[first:last], part.end]
            pieces = _pieces(document.text, bounds, count_tokens, budget)
            if cut.rows:
                pieces = (piece._replace(heading=_is_heading(document.text, piece)) for piece in pieces)
            blocks = list(_pack([*above, *pieces], budget, cut.overlap))
            above = _headings(blocks[-1]) if blocks and part is not parts[-1] else []
            if above:
                blocks[-1] = blocks[-1][: -len(above)]
            passages += [
                _passage(document, part.title, annotations.spans, block) for block in blocks if block
            ]
    return passages


class _Part(NamedTuple):
    """A part of a text that shares no passage with other parts, except for the headings at its end."""

    start: int
    end: int
    title: str
    """The title of the passages."""
    is_row: bool = False


def _parts(document: Document, cut: Cut) -> Iterator[list[_Part]]:
    """The parts of each section; with `cut.rows`, a part for each row, and one for each text between rows."""
    apart = [one for one in document.sections if not (cut.rows and one.heading)]
    if not apart or apart[0].start > 0:
        apart.insert(0, Section(0, document.title))
    titles = sorted({*apart, *document.sections}, key=lambda one: (one.start, one.heading))
    starts = [one.start for one in titles]
    for section, end in zip(apart, [*(one.start for one in apart[1:]), len(document.text)], strict=True):
        parts, done = [], section.start
        for row in ROW.finditer(document.text, section.start, end) if cut.rows else ():
            title = titles[bisect_right(starts, row.start()) - 1].title
            parts += [_Part(done, row.start(), section.title), _Part(*row.span(), title, is_row=True)]
            done = row.end()
        yield [*parts, _Part(done, end, section.title)]


class _Piece(NamedTuple):
    """A sentence or a part of a sentence."""

    start: int
    end: int
    tokens: int
    heading: bool = False


def _counted(texts: Collection[str], count_tokens: CountTokens) -> Iterator[tuple[str, int]]:
    return zip(texts, count_tokens(list(texts)), strict=True)


def _pieces(text: str, bounds: Sequence[int], count_tokens: CountTokens, budget: int) -> Iterator[_Piece]:
    """The sentences between the `bounds`, which are the starts of the sentences and the end of the last sentence.

    A sentence extends to the start of the next one, so that text between the tagger's sentences is not lost.
    """
    ranges = [_trim(text, start, end) for start, end in pairwise(bounds)]
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


def _pack(pieces: Iterable[_Piece], budget: int, overlap: int = 0) -> Iterator[list[_Piece]]:
    """Groups of consecutive pieces with at most `budget` tokens; a group of one piece may have more tokens.

    Headings at the end of a group move to the next group if there is room. Otherwise, the next group begins with the last
    pieces of the group before, as far as these have at most `overlap` tokens and leave room for a further piece.
    """
    block: list[_Piece] = []
    tokens = 0
    for piece in pieces:
        if block and tokens + piece.tokens > budget:
            above = _headings(block)
            if 0 < len(above) < len(block) and sum(one.tokens for one in (*above, piece)) <= budget:
                yield block[: -len(above)]
                block = above
            else:
                yield block
                block = _last(block, min(overlap, budget - piece.tokens)) if overlap else []
            tokens = sum(one.tokens for one in block)
        block.append(piece)
        tokens += piece.tokens
    if block:
        yield block


def _headings(block: Sequence[_Piece]) -> list[_Piece]:
    """The headings at the end of a group; none if they are so many that they are the items of a list."""
    number = next((n for n, piece in enumerate(reversed(block)) if not piece.heading), len(block))
    return list(block[len(block) - number :]) if number <= _MOST_HEADINGS else []


_MOST_HEADINGS = 3
_HEADING = re.compile(r"(?![-*+•–]\s)[^\n]{0,99}[^\s.!?;,]\Z")


def _is_heading(text: str, piece: _Piece) -> bool:
    """Whether a sentence is a heading: a short line above another one, without a mark at its end, and no item of a list."""
    alone = text[max(0, piece.start - 1) : piece.start] in ("", "\n") and text.startswith("\n", piece.end)
    return alone and _HEADING.match(text, piece.start, piece.end) is not None


def _last(block: Sequence[_Piece], most: int) -> list[_Piece]:
    """The last pieces of a group that have at most `most` tokens together, without the first piece of the group."""
    first, tokens = len(block), 0
    while first > 1 and tokens + block[first - 1].tokens <= most:
        first -= 1
        tokens += block[first].tokens
    return list(block[first:])


def _passage(document: Document, title: str, spans: Sequence[Span], block: Sequence[_Piece]) -> Passage:
    start, end = block[0].start, block[-1].end
    text = document.text[start:end]
    first = bisect_left(spans, start, key=lambda span: span.start)
    last = bisect_left(spans, end, key=lambda span: span.start)
    return Passage(
        id=passage_id(title, text),
        document_id=document.id,
        title=title,
        text=text,
        sentences=tuple((piece.start - start, piece.end - start) for piece in block),
        spans=tuple(
            Span(span.start - start, span.end - start, span.label)
            for span in spans[first:last]
            if span.end <= end
        ),
        links=None if document.links is None else _titles(document.links, start, end),
        fields=document.fields,
    )


def _titles(links: Sequence[Link], start: int, end: int) -> tuple[str, ...]:
    """Titles of the links whose words begin in [start, end), each once."""
    first, last = (bisect_left(links, place, key=lambda link: link.start) for place in (start, end))
    return tuple(dict.fromkeys(link.title for link in links[first:last]))


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end]
    return end - len(piece.lstrip()), start + len(piece.rstrip())
