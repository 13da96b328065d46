import itertools
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from realm.documents.formats.rows import sentence_of
from realm.text.corpus import (
    ROW,
    Annotations,
    Cut,
    Document,
    Link,
    Passage,
    Section,
    Span,
    passage_id,
    split_document,
)


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def characters(texts: Sequence[str]) -> list[int]:
    return [len("".join(text.split())) for text in texts]


def annotated(*sentences: str, gap: str = " ") -> tuple[str, tuple[tuple[int, int], ...]]:
    """A text of these sentences, and where each stands in it."""
    text, ranges = "", []
    for sentence in sentences:
        text += gap if text else ""
        ranges.append((len(text), len(text) + len(sentence)))
        text += sentence
    return text, tuple(ranges)


def split(
    text: str, sentences: Sequence[tuple[int, int]], spans: Sequence[Span] = (), **limits: int
) -> list[Passage]:
    document = Document("a title", text, "an id")
    return split_document(document, Annotations(tuple(sentences), tuple(spans)), words, Cut(**limits))


def test_id_of_the_empty_passage_is_the_published_one() -> None:
    # SHA-1 of " <sep> ", the null document of the released code
    assert "349df205d0f86e6cfa2751aa09f7a343260bc7e4".startswith(passage_id("", ""))
    assert len(passage_id("Title", "text")) == 16


def test_sentences_join_a_passage_while_the_budget_lasts() -> None:
    text, sentences = annotated("one two three.", "four five.", "six seven eight nine.")
    # 3 special tokens + 2 of the title + 3 + 2 words = 10
    assert [p.text for p in split(text, sentences, max_tokens=10)] == [
        "one two three. four five.",
        "six seven eight nine.",
    ]
    assert [p.text for p in split(text, sentences, max_tokens=9)] == [
        "one two three.",
        "four five.",
        "six seven eight nine.",
    ]
    assert [p.text for p in split(text, sentences, max_tokens=14)] == [text]


def test_passage_keeps_the_white_space_between_its_sentences() -> None:
    text, sentences = annotated("One.", "Two.", gap=" \n\n ")
    (passage,) = split(text, sentences)
    assert passage.text == text
    assert passage.sentences == ((0, 4), (8, 12))
    assert passage[:3] == (passage_id("a title", text), "an id", "a title")


def test_spans_move_with_their_passage_and_are_dropped_across_a_cut() -> None:
    text, sentences = annotated("Ada met Bob.", "Eve saw Ann.", "Leo left.")
    spans = [Span(text.index(name), text.index(name) + 3, "PERSON") for name in ("Ada", "Bob", "Eve", "Leo")]
    across = Span(text.index("Ann"), text.index("Leo") + 3, "ORG")
    first, second = split(text, sentences, [*spans[:3], across, spans[3]], max_tokens=11)
    assert [first.text[s.start : s.end] for s in first.spans] == ["Ada", "Bob", "Eve"]
    assert [second.text[s.start : s.end] for s in second.spans] == ["Leo"]
    assert second.spans == (Span(0, 3, "PERSON"),)


def test_long_sentence_is_cut_at_white_space_and_its_rest_takes_the_next_sentence_in() -> None:
    text, sentences = annotated("a b c d e f g.", "h.")
    assert [p.text for p in split(text, sentences, max_tokens=8)] == ["a b c", "d e f", "g. h."]


def test_text_without_white_space_is_cut_between_characters() -> None:
    text = "漢字仮名交文"
    passages = split_document(Document("", text, "id"), Annotations(((0, 6),), ()), characters, Cut(7))
    assert [p.text for p in passages] == ["漢字仮名", "交文"]


def test_long_title_leaves_half_of_the_budget() -> None:
    text, sentences = annotated("a b", "c d")
    document = Document("word " * 100, text, "id")
    passages = split_document(document, Annotations(sentences, ()), words, Cut(10))
    assert [p.text for p in passages] == ["a b", "c d"]


def test_text_that_no_sentence_covers_is_kept() -> None:
    assert [p.text for p in split("Stray. One. Stray again.", [(7, 11)])] == ["Stray. One. Stray again."]
    assert [p.text for p in split("No sentence at all", [])] == ["No sentence at all"]


