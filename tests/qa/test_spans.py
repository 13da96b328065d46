"""Spans of answers in wordpieces, against plain searches of ids and of text."""

import itertools
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realm.model.span_reader import body_mask
from realm.qa.question_files import Question
from realm.qa.reading import joint_reading
from realm.qa.spans import answer_pieces, body_start, correct_mask, pieces_of_answers, span_scores
from realm.tokens.layouts import Lengths, joint_inputs
from realm.tokens.tokenizer import Encoding, Tokenizer
from tests.store.tiny import TOKENIZER

LENGTHS = Lengths(query=8, passage=14)
TEXT = "The river Tarn, in 1284: the TARN froze. Tärn River was 1,300 km long; O'Neill's tarn."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT] * 3 + ["river tarn froze long o'neill's ouse"] * 3, vocab_size=200)


def question(*answers: str, regex: bool = False) -> Question:
    return Question("1", "?", answers, regex)


def found(tokenizer: Tokenizer, text: str, asked: Question) -> list[str]:
    """The texts of all correct spans."""
    (encoding,) = tokenizer.encode_with_offsets([text])
    ids = [] if asked.regex else tokenizer.encode(asked.answers)
    pieces = answer_pieces(asked, ids, text, encoding)
    return [text[encoding.starts[first] : encoding.ends[first + width]] for first, width in pieces]


@given(st.integers(0, 30), st.integers(0, 30))
def test_body_starts_where_segment_1_does(question_length, body_length) -> None:
    tokenizer = Tokenizer.train([TEXT], vocab_size=60)
    ids = list(range(10, 10 + question_length))
    tokens = joint_inputs([ids], [list(range(40, 40 + body_length))], tokenizer, LENGTHS)
    start = body_start(ids, LENGTHS)
    assert tokens.segments_BT[0].tolist().index(1) == start
    kept = tokens.ids_BT[0, start:-1].tolist()
    assert kept == list(range(40, 40 + len(kept))) and len(kept) == min(
        body_length, LENGTHS.joint - 3 - min(question_length, 6)
    )


def test_answers_are_found_whatever_their_case_and_accents(tokenizer) -> None:
    assert found(tokenizer, TEXT, question("tarn")) == ["Tarn", "TARN", "Tärn", "tarn"]
    assert found(tokenizer, TEXT, question("River Tarn")) == ["river Tarn"]
    assert found(tokenizer, TEXT, question("O'Neill")) == ["O'Neill"]
    assert found(tokenizer, TEXT, question("1,300 km", "1284")) == ["1284", "1,300 km"]
    assert found(tokenizer, TEXT, question("Ouse")) == []


def test_patterns_are_found_from_the_first_piece_they_touch_to_the_last(tokenizer) -> None:
    assert found(tokenizer, TEXT, question(r"\d,?\d+", regex=True)) == ["1284", "1,300"]
    assert found(tokenizer, TEXT, question(r"river\s+tarn|TÄRN river", regex=True)) == [
        "river Tarn",
        "Tärn River",
    ]
    assert found(tokenizer, TEXT, question(r"^tarn", regex=True)) == []


def test_answer_longer_than_ten_pieces_cannot_be_read(tokenizer) -> None:
    text = "a b c d e f g h i j k"
    assert found(tokenizer, text, question("a b c d e f g h i j")) == ["a b c d e f g h i j"]
    assert found(tokenizer, text, question("a b c d e f g h i j k")) == []
    assert found(tokenizer, text, question("a.*k", regex=True)) == []


def test_overlapping_answers_all_count(tokenizer) -> None:
    assert found(tokenizer, "x x x", question("x x", "x")) == ["x", "x x", "x", "x x", "x"]


