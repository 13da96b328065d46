"""The page's first view in a real headless Chromium: questions, answers and their passages, and feedback on answers."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from realm.serve.client import Client
from tests.serve.asking import QUESTION
from tests.serve.conftest import CONFIG, TOKEN, Served, running
from tests.serve.visiting import PATIENCE, browser, expect, runs, serious_findings, site, visit

__all__ = ["browser", "runs", "site", "visit"]
pytestmark = pytest.mark.page


def test_ask_shows_the_servers_answer_and_the_passages_it_was_read_from(visit, site) -> None:
    said = Client(site.url).answers(QUESTION)
    page = visit.ask(QUESTION)
    assert page.locator(".answer").inner_text() == said.answers[0].text
    cards = page.locator(".evidence .card")
    assert cards.count() == len(said.passages)
    for place, passage in enumerate(said.passages):
        assert cards.nth(place).locator(".text").inner_text() == passage.text
        assert cards.nth(place).locator("h3").inner_text() == passage.title
        span = passage.span
        if passage.id == said.answers[0].passage.id:
            span = said.answers[0]
        href = f"#passage/{passage.id}?start={span.start}&end={span.end}"
        assert cards.nth(place).locator("a").get_attribute("href") == href
        if passage.id != said.answers[0].passage.id:
            assert cards.nth(place).locator("mark").inner_text() == span.text
            assert f"span score {span.score:.2f}" in cards.nth(place).locator(".score").inner_text()
        shown = cards.nth(place).locator(".prior b").inner_text()
        assert float(shown.strip("<%")) == pytest.approx(100 * passage.probability, abs=0.51)
    chosen = page.locator(".card.chosen")
    assert chosen.locator("mark").inner_text() == said.answers[0].text
    assert f"{said.answers[0].score:.2f}" in chosen.locator(".score").inner_text()
    facts = page.locator(".facts").inner_text()
    for word in ("Null passage", "queue", "embed", "search", "read", "version 1", "step 3", "old"):
        assert word in facts
    page.locator(".other").first.click()
    assert page.locator(".answer").inner_text() == said.answers[1].text
    assert page.locator(".card.chosen mark").inner_text() == said.answers[1].text


def test_three_rankings_stand_side_by_side(visit, site) -> None:
    page = visit.ask("Arden wool", "Compare")
    assert page.locator(".column").count() == 3
    for place, method in enumerate(("dense", "bm25", "hybrid")):
        said = Client(site.url).answers("Arden wool", method=method)
        titles = page.locator(".column").nth(place).locator(".card h4").all_inner_texts()
        assert titles == [one.title for one in said.passages]
    boxes = [page.locator(".column").nth(place).bounding_box() for place in range(3)]
    assert boxes[0]["y"] == boxes[1]["y"] == boxes[2]["y"] and boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]


def test_the_answer_shown_is_that_of_the_last_question(visit) -> None:
    page, asked = visit.open("ask"), []
    stopped: list[str] = []
    page.on("requestfailed", lambda request: stopped.append(json.loads(request.post_data)["question"]))
    page.route("**/answer", lambda route: asked.append(route))

    def wait_for_request(count: int) -> None:
        while len(asked) < count:
            page.wait_for_timeout(10)

    page.get_by_label("Question").fill("first?")
    page.keyboard.press("Enter")
    wait_for_request(1)
    page.get_by_label("Read").select_option("3")  # asks by itself
    wait_for_request(2)
    page.get_by_label("Question").fill(QUESTION)
    page.keyboard.press("Enter")
    wait_for_request(3)
    assert [json.loads(one.request.post_data)["question"] for one in asked] == ["first?", "first?", QUESTION]
    while len(stopped) < 2:  # the older ones keep the server busy no more
        page.wait_for_timeout(10)
    assert stopped == ["first?", "first?"]
    asked[2].continue_()
    expect(page.locator(".card")).to_have_count(3)
    assert page.locator(".asked").inner_text() == QUESTION
    said = Client(visit.url).answers(QUESTION, top_k=3)
    assert page.locator(".answer").inner_text() == said.answers[0].text


def test_the_address_holds_the_question_and_back_goes_to_the_one_before(visit, browser) -> None:
    page = visit.ask(QUESTION, "BM25")
    first = page.url
    page.get_by_label("Question").fill("Arden wool & more?")
    page.keyboard.press("Enter")
    expect(page.locator(".asked")).to_have_text("Arden wool & more?")
    expect(page.locator(".results:not([aria-busy]) .answer")).to_have_count(1)
    page.go_back()
    expect(page.locator(".asked")).to_have_text(QUESTION)
    assert page.url == first and page.get_by_label("Question").input_value() == QUESTION
    page.go_forward()
    expect(page.locator(".asked")).to_have_text("Arden wool & more?")
    page.reload()
    expect(page.locator(".asked")).to_have_text("Arden wool & more?")
    other = browser.new_page()
    other.goto(f"{visit.url}/#fill")
    other.wait_for_selector(".words")
    other.evaluate("address => { location.hash = address }", first.split("#")[1].replace("&read=5", ""))
    expect(other.locator(".asked")).to_have_text(QUESTION, timeout=PATIENCE)
    assert other.get_by_label("BM25").is_checked() and other.url == first
    other.go_back()  # opening a shared address is one entry of the history
    other.wait_for_selector(".words")
    other.close()


def test_an_opened_passage_keeps_its_mark_and_names_its_document(visit, site) -> None:
    page = visit.ask(QUESTION)
    marked = page.locator(".card.chosen mark").inner_text()
    passage = Client(site.url).answers(QUESTION).answers[0].passage
    page.locator(".card.chosen h3 a").click()
    expect(page.locator(".passage mark")).to_have_text(marked)
    assert Client(site.url).passage(passage.id)["document"] in page.locator(".passage .source").inner_text()
    page.go_back()
    expect(page.locator(".asked")).to_have_text(QUESTION)
    page.goto(f"{site.url}/#passage/{passage.id}?start=x&end=99999999")
    expect(page.locator(".passage .text")).to_have_text(passage.text)


def test_an_empty_and_a_long_question_are_messages_and_not_requests(visit) -> None:
    page, asked = visit.open("ask"), []
    page.on("request", lambda request: asked.append(request.url) if "/answer" in request.url else None)
    field = page.get_by_label("Question")
    field.fill("   ")
    page.keyboard.press("Enter")
    expect(page.locator(".line.big .note")).to_have_text("Type something first.")
    field.fill("🏰" * 2001)
    expect(page.locator(".line.big .note")).to_have_text("2,001 characters: shorten it to 2,000.")
    page.keyboard.press("Enter")
    assert len(field.input_value()) == 2001 and asked == []
    field.fill("🏰" * 2000)
    expect(page.locator(".line.big .note")).to_be_hidden()


def test_a_slash_goes_to_the_field_and_is_typed_only_in_the_midst_of_a_question(visit) -> None:
    page = visit.open("ask")
    field = page.get_by_label("Question")
    expect(field).not_to_have_value("")
    page.keyboard.press("/")  # the field has the focus already, and its example is selected
    expect(field).not_to_have_value(re.compile("/"))
    page.keyboard.type("AC/DC")
    assert field.input_value() == "AC/DC"
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.press("/")
    assert field.input_value() == "AC/DC" and field.evaluate("e => e === document.activeElement")


def test_example_questions_come_from_the_documents_and_are_asked_by_pressing_them(
    visit, site, monkeypatch
) -> None:
    monkeypatch.setitem(site.knowledge.current.__dict__, "examples", ["where is Arden?", "what is wool?"])
    page = visit.open("ask")
    page.get_by_role("button", name="what is wool?").click()
    expect(page.locator(".asked")).to_have_text("what is wool?")
    page.wait_for_selector(".results:not([aria-busy]) .answer")
    assert "question=what+is+wool%3F" in page.url


def test_a_first_visit_shows_the_corpus_and_enter_asks_the_example_in_the_field(
    visit, site, monkeypatch
) -> None:
    monkeypatch.setitem(site.knowledge.current.__dict__, "examples", ["where is Arden?", "what is wool?"])
    corpus = Client(site.url).corpus()
    page = visit.open("ask")
    welcome = page.locator(".welcome")
    expect(welcome.locator("h2")).to_have_text(site.kb.parent.name)
    expect(welcome).to_contain_text(f"{corpus['documents']} documents in {corpus['passages']} passages")
    assert welcome.locator("p a").all_inner_texts() == corpus["titles"]
    field = page.get_by_label("Question")
    expect(field).to_have_value("where is Arden?")
    assert serious_findings(page) == []
    page.get_by_label("BM25").check()  # asks nothing, because nobody has asked for the example yet
    assert page.locator(".asked").count() == 0
    field.click()
    page.keyboard.type("what of salt?")  # a click selects the example, so that typing replaces it
    expect(field).to_have_value("what of salt?")
    page.reload()
    expect(field).to_have_value("where is Arden?")
    page.keyboard.press("Enter")
    expect(page.locator(".asked")).to_have_text("where is Arden?")
    page.goto(f"{site.url}/#knowledge")
    page.goto(f"{site.url}/#ask")
    expect(page.locator(".asked")).to_have_text("where is Arden?")
    assert page.locator(".welcome").count() == 0


def test_without_made_questions_the_examples_are_about_titles(visit, site, monkeypatch) -> None:
    monkeypatch.setitem(site.knowledge.current.__dict__, "examples", [])
    page = visit.open("ask")
    shown = page.locator(".examples button")
    expect(shown).to_have_count(3)
    titles = Client(site.url).corpus()["titles"]
    assert shown.all_inner_texts() == [f"What is said about {title}?" for title in titles[:3]]
    page.locator(".welcome p a").first.click()
    expect(page.locator(".found .card h3").first).to_be_visible()
    assert page.get_by_label("Search").input_value() == titles[0]


def change_answers(page: Any, **to: Any) -> None:
    """Lets the page see answers with another `found`, or with another probability of the best answer."""

    def change(route: Any) -> None:
        response = route.fetch()
        row = response.json()
        row["answers"][0]["probability"] = to.get("probability", row["answers"][0]["probability"])
        route.fulfill(response=response, json=row | {"found": to.get("found", True)})

    page.route("**/v1/answer", change)


@pytest.mark.parametrize(
    ("probability", "words", "colour"),
    [
        (0.83, "Very likely right", "up"),
        pytest.param(0.5, "Probably right", "accent", marks=pytest.mark.slow),
        pytest.param(0.2, "Unsure", "warn", marks=pytest.mark.slow),
    ],
)
def test_an_answer_has_its_probability_as_a_number_in_words_and_in_a_colour(
    visit, probability, words, colour
) -> None:
    change_answers(visit.page, probability=probability)
    page = visit.ask(QUESTION)
    shown = page.locator(".best .sure")
    assert shown.inner_text().split() == [*words.split(), f"{100 * probability:.0f}%"]
    wanted = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{colour}')")
    drawn = shown.evaluate("e => getComputedStyle(e).color")
    assert drawn == f"rgb({', '.join(str(int(wanted[place : place + 2], 16)) for place in (1, 3, 5))})"
    assert serious_findings(page) == []


def test_without_a_confident_answer_the_passages_come_first_and_the_guess_after_them(visit, site) -> None:
    said = Client(site.url).answers(QUESTION)
    change_answers(visit.page, found=False)
    page = visit.ask(QUESTION)
    assert page.locator(".verdict").inner_text().startswith("No confident answer")
    order = page.evaluate(
        "[...document.querySelectorAll('.verdict, .evidence, .answer')].map(e => e.className)"
    )
    assert order == ["verdict", "evidence", "answer"]
    assert page.locator(".answer").inner_text() == said.answers[0].text
    assert page.locator(".best .sure b").inner_text() == "A guess"
    assert page.locator(".evidence h2").inner_text() == "The best passages"
    boxes = [page.locator(name).bounding_box() for name in (".verdict", ".evidence", ".best")]
    assert boxes[0]["y"] < boxes[1]["y"] and boxes[1]["x"] < boxes[2]["x"]
    page.set_viewport_size({"width": 360, "height": 740})
    boxes = [page.locator(name).bounding_box() for name in (".verdict", ".evidence", ".best")]
    assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"]
    assert serious_findings(page) == []


def feedback_lines(site: Served, rejected: str = "") -> list[dict[str, Any]]:
    file = site.kb.with_name(f"kb.feedback.jsonl{rejected}")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_an_answer_is_marked_as_right_or_wrong_by_keyboard_alone(visit, site) -> None:
    best = Client(site.url).answers(QUESTION).answers[0]
    page = visit.ask(QUESTION)
    page.get_by_role("button", name="Right", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator(".feedback .problem")).to_contain_text("token for writing")
    assert page.evaluate("document.activeElement.type") == "password" and feedback_lines(site) == []
    page.keyboard.type("not the token")
    page.keyboard.press("Enter")
    expect(page.locator(".feedback .problem")).to_contain_text("writing needs the server's token")
    visit.wrong.clear()  # the browser notes the 401
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator(".feedback .done")).to_have_text("Saved as right.")
    page.get_by_role("button", name="Wrong").press("Enter")
    expect(page.locator(".feedback .done")).to_have_text("Saved as wrong.")
    page.get_by_role("button", name="Right", exact=True).press("Enter")
    expect(page.locator(".feedback .done")).to_have_text("This was already saved as right.")
    for lines in (feedback_lines(site), feedback_lines(site, ".rejected")):
        assert [(one["question"], one["answers"]) for one in lines] == [(QUESTION, [best.text])]
    assert serious_findings(page) == []


def test_a_better_answer_is_selected_in_a_passage_or_typed(visit, site) -> None:
    client = Client(site.url, TOKEN)
    client.add([{"id": "astral", "title": "Astral", "text": "🏰🏰🏰 Quokka 𝔘 lives in Norden 🏰 Tarn."}])
    try:
        visit.page.add_init_script(f"sessionStorage.setItem('realm-token', {json.dumps(TOKEN)})")
        page = visit.ask("Quokka", "BM25")
        page.get_by_role("button", name="Another answer").click()
        page.evaluate(
            "() => { const text = [...document.querySelectorAll('.text')].find(e => e.textContent.includes('Quokka'));"
            "const walk = document.createTreeWalker(text, NodeFilter.SHOW_TEXT); const range = document.createRange();"
            "let node; while ((node = walk.nextNode())) { const at = node.data.indexOf('Norden');"
            "if (at >= 0) { range.setStart(node, at); range.setEnd(node, at + 7); } }"
            "getSelection().removeAllRanges(); getSelection().addRange(range); }"
        )
        expect(page.get_by_label("Better answer")).to_have_value("Norden")
        expect(page.locator(".feedback .hint")).to_contain_text("Astral.")
        page.get_by_role("button", name="Save").click()
        expect(page.locator(".feedback .done")).to_have_text("Saved as better.")
        line = feedback_lines(site)[-1]
        assert (line["answers"], line["document_id"], line["verdict"]) == (["Norden"], "astral", "better")
        page.get_by_label("Better answer").fill("nowhere")
        expect(page.locator(".feedback .hint")).to_have_text("None of these passages has this text.")
        before = feedback_lines(site)
        page.keyboard.press("Enter")
        assert feedback_lines(site) == before
        page.get_by_label("Better answer").fill("🏰 Tarn")
        with page.expect_response("**/v1/feedback"):
            page.keyboard.press("Enter")
        assert feedback_lines(site)[-1]["answers"] == ["🏰 Tarn"]
        assert serious_findings(page) == []
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    finally:
        client.delete("astral")


def test_a_link_with_a_question_as_q_opens_its_answer(visit, site) -> None:
    visit.page.goto(f"{site.url}/?q=Arden+wool+%26+more%3F")
    expect(visit.page.locator(".asked")).to_have_text("Arden wool & more?")
    assert visit.page.url.startswith(f"{site.url}/#ask?question=Arden+wool+%26+more%3F")


def test_the_numbers_are_explained_where_they_stand(visit) -> None:
    page = visit.ask(QUESTION)
    meaning = page.get_by_text("The retriever's probability of passage z")
    assert not meaning.is_visible()
    page.get_by_text("What do p(z|x) and span score mean?").focus()
    page.keyboard.press("Enter")
    expect(meaning).to_be_visible()
    page.get_by_text("What do null passage and probability mean?").click()
    expect(page.get_by_text("An empty passage that is ranked together")).to_be_visible()
    assert serious_findings(page) == []
    page = visit.open("fill")
    page.wait_for_selector(".predictions")
    page.get_by_text("What do p(z|x), p(y|z,x), and nats mean?").click()
    expect(page.get_by_text("A difference of natural logarithms")).to_be_visible()
    assert serious_findings(page) == []


def test_the_answer_before_is_readable_while_the_next_is_awaited(visit) -> None:
    page = visit.ask(QUESTION, "Compare")
    awaited: list[Any] = []
    page.route("**/answer", lambda route: awaited.append(route))
    page.get_by_role("button", name="Ask").click()
    page.wait_for_selector(".results[aria-busy] .method")
    assert serious_findings(page) == []
    for route in awaited:
        route.continue_()
    page.wait_for_selector(".results:not([aria-busy]) .answer")
    assert len(awaited) == 3


def test_as_many_passages_are_read_as_the_server_is_set_to_unless_the_address_has_its_own_number(
    browser, tiny_kb, qa_model
) -> None:
    page = browser.new_page()
    with running(tiny_kb.folder, qa_model, replace(CONFIG, read=2), token=None) as server:
        page.goto(f"{server.url}/#ask?question=Arden")
        expect(page.locator(".card")).to_have_count(2)
        assert page.get_by_label("Read").locator("option").all_inner_texts() == ["2", "3", "5", "10", "20"]
        page.goto(f"{server.url}/#ask?question=Arden&read=4")
        expect(page.locator(".card")).to_have_count(4)
        expect(page.get_by_label("Read")).to_have_value("4")
        page.goto(f"{server.url}/#ask?question=Arden+wool&read=many")
        expect(page.locator(".asked")).to_have_text("Arden wool")
        expect(page.get_by_label("Read")).to_have_value("4")
    page.close()


def test_a_server_that_is_gone_is_a_message_on_the_page(browser, tiny_kb, qa_model) -> None:
    page = browser.new_page()
    with running(tiny_kb.folder, qa_model, token=None) as server:
        page.goto(server.url)
        page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Ask").click()
    page.wait_for_selector(".problem")
    assert page.locator(".problem").inner_text() == "The server cannot be reached."
    page.close()