def test_blank_document_has_no_passages() -> None:
    assert split(" \n\t ", []) == []


@st.composite
def annotated_documents(draw: st.DrawFn) -> tuple[Document, Annotations]:
    sentence = st.text("ab é漢. \n", min_size=1, max_size=40).filter(lambda s: s == s.strip())
    text, ranges = draw(st.sampled_from(["", " ", "\n\n"])), []
    for piece in draw(st.lists(sentence, max_size=8)):
        ranges.append((len(text), len(text) + len(piece)))
        text += piece + draw(st.sampled_from(["", " ", "\u00a0\n", "\n\n"]))
    bounds = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    spans = tuple(Span(a, b, "X") for a, b in zip(bounds[::2], bounds[1::2], strict=False))
    title = draw(st.text("ab ", max_size=30))
    return Document(title, text, "id"), Annotations(tuple(ranges), spans)


@given(annotated_documents(), st.sampled_from([words, characters]), st.integers(8, 40), st.booleans())
@example((Document("", "a", "id"), Annotations(((0, 1),), ())), words, 8, False)
def test_split_loses_nothing_and_keeps_order_budget_and_spans(
    annotated_document, count, max_tokens, rows
) -> None:
    document, annotations = annotated_document
    passages = split_document(document, annotations, count, Cut(max_tokens, rows=rows))

    position, kept = 0, []
    budget = max_tokens - 3 - min(count([document.title])[0], max_tokens // 2)
    for passage in passages:
        start = position + len(document.text[position:]) - len(document.text[position:].lstrip())
        end = start + len(passage.text)
        assert document.text[start:end] == passage.text  # an exact slice, right after the one before
        assert passage.text == passage.text.strip() != ""
        tokens = sum(count([passage.text[a:b] for a, b in passage.sentences]))
        assert tokens <= budget or len(passage.text) == 1
        covered = "".join(passage.text[a:b] for a, b in passage.sentences)
        assert "".join(covered.split()) == "".join(passage.text.split())
        inside = [s for s in annotations.spans if start <= s.start and s.end <= end]
        assert [(s.start + start, s.end + start, s.label) for s in passage.spans] == inside
        assert [passage.text[s.start : s.end] for s in passage.spans] == [
            document.text[s.start : s.end] for s in inside
        ]
        kept.append(passage.text)
        position = end
    assert document.text[position:].strip() == ""
    assert "".join("".join(kept).split()) == "".join(document.text.split())


@given(annotated_documents(), st.integers(8, 40))
def test_next_sentence_would_not_have_fitted(annotated_document, max_tokens) -> None:
    document, annotations = annotated_document
    passages = split_document(document, annotations, words, Cut(max_tokens))
    budget = max_tokens - 3 - min(words([document.title])[0], max_tokens // 2)
    for passage, following in pairwise(passages):
        first = following.text[slice(*following.sentences[0])]
        assert sum(words([passage.text[a:b] for a, b in passage.sentences])) + words([first])[0] > budget


@given(
    annotated_documents(),
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from("ABC"))),
    st.integers(8, 40),
)
def test_a_link_belongs_to_the_passage_in_which_its_words_begin(drawn, places, max_tokens) -> None:
    document, annotations = drawn
    links = sorted(Link(start, title) for start, title in places if start < len(document.text))
    passages = split_document(document._replace(links=tuple(links)), annotations, words, Cut(max_tokens))
    end = 0
    for passage in passages:
        start = document.text.index(passage.text, end)
        end = start + len(passage.text)
        assert passage.links == tuple(dict.fromkeys(one.title for one in links if start <= one.start < end))
    for passage in split_document(document, annotations, words, Cut(max_tokens)):
        assert passage.links is None


def squeezed(text: str) -> str:
    return "".join(text.split())


