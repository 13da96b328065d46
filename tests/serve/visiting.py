"""A real headless Chromium that visits the page, for the tests of the page. Without Chromium these tests are skipped."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api as playwright

from tests.serve.conftest import Served, running

BROWSER = os.environ.get("REALM_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
PATIENCE = 60_000  # milliseconds: other work may share the machine
expect = playwright.expect
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium here: `apt-get install chromium`, or name one in REALM_BROWSER")
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
    assert seen.wrong == [], seen.wrong
    assert seen.hosts <= {site.url.removeprefix("http://")}, seen.hosts


def serious_findings(page: Any) -> list[tuple[str, str, str]]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    bad = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for one in axe.run(page).response["violations"]:
            if one["impact"] in ("serious", "critical"):
                bad.append((scheme, one["id"], one["nodes"][0]["html"]))
    return bad
