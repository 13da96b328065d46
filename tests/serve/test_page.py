"""The page in a real headless Chromium: every view, hostile passages, keyboard, phones, and axe."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from realm.serve.client import Client
from tests.conftest import TOWNS
from tests.serve.conftest import TOKEN, Served, running

BROWSER = os.environ.get("REALM_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
if BROWSER is None:
    pytest.skip(
        "no Chromium here: `apt-get install chromium`, or name one in REALM_BROWSER", allow_module_level=True
    )
playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here: `pip install playwright`")

PATIENCE = 60_000  # milliseconds: other work may share the machine
expect = playwright.expect
expect.set_options(timeout=PATIENCE)
QUESTION = "who built a tower in Arden?"
VIEWS = ("ask", "fill", "knowledge", "training")
HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 2'>",
    '"><svg/onload=window.pwned=3>',
    "<a href='javascript:window.pwned=4'>Arden</a>",
    "<iframe srcdoc='<script>parent.pwned=5</script>'></iframe>",
    "{{constructor.constructor('window.pwned=6')()}}",
    "</p></main><style>*{display:none}</style><base href='https://evil.example/'>",
    "\u202e<b onmouseover=window.pwned=7>\u0000 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🏰",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses to be root in one
        browser = started.chromium.launch(executable_path=BROWSER, args=sandbox)
        yield browser
        browser.close()


def write_refreshed_run(folder: Path) -> None:
    """A killed run of 100 steps: version 2 is in use from step 40 on, version 3 is refused, a build was running at the end."""
    rows: list[dict[str, Any]] = []
    for step in range(10, 101, 10):
        snapshot = 0 if step <= 40 else 20
        building = float(step in (30, 40, 70, 80, 90, 100))
        rows.append({"step": step, "seconds": step, "loss": 2 - step / 100, "building": building})
        rows[-1]["index_age"] = step - 5.5 - snapshot  # the mean over the ten steps of the line
    rows.insert(8, {"step": 80, "seconds": 80, "index_step": 60, "index_number": 3, "build_seconds": 15})
    rows.insert(4, {"step": 40, "seconds": 40, "index_step": 20, "index_number": 2, "build_seconds": 10})
    rows[4]["swap_seconds"] = 0.5
    rows.insert(0, {"step": 0, "seconds": 0, "index_step": 0, "index_number": 1, "build_seconds": 4})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(folder / "metrics.jsonl", (1, 1))  # so that it is not the run with the latest change


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_refreshed_run(folder / "table" / "refreshed.training")
    (folder / "pretrain.training").mkdir()
    rows = [
        {
            "step": n,
            "seconds": n / 2,
            "loss": 9 / (n + 1),
            "retrieval_utility": n / 9,
            "null_probability": 0.1,
            "index_age": n % 3,
        }
        for n in range(6)
    ]
    rows[0] |= {"probe_recall_1": 10.0, "probe_recall_5": 20.0, "probe_recall_20": 30.0}
    rows[5] |= {"probe_recall_1": 12.0, "probe_recall_5": 24.0, "probe_recall_20": 36.0, "churn": 0.25}
    (folder / "pretrain.training" / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return folder


@pytest.fixture(scope="module")
def site(
    tiny_kb: Any, qa_model: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server that a test may write to as long as it takes its writing back."""
    folder = tmp_path_factory.mktemp("site") / "kb"
    shutil.copytree(tiny_kb.folder, folder)
    with running(folder, qa_model, runs=runs) as server:
        yield server


class Visit:
    """A page, and everything that went wrong in it."""

    def __init__(self, page: Any, url: str):
        self.page, self.url = page, url
        self.wrong: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}") or dialog.dismiss())
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def open(self, view: str) -> Any:
        self.page.goto(f"{self.url}/#{view}")
        self.page.wait_for_selector("main > *")
        return self.page

    def ask(self, question: str, method: str = "Dense") -> Any:
        page = self.open("ask")
        page.get_by_label("Question").fill(question)
        page.get_by_label(method).check()
        page.get_by_role("button", name="Ask").click()
        page.wait_for_selector(".results:not([aria-busy]) .answer")  # and not the one of the method before
        return page


@pytest.fixture
def visit(browser: Any, site: Served) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    seen = Visit(context.new_page(), site.url)
    yield seen
    context.close()
    assert seen.wrong == []
    assert seen.hosts <= {site.url.removeprefix("http://")}


# -- the views


def test_ask_shows_the_servers_answer_and_the_passages_it_was_read_from(visit, site) -> None:
    said = Client(site.url).answer(QUESTION)
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
        said = Client(site.url).answer("Arden wool", method)
        titles = page.locator(".column").nth(place).locator(".card h4").all_inner_texts()
        assert titles == [one.title for one in said.passages]
    boxes = [page.locator(".column").nth(place).bounding_box() for place in range(3)]
    assert boxes[0]["y"] == boxes[1]["y"] == boxes[2]["y"] and boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]


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
    assert "Zanzibar" not in {p["title"] for p in Client(site.url).retrieve("Zanzibar cloves", "bm25")}


