"""The rules that make annotations from the sentences and names that a tagger found: which names are salient, which dates are
found besides, and where sentences end.

Offsets count characters of the text, and ends are exclusive.
"""

import re
from collections.abc import Iterable, Sequence

from realm.text.corpus import Annotations, Span
from realm.text.dates import DATE_PATTERN, MONTH_PATTERN, find_dates

NOT_SALIENT = frozenset({"CARDINAL", "MONEY", "ORDINAL", "PERCENT", "QUANTITY", "TIME"})
"""OntoNotes labels of amounts, which are neither named entities nor dates."""


def _salient(text: str, entities: Iterable[Span]) -> list[Span]:
    """The entities that a tagger found, except amounts; a leading "the" and a final "'s" are cut off.

    A name must contain a letter. A DATE must contain the name of a month, or a date that the regular expression finds, so
    "today", "later that year" and "three days" are left out.
    """
    spans = []
    for entity in entities:
        if entity.label in NOT_SALIENT:
            continue
        start, end = _bare(text, entity.start, entity.end)
        inside = text[start:end]
        says_when = MONTH_PATTERN.search(inside) or DATE_PATTERN.search(inside)
        named = says_when if entity.label == "DATE" else any(map(str.isalpha, inside))
        if named and not _BREAK.search(inside):
            spans.append(Span(start, end, entity.label))
    return spans


_ARTICLE = re.compile(r"the(?:\s+|\Z)", re.IGNORECASE)
_BREAK = re.compile(r"\n\s*\n|\n[ \t]*(?=(?:[-*+•‣◦–]|\d{1,3}[.)])[ \t]|\|)")
"""A blank line, or a line break before an item of a list ("- ", "2. ") or a row of a Markdown table ("|")."""
_AROUND = " \t\n\r\u00a0\"“”‘’'`,;:"


def _bare(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start] in _AROUND:
        start += 1
    if article := _ARTICLE.match(text, start, end):
        start = article.end()
    if text[start:end].endswith(("'s", "’s")):
        end -= 2
    while start < end and text[end - 1] in _AROUND:
        end -= 1
    return start, end


def _merge(text: str, entities: Iterable[Span], rule_dates: Sequence[Span]) -> tuple[Span, ...]:
    """Spans in order without overlaps. Names take precedence over dates, and `rule_dates` over dates of the tagger.

    The dates of the regular expression (`rule_dates`) are shorter: in "between 1914 and 1918" the regular expression finds two
    dates, a tagger one. The exception is a name that lies inside a date of the regular expression: such a name is dropped,
    because taggers wrongly find a name in "44 BC"."""
    in_date = bytearray(len(text))
    for date in rule_dates:
        in_date[date.start : date.end] = b"\1" * (date.end - date.start)
    ranked = [(1, span.start - span.end, span) for span in rule_dates]
    for span in entities:
        if not all(in_date[span.start : span.end]):
            ranked.append((2 if span.label == "DATE" else 0, span.start - span.end, span))
    taken = bytearray(len(text))
    spans = []
    for _, _, span in sorted(ranked):
        if not any(taken[span.start : span.end]):
            taken[span.start : span.end] = b"\1" * (span.end - span.start)
            spans.append(span)
    return tuple(sorted(spans))


def sentences_of(text: str, ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The sentences of a tagger, trimmed, and cut at blank lines and before items of lists and rows of tables.

    So a heading is not part of the next sentence, and a list is not one sentence. A sentence without a letter or digit, such as
    a closing quote, is joined to the previous one.
    """
    sentences: list[tuple[int, int]] = []
    for start, end in ranges:
        breaks = [match.span() for match in _BREAK.finditer(text, start, end)]
        starts, ends = [start, *(b for _, b in breaks)], [*(a for a, _ in breaks), end]
        for first, last in zip(starts, ends, strict=True):
            piece = text[first:last]
            first, last = last - len(piece.lstrip()), first + len(piece.rstrip())
            if first >= last:
                continue
            if sentences and not any(map(str.isalnum, piece)):
                sentences[-1] = (sentences[-1][0], last)
            else:
                sentences.append((first, last))
    return tuple(sentences)


def annotations_of(text: str, ranges: Iterable[tuple[int, int]], entities: Iterable[Span]) -> Annotations:
    """Annotations of a text, from the sentences and entities that a tagger found."""
    return Annotations(sentences_of(text, ranges), _merge(text, _salient(text, entities), find_dates(text)))
