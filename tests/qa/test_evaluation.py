"""Scores of answers and rankings, compared with plain readings of the published scripts."""

import json
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.errors import InputError
from realm.qa.question_files import Question
from realm.qa.scoring import evaluation
from realm.qa.scoring.calibration import Confidence
from realm.qa.scoring.evaluation import evaluate
from realm.qa.scoring.metrics import (
    DPR,
    ORQA,
    contains_answer,
    exact_match,
    f1,
    first_hit,
    has_answer,
    is_acceptable,
    is_correct,
    mean_reciprocal_rank,
    normalise_answer,
    recall_at,
    regex_match,
    stands_for,
)

# -- one prediction


def squad_normalise(text: str) -> str:
    """The steps of the published script."""
    text = text.lower()
    text = "".join(ch for ch in text if ch not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def squad_f1(prediction: str, answer: str) -> float:
    predicted, gold = squad_normalise(prediction).split(), squad_normalise(answer).split()
    common = 0
    left = list(gold)
    for token in predicted:
        if token in left:
            left.remove(token)
            common += 1
    if common == 0:
        return 0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


phrases = st.lists(st.sampled_from(["the", "a", "Nile", "nile,", "river", "Blue", "blue-nile", "é"])).map(
    " ".join
)


@given(phrases, phrases)
def test_f1_and_normalisation_equal_a_plain_reading_of_squads_script(prediction: str, answer: Any) -> None:
    assert normalise_answer(prediction, "squad") == squad_normalise(prediction)
    assert f1(prediction, [answer], "squad") == pytest.approx(squad_f1(prediction, answer))


def test_f1_takes_the_best_answer() -> None:
    assert f1("blue nile", ["white nile", "the Blue Nile", ""]) == 1
    assert f1("nile", []) == 0


def test_orqa_decomposes_and_squad_does_not() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert exact_match(composed, [decomposed], "orqa")
    assert not exact_match(composed, [decomposed], "squad")
    assert not exact_match(composed, ["cafe"], "orqa")  # decomposed, not removed


def test_exact_match_forgives_articles_case_punctuation_and_space_only() -> None:
    assert exact_match("The  U.S. dollar", ["Euro", "us Dollar!"])
    assert not exact_match("us dollars", ["us dollar"])
    assert exact_match("10,605", ["10605"]) and not exact_match("10 , 605", ["10605"])


def test_patterns_match_anywhere_by_default_and_at_the_start_for_orqa() -> None:
    question = Question("1", "where?", (r"New\s?York",), regex=True)
    assert is_correct("in new york", question)
    assert not is_correct("in new york", question, ORQA)
    assert is_correct("New York and more", question, ORQA)
    assert regex_match("a\nParis", ["^paris$"])  # each line has its own ends


# -- retrieval


def test_token_containment_requires_whole_tokens_and_substring_does_not() -> None:
    one, art = Question("1", "q", ("1",)), Question("2", "q", ("Art",))
    assert not has_answer("in 2018", one) and has_answer("in 2018", one, "substring")
    assert not has_answer("King Arthur", art) and has_answer("King Arthur", art, "substring")
    assert has_answer("the ART of war", art) and not has_answer("the ART of war", art, "substring")
    assert has_answer("born in Zu\u0308rich.", Question("3", "q", ("Z\u00fcrich",)))
    assert has_answer("Martin Luther King, Jr. said", Question("4", "q", ("king, jr.",)))
    assert not has_answer("anything", Question("5", "q", ("\u200b",)))


@given(st.text("ab1, é-", max_size=20), st.text("ab1, é-", min_size=1, max_size=4))
def test_token_containment_equals_a_search_for_a_run_of_tokens(text: str, answer: Any) -> None:
    def tokens(s: str) -> list[str]:
        return re.findall(
            r"\w+|[^\w\s]", s
        )  # no decomposed characters here, so \w is what DPR's pattern takes

    run, inside = tokens(answer), tokens(text)
    found = any(inside[i : i + len(run)] == run for i in range(len(inside))) if run else False
    assert has_answer(text, Question("1", "q", (answer,))) == found


def test_first_hit_counts_from_one_and_stops_reading() -> None:
    question = Question("1", "q", ("b",))

    def texts() -> Iterator[str]:
        yield "a"
        yield "a b"
        raise AssertionError("read on after the hit")

    assert first_hit(texts(), question) == 2
    assert first_hit(["a"], question) == 0


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 30))
def test_recall_and_reciprocal_rank_equal_plain_loops(ranks: list[int], k: int) -> None:
    assert recall_at(ranks, k) == pytest.approx(100 * sum(1 for r in ranks if r and r <= k) / len(ranks))
    assert mean_reciprocal_rank(ranks) == pytest.approx(sum(1 / r for r in ranks if r) / len(ranks))


# -- a set of predictions

QUESTIONS = [
    Question("1", "q", ("Blue Nile",)),
    Question("2", "q", ("Nile", "Amazon")),
    Question("3", "q", ("par[iy]s",), regex=True),
    Question("4", "q", ("Rome",)),
]
TEXTS = [["x", "the Blue Nile"], ["Amazon"], ["Parys"], ["x", "x"]]