def test_a_passage_has_a_page_with_its_neighbours(visit, site) -> None:
    (first,) = Client(site.url).retrieve("Arden lies on the river", "bm25", 1)
    page = visit.open(f"passage/{first['id']}")
    assert page.locator(".passage .text").inner_text() == first["text"]
    page.get_by_role("link", name="Next passage").click()
    expect(page.locator(".passage .text")).not_to_have_text(first["text"])
    assert page.locator("h1").inner_text() == first["title"]


def test_what_comes_late_does_not_appear_in_another_view(visit, site) -> None:
    (first,) = Client(site.url).retrieve("Arden lies on the river", "bm25", 1)
    page, late = visit.open("ask"), []
    page.route("**/passages/*", lambda route: late.append(route))
    page.evaluate(f"location.hash = '#passage/{first['id']}'")
    while not late:
        page.wait_for_timeout(10)
    page.evaluate("location.hash = '#fill'")
    page.wait_for_selector(".words")
    with page.expect_response("**/passages/*") as response:
        late[0].continue_()
    response.value.finished()
    page.wait_for_timeout(100)
    assert page.locator(".words").count() == 1 and page.locator(".passage").count() == 0


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
    said = Client(visit.url).answer(QUESTION, top_k=3)
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
    other.goto(first)
    expect(other.locator(".asked")).to_have_text(QUESTION, timeout=PATIENCE)
    assert other.get_by_label("BM25").is_checked()
    other.close()


def test_an_opened_passage_keeps_its_mark_and_names_its_document(visit, site) -> None:
    page = visit.ask(QUESTION)
    marked = page.locator(".card.chosen mark").inner_text()
    passage = Client(site.url).answer(QUESTION).answers[0].passage
    page.locator(".card.chosen h3 a").click()
    expect(page.locator(".passage mark")).to_have_text(marked)
    assert Client(site.url).passage(passage.id)["document"] in page.locator(".passage .source").inner_text()
    page.go_back()
    expect(page.locator(".asked")).to_have_text(QUESTION)
    page.goto(f"{site.url}/#passage/{passage.id}?start=x&end=99999999")
    expect(page.locator(".passage .text")).to_have_text(passage.text)


def test_an_empty_and_a_long_question_are_said_so_and_not_asked(visit) -> None:
    page, asked = visit.open("ask"), []
    page.on("request", lambda request: asked.append(request.url) if "/answer" in request.url else None)
    field = page.get_by_label("Question")
    field.fill("   ")
    page.keyboard.press("Enter")
    expect(page.locator(".ask .note")).to_have_text("Type something first.")
    field.fill("🏰" * 2001)
    expect(page.locator(".ask .note")).to_have_text("2,001 characters: shorten it to 2,000.")
    page.keyboard.press("Enter")
    assert len(field.input_value()) == 2001 and asked == []
    field.fill("🏰" * 2000)
    expect(page.locator(".ask .note")).to_be_hidden()


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
    [(0.83, "Very likely right", "up"), (0.5, "Probably right", "accent"), (0.2, "Unsure", "warn")],
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
    said = Client(site.url).answer(QUESTION)
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
    best = Client(site.url).answer(QUESTION).answers[0]
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
        assert (line["answers"], line["passage_id"], line["verdict"]) == (["Norden"], "astral", "better")
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