@given(
    annotated_documents(),
    st.lists(st.tuples(st.integers(0, 200), st.text("AB", min_size=1, max_size=3)), max_size=4),
    st.integers(8, 40),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_each_section_is_split_as_a_document_with_its_title(
    drawn, places, max_tokens, whole, rows, heading
) -> None:
    document, annotations = drawn
    starts = {start: title for start, title in places if start < len(document.text)}
    sections = tuple(Section(start, starts[start], heading and not rows) for start in sorted(starts))
    document = document._replace(sections=sections)
    found = split_document(document, annotations, words, Cut(max_tokens, whole=whole, rows=rows))
    bounds = [*sections] if sections and not sections[0].start else [Section(0, document.title), *sections]
    rest = list(found)
    for section, end in zip(bounds, [*(one.start for one in bounds[1:]), len(document.text)], strict=True):
        inside = squeezed(document.text[section.start : end])
        own: list[Passage] = []
        while squeezed("".join(one.text for one in own)) != inside:
            own.append(rest.pop(0))
        assert {one.title for one in own} <= {section.title}
        assert not whole or len(own) <= 1
        assert all(one.id == passage_id(section.title, one.text) for one in own)
    assert rest == []


@given(annotated_documents(), st.integers(8, 40), st.integers(1, 20))
@example((Document("", "a aa aa a", "id"), Annotations(((0, 3), (3, 6), (6, 9)), ())), 8, 1)
def test_an_overlap_repeats_whole_sentences_and_loses_nothing(drawn, max_tokens, overlap) -> None:
    document, annotations = drawn
    budget = max_tokens - 3 - min(words([document.title])[0], max_tokens // 2)
    passages = split_document(document, annotations, words, Cut(max_tokens, overlap))
    end, start = 0, 0
    for passage in passages:
        # If the text of the passage occurs several times, the passage is the last occurrence that leaves nothing out.
        unread = end + len(document.text[end:]) - len(document.text[end:].lstrip())
        start = document.text.rindex(passage.text, start, unread + len(passage.text))
        repeated = document.text[start:end]
        assert words([repeated])[0] <= overlap
        assert squeezed(document.text[end:start]) == ""  # nothing is left out
        assert start + len(passage.text) > end
        assert sum(words([passage.text[a:b] for a, b in passage.sentences])) <= budget
        end = start + len(passage.text)
        start += 1
    assert squeezed(document.text[end:]) == ""
    plain = split_document(document, annotations, words, Cut(max_tokens))
    assert len(plain) <= len(passages)


def test_an_overlap_is_as_long_as_it_may_be() -> None:
    text, sentences = annotated("a b.", "c d.", "e.", "f g.", "h i j.")
    texts = [p.text for p in split(text, sentences, max_tokens=10, overlap=2)]
    assert texts == ["a b. c d. e.", "e. f g.", "f g. h i j."]
    assert [p.text for p in split(text, sentences, max_tokens=10)] == ["a b. c d. e.", "f g. h i j."]


ROWS = (
    "Town: Arden; River: Tay.",
    "Town: Kelso; River: Tweed; Since: 1113.",
    "Q: why?; A: so!",
    "Ratio: 1: 2; To: x; By: y.",
)
PROSE = (
    "Three towns: Arden, Kelso and Perth.", "He came; he saw.", "See: the note; nothing more.", "A town.", "Town: Arden.",
    "Town: Arden; River: Tay,", "", "No name; River: Tay.",
)  # fmt: skip


@given(st.lists(st.sampled_from([*ROWS, *PROSE]), max_size=12), st.integers(20, 40), st.booleans())
def test_each_row_of_a_table_is_a_passage_and_other_lines_are_packed_as_before(
    lines, max_tokens, found
) -> None:
    """`found`: whether the tagger found the lines, or took all of them for one sentence."""
    text, ends = "\n".join(lines), np.cumsum([len(line) + 1 for line in lines]).tolist()
    ranges = [(end - len(line) - 1, end - 1) for line, end in zip(lines, ends, strict=True) if line]
    sentences = tuple(ranges if found else [(0, len(text))] if ranges else [])
    made = [one.text for one in split(text, sentences, max_tokens=max_tokens, rows=True)]
    assert [one for one in made if one in ROWS] == [line for line in lines if line in ROWS]
    assert "".join("".join(made).split()) == "".join(text.split())
    assert not any(row in one and row != one for row in ROWS for one in made)
    apart = [list(part) for is_row, part in itertools.groupby(lines, lambda line: line in ROWS) if not is_row]
    others = [one for one in made if one not in ROWS]
    if found:
        plain = [split("\n".join(part), *lines_of(part), max_tokens=max_tokens) for part in apart]
        assert others == [one.text for part in plain for one in part]


def lines_of(part: list[str]) -> tuple[tuple[tuple[int, int], ...]]:
    """The places of the lines that are not empty, in their joined text."""
    ends = np.cumsum([len(line) + 1 for line in part]).tolist()
    return (tuple((end - len(line) - 1, end - 1) for line, end in zip(part, ends, strict=True) if line),)


def test_a_row_that_is_too_long_is_cut_and_shares_no_passage_with_others() -> None:
    row = "Town: Arden; Notes: " + "word " * 30 + "end."
    made = [one.text for one in split(f"Before.\n{row}\nAfter.", [(0, 7)], max_tokens=15, rows=True)]
    assert made[0] == "Before." and made[-1] == "After." and len(made) > 4
    assert "".join("".join(made[1:-1]).split()) == "".join(row.split())


def test_a_row_has_the_title_of_its_section_and_other_text_that_of_the_document() -> None:
    lines = ("Before.", "North", ROWS[0], "A note.", "South", ROWS[1], "Apart.", ROWS[0])
    text, ranges = annotated(*lines, gap="\n\n")
    starts = [start for start, _ in ranges]
    headings = (
        Section(starts[1], "Towns > North", heading=True),
        Section(starts[4], "Towns > South", heading=True),
    )
    document = Document("Towns", text, "id", sections=(*headings, Section(starts[6], "Own")))
    made = split_document(document, Annotations(ranges, ()), words, Cut(rows=True))
    assert [(one.title, one.text.split("\n\n")) for one in made] == [
        ("Towns", ["Before."]),
        ("Towns > North", ["North", ROWS[0]]),
        ("Towns", ["A note."]),
        ("Towns > South", ["South", ROWS[1]]),
        ("Own", ["Apart."]),
        ("Own", [ROWS[0]]),
    ]
    assert "".join(squeezed(one.text) for one in made) == squeezed(text)


def test_a_heading_is_in_the_passage_of_the_text_below_it() -> None:
    lines = (
        "Holidays",
        "You have 28 days.",
        "Illness",
        "At work",
        "Call your manager before nine.",
        "Parts",
        ROWS[0],
        ROWS[1],
    )
    text, sentences = annotated(*lines, gap="\n\n")
    assert split(text, sentences, max_tokens=14)[0].text.endswith("Illness\n\nAt work")
    made = [one.text.split("\n\n") for one in split(text, sentences, max_tokens=14, rows=True)]
    assert made == [[*lines[:2]], [*lines[2:5]], ["Parts", ROWS[0]], [ROWS[1]]]


def test_a_heading_without_room_below_it_and_the_last_items_of_a_list_stay() -> None:
    lines = (
        "Ill",
        "Call your manager before nine o'clock today.",
        "A",
        "B",
        "C",
        "D",
        "A long sentence is below the list.",
    )
    text, sentences = annotated(*lines, gap="\n\n")
    made = [one.text.split("\n\n") for one in split(text, sentences, max_tokens=12, rows=True)]
    assert made == [["Ill"], [lines[1]], [*lines[2:6]], [lines[6]]]


def test_the_rows_are_those_that_the_readers_write() -> None:
    for headings, cells in (
        (["Country", "Capital"], ["France", "Paris"]),
        (["Question", "Answer"], ["What?", "A town."]),
    ):
        assert ROW.fullmatch(sentence_of(headings, cells))
    assert not ROW.fullmatch(sentence_of(["Country"], ["France"]))


def test_many_names_and_values_are_searched_in_linear_time() -> None:
    start = time.process_time()
    assert not ROW.search("name: value; " * 200_000) and not ROW.search("a: " * 200_000)
    assert time.process_time() - start < 5