def test_the_report_is_in_percent_and_has_the_contracted_keys() -> None:
    report = evaluate(["the blue nile", "river nile", "in Paris", "Milan"], iter(TEXTS), QUESTIONS, depth=100)
    summary = report.as_dict()
    low, high = summary.pop("em_ci95")
    assert summary == {
        "n": 4,
        "em": 50.0,
        "contains": 75.0,
        "f1": pytest.approx(100 * (1 + 2 / 3 + 1 + 0) / 4, abs=0.01),
        "recall": {"1": 50.0, "5": 75.0, "20": 75.0, "100": 75.0},
        "mrr": pytest.approx(100 * (0.5 + 1 + 1 + 0) / 4, abs=0.01),
        "confidence": None,
    }
    assert 0 < low < 50 < high < 100
    assert json.loads(json.dumps(report.as_dict()))["n"] == 4
    assert report.correct_N.tolist() == [True, False, True, False]
    assert report.contains_N.tolist() == [True, True, True, False]


def test_probabilities_are_compared_with_the_answers_that_are_right_apart_from_their_boundaries() -> None:
    report = evaluate(["the blue nile", "river nile", "in Paris", "Milan"], TEXTS, QUESTIONS)
    assert report.acceptable_N.tolist() == report.contains_N.tolist()
    confident = report._replace(confidence=Confidence(np.array([0.95, 0.85, 0.75, 0.05]), threshold=0.8))
    confidence = confident.as_dict()["confidence"]
    assert [(one["right"], one["n"]) for one in confidence["bins"]] == [(0, 1), (100, 1), (100, 1), (100, 1)]
    assert confidence["right_declined"] == pytest.approx(100 / 3, abs=0.01)


def test_an_answer_with_more_words_contains_the_right_answer_and_one_with_fewer_words_does_not() -> None:
    asked = Question("1", "who discovered penicillin?", ("Alexander Fleming",))
    assert contains_answer("Sir Alexander Fleming", asked)
    for wrong in ("Fleming", "Alexander Flemings", ""):
        assert not contains_answer(wrong, asked), wrong


def test_the_larger_part_of_an_answer_is_acceptable_in_one_piece() -> None:
    asked = Question(
        "1",
        "which architects?",
        ("Paul Rudolph, Marcel Breuer and Eero Saarinen", "ostrich feathers", "May 4 1999"),
    )
    for right in ("Marcel Breuer and Eero Saarinen", "Paul Rudolph, Marcel Breuer", "the ostrich"):
        assert is_acceptable(right, asked), right
    for wrong in ("Marcel Breuer", "Paul Rudolph and Eero Saarinen", "May 11 1999", "", "the"):
        assert not is_acceptable(wrong, asked), wrong
    pattern = Question("2", "when?", ("1[0-9]{3} or later",), regex=True)
    assert not is_acceptable("or later", pattern)


@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
def test_a_part_is_found_wherever_it_is(part: list[str], answer: list[str]) -> None:
    asked = Question("1", "which?", (" ".join(f"{letter}x" for letter in answer),))
    prediction = " ".join(f"{letter}x" for letter in part)
    is_part = "".join(part) in "".join(answer) and 2 * len(part) >= len(answer)
    assert is_acceptable(prediction, asked) == (is_part or contains_answer(prediction, asked))


WORDS = st.lists(st.sampled_from(["the", "south", "korea", "1,989"]), max_size=5).map(" ".join)


@given(WORDS, WORDS)
def test_a_text_stands_for_another_if_it_is_acceptable_where_the_other_is_right(
    text: str, other: str
) -> None:
    text, other = normalise_answer(text), normalise_answer(other)
    assert stands_for(text, other) == is_acceptable(text, Question("1", "which?", (other,)))


def test_recall_beyond_what_was_retrieved_is_null() -> None:
    summary = evaluate([""] * 4, TEXTS, QUESTIONS).as_dict()
    assert summary["recall"] == {"1": 50.0, "5": None, "20": None, "100": None}
    assert evaluate([""] * 4, TEXTS, QUESTIONS, depth=5).as_dict()["recall"]["5"] == 75.0


def test_recall_by_title_counts_questions_that_name_titles() -> None:
    questions = [
        Question("1", "who?", ("x",), gold_titles=("The Nile", "Amazon")),
        Question("2", "when?", ("y",), gold_titles=("Rhine",)),
        Question("3", "where?", ("z",)),
    ]
    texts = [["a", "b"], ["a"], ["z"]]
    titles = [["Congo", "nile"], ["Elbe"], ["Rhine"]]
    report = evaluate(None, texts, questions, depth=20, titles=titles)
    assert report.first_title_N is not None
    assert report.first_title_N.tolist() == [2, 0, -1]
    assert report.as_dict()["title_recall"] == {"1": 0.0, "5": 50.0, "20": 50.0}
    assert any(line.startswith("titles:") for line in report.lines())
    assert (
        evaluate(None, texts[2:], questions[2:], titles=titles[2:])
        .as_dict()
        .keys()
        .isdisjoint({"title_recall"})
    )
    assert "title_recall" not in evaluate(None, texts, questions).as_dict()


def test_published_scorings_differ_where_they_should() -> None:
    question = [Question("1", "q", ("Zu\u0308rich",))]
    for scoring, em, hit in ((ORQA, True, 0), (DPR, False, 1)):
        report = evaluate(["Z\u00fcrich"], [["z\u00fcrich"]], question, scoring=scoring)
        assert (bool(report.correct_N[0]), int(report.first_hit_N[0])) == (em, hit)


def test_predictions_must_be_as_many_as_questions() -> None:
    with pytest.raises(ValueError, match="shorter"):
        evaluate(["a"], TEXTS, QUESTIONS)
    with pytest.raises(InputError, match="no questions"):
        evaluate([], [], [])


def test_scoring_needs_no_torch() -> None:
    code = f"import sys, {evaluation.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