@pytest.fixture
def trainer(runs) -> Iterator[Any]:
    """The lock that a run holds while it trains."""
    with (runs / "pretrain.training" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


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


# -- safety


def plain(text: str) -> str:
    """Without the characters that a page may not or need not show."""
    return " ".join(re.sub("[\u0000\u202e\ufffd]", "", text).split())


def test_hostile_passages_are_shown_as_text_and_nothing_runs(visit, site) -> None:
    client = Client(site.url, TOKEN)
    documents = [
        {
            "id": f"hostile {n}{payload}",
            "title": f"Hostile {payload}",
            "text": f"Hostile {n} {payload} end.",
            "fields": {
                "note": payload,
                "url": "javascript:window.pwned=9",
                "source": f"https://example.org/{n}",
            },
        }
        for n, payload in enumerate(HOSTILE)
    ]
    client.add(documents)
    try:
        page = visit.ask("Hostile", "BM25")
        page.get_by_label("Read").select_option("20")
        expect(page.locator(".card")).to_have_count(len(client.retrieve("Hostile", "bm25", 20)))
        shown = page.locator("main").inner_text()
        for payload in HOSTILE:
            assert plain(payload) in plain(shown)
        page = visit.open("knowledge")
        page.get_by_label("Search").fill("Hostile")
        page.get_by_label("BM25").check()
        page.get_by_role("button", name="Search").click()
        page.wait_for_selector(".found .card")
        expect(page.locator(".found .card")).to_have_count(10)
        assert "<script>window.pwned = 1</script>" in page.locator(".found").inner_text()
        for passage in client.retrieve("Hostile", "bm25", 20):
            page = visit.open(f"passage/{passage['id']}")
            page.wait_for_selector(".passage")
            fields = page.locator(".fields")
            assert plain(passage["fields"]["note"]) in plain(fields.inner_text())
            expect(fields.get_by_role("link")).to_have_count(1)
            expect(fields.get_by_role("link")).to_have_attribute("href", passage["fields"]["source"])
        page.wait_for_timeout(100)
        assert page.evaluate(
            "window.pwned === undefined && document.scripts.length === 1 && !document.querySelector('iframe, base')"
        )
        page = visit.open("fill")
        page.get_by_label("Sentence").fill("[MASK] <img src=x onerror=window.pwned=8>")
        page.get_by_role("button", name="Predict").click()
        page.wait_for_selector(".predictions")
        assert page.evaluate("window.pwned === undefined")
    finally:
        for document in documents:
            client.delete(document["id"])


def test_hostile_titles_examples_and_names_of_a_first_visit_are_shown_as_text(
    visit, site, runs, monkeypatch
) -> None:
    for name, values in (("titles", HOSTILE[:6]), ("examples", HOSTILE[:3])):
        monkeypatch.setitem(site.knowledge.current.__dict__, name, values)
    page = visit.open("ask")
    expect(page.locator(".examples button")).to_have_count(3)
    assert [plain(text) for text in page.locator(".examples button").all_inner_texts()] == [
        plain(payload) for payload in HOSTILE[:3]
    ]
    assert page.locator(".welcome p a").count() == 6
    assert page.get_by_label("Question").input_value() == HOSTILE[0]
    hostile = runs / "<img src=x onerror=window.pwned=9>" / "?a&b#c%2F"
    hostile.mkdir(parents=True)
    (hostile / "metrics.jsonl").write_text('{"step": 1, "seconds": 1, "loss": 2.0}\n')
    os.utime(hostile / "metrics.jsonl", (0, 0))
    try:
        page = visit.open("training/pretrain")
        page.get_by_label("Compare with").select_option(str(hostile.relative_to(runs)))
        expect(page.locator(".state b").nth(1)).to_have_text(str(hostile.relative_to(runs)))
        assert page.evaluate("window.pwned === undefined && document.scripts.length === 1")
    finally:
        shutil.rmtree(hostile.parent)


def test_offsets_count_characters_also_beyond_the_basic_plane(visit, site) -> None:
    client = Client(site.url, TOKEN)
    client.add([{"id": "astral", "title": "Astral", "text": "🏰🏰🏰 Quokka 𝔘 lives in Norden."}])
    try:
        said = client.answer("Quokka", "bm25")
        page = visit.ask("Quokka", "BM25")
        assert page.locator(".card.chosen mark").inner_text() == said.answers[0].text
        assert page.locator(".answer").inner_text() == said.answers[0].text
    finally:
        client.delete("astral")


def test_the_policy_stops_a_script_that_got_in_anyway(browser, site) -> None:
    page = browser.new_page()
    page.goto(site.url)
    with pytest.raises(playwright.Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    with pytest.raises(playwright.Error, match="TrustedScript"):
        page.evaluate(
            "const s = document.createElement('script'); s.text = 'window.pwned = 1'; document.body.append(s)"
        )
    assert page.evaluate("fetch('http://127.0.0.2:1/').then(() => 'out', error => String(error))").startswith(
        "TypeError"
    )
    assert page.evaluate("window.pwned === undefined")
    page.close()


# -- everybody


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


def serious_findings(page: Any) -> list[tuple[str, str, str]]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    bad = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for one in axe.run(page).response["violations"]:
            if one["impact"] in ("serious", "critical"):
                bad.append((scheme, one["id"], one["nodes"][0]["html"]))
    return bad


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious_by_day_or_night(visit, view) -> None:
    assert serious_findings(fill_view(visit, view)) == []


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


def test_a_private_server_asks_for_the_token_once(browser, tiny_kb, qa_model) -> None:
    page = browser.new_page()
    with running(tiny_kb.folder, qa_model, token=None, read_token="the readers' own token") as server:
        page.goto(f"{server.url}/#ask?question=Arden")
        page.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator(".problem")).to_have_text("This token is not the server's.")
        assert serious_findings(page) == []
        page.get_by_label("Token").fill("the readers' own token")
        page.keyboard.press("Enter")
        page.wait_for_selector(".results:not([aria-busy]) .answer")
        page.reload()
        page.wait_for_selector(".results:not([aria-busy]) .answer")
    page.close()


def test_a_server_that_is_gone_is_said_so(browser, tiny_kb, qa_model) -> None:
    page = browser.new_page()
    with running(tiny_kb.folder, qa_model, token=None) as server:
        page.goto(server.url)
        page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Ask").click()
    page.wait_for_selector(".problem")
    assert page.locator(".problem").inner_text() == "The server cannot be reached."
    page.close()
