"""The other views of the page in a real headless Chromium, and what holds for every view: keyboard, phones, and axe."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from realm.serve.client import Client
from tests.conftest import TOWNS
from tests.serve.asking import QUESTION
from tests.serve.conftest import TOKEN, running
from tests.serve.visiting import (
    Visit,
    browser,
    expect,
    runs,
    serious_findings,
    site,
    visit,
    write_refreshed_run,
)

__all__ = ["browser", "runs", "site", "visit"]
pytestmark = pytest.mark.page
VIEWS = ("ask", "fill", "knowledge", "training")


def test_words_are_hidden_by_pressing_them_and_their_passages_stand_below(visit, site) -> None:
    page = visit.open("fill")
    page.wait_for_selector(".predictions")  # the example of the paper is there at once
    page.get_by_label("Sentence").fill("Arden lies on the river Ouse.")
    page.get_by_role("button", name="Ouse").click()
    page.get_by_role("button", name="Arden").click()
    said = Client(site.url).fill("[MASK] lies on the river [MASK].")
    expect(page.locator(".mask")).to_have_count(2)
    names = page.locator(".predictions .name").all_inner_texts()
    assert names == [p["text"].replace("##", "…") for mask in said["masks"] for p in mask]
    assert page.locator(".card h3").all_inner_texts() == [p["title"] for p in said["passages"]]
    effects = page.locator(".effect > span:first-child").all_inner_texts()
    assert [e.startswith("▲ raised") for e in effects] == [p["utility"] >= 0 for p in said["passages"]]
    page.get_by_role("button", name="Arden, masked").click()
    expect(page.locator(".mask")).to_have_count(1)


def test_a_document_that_is_added_changes_the_watched_answer_and_one_deleted_is_gone(visit, site) -> None:
    page = visit.open("knowledge")
    page.get_by_label("Question").fill("zanzibar")
    page.get_by_role("button", name="Ask now").click()
    page.wait_for_selector(".watched li")
    page.get_by_label("Title", exact=True).fill("Zanzibar")
    page.get_by_label("Text").fill("Zanzibar sells cloves to zanzibar and zanzibar.")
    page.get_by_role("button", name="Add", exact=True).click()
    page.wait_for_selector(".problem")  # no token yet
    assert "token" in page.locator(".problem").inner_text()
    visit.wrong.clear()  # the browser notes the 401
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Add", exact=True).click()
    page.wait_for_selector(".done")
    assert "Added: Zanzibar, 1 new passage" in page.locator(".done").inner_text()
    expect(page.locator(".watched li")).to_have_count(2)
    expect(page.locator(".watched li").first).to_contain_text("added Zanzibar")
    assert page.get_by_label("Token").input_value() == TOKEN
    page.get_by_label("Search").fill("Zanzibar cloves")
    page.get_by_label("BM25").check()
    page.get_by_role("button", name="Search").click()
    expect(page.locator(".found .card h3").first).to_have_text("Zanzibar")
    page.get_by_role("button", name="Delete document").first.click()
    page.get_by_label("Title", exact=True).click()  # to leave the button is to change one's mind
    expect(page.get_by_role("button", name="Delete for good?")).to_have_count(0)
    page.get_by_role("button", name="Delete document").first.click()
    page.get_by_role("button", name="Delete for good?").click()
    expect(page.locator(".watched li")).to_have_count(3)
    expect(page.locator(".found")).not_to_contain_text("Zanzibar")
    expect(page.locator(".versions .used")).to_have_count(2)
    assert "Zanzibar" not in {p.title for p in Client(site.url).search("Zanzibar cloves", method="bm25")}


def test_back_leaves_a_search_that_was_made_when_its_view_was_opened(visit, site) -> None:
    page = visit.open("fill")
    page.evaluate("location.hash = '#knowledge?search=wool'")  # without a method, as a person may write it
    page.wait_for_selector(".found .card")
    searched = page.url
    assert searched.endswith("#knowledge?search=wool&method=hybrid")
    page.get_by_role("link", name="Ask").click()
    page.wait_for_selector(".welcome")
    page.get_by_role("link", name="Knowledge").click()  # repeats the last search
    page.wait_for_selector(".found .card")
    assert page.url == searched
    page.get_by_label("BM25").check()
    expect(page).to_have_url(searched.replace("hybrid", "bm25"))
    for there, seen in ((searched, ".found .card"), (f"{site.url}/#ask", ".welcome")):
        page.go_back()
        page.wait_for_selector(seen)
        assert page.url == there
    page.go_back()
    page.wait_for_selector(".found .card")
    page.go_back()
    page.wait_for_selector(".words")
    assert page.url == f"{site.url}/#fill"


def test_a_passage_has_a_page_with_its_neighbours(visit, site) -> None:
    (first,) = Client(site.url).search("Arden lies on the river", 1, method="bm25")
    page = visit.open(f"passage/{first.id}")
    assert page.locator(".passage .text").inner_text() == first.text
    page.get_by_role("link", name="Next passage").click()
    expect(page.locator(".passage .text")).not_to_have_text(first.text)
    assert page.locator("h1").inner_text() == first.title


def test_a_passage_without_a_title_has_the_id_of_its_document_as_its_name(visit, site) -> None:
    client = Client(site.url, TOKEN)
    client.add([{"id": "crawl.jsonl:7", "title": "", "text": "Quince is grown in Tamsel."}])
    try:
        (found,) = client.search("quince Tamsel", 1, method="bm25")
        assert visit.open(f"passage/{found.id}").locator("h1").inner_text() == "crawl.jsonl:7"
        page = visit.open("knowledge?search=quince+Tamsel&method=bm25")
        expect(page.locator(".found .card h3").first).to_have_text("crawl.jsonl:7")
        page = visit.open("ask?question=Where+is+quince+grown&method=bm25")
        expect(page.locator(".card h3").filter(has_text="crawl.jsonl:7")).to_have_count(1)
    finally:
        client.delete("crawl.jsonl:7")


def test_what_comes_late_does_not_appear_in_another_view(visit, site) -> None:
    (first,) = Client(site.url).search("Arden lies on the river", 1, method="bm25")
    page, late = visit.open("ask"), []
    page.route("**/passages/*", lambda route: late.append(route))
    page.evaluate(f"location.hash = '#passage/{first.id}'")
    while not late:
        page.wait_for_timeout(10)
    page.evaluate("location.hash = '#fill'")
    page.wait_for_selector(".words")
    with page.expect_response("**/passages/*") as response:
        late[0].continue_()
    response.value.finished()
    page.wait_for_timeout(100)
    assert page.locator(".words").count() == 1 and page.locator(".passage").count() == 0


@pytest.mark.parametrize("late", ["versions", "documents"])
def test_a_late_response_of_the_knowledge_view_leaves_the_address_of_another_view(visit, site, late) -> None:
    page, held = visit.open("knowledge?search=wool&method=bm25"), []
    page.wait_for_selector(".found .card")
    page.route(f"**/v1/{late}", lambda route: held.append(route))
    if late == "versions":
        page.evaluate("location.hash = '#knowledge?search=salt&method=bm25'")
    else:
        page.get_by_label("Title", exact=True).fill("Arden")
        page.get_by_label("Text").fill("Arden")
        page.get_by_role("button", name="Add", exact=True).click()
    while not held:
        page.wait_for_timeout(10)
    page.evaluate("location.hash = '#fill'")
    page.wait_for_selector(".predictions")
    searches: list[str] = []
    page.on("request", lambda request: searches.append(request.url) if "retrieve" in request.url else None)
    with page.expect_response("**/v1/versions") as response:
        if late == "versions":
            held[0].continue_()
        else:  # as if the document had been added; the view then reads the versions again
            held[0].fulfill(json={"ids": ["Arden"], "added": 1, "passages_added": 1})
    response.value.finished()
    page.wait_for_timeout(100)
    assert page.url == f"{site.url}/#fill" and searches == []


@pytest.fixture
def trainer(runs) -> Iterator[Any]:
    """The lock that a run holds while it trains."""
    with (runs / "pretrain.training" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


@pytest.mark.slow
def test_a_run_whose_process_has_ended_is_shown_as_stopped(visit, trainer) -> None:
    page = visit.open("training")
    expect(page.locator(".state .dot.training")).to_be_visible()
    fcntl.flock(trainer, fcntl.LOCK_UN)
    expect(page.locator(".state")).to_contain_text("stopped before its end (killed or interrupted), step 5")
    expect(page.locator(".state .dot.stopped")).to_be_visible()


def test_curves_grow_while_the_run_trains(visit, runs, trainer) -> None:
    page = visit.open("training")
    page.wait_for_selector(".chart")
    titles = page.locator(".chart b").all_inner_texts()
    assert titles[:4] == ["Loss", "Retrieval utility", "Null passage, p(z|x)", "Masked facts found"]
    assert "Index age" in titles and "Candidate freshness" in titles and "Questions found" not in titles
    expect(page.locator(".state")).to_contain_text("training, step 5")
    line = page.locator(".chart path.line").first
    before = line.get_attribute("d").count("L")
    with (runs / "pretrain.training" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "seconds": 3, "loss": 0.125}) + "\n")
    expect(page.locator(".chart .reading").first).to_have_text("0.125")
    assert line.get_attribute("d").count("L") == before + 1
    page.locator(".chart svg").first.hover(position={"x": 60, "y": 50})
    assert "at 0" in page.locator(".chart .reading").first.inner_text()


def test_the_first_run_of_an_empty_folder_appears_by_itself(browser, tiny_kb, qa_model, tmp_path) -> None:
    page = browser.new_page()
    with running(tiny_kb.folder, qa_model, token=None, runs=tmp_path) as server:
        page.goto(f"{server.url}/#training")
        expect(page.locator("main .hint")).to_have_text("There is no training run in this folder yet.")
        write_refreshed_run(tmp_path / "first")
        expect(page.locator(".strip")).to_be_visible()
        expect(page.get_by_label("Run", exact=True)).to_have_value("first")
        assert page.locator("main .hint").count() == 0
    page.close()


def test_new_runs_and_states_appear_in_the_lists_of_runs_without_a_change_of_selection_or_focus(
    visit, runs, trainer
) -> None:
    page = visit.open("training/table%2Frefreshed")
    run, other = page.get_by_label("Run", exact=True), page.get_by_label("Compare with")
    expect(run.locator("option", has_text="pretrain (training)")).to_have_count(1)
    run.focus()
    write_refreshed_run(runs / "added")
    try:
        fcntl.flock(trainer, fcntl.LOCK_UN)
        for field in (run, other):
            expect(field.locator("option", has_text="pretrain (stopped)")).to_have_count(1)
            expect(field.locator("option", has_text="added")).to_have_count(1)
        assert run.evaluate("e => e === document.activeElement")
        assert (run.input_value(), other.input_value()) == ("table/refreshed", "")
        assert other.locator("option[value='table/refreshed']").count() == 0
    finally:
        shutil.rmtree(runs / "added")


def test_the_refreshes_of_a_killed_run_in_a_subfolder_are_a_strip_under_the_curves(visit) -> None:
    page = visit.open("training")
    page.get_by_label("Run", exact=True).select_option("table/refreshed")
    expect(page.locator(".state")).to_contain_text("killed or interrupted")
    strip = page.locator(".strip")
    assert page.locator(".panels > *").last.evaluate("e => e.classList.contains('strip')")
    expect(strip.locator("rect.building")).to_have_count(4)  # three versions and the build that was killed
    assert strip.locator("rect.using").count() == 2 and strip.locator(".ended").count() == 2
    strip.get_by_text("All versions").click()
    assert strip.locator("tbody tr").all_inner_texts() == [
        "1\t0\t4\t\t0",
        "2\t20\t10\t0.5\t40",
        "3\t60\t15\t\trefused",
    ]
    box = lambda kind, n: strip.locator(f"rect{kind}").nth(n).bounding_box()  # noqa: E731
    whole = box(".using", 1)["x"] + box(".using", 1)["width"] - box(".using", 0)["x"]
    # Build 2 lasted 10 s, 10 steps, from step 20 on; it waited until step 40.
    assert box(".building", 1)["width"] / whole == pytest.approx(0.1, abs=0.01)
    assert (box(".waiting", 0)["x"] - box(".using", 0)["x"]) / whole == pytest.approx(0.3, abs=0.02)
    assert (box(".using", 1)["x"] - box(".using", 0)["x"]) / whole == pytest.approx(0.4, abs=0.02)
    picture = strip.locator("svg")
    picture.hover(position={"x": picture.bounding_box()["width"] * (52 + 0.35 * 1016) / 1080, "y": 20})
    expect(strip.locator(".reading")).to_have_text("version 1, 35 steps old; version 2 waits at 35")
    loss = page.locator(".chart").first
    expect(loss.locator(".reading")).to_have_text(
        re.compile(r"1\.[67] at (30|40)")
    )  # one cursor for all charts
    assert serious_findings(page) == []


def test_values_are_read_by_keyboard_and_stay_while_the_run_grows(visit, runs) -> None:
    page = visit.open("training/table%2Frefreshed")
    loss = page.locator(".chart").first
    loss.locator("svg").focus()
    page.keyboard.press("End")
    expect(loss.locator(".reading")).to_have_text("1 at 100")
    page.keyboard.press("PageDown")
    expect(loss.locator(".reading")).to_have_text("1.2 at 80")
    metrics = runs / "table" / "refreshed.training" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 100, "seconds": 100, "dev_em": 7.0}) + "\n")
    os.utime(metrics, (1, 1))
    expect(page.locator(".chart", has_text="Dev exact match")).to_be_visible()
    assert page.evaluate("document.activeElement.closest('.chart').dataset.title") == "Loss"
    expect(loss.locator(".reading")).to_have_text("1.2 at 80")
    page.keyboard.press("Escape")
    expect(loss.locator(".reading")).to_have_text("1")


def test_two_runs_lie_over_each_other(visit) -> None:
    page = visit.open("training")
    page.get_by_label("Compare with").select_option("table/refreshed")
    expect(page.locator(".state")).to_have_count(2)
    assert page.url.endswith("#training/pretrain?with=table%2Frefreshed")
    loss = page.locator(".chart").first
    expect(loss.locator("path.line")).to_have_count(2)
    assert loss.locator("path.run-1").count() == 1
    expect(loss.locator(".reading")).to_have_text(re.compile(r"^[\d.]+ vs 1$"))
    assert loss.locator(".ended").count() == 2  # both runs were killed
    expect(page.locator(".strip b")).to_have_text("Index refreshes of table/refreshed")
    assert page.locator(".state b").all_inner_texts() == ["pretrain", "table/refreshed"]
    assert serious_findings(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.go_back()
    expect(page.locator(".state")).to_have_count(1)


@pytest.mark.slow
def test_the_api_is_described_for_people_without_another_host(visit, site) -> None:
    page = visit.page
    page.goto(f"{site.url}/docs")
    page.wait_for_selector(".request")
    described = httpx.get(site.url + "/openapi.json").json()
    expected = [
        f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods
    ]
    assert page.locator(".request h2").all_inner_texts() == expected
    answer = page.locator("#answer")
    assert "In which country is Mount Fuji?" in answer.locator("pre").first.inner_text()
    assert "null_probability" in answer.inner_text() and "top_k" in answer.inner_text()
    assert serious_findings(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    if picture := os.environ.get("REALM_SHOT"):
        page.screenshot(path=picture)
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.screenshot(path=picture.replace(".png", "-wide.png"))


def test_the_page_is_used_by_keyboard_alone(visit) -> None:
    page = visit.open("ask")
    page.keyboard.type(QUESTION)  # the question has the focus
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer")
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.wait_for_selector(".words")
    assert page.locator("nav a[aria-current]").inner_text() == "Fill"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.value").startswith("The pound")
    page.keyboard.press("Tab")  # Predict
    page.keyboard.press("Tab")  # The
    page.keyboard.press("Space")
    expect(page.locator(".mask")).to_have_count(2)
    assert page.evaluate("document.activeElement.textContent") == "[MASK]"  # the focus stays on the word
    page.keyboard.press("3")
    page.wait_for_selector(".side")
    page.keyboard.press("4")
    page.wait_for_selector(".chart")


def fill_view(visit: Visit, view: str) -> Any:
    if view == "ask":
        return visit.ask(QUESTION, "Compare")
    page = visit.open(view)
    if view == "knowledge":
        page.get_by_label("Search").fill(" ".join(TOWNS))
        page.keyboard.press("Enter")
    page.wait_for_selector({"fill": ".predictions", "knowledge": ".found .card", "training": ".chart"}[view])
    return page


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious_by_day_or_night(visit, view) -> None:
    assert serious_findings(fill_view(visit, view)) == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_has_nothing_beyond_its_edge(visit, view) -> None:
    visit.page.set_viewport_size({"width": 360, "height": 740})
    page = fill_view(visit, view)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    small = page.evaluate(
        "[...document.querySelectorAll('main button, nav a, main input:not([type=radio])')]"
        ".filter(e => e.offsetParent && e.getBoundingClientRect().height < 24).map(e => e.outerHTML)"
    )
    assert small == []
