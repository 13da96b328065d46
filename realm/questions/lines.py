"""Sentences without brackets, as the rules need them, with the positions of their characters in the passage."""

import re
from typing import NamedTuple

from realm.text.corpus import Passage, Span


class Line(NamedTuple):
    """A sentence without brackets. `origin` has the position of each character in the passage; `spans` are spans of `text`."""

    text: str
    origin: list[int]
    spans: list[Span]


def line_of(passage: Passage, start: int, end: int) -> Line:
    """Characters [start, end) of the passage without brackets, with the spans that are outside of brackets."""
    text = passage.text
    kept = []
    depth = 0
    for i in range(start, end):
        opens = text[i] in "(["
        depth += opens
        if depth == 0 and not (text[i] == " " and text[i + 1 : i + 2] in ("(", "[")):
            kept.append(i)
        depth -= text[i] in ")]" and depth > 0
    place = {origin: i for i, origin in enumerate(kept)}
    spans = [
        Span(place[span.start], place[span.end - 1] + 1, span.label)
        for span in passage.spans
        if start <= span.start < span.end <= end
        and span.start in place
        and place.get(span.end - 1) == place[span.start] + span.end - 1 - span.start
    ]
    return Line(re.sub(r"\s", " ", "".join(text[i] for i in kept)), kept, spans)
