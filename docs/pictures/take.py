"""Takes the pictures of docs/serve.md from a running server that was started with --writable.

REALM_TOKEN=... realm serve --kb demo-from-text/kb --model demo-from-text/models/qa --runs demo-from-text/models --writable
REALM_TOKEN=... python docs/pictures/take.py http://127.0.0.1:8000
"""

import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from realm.serve.client import Client

MAXCOVERAGE = Image.Quantize.MAXCOVERAGE  # keeps colours of thin lines
HERE = Path(__file__).parent
QUESTION = "In which country is Mount Zamora?"
TITLE = "Mount Zamora"
TEXT = "Mount Zamora is an active stratovolcano with a summit elevation of 2,911 m. It is the highest mountain in Chile."


def first(page: Any, token: str) -> None:
    """Shows the corpus and the example questions, before the first question."""
    page.wait_for_selector(".welcome .hint")


def ask(page: Any, token: str) -> None:
    """Shows an answer with its evidence."""
    page.get_by_label("Question").fill("In which country is Mount Fuji?")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.wait_for_selector(".answer")


def compare(page: Any, token: str) -> None:
    """Shows the passages of the three search methods side by side."""
    page.get_by_label("Question").fill("In which country is Mount Fuji?")
    page.get_by_label("Compare").check()
    page.wait_for_selector(".of-3")


def fill(page: Any, token: str) -> None:
    """Masks a word, and shows the prediction with the passages."""
    page.get_by_label("Sentence").fill("Mount Fuji is the highest mountain in Japan.")
    page.get_by_role("button", name="Japan").click()
    page.wait_for_selector(".results:not([aria-busy]) .predictions")


def knowledge(page: Any, token: str) -> None:
    """Shows an answer before and after a document was added."""
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Ask now").click()
    page.wait_for_selector(".watched li")
    page.get_by_label("Search").fill("Mount Zamora")
    page.get_by_label("Title", exact=True).fill(TITLE)
    page.get_by_label("Text").fill(TEXT)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Search").click()
    page.wait_for_selector(".found .card")
    page.get_by_role("button", name="Add", exact=True).click()
    page.wait_for_selector(".watched li:nth-child(2)")
    page.get_by_role("link", name=TITLE).wait_for()


def training(page: Any, token: str) -> None:
    """Shows the curves and the index refreshes of pre-training."""
    page.get_by_label("Run", exact=True).select_option("realm")
    page.wait_for_selector(".state .dot")
    page.wait_for_selector(".strip")


def main(url: str, names: Sequence[str]) -> None:
    """Takes pictures of the named views (default: all views): wide in light colours, and narrow in dark colours."""
    token = os.environ["REALM_TOKEN"]
    browser_path = (
        os.environ.get("REALM_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    views = (
        ("first", first),
        ("ask", ask),
        ("compare", compare),
        ("fill", fill),
        ("knowledge", knowledge),
        ("training", training),
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=[] if os.geteuid() else ["--no-sandbox"]
        )
        for name, act in views if not names else [view for view in views if view[0] in names]:
            for size, scheme, suffix in (((1280, 860), "light", ""), ((390, 844), "dark", "-phone")):
                page = browser.new_page(
                    viewport={"width": size[0], "height": size[1]},
                    color_scheme=scheme,  # type: ignore[arg-type]
                )
                page.set_default_timeout(300_000)
                page.goto(f"{url}/#{'ask' if name in ('first', 'compare') else name}")
                page.wait_for_selector("main > *")
                act(page, token)
                page.evaluate("scrollTo(0, 0)")
                whole = name == "training" and not suffix  # the strip of index refreshes is under the curves
                taken = page.screenshot(full_page=whole)
                picture = (
                    Image.open(io.BytesIO(taken)).convert("RGB").quantize(256, MAXCOVERAGE)
                )  # half the size
                picture.save(HERE / f"{name}{suffix}.png", optimize=True)
                page.close()
                if name == "knowledge":
                    Client(url, token).delete(TITLE)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), sys.argv[2:])
