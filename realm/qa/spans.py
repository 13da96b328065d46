"""Finds the answers to a question among the wordpieces of a passage, makes labels of the correct spans, and scores spans.

Axis letters: B rows, W span widths, T tokens.
"""

import re
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realm.model.span_reader import SpanConfig, word_bounds
from realm.qa.question_files import Question
from realm.text.corpus import ROW
from realm.tokens.layouts import Lengths
from realm.tokens.tokenizer import Encoding, Tokenizer

PARAGRAPH_END = "\n\n"
"""Text between two paragraphs."""
LONGEST_NAME = 5
_JOINT = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))|(?<=\d)(?<![12]\d{3})[.:](?=\d)"  # not in "May 5,1999", nor before a note, as in "in 1921.2"
    r"|(?<=\w)\.(?=[a-z])|(?<=[A-Z])\.(?=[A-Z](?![a-z]))"  # not where a sentence ends without a space, as in "NASA.The"
    r"|(?<=\w)[_@](?=\w)|(?<=\w)::(?=\w)"
)
"""Signs inside a number or a name: "1,300", "3.5", "10:30", "Cargo.toml", "U.S.", "read_only", "a@b.org", "io::Error"."""


def answer_ranges(text: str) -> list[tuple[int, int]]:
    """The ranges of characters in which answers are: the paragraphs of a text, and in rows of tables the values of the cells.

    So an answer does not extend over a blank line, and is neither the name of a column nor parts of two cells. A line with a
    name of more than `LONGEST_NAME` words is prose with a colon and a semicolon.

    >>> text = "Two towns:\\nTown: Arden; River: Tay."
    >>> [text[start:end] for start, end in answer_ranges(text)]
    ['Two towns:\\n', 'Arden', 'Tay']
    """
    found, done = [], 0
    for end in re.finditer(rf"{PARAGRAPH_END}|\Z", text):
        for row in ROW.finditer(text, done, end.start()):
            cells = list(re.finditer(r"([^:;]+): ([^;]*?)(?:; |\.?\Z)", row[0]))
            if all(len(cell[1].split()) <= LONGEST_NAME for cell in cells):
                found.append((done, row.start()))
                found += [(row.start() + cell.start(2), row.start() + cell.end(2)) for cell in cells]
                done = row.end()
        found.append((done, end.start()))
        done = end.end()
    return [(start, end) for start, end in found if start < end]


def answer_bounds(text: str, starts: Sequence[int], ends: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For wordpieces with the characters [start, end), the number of the `answer_ranges` in which an answer can begin with
    them, and the number of the range in which an answer can end with them -> two arrays [T]; -1 if it cannot.

    A span can be an answer if the number of its first wordpiece is that of its last wordpiece, and not -1. No answer begins or
    ends beside a `_JOINT`: "000" of "1,000" and "toml" of "Cargo.toml" are no answers.
    """
    ranges = np.array(answer_ranges(text)).reshape(-1, 2)
    found_T = np.searchsorted(ranges[:, 0], starts, side="right") - 1
    inside_T = (found_T >= 0) & (np.append(ranges[:, 1], -1)[found_T] >= ends)
    inner = [place for joint in _JOINT.finditer(text) for place in range(joint.start(), joint.end() + 1)]
    begin_T, end_T = (np.where(inside_T & ~np.isin(bounds, inner), found_T, -1) for bounds in (starts, ends))
    return begin_T, end_T


def body_start(question_ids: Sequence[int], lengths: Lengths) -> int:
    """The position of the first wordpiece of the passage in a row of [CLS], question, [SEP] and passage."""
    return 2 + min(len(question_ids), lengths.query - 2)


def answer_pieces(
    question: Question,
    answer_ids: Sequence[Sequence[int]],
    text: str,
    body: Encoding,
    max_width: int = SpanConfig.max_width,
) -> list[tuple[int, int]]:
    """All occurrences of answers in the body of a passage, as (first wordpiece, number of further wordpieces).

    Occurrences can overlap (as in the span labels of ORQA). Answers are compared as sequences of wordpieces, so it depends on
    the tokenizer whether case and accents make a difference. Patterns are compared with the text; the span has all wordpieces
    that overlap with the match. Answers of more than `max_width` wordpieces are left out.
    """
    found = set()
    if question.regex:
        for pattern in question.answers:
            for match in re.finditer(pattern, text, re.IGNORECASE | re.UNICODE | re.MULTILINE):
                inside = [
                    i
                    for i, (s, e) in enumerate(zip(body.starts, body.ends, strict=True))
                    if s < match.end() and e > match.start()
                ]
                if inside:
                    found.add((inside[0], len(inside) - 1))
    else:
        ids = np.asarray(body.ids)
        for answer in answer_ids:
            width = len(answer)
            if 0 < width <= len(ids):
                windows = np.lib.stride_tricks.sliding_window_view(ids, width)
                found |= {
                    (int(i), width - 1) for i in np.flatnonzero((windows == np.asarray(answer)).all(axis=1))
                }
    return sorted((first, width) for first, width in found if width < max_width)


def pieces_of_answers(
    question: Question, texts: Sequence[str], tokenizer: Tokenizer, max_width: int
) -> list[list[tuple[int, int]]]:
    """The occurrences of answers in each text that are whole words, and can be answers (`answer_bounds`)."""
    answers = [] if question.regex else tokenizer.encode(question.answers)
    places = []
    for text, body in zip(texts, tokenizer.encode_with_offsets(texts), strict=True):
        inner_1T = torch.tensor([[one in tokenizer.continuing_ids for one in body.ids]], dtype=torch.bool)
        (first_T,), (last_T,) = word_bounds(inner_1T, torch.ones_like(inner_1T))
        begin_T, end_T = answer_bounds(text, body.starts, body.ends)
        places.append(
            [
                (first, width)
                for first, width in answer_pieces(question, answers, text, body, max_width)
                if first_T[first] and last_T[first + width]
                and begin_T[first] == end_T[first + width] >= 0
            ]
        )  # fmt: skip
    return places


def span_scores(first_BT: Tensor, last_BT: Tensor, widths: int) -> Tensor:
    """Score of the first token plus score of the last token, of each span of up to `widths` tokens -> [B, W, T].

    Spans that extend over the end of the row have the score -inf.
    """
    last_BTW = F.pad(last_BT, (0, widths - 1), value=-torch.inf).unfold(1, widths, 1)
    return first_BT[:, None] + last_BTW.transpose(1, 2)


def correct_mask(
    spans: Sequence[Sequence[tuple[int, int]]], starts: Sequence[int], shape: tuple[int, int, int]
) -> Tensor:
    """True at the given spans of each row -> [B, W, T] bool.

    The passage of a row begins at the position in `starts`. Spans that are not completely in the row are left out.
    """
    correct_BWT = torch.zeros(shape, dtype=torch.bool)
    for row, (pieces, start) in enumerate(zip(spans, starts, strict=True)):
        for first, width in pieces:
            if width < shape[1] and start + first + width < shape[2] - 1:  # the last token is a [SEP]
                correct_BWT[row, width, start + first] = True
    return correct_BWT
