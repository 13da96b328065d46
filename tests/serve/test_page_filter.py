"""The field of the page for a filter over the fields of documents, in a real headless Chromium."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realm.serve.client import Client
from tests.serve.asking import QUESTION
from tests.serve.conftest import TOKEN, Served, running
from tests.serve.visiting import Visit, browser, expect, serious_findings, visit

__all__ = ["browser", "visit"]
pytestmark = pytest.mark.page
HOSTILE = "<img src=x onerror='window.pwned=1'>"
DOCUMENTS: list[dict[str, Any]] = [
    {"id": f"{year}", "title": f"Oakham {year}", "text": f"In {year} Berthe sold bells.", "fields": fields}
    for year, fields in (
        (2018, {"year": 2018, "source": HOSTILE, "and": True}),
        (2020, {"year": 2020, "source": "the town's book"}),
        (2022, {"year": 2022, "printed": "2022-05-01"}),
    )
]


@pytest.fixture(scope="module")
def site(tiny_kb: Any, qa_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over the towns, which have no fields, and three documents with fields."""
    folder = tmp_path_factory.mktemp("filtered") / "kb"
    shutil.copytree(tiny_kb.folder, folder)
    with running(folder, qa_model) as server:
        Client(server.url, TOKEN).add(DOCUMENTS)
        yield server


def filter_of(page: Any) -> Any:
    return page.get_by_role("textbox", name="Filter (only documents whose fields match)")


def ask_where(visit: Visit, where: str, question: str = "bells") -> Any:
    page = visit.open("ask")
    page.get_by_label("Question").fill(question)
    filter_of(page).fill(where)
    page.keyboard.press("Enter")
    return page


def ids(page: Any) -> list[str]:
    """Ids of the documents whose passages are shown."""
    page.wait_for_selector(":is(.results, .found):not([aria-busy]) .card")
    return [title.removeprefix("Oakham ") for title in page.locator(".card :is(h3, h4)").all_inner_texts()]


def test_a_filter_limits_the_passages_that_are_read_and_their_fields_are_shown(visit, site) -> None:
    page = ask_where(visit, "year >= 2020")
    expect(page.locator(".asked")).to_have_text("bells where year >= 2020")
    said = Client(site.url).answers("bells", where="year >= 2020")
    assert ids(page) == [passage.document for passage in said.passages]
    assert set(ids(page)) == {"2020", "2022"}
    shown = page.locator(".card", has=page.get_by_role("link", name="Oakham 2020")).locator(".fields")
    assert shown.inner_text().split() == ["year", "2020", "source", "the", "town's", "book"]
    page.get_by_label("Compare").check()
    expect(page.locator(".column")).to_have_count(3)
    assert set(ids(page)) == {"2020", "2022"}


def test_the_search_of_the_knowledge_view_has_the_same_filter(visit, site) -> None:
    page = visit.open("knowledge")
    page.get_by_label("Search").fill("bells")
    filter_of(page).fill("year < 2020")
    page.keyboard.press("Enter")
    assert ids(page) == ["2018"]
    assert page.url.endswith("#knowledge?search=bells&method=hybrid&where=year+%3C+2020")
    page.reload()
    assert ids(page) == ["2018"] and filter_of(page).input_value() == "year < 2020"
    filter_of(page).fill("yeer < 2020")
    page.keyboard.press("Enter")
    expect(page.locator(".filter .note")).to_contain_text("yeer is not a field")
    expect(page.locator(".card")).to_have_count(0)
    visit.wrong.clear()  # the browser notes the 400


def test_the_address_has_the_filter_and_back_and_forward_change_it(visit, browser) -> None:
    page = ask_where(visit, "year = 2022")
    assert ids(page) == ["2022"]
    shared = page.url
    assert shared.endswith("&where=year+%3D+2022")
    filter_of(page).fill("")
    page.keyboard.press("Enter")
    expect(page.locator(".asked")).to_have_text("bells")
    assert len(ids(page)) == 5 and "where" not in page.url
    page.go_back()
    expect(page.locator(".asked")).to_have_text("bells where year = 2022")
    assert ids(page) == ["2022"] and filter_of(page).input_value() == "year = 2022"
    page.go_forward()
    expect(page.locator(".asked")).to_have_text("bells")
    expect(filter_of(page)).to_have_value("")
    other = browser.new_page()
    other.goto(shared)
    assert ids(other) == ["2022"]
    other.close()


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("yeer = 2020", "yeer is not a field; the fields are id (text), title (text)"),
        pytest.param("year >= 'new'", "compares year (whole number) with 'new'", marks=pytest.mark.slow),
        (f"source = {HOSTILE}", "cannot be used"),
        pytest.param("year = 1" + " or year = 1" * 200, "shorten the text to 2000", marks=pytest.mark.slow),
    ],
)
def test_a_filter_that_cannot_be_used_is_explained_beside_its_field(visit, where, says) -> None:
    page = ask_where(visit, where)
    note = page.locator(".filter .note")
    expect(note).to_contain_text(says)
    visit.wrong.clear()  # the browser notes the refused request
    assert "\n" not in note.inner_text() and page.locator(".problem").count() == 0
    field = filter_of(page)
    assert field.get_attribute("aria-invalid") == "true"
    assert page.evaluate("document.activeElement.name") == "where"
    assert page.locator(f"#{field.get_attribute('aria-describedby')}").inner_text() == note.inner_text()
    page.get_by_text("Which fields are there?").click()
    assert serious_findings(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("window.pwned === undefined && !document.querySelector('img[src=x]')")
    field.fill("year = 2020")
    expect(note).to_have_text("")
    page.keyboard.press("Enter")
    assert ids(page) == ["2020"] and field.get_attribute("aria-invalid") is None


def test_the_fields_and_the_example_are_those_of_the_corpus_and_used_by_keyboard(visit, site) -> None:
    corpus = Client(site.url).corpus()
    page = visit.open("ask")
    page.get_by_label("Question").fill("bells")
    page.get_by_text("Which fields are there?").focus()
    page.keyboard.press("Enter")
    shown = page.locator(".filter dl > div").all_inner_texts()
    assert [entry.split("\n") for entry in shown] == [list(entry) for entry in corpus["fields"].items()]
    assert corpus["fields"] == {
        "year": "whole number",
        "source": "text",
        "and": "true or false",
        "printed": "date",
    }
    assert serious_findings(page) == []
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the example
    expect(filter_of(page)).to_have_value(corpus["filter"])
    assert page.evaluate("document.activeElement.name") == "where"
    page.keyboard.press("Enter")
    assert set(ids(page)) <= {"2018", "2020", "2022"}


def test_a_filter_that_matches_nothing_has_an_answer_of_its_own(visit) -> None:
    page = ask_where(visit, "year = 1", QUESTION)
    expect(page.locator(".answer.none")).to_have_text("No passage that matches the filter was found.")


def test_a_corpus_without_fields_has_no_filter_unless_the_address_has_one(browser, tiny_kb, qa_model) -> None:
    page = browser.new_page()
    with running(tiny_kb.folder, qa_model, token=None) as server:
        for view in ("ask", "knowledge"):
            page.goto(f"{server.url}/#{view}")
            with page.expect_response("**/v1/corpus"):
                page.reload()
            page.wait_for_load_state("networkidle")
            assert not page.locator(".filter").is_visible()
        page.goto(f"{server.url}/#ask?question=Arden&where=title+%3D+'Arden'")
        assert set(ids(page)) == {"Arden"}
        expect(filter_of(page)).to_have_value("title = 'Arden'")
    page.close()