@given(
    st.lists(st.integers(0, 3), max_size=25), st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=3)
)
def test_answer_pieces_agree_with_a_plain_loop(body, answers) -> None:
    encoding = Encoding(body, list(range(len(body))), list(range(1, len(body) + 1)))
    plain = {
        (start, len(answer) - 1)
        for answer in answers
        for start in range(len(body))
        if answer and body[start : start + len(answer)] == answer
    }
    assert answer_pieces(question("-"), answers, "", encoding) == sorted(plain)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        # "ard" is not in "Arden", and "is in" does not extend over the end of a paragraph.
        (question("ard", "is in"), [["ard", "ard"], ["is in"]]),
        (question("is ard", "it is"), [["is ard"], ["It is"]]),
        (question("arde?n?", "is.in", regex=True), [["Arden", "ard", "arden", "ard"], ["is in"]]),
        (question("ar", regex=True), [[], []]),
    ],
)
def test_answers_to_train_on_are_whole_words_of_one_paragraph(asked, wanted) -> None:
    texts = ["Arden, ard\n\nen arden is ard", "It is\n\nin one is in"]
    places = pieces_of_answers(asked, texts, TOKENIZER, 10)
    bodies = TOKENIZER.encode_with_offsets(texts)
    assert [
        [text[body.starts[first] : body.ends[first + width]] for first, width in own]
        for text, body, own in zip(texts, bodies, places, strict=True)
    ] == wanted


def test_scores_of_spans_are_those_of_a_plain_loop() -> None:
    first_BT, last_BT = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    for widths in (1, 4, 9):
        found = span_scores(first_BT, last_BT, widths)
        assert found.shape == (3, widths, 7)
        for row, width, first in itertools.product(range(3), range(widths), range(7)):
            inside = first + width < 7
            plain = first_BT[row, first] + last_BT[row, first + width] if inside else -torch.inf
            assert float(found[row, width, first]) == float(plain)


@given(st.text(alphabet="ab c", max_size=40), st.sampled_from(["a+", "b c", "a b|c", "[ab]{2}"]))
def test_patterns_agree_with_a_plain_search_of_the_text(text, pattern) -> None:
    pieces = [match.span() for match in re.finditer(r"\S", text)]
    encoding = Encoding([7] * len(pieces), [s for s, _ in pieces], [e for _, e in pieces])
    spans = answer_pieces(question(pattern, regex=True), [], text, encoding)
    cut = sorted((encoding.starts[first], encoding.ends[first + width]) for first, width in spans)
    assert cut == sorted(
        m.span() for m in re.finditer(pattern, text) if len(m.group().replace(" ", "")) <= 10
    )


def test_correct_spans_stand_where_the_reader_scores_them_and_cut_ones_are_left_out(tokenizer) -> None:
    """The golden example of the reference: [CLS] 7 8 [SEP] 20 21 22 21 22 [SEP], the answer 21 22 at 5-6 and 7-8."""
    sentence, body, spans = [7, 8], [20, 21, 22, 21, 22], [(1, 1), (3, 1)]
    start = body_start(sentence, LENGTHS)
    whole = correct_mask([spans], [start], (1, 10, 10))
    assert whole.nonzero().tolist() == [[0, 1, 5], [0, 1, 7]]
    # at length 8 the second one is cut, its last piece by the closing [SEP]
    cut = Lengths(query=4, passage=4)
    tokens = joint_inputs([sentence], [body], tokenizer, cut)
    assert tokens.ids_BT.shape == (1, 8)
    assert correct_mask([spans], [start], (1, 8, 8)).nonzero().tolist() == [[0, 1, 5]]
    assert correct_mask([[(2, 0), (3, 0)]], [start], (1, 8, 8)).nonzero().tolist() == [[0, 0, 6]]


@given(st.integers(0, 9), st.lists(st.integers(0, 14), min_size=1, max_size=4), st.integers(0, 1000))
def test_every_correct_span_lies_in_its_passage(question_length, body_lengths, seed) -> None:
    tokenizer = Tokenizer.train([TEXT], vocab_size=60)
    draw = np.random.default_rng(seed)
    ids = [list(range(10, 10 + question_length))] * len(body_lengths)
    tokens = joint_inputs(ids, [[30] * n for n in body_lengths], tokenizer, LENGTHS)
    spans = [[(int(draw.integers(n)), int(draw.integers(3)))] if n else [] for n in body_lengths]
    spans = [[(f, w) for f, w in row if f + w < n] for row, n in zip(spans, body_lengths, strict=True)]
    length = tokens.ids_BT.shape[1]
    starts = [body_start(one, LENGTHS) for one in ids]
    correct = correct_mask(spans, starts, (len(ids), min(10, length), length))
    inside = body_mask(tokens, tokenizer.sep_id)
    for row, width, first in correct.nonzero().tolist():
        assert inside[row, first : first + width + 1].all()
    uncut = [s for s, start in zip(spans, starts, strict=True) if s and start + sum(s[0]) < LENGTHS.joint - 1]
    assert int(correct.sum()) == len(uncut)
    assert correct.dtype == torch.bool


