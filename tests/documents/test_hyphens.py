"""Words that are divided at line ends, and hyphens that are not divisions."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.documents.formats.hyphens import halves, hyphen, with_whole_words, words_of
from tests.documents.writers import read


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("The north ter-\nminal.", "The north terminal."),
        ("The author\u2010\n       ization.", "The authorization."),
        ("The op\u00ad\nera\u00adtor waits.", "The operator waits."),
        ("A well\u2010\nknown town, well\u2010known to all.", "A well-known town, well\u2010known to all."),
        ("Mr Ott-\nLee waits.", "Mr Ott-Lee waits."),
        ("A harbour-\nmaster: the master of a harbour.", "A harbour-master: the master of a harbour."),
        ("A re-\nstart, a restart-\nlike re-\nstart.", "A restart, a restartlike restart."),
        ("x86-\n64, a -\nb, one-\n\ntwo, --\nthree", "x86-\n64, a -\nb, one-\n\ntwo, --\nthree"),
    ],
)
def test_a_word_that_is_divided_at_a_line_end_is_whole(text: str, whole: str) -> None:
    assert with_whole_words(text) == whole


@pytest.mark.parametrize(
    ("before", "after", "between"),
    [("COVID", "19", "-"), ("2", "and 3", "-"), ("cafe\u0301", "teria", ""), ("pr", "\u00b4ecis", "")],
)
def test_a_hyphen_beside_a_number_stays_and_one_beside_an_accent_does_not(
    before: str, after: str, between: str
) -> None:
    assert hyphen(*halves(before, after), words_of("")) == between


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("The state-of-the-\nart method. Also state-of-the-art.", "state-of-the-art method"),
        ("The state-\nof-the-art method. Also state-of-the-art.", "state-of-the-art method"),
        (
            "The state\u2010of\u2010the-\nart method. Also state-of-the-art.",
            "state\u2010of\u2010the-art method",
        ),
        ("State-of-the-\nart methods. Also state-of-the-art.", "State-of-the-art methods"),
        ("A well-to-\ndo town. The todo list is well-to-do.", "A well-to-do town"),
        ("An anti-missile-sys-\ntem. The system is old.", "An anti-missile-system."),
        ("The out-of-the-\nblue idea of the sky: a blue sky.", "The out-of-the-blue idea"),
    ],
)
def test_a_divided_word_with_hyphens_is_sought_as_a_whole(text: str, whole: str) -> None:
    assert whole in with_whole_words(text)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("Der Haupt-\nund Nebensatz.", "Der Haupt- und Nebensatz."),
        ("Both short- and long-\nor mid-term", "Both short- and long- or mid-term"),
        ("Land\u2010\n  oder Seeweg", "Land- oder Seeweg"),
        (
            "A low and high rate goes to low-\nto high-income towns.",
            "A low and high rate goes to low- to high-income towns.",
        ),
        ("A black-\nand-white photo.", "A black-and-white photo."),
        ("The auth-\nor is an author.", "The author is an author."),
        ("An x-\ny plane, an x-y line.", "An x-y plane, an x-y line."),
        ("Die Frau-\nen und das Pho-\nto.", "Die Frauen und das Photo."),
    ],
)
def test_a_hyphen_before_a_conjunction_stays_with_a_space(text: str, whole: str) -> None:
    assert with_whole_words(text) == whole


def test_a_text_that_ends_lines_at_hyphens_keeps_them() -> None:
    text = "A well-known town is well-\nknown, and an old-\nfashioned town."
    assert with_whole_words(text) == "A well-known town is well-known, and an old-fashioned town."


def test_text_files_and_mails_have_whole_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"The north ter-\r\n  minal.\r\n")
    (tmp_path / "b.eml").write_bytes(b"Subject: B\r\n\r\nThe south ter-\r\nminal.\r\n")
    assert read(tmp_path)[0] == {"a": "The north terminal.", "B": "The south terminal."}


@given(st.text("ab-\u2010\u00ad\n A"))
def test_only_hyphens_line_ends_and_blanks_are_taken_away(text: str) -> None:
    def letters(text: str) -> str:
        return "".join(filter(str.isalpha, text))

    found = with_whole_words(text)
    assert letters(found) == letters(text) and "\u00ad" not in found
    assert found.count("\n\n") >= text.replace("\u00ad", "").count("\n\n")


@pytest.mark.parametrize("part", ["a", "a-\n", "-\n ", "\u00ad", "\u00ad\n", " \n"])
def test_hostile_texts_take_linear_time(part: str) -> None:
    def seconds(parts: int) -> float:
        start = time.process_time()
        with_whole_words(part * parts)
        return time.process_time() - start

    seconds(1_000)
    assert min(seconds(4_000) for _ in range(2)) < 8 * min(seconds(1_000) for _ in range(2)) + 0.01
