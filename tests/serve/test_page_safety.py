"""The page in a real headless Chromium with hostile passages and names, its content policy, and its token."""

import os
import re
import shutil

import pytest

from realm.serve.client import Client
from tests.serve.conftest import TOKEN, running
from tests.serve.visiting import browser, expect, playwright, runs, serious_findings, site, visit

__all__ = ["browser", "runs", "site", "visit"]
pytestmark = pytest.mark.page
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
        expect(page.locator(".card")).to_have_count(len(client.search("Hostile", 20, method="bm25")))
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
        for passage in client.search("Hostile", 20, method="bm25"):
            page = visit.open(f"passage/{passage.id}")
            page.wait_for_selector(".passage")
            fields = page.locator(".fields")
            assert plain(passage.fields["note"]) in plain(fields.inner_text())
            expect(fields.get_by_role("link")).to_have_count(1)
            expect(fields.get_by_role("link")).to_have_attribute("href", passage.fields["source"])
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
        said = client.answers("Quokka", method="bm25")
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


def test_a_wrong_token_for_writing_leaves_the_token_for_reading_in_use(browser, tiny_kb, qa_model) -> None:
    page = browser.new_page()
    with running(tiny_kb.folder, qa_model, read_token="the readers' own token") as server:
        page.goto(f"{server.url}/#knowledge")
        page.get_by_label("Token").fill("the readers' own token")
        page.keyboard.press("Enter")
        page.get_by_label("Title", exact=True).fill("Arden")
        page.get_by_label("Text").fill("Arden")
        page.get_by_label("Token").fill("mistyped")
        page.get_by_role("button", name="Add", exact=True).click()
        expect(page.locator(".said .problem")).to_contain_text("needs the server's token")
        page.get_by_role("link", name="Ask").click()
        page.get_by_label("Question").fill("Arden")
        page.keyboard.press("Enter")
        page.wait_for_selector(".results:not([aria-busy]) .answer")
    page.close()


@pytest.mark.parametrize("view", ["Fill", "Knowledge"])
def test_a_private_server_asks_again_for_a_token_that_it_no_longer_accepts(
    browser, tiny_kb, qa_model, view
) -> None:
    page = browser.new_page()
    with running(tiny_kb.folder, qa_model, token=None, read_token="the readers' own token") as server:
        page.goto(server.url)
        page.get_by_label("Token").fill("the readers' own token")
        page.keyboard.press("Enter")
        page.wait_for_selector(".welcome")
        page.evaluate("sessionStorage.setItem('realm-token', 'the token before')")
        page.get_by_role("link", name=view).click()
        page.get_by_label("Token").fill("the readers' own token")
        page.keyboard.press("Enter")
        page.wait_for_selector({"Fill": ".predictions", "Knowledge": ".versions .used"}[view])
    page.close()