@given(
    st.lists(st.lists(st.sampled_from(["river", "tarn;", "O'Neill's", "1,300"]), max_size=4), max_size=5),
    st.sampled_from([4, 12, 200]),
)
def test_no_answer_goes_from_one_paragraph_into_the_next(
    tokenizer: Tokenizer, paragraphs: list[list[str]], longest: int
) -> None:
    text = "\n\n".join(" ".join(words) for words in paragraphs)
    for span, none in spans_of(text, tokenizer, longest):
        cuts_number = span.startswith((",", "300")) or span.endswith(("1", ","))
        assert none == ("\n\n" in span or cuts_number)


@pytest.mark.parametrize("before", ["", "River: Ouse\n", "Tarns.\n\n"])
def test_an_answer_in_a_row_of_a_table_is_within_one_cell(tokenizer: Tokenizer, before: str) -> None:
    cells = {"River": "the Ouse", "On the river": "1: 300 tarn", "Tarn": "", "Year": "1300"}
    text = (
        before
        + "; ".join(f"{name}: {value}" for name, value in cells.items())
        + ".\nThe river: tarn; the end."
    )
    allowed = {span for span, none in spans_of(text, tokenizer, 200) if not none}
    prose = [part for part in (*before.split("\n"), "The river: tarn; the end.") if part]
    assert allowed and all(any(span in part for part in (*cells.values(), *prose)) for span in allowed)
    assert {"the Ouse", "1: 300 tarn", "1300", "tarn; the end."} <= allowed


def test_prose_with_a_colon_and_a_semicolon_is_no_row_of_a_table(tokenizer: Tokenizer) -> None:
    text = "The river Tarn froze in two: tarn and ouse; the river: none."
    assert all(none is False for _, none in spans_of(text, tokenizer, 200))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("The tower cost 1,300 tarn.", "1,300"),
        ("It is 1:300 in the tower.", "1:300"),
        ("The river.tarn is a tower.", "river.tarn"),
        ("The U.S. Tarn is it.", "U.S"),
        ("In the tower, river_tarn is it.", "river_tarn"),
        ("It is tarn@river.tarn.", "tarn@river.tarn"),
        ("It is river::tarn of Ouse.", "river::tarn"),
    ],
)
def test_no_answer_begins_or_ends_inside_a_number_or_a_name(
    text: str, name: str, tokenizer: Tokenizer
) -> None:
    allowed = {span for span, none in spans_of(text, tokenizer, 200) if not none}
    assert name in allowed
    cuts = [place for sign in re.finditer(r"[^a-zA-Z0-9]+", name) for place in sign.span()]
    parts = {part for cut in cuts for part in (name[:cut], name[cut:])}
    assert not allowed & parts


def test_sentences_without_a_space_between_them_are_no_name(tokenizer: Tokenizer) -> None:
    text = "It is a tarn.The tower, one/a river. Ouse.2 Of the U.S.The Ouse in 1300.2 is 5,1300."
    allowed = {span for span, none in spans_of(text, tokenizer, 200) if not none}
    assert {"tarn", "The tower", "one", "a river", "Ouse", "U.S", "The Ouse", "1300", "5"} <= allowed


def spans_of(text: str, tokenizer: Tokenizer, longest: int) -> Iterator[tuple[str, bool]]:
    """Each span of up to six wordpieces of a text, and whether it can be no answer."""
    reading = joint_reading(
        [[7, 8, 9], [7]], ["tarn " * 30, text], tokenizer, Lengths(query=8, passage=longest)
    )
    no_answer_WT = reading.no_answer_WT(1, text, 6)
    assert no_answer_WT.shape == (6, reading.tokens.ids_BT.shape[1])
    body = reading.body_BT[1].nonzero().flatten().tolist()
    for first, last in itertools.combinations_with_replacement(body, 2):
        if (width := last - first) < 6:
            start, end = reading.text_span(1, first, last)
            yield text[start:end], bool(no_answer_WT[width, first])
