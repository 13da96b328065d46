"""Filters over the fields of documents: what they select, and how wrong filters are refused."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realm.errors import RealmError
from realm.store.fields.filters import DEEPEST, LONGEST_FILTER, example_filter
from realm.store.knowledge_base import KnowledgeBase
from realm.text.fields import kind_of
from tests.store.tiny import DOCUMENTS, make
from tests.store.with_fields import FIELDS, kb, made

__all__ = ["kb", "made"]

Condition = Callable[[dict[str, Any]], bool | None]
FILTERS: list[tuple[str, Condition]] = [
    ("year >= 2020", lambda f: f.get("year", 0) >= 2020),
    (
        "year >= 2020 and source = 'handbook'",
        lambda f: f.get("year", 0) >= 2020 and f.get("source") == "handbook",
    ),
    ("not (year >= 2020)", lambda f: "year" in f and f["year"] < 2020),
    ("year is null OR draft", lambda f: "year" not in f or f.get("draft")),
    ("draft = false", lambda f: f.get("draft") is False),
    (
        "price between (1) and (2.5) and year > 0",
        lambda f: 1 <= f.get("price", 0) <= 2.5 and f.get("year", 0) > 0,
    ),
    ("price between 1 and 2.5", lambda f: 1 <= f.get("price", 0) <= 2.5),
    ("year < 9223372036854775807 and year > -9223372036854775807", lambda f: "year" in f),
    ("year in (2000, 2019) and price < 2", lambda f: f.get("year") == 2000),
    ("source = 'it''s'", lambda f: f.get("source") == "it's"),
    ("source like 'h%k'", lambda f: f.get("source") == "handbook"),
    ("tags like '%\"a\"%'", lambda f: "a" in f.get("tags", [])),
    ("day >= '2020-02-01'", lambda f: f.get("day", "") >= "2020-02-01"),
    ("day between '2020-01-01' and '2020-01-31' and year = 2000", lambda f: f.get("day") == "2020-01-05"),
    ("day < date '2020-02-01'", lambda f: "day" in f and f["day"] < "2020-02-01"),
    ("at > '2020-03-01T12:00:00+01:00'", lambda f: f.get("at", "").startswith("2020-03-01T12")),
    ("at >= '2020-03-01'", lambda f: "at" in f),
    ("at > '0900-03-01T12:00:00.25Z'", lambda f: "at" in f),
    ("at < '2300-01-01' and at < date '9999-12-31'", lambda f: "at" in f),
    ("at > '1600-01-01' and day < '2300-01-01' or at > date '0001-01-01'", lambda f: "at" in f),
    ("day < at or at > day or day is not null", lambda f: "day" in f),
    ("number >= year or year >= number", lambda f: "number" in f and "year" in f),
    ("mixed = '1'", lambda f: f.get("mixed") == 1),
    ("number > 2", lambda f: f.get("number", 0) > 2),
    ("`og_url` like 'https:%'", lambda f: "og_url" in f),
    ('"year" <> 2000', lambda f: f.get("year", 2000) != 2000),
]


@pytest.mark.parametrize(("where", "holds"), FILTERS, ids=[where for where, _ in FILTERS])
def test_a_filter_selects_the_passages_for_which_its_condition_holds(
    kb: KnowledgeBase, where: str, holds: Condition
) -> None:
    expected = [bool(holds(dict(passage.fields))) for passage in kb]
    assert 0 < sum(expected) < len(expected)
    assert kb.matching(where).tolist() == expected


def test_a_filter_can_use_the_id_of_the_document_and_the_title(kb: KnowledgeBase) -> None:
    for where in ("id = 'd3'", "title = 'Town 3'"):
        assert {kb.passages([n])[0].document_id for n in np.flatnonzero(kb.matching(where))} == {"d3"}


def test_the_example_of_a_filter_is_made_from_the_first_document_with_a_suitable_field() -> None:
    kinds = {name: [kind_of(value)] for one in FIELDS for name, value in one.items()}
    shown = [example_filter([one], kinds) for one in FIELDS]
    assert shown == [
        "year >= 2000 and source = 'handbook'",
        "year >= 2020 and source = 'notes'",
        "year >= 2021 and source = 'handbook'",
        "source = 'it''s' and at >= '2020-03-01'",
        None,
        "year >= 2019",
        "year >= 2030 and mixed = 'one'",
    ]
    assert example_filter([{}, {"tags": ["a"]}, {"long": "x" * 100}, {"in": True}], {"in": ["bool"]}) == (
        "`in` = true"
    )
    assert example_filter([{"mixed": 1}, {"unknown": 1}], {"mixed": ["int", "text"]}) is None
    assert example_filter([{"at": "2263-01-01"}], {"at": ["time"]}) == "at >= '2263-01-01'"
    of_a_file = {"path": "a.md", "source": "handbook"}
    assert example_filter([of_a_file], {"path": ["text"], "source": ["text"]}) == "source = 'handbook'"


WRONG = [
    ("", "it has no field"),
    ("year >=", "cannot be used: it is not a complete condition"),
    ("(year = 1", "cannot be used: [)] was expected at the end;"),
    ("year = 1 and source between 'a' source", "cannot be used: AND was expected before source;"),
    ("year = 1) and (source = 'a'", r"cannot be used: it has a \) without a \(;"),
    ("year = 1 2", "cannot be used: 2 was not expected;"),
    ("year = 1 year = 2", "cannot be used: year was not expected;"),
    ("year = 1, year = 2", "cannot be used: it is not a condition, such as year >= 2020;"),
    ("year in ()", "cannot be used: it is not a complete condition"),
    ("at < date '10000-01-01'", "compares at .time. with '10000-01-01': write a time like"),
    *(
        (
            f"year < {number}",
            f"compares year .whole number. with {number.replace('.', '[.]')}: write a whole number from "
            "-9223372036854775807 to 9223372036854775807",
        )
        for number in ("1e30", "1.5", "9223372036854775808", "-9223372036854775808")
    ),
    ("1 = 1", "it has no field"),
    (
        "id = 'd3' or 1=1",
        "cannot be used: its part '1=1' has no field: write a condition such as year >= 2020; the fields are id",
    ),
    ("(true) or id = 'd3'", "its part 'true' has no field"),
    ("year = 2000 or (source = 'a' and not (2 > 1))", "its part 'not [(]2 > 1' has no field"),
    ("year between 1 and 2 and 3", "its part '3' has no field"),
    ("year = 2019 or 2020", "its part '2020' has no field"),
    ("year = 2019 or", "it is not a complete condition"),
    ("year = 2019 or number", "one side of or is not a condition, such as year >= 2020;"),
    ("year", "it is not a condition"),
    ("nothing = 1", "nothing is not a field; the fields are id .text., title .text., year .whole number."),
    ("text = 'a'", "text is not a field"),
    ("document_key = 1", "document_key is not a field"),
    ("`year:int` = 1", "year:int is not a field"),
    ("_rowid = 1", "_rowid is not a field"),
    ("lower(source) = 'a'", "lower is not a field, and a filter cannot contain functions"),
    ("source = 'a' adn (year = 1)", "adn is not a field, and a filter cannot contain functions"),
    ("source = handbook", "handbook is not a field; a text needs single quotation marks, such as 'handbook'"),
    ('source = "a\'b"', "a'b is not a field; a text needs single quotation marks, such as 'a''b'"),
    ("source between 'a' and b", "b is not a field; a text needs single quotation marks, such as 'b'"),
    ("source in (a)", "a is not a field; a text needs single quotation marks, such as 'a'"),
    ("source = 'a' adn year = 1", "adn is not a field; the fields"),
    ("source = 'it's'", "s is not a field; the fields"),
    ("source is nul", "nul is not a field; the fields"),
    ("source = 'handbook", "the quotation mark is missing at the end of 'handbook"),
    ('source = "handbook', 'the quotation mark is missing at the end of "handbook'),
    ("source = 'a'; drop", "'; drop' cannot be read"),
    ("source = 'a' -- all", "cannot be read"),
    ("year = (select 1)", "select is not a field"),
    ("source = 5", r"compares source \(text\) with 5: write '5'"),
    ("year = '2020'", "write the number without quotation marks"),
    ("draft = 'true'", "write true or false without quotation marks"),
    ("day > '5 May'", "write a date like '2020-12-31'"),
    ("at > 2020", "write a time like"),
    ("mixed = 1", r"compares mixed \(text, because values are whole number and text\) with 1: write '1'"),
    (f"year = 1{' ' * LONGEST_FILTER}", f"the limit is {LONGEST_FILTER}"),
    ("(" * 900 + "draft" + ")" * 900, "more than 16 parentheses are open at one place"),
    ("year > mixed", r"it compares year .whole number. with mixed .text, because"),
    ("mixed in (year)", "it compares mixed"),
    ("year between source and 5", "it compares year .whole number. with source .text."),
    ("date '2020-01-01' < source", "Cannot cast"),
    ("source = timestamp '2020-01-01'", "cannot be used: .*Parser error"),
    ("price not like null", "cannot be used: .*Invalid string/binary operation"),
    ("not " * 400 + "draft", "cannot be used"),
]


def test_a_date_that_cannot_be_compared_with_a_time_is_refused_in_one_line(tmp_path: Path) -> None:
    documents = [DOCUMENTS[0]._replace(fields={"day": "2300-01-01", "at": "2020-01-01T00:00:00Z"})]
    kb = make(tmp_path / "kb", documents)
    with pytest.raises(
        RealmError, match=r"at > day cannot be used: dates .* only from the year 1678 to 2261;"
    ):
        kb.matching("at > day")
    assert kb.matching("day > '2299-12-31'").all()


@pytest.mark.parametrize(("where", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_filter_is_refused_in_one_line(kb: KnowledgeBase, where: str, message: str) -> None:
    with pytest.raises(RealmError, match=message) as refused:
        kb.matching(where)
    assert "\n" not in str(refused.value)
    assert ".rs" not in str(refused.value)
    assert ":int" in where or ":int" not in str(refused.value)  # the name of a column of the table


def test_a_deep_filter_takes_no_long_time(kb: KnowledgeBase) -> None:
    deepest = "not(" * DEEPEST + "draft" + ")" * DEEPEST
    start = time.monotonic()
    assert kb.matching(deepest).tolist() == [
        fields.get("draft", False) for fields in (one.fields for one in kb)
    ]
    with pytest.raises(RealmError, match="parentheses"):
        kb.matching("not(" * 330 + "draft" + ")" * 330)
    assert time.monotonic() - start < 1


words = st.sampled_from(
    "year source draft day at mixed id text fields_key = < >= <> ( ) , and or not in is null like between true 2020 1.5 "
    "'a' '2020-01-01' date ` \" ' ; -- + * lower cast ? \x00 é".split(" ")
)


@given(st.lists(words, max_size=12).map(" ".join))
@example("not source is null")
def test_any_filter_is_a_mask_or_refused(made: Path, where: str) -> None:
    opened = KnowledgeBase.open(made)
    try:
        match_N = opened.matching(where)
    except RealmError:
        return
    assert match_N.shape == (len(opened),)
    assert match_N.dtype == bool
